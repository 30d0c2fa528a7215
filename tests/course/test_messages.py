"""What a check says of an error in an answer."""

import functools

import pytest
import torch

from hooklab import check


class Stamp:
    def __init__(self, factor=2):
        self.factor = factor

    def __call__(self, grad):
        return grad * unknown_factor  # noqa: F821


class Made:
    def __init__(self, grad):
        self.grad = grad * unknown_factor  # noqa: F821


class Method:
    def halve(self, grad):
        return grad * unknown_factor  # noqa: F821


class Static:
    __slots__ = ()

    @staticmethod
    def __call__(grad):
        return grad * unknown_factor  # noqa: F821


def halve(factor, grad):
    return grad * unknown_factor  # noqa: F821


@torch.no_grad()
def decorated(grad):
    return grad * unknown_factor  # noqa: F821


@pytest.mark.parametrize(
    "answer",
    [Made, Stamp(), Method().halve, Static(), functools.partial(halve, 2), functools.partial(Stamp()), decorated],
)  # fmt: skip
def test_the_line_that_raised_is_shown_whatever_the_answer_is(answer):
    message = check.exercise("00.A", answer)
    assert message.reason == "raised"
    assert "NameError: name 'unknown_factor' is not defined" in message.en
    assert "unknown_factor  # noqa: F821`" in message.en.partition("The line: `")[2]
    assert "出错的那一行" in message.zh


def test_no_line_is_shown_of_what_the_learner_has_not_written():
    message = check.exercise("00.A", functools.partial(print, end=3))
    assert (message.reason, "The line" in message.en) == ("raised", False)


def test_a_bare_assertion_is_named_in_an_exercise_of_the_course():
    def checked(pack, unpack):
        def unpack_checked(kept):
            tensor, version, packed = kept
            if tensor._version != version:
                raise AssertionError
            return unpack(packed)

        return lambda tensor: (tensor.detach(), tensor._version, pack(tensor)), unpack_checked

    assert check.exercise("32.B", checked).en.endswith("it raised `AssertionError`.")
