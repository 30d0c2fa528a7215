"""A right guess is right in every dress; a wrong one stays wrong in all of them."""

import pytest
import torch

from hooklab import check

ORDER = "ECDBA"  # 21.3
NAMES = ["Linear", "Sequential"]  # 21.4
SCALED = torch.tensor([1.0, -1.0, 1.0]) / 1024  # 25.5
PINNED = [5.0, 1.0]  # 33.1
ONE_RAISES = [5.0, "error"]
FOUR = torch.tensor([2.0, 4.0, 6.0, 8.0])  # 11.1
FIRE = {"tensor hook"}  # 14.1
TWO_FIRE = {"tensor hook", "Node hook"}
ALIVE = [False, False, True, False]  # 31.1


@pytest.mark.parametrize(
    ("guess", "actual"),
    [
        *[(guess, 1) for guess in ({1}, [1], (1,), "{1}", ["1"], "1", " 1 ", "“1”", "１")],
        *[(guess, 0.25) for guess in ({0.25}, "1/4", "1 / 4", ["1/4"])],
        ({True}, True),
        ("[True]", True),
        ([None], None),
        ("−4", -4),
        ("24，000", 24_000),
        *[(guess, FOUR) for guess in ("2，4，6，8", "2、4、6、8", "[2，4，6，8]", "2 4 6 8", ["2", "4", "6", "8"])],
        *[(guess, PINNED) for guess in (["5", "1"], [5, "1"], ("5", 1.0), "5，1", "[5, 1]", "5 和 1")],
        *[(guess, ONE_RAISES) for guess in ([5, "error"], ["5", "Error"], "5, error", "[5.0, 'error']", "5，“error”")],
        *[(guess, ORDER) for guess in (list(ORDER), tuple("ecdba"), "E, C, D, B, A", "E→C→D→B→A", "E C D B A")],
        *[(guess, ORDER) for guess in ("“ECDBA”", "[E，C，D，B，A]", ["ECDBA"], "'ecdba'")],
        *[(guess, NAMES) for guess in ("Linear, Sequential", "[Linear, Sequential]", "Linear、Sequential")],
        *[(guess, NAMES) for guess in ("Linear 和 Sequential", "“Linear”，“Sequential”", "linear -> sequential")],
        *[(guess, SCALED) for guess in ("[1/1024, -1/1024, 1/1024]", "1/1024，−1/1024，1/1024", "[0.001, -0.001, 0.001]")],
        *[(guess, FIRE) for guess in ("“tensor hook”", "「tensor hook」", '"tensor hook"', "{tensor hook}", ["Tensor Hook"])],
        ({"“tensor hook”"}, FIRE),
        *[(guess, "tensor hook") for guess in ("“tensor hook”", "‘tensor hook’", "`tensor hook`", {"“tensor hook”"})],
        *[(guess, TWO_FIRE) for guess in ("tensor hook, Node hook", "Node hook和tensor hook", "{node hook，tensor hook}")],
        *[(guess, ALIVE) for guess in ("False，False，True，False", ["false", "False", "true", False])],
        ("false, false, true, false", ALIVE),
        *[(guess, set()) for guess in ("nothing", "Nothing", "空集", "没有", set())],
        *[(guess, 2) for guess in ("2次", "2 次", "2 times", "２个", "2x", "2×", "2倍", "2 Times", "两行", "二", "2 rows")],
        *[(guess, 2) for guess in ("2 files", "2步", "2 steps", "2 calls", "2。", "2!", "2？", "2  个", "2个。", "2e0", "0x2")],
        *[(guess, 24_000) for guess in ("24,000 bytes", "24，000 字节", "2.4e4", "2.4e4 bytes", "24_000")],
        *[(guess, 0.5) for guess in ("½", "1/2", "1⁄2")],
        ("–1.5", -1.5),
        *[(guess, 0.5) for guess in ("50%", "50 ％", "1/2")],
        *[(guess, 50) for guess in ("50%", "50")],
        *[(guess, True) for guess in ("是", "会", "对", "Yes", "true")],
        *[(guess, False) for guess in ("不会", "不是", "没有", "no")],
        *[(guess, "error") for guess in ("报错", "会报错", "Error", "raises")],
    ],
)  # fmt: skip
def test_a_right_guess_in_another_dress(guess, actual):
    assert check.predict("11.1", guess, actual=actual).kind == "right"


@pytest.mark.parametrize(
    ("guess", "actual"),
    [
        *[(guess, 1) for guess in ({2}, {1, 2}, [1, 1], [], {}, set(), "{2}", "{1, 2}", True, {True}, "1.5", "1/2")],
        *[(guess, 2) for guess in ("3次", "次", "3 files", "三", "是", "200%", "3。", "3e0", "0x10")],
        *[(guess, 24_000) for guess in ("1e6", "2.5e3", "24_001", "24,001 bytes", "1e6 bytes")],
        *[(guess, 0.5) for guess in ("5%", "1/5")],
        *[(guess, True) for guess in ("不会", "no", "会不会", "1")],
        ("报错", "none"),
        *[(guess, FIRE) for guess in ("空集", set())],
        *[(guess, 100) for guess in (101, [101], {101}, "101")],  # whole numbers agree exactly
        *[(guess, 0.25) for guess in ({0.5}, "1/3", "4/1", "-1/4")],
        *[(guess, True) for guess in ({False}, [1], {1}, "[False]", [True, True])],
        ([0], None),
        *[(guess, FOUR) for guess in ("2，4，6", "2，4，8，6", "2，4，6，8，8", "2468", "2.4.6.8", {2, 4, 6, 8}, "{2, 4, 6, 8}")],
        *[(guess, PINNED) for guess in (["1", "5"], ["5", "error"], ["5"], "5", ["5", "1", "1"], ["5", None], {"5", "1"})],
        *[(guess, ONE_RAISES) for guess in (["error", 5], ["error", "error"], [5, 1], ["5.5", "error"], "5 error 1", "error")],
        *[(guess, ORDER) for guess in (list("ECDAB"), "E, C, D, B", "E, C, D, B, A, A", set(ORDER), "EC, DB, A", ["EC", "DBA"])],
        *[(guess, ORDER) for guess in ("ABCDE", "-ECDBA", "not ECDBA", "", ",", "“”")],
        *[(guess, NAMES) for guess in ("Sequential, Linear", "Linear", "LinearSequential", "{Linear, Sequential}", set(NAMES))],
        *[(guess, NAMES) for guess in ("Linear, not Sequential", "Linear, Sequential, ReLU", "[Linear], [ReLU]")],
        *[(guess, SCALED) for guess in ("[1/1024, 1/1024, 1/1024]", "[1/512, -1/512, 1/512]", "1/1024", "0, 0, 0")],
        *[(guess, FIRE) for guess in ("“Node hook”", "tensor, hook", "tensor hook, Node hook", "hook", "no tensor hook")],
        *[(guess, "tensor hook") for guess in ("“hook”", "tensor", {"tensor", "hook"}, ["tensor", "hook"], "tensorhook")],
        *[(guess, TWO_FIRE) for guess in ("tensor hook", "tensor hook, not Node hook", "tensor hook, Node pre-hook")],
        ("Node, tensor, hook", TWO_FIRE),
        *[(guess, {"x", "y"}) for guess in ("x，没有 y", "x, not y", "x, y, z", "xy", "x", ["x"], {"x", "z"})],
        *[(guess, ALIVE) for guess in ("False，False，False，True", ["false", "false", "false", "false"], "False", "true")],
        ("nothing", {"x"}),
    ],
)  # fmt: skip
def test_a_wrong_guess_stays_wrong_in_every_dress(guess, actual):
    message = check.predict("11.1", guess, actual=actual)
    assert message.kind == "wrong"
    said, happened = message.en.removeprefix("You guessed `").split("`; it is `", 1)
    assert not happened.startswith(f"{said}`"), "two equal values are shown"


@pytest.mark.parametrize(
    "guess",
    [
        *(
            "2 GB",
            "2 或 3 次",
            "2 or 3",
            "“2 MB”",
            "2 个文件",
            "2 3次",
            "2 000",
            "2**1",
            "24k",
            "~2",
            "about 2",
        ),
        *("约2", "两三次", "一半次", "十二", "2 次左右", "2nd", "1/0", "1/2 倍"),
    ],
)
@pytest.mark.parametrize("actual", [2, 2.0, torch.tensor(2)])
def test_a_number_in_other_words_is_asked_for_again_and_not_told(guess, actual):
    message = check.predict("11.1", guess, actual=actual)
    assert (message.kind, message.reason) == ("wrong", "no_number")
    assert message.en == f"`{guess}` cannot be read: write one number, nothing else, and run this cell again."
    assert message.zh == f"读不懂 `{guess}`：这里只写一个数，别的都不写。改好以后再运行这一格。"


def test_words_are_no_unit():
    for guess, actual in (
        ("2 GB", True),
        ("2 GB", torch.tensor(True)),
        ("2 GB", [2]),
        ("2 GB", "3 GB"),
        ("error", 2),
        ("2", 3),
        ("-", 3),
    ):
        assert check.predict("11.1", guess, actual=actual).reason == "other"


def test_a_set_is_shown_with_its_braces_where_none_was_asked_for():
    assert "You guessed `{Linear, Sequential}`; it is `[Linear, Sequential]`" in (
        check.predict("21.4", set(NAMES), actual=NAMES).en
    )
    assert "You guessed `x`; it is `x, y`" in check.predict("12.1", {"x"}, actual={"x", "y"}).en


def test_an_empty_guess_and_backticks_are_shown_as_code():
    assert "<code>''</code>" in check.predict("11.1", "", actual=1)._repr_html_()
    assert "<code>'x' or 'y'</code>" in check.predict("11.1", "`x` or `y`", actual=1)._repr_html_()


def test_a_value_that_is_another_than_at_first_is_announced():
    question = check.Prediction("99.1", zh="解释。", en="The reason.")
    check.predict(question, None, actual=2)
    assert "first" not in check.predict(question, 2, actual=2).en
    for guess, kind in ((2, "wrong"), (1, "right")):  # a later cell has counted on
        message = check.predict(question, guess, actual=1)
        assert message.kind == kind
        assert "the value was `2`" in message.en
        assert "实际值是 `2`" in message.zh
    assert "first" not in check.predict(question, 2, actual=torch.tensor(2)).en


def test_an_empty_guess_is_shown_as_it_was_written():
    message = check.predict(check.Prediction("99.2", zh="", en=""), set(), actual={"tensor hook"})
    assert "你猜的是 `set()`" in message.zh
    assert "You guessed `set()`" in message.en
