"""Every check passes its own solution and refuses every wrong answer for the reason it names."""

import gc
import html
import io
import itertools
import re
import subprocess
import sys
import tomllib
import weakref
from dataclasses import replace
from functools import cache, partial
from inspect import isfunction
from types import FunctionType

import notebook_form
import pytest
import torch
from answers import ALSO_WRONG, RIGHT, WRONG
from answers.n33_offloading_to_cpu import _views
from answers.n34_offloading_to_disk import _byte_store, deleting_themselves, files_in_a_list
from torch.nn.modules import module as modules

from hooklab import check, saved_tensors, trace
from hooklab.course.check import Exercise, Prediction, expect_like, refuse, registered
from hooklab.course.checks.n35_checkpointing import buffers_once
from hooklab.course.reachable import within

EXERCISES = [item for item in registered() if isinstance(item, Exercise)]
PREDICTIONS = [item for item in registered() if isinstance(item, Prediction)]
BY_ID = {item.id: item for item in EXERCISES}
EACH_WRONG = [(item, reason) for item in EXERCISES for reason in WRONG[item.id]]
GOOD = {"right": {"zh": "好", "en": "Good"}}
HALVES = re.compile(
    r'<div class="hooklab-message hooklab-\w+"><div lang="zh">(.+)</div><div lang="en">(.+)</div></div>'
)


@cache
def refusal(exercise, reason):
    """The message for a wrong answer; several tests look at it."""
    return check.exercise(exercise, WRONG[exercise][reason])


@cache
def praise(exercise):
    """The message for the solution."""
    return check.exercise(exercise, BY_ID[exercise].solution)


def by_id(item):
    return getattr(item, "id", item)


@pytest.mark.parametrize("item", EXERCISES, ids=by_id)
def test_the_solution_passes(item):
    message = praise(item.id)
    assert message.kind == "right", message


@pytest.mark.parametrize(("item", "reason"), EACH_WRONG, ids=by_id)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_wrong_answer_is_refused_for_its_own_reason(item, reason):
    message = refusal(item.id, reason)
    assert (message.kind, message.reason) == ("wrong", reason), message
    again = check.exercise(item, WRONG[item.id][reason])
    assert again.reason == reason, "when the learner runs the check again: " + str(again)


@pytest.mark.parametrize("item", EXERCISES, ids=by_id)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_each_wrong_answer_gets_a_message_of_its_own(item):
    assert len(WRONG[item.id]) >= 3
    messages = [refusal(item.id, reason) for reason in WRONG[item.id]]
    for texts in ([message.zh for message in messages], [message.en for message in messages]):
        assert [text for text in texts if texts.count(text) > 1] == []


@pytest.mark.parametrize("item", EXERCISES, ids=by_id)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_no_message_gives_the_answer_away(item):
    lines = {line.strip() for line in notebook_solutions()[item.id].splitlines()[1:]}
    told = {re.sub(r"^(return|\w+ \S?=) ", "", line) for line in lines}
    # What says how: a call with arguments, or arithmetic. Every answer has to run the model.
    steps = {line for line in told if len(line) >= 8 and re.search(r"[-+*/<>\[]|\w\(.*\w.*\)", line)}
    for reason in WRONG[item.id]:
        message = refusal(item.id, reason)
        if message.reason != "raised":  # which quotes the learner's own line
            assert not [step for step in steps - {"model(x)", "block(x)"} if step in message.en]


@cache
def notebook_solutions():
    """By exercise: the code of the folded solution in the notebook."""
    solutions = {}
    for path in notebook_form.paths():
        asked = None
        for cell in notebook_form.cells(notebook_form.read(path)):
            if found := re.search(r'check\.exercise\("(.+?)"', cell.source):
                asked = found[1]
            if "solution" in cell.tags:
                solutions[asked] = re.search(r"```python\n(.*?)```", cell.halves["zh"], re.DOTALL)[1]
    return solutions


@pytest.mark.parametrize("item", EXERCISES, ids=by_id)
def test_the_folded_solution_in_the_notebook_passes_also_where_gradients_are_switched_off(item):
    code = notebook_solutions()[item.id]
    namespace = {"torch": torch, "nn": torch.nn}
    exec(code, namespace)
    answer = namespace[re.search(r"^def (\w+)", code, re.MULTILINE)[1]]
    with torch.no_grad():
        assert check.exercise(item.id, answer).kind == "right"


def test_every_check_stands_in_a_notebook():
    code = "\n".join(
        cell.source for path in notebook_form.paths() for cell in notebook_form.cells(notebook_form.read(path))
    )
    called = re.findall(r'check\.(?:predict|exercise)\("(.+?)"', code)
    assert sorted(called) == sorted(item.id for item in EXERCISES + PREDICTIONS)


# ---- messages ----


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_every_message_holds_both_languages_with_the_same_code_in_them():
    messages = [check.predict(item, "nonsense", actual=1.0) for item in PREDICTIONS]
    messages += [refusal(item.id, reason) for item, reason in EACH_WRONG]
    messages += [praise(item.id) for item in EXERCISES]
    for message in messages:
        zh, en = HALVES.fullmatch(message._repr_html_()).groups()
        assert set(re.findall(r"<code>(.*?)</code>", zh)) == set(re.findall(r"<code>(.*?)</code>", en)), message
        assert re.search(r"[\u4e00-\u9fff]", zh)
        assert not re.search(r"[\u4e00-\u9fff]", en)
        assert repr(message) == f"{message.zh}\n{message.en}"


def test_a_message_shows_markup_as_text():
    def answer(grad):
        raise ValueError("<b>1 & 2</b>")

    shown = check.exercise("00.A", answer)._repr_html_()
    assert "<b>" not in shown
    assert html.escape("<b>1 & 2</b>", quote=False) in shown


# ---- answers that cannot be examined ----


def untouched(grad): ...


def with_a_docstring(grad):
    """Halve it."""


@pytest.mark.parametrize("answer", [None, ..., untouched, with_a_docstring, lambda grad: ..., lambda grad: None])
def test_an_untouched_stub_is_not_attempted(answer):
    assert check.exercise("00.A", answer).kind == "todo"


@pytest.mark.parametrize("answer", [lambda grad: 0, lambda grad: grad, lambda grad: print(), "text", 3])
def test_anything_else_is_an_attempt(answer):
    assert check.exercise("00.A", answer).kind == "wrong"


def test_an_answer_of_the_wrong_kind_is_named():
    message = check.exercise("00.A", torch.ones(2))
    assert (message.reason, "`Tensor`" in message.en) == ("not_a_function", True)


@pytest.mark.parametrize("exercise", ["31.A", "36.A"])
def test_a_tensor_that_is_no_single_number_is_shown_with_its_shape(exercise):
    message = check.exercise(exercise, lambda *given: torch.tensor([BY_ID[exercise].solution(*given)]))
    assert message.kind == "wrong"
    assert re.search(r"`Tensor, torch\.\w+ \[1\]`", message.zh), message
    assert re.search(r"`Tensor, torch\.\w+ \[1\]`", message.en), message


def test_an_answer_with_other_arguments_says_so():
    assert "positional argument" in check.exercise("00.A", lambda: 1 + 1).en


def test_an_answer_that_raises_shows_the_error_and_the_line():
    def answer(grad):
        half = grad / 2
        return half.no_such_method()

    message = check.exercise("00.A", answer)
    assert message.reason == "raised"
    assert "AttributeError" in message.en
    assert "`return half.no_such_method()`" in message.en


def test_a_check_can_be_interrupted():
    def answer(grad):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check.exercise("00.A", answer)


def test_a_check_leaves_the_random_numbers_as_they_were():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    check.exercise("11.A", lambda loss, tensor: torch.randn(2, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_check_draws_the_same_numbers_each_time():
    drawn = []
    own = Exercise("99.A", lambda answer: drawn.append(torch.randn(3)), 1, GOOD)
    for seed in (1, 2):
        torch.manual_seed(seed)
        check.exercise(own, 1)
    assert torch.equal(*drawn)


@pytest.mark.parametrize("wanted", ["11.Z", "", "twelve", 11])
def test_an_unknown_id_names_the_closest(wanted):
    with pytest.raises(KeyError, match=r"no exercise has the id .*close: .*11"):
        check.exercise(wanted, len)
    with pytest.raises(KeyError, match=r"no prediction has the id .*close: "):
        check.predict(wanted, 1, actual=1)


# ---- a check of one's own, as a teacher would write it ----


def test_a_teacher_can_write_a_check_in_a_few_lines():
    def examine(answer):
        if answer == 3:
            refuse("off_by_one", answer=answer)
        expect_like(torch.tensor(answer), torch.tensor(4), "the_answer")

    words = {
        "right": {"zh": "是四。", "en": "It is four."},
        "off_by_one": {"zh": "`{answer}` 少了一个。", "en": "`{answer}` is one too few."},
        "phrases": {"the_answer": {"zh": "答案", "en": "the answer"}},
    }
    own = Exercise("99.A", examine, 4, words)
    assert check.exercise(own, 4).en == "Right. It is four."
    assert check.exercise(own, 3).zh == "还不对。`3` 少了一个。"
    assert check.exercise(own, 5).en.startswith("Not yet. The shape is right, the values of the answer are not.")
    assert (
        check.exercise(own, 4.0).en == "Not yet. The answer should have the dtype `torch.int64`; found `torch.float32`."
    )


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CONTRIBUTING.zh-CN.md"])
def test_the_check_printed_in_contributing_works_as_it_stands(name):
    printed = (notebook_form.ROOT / name).read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(python|toml)\n(.*?)```", printed, re.DOTALL))
    python = re.findall(r"```python\n(.*?)```", printed, re.DOTALL)
    namespace = {}
    for block in python:
        exec(block, namespace)
    (example,) = namespace["EXERCISES"]
    example = replace(example, words=tomllib.loads(blocks["toml"])[example.id])
    assert check.exercise(example, example.solution).kind == "right"
    wrong = namespace["WRONG"][example.id]
    assert len(wrong) >= 3
    for reason, answer in wrong.items():
        message = check.exercise(example, answer)
        assert message.reason == reason, message


# ---- answers that are right on what is easy alone, and right in another way ----


def test_a_refused_answer_that_edits_the_input_does_not_spoil_the_next_check():
    def zeroed(model, name, x):
        try:
            return BY_ID["24.A"].solution(model, name, x)
        finally:
            x.zero_()

    assert check.exercise("24.A", zeroed).reason == "edited_input"
    assert check.exercise("24.A", BY_ID["24.A"].solution).kind == "right"


def test_what_a_function_keeps_alive_is_found_once_also_where_it_leads_back():
    wanted = captured, default, keyword = [torch.ones(1) for _ in range(3)]

    def function(x=default, *, y=keyword):
        return captured, pytest

    loop = [function, function]
    loop.append(loop)
    found = list(within(loop))
    assert sum(part is loop for part in found) == sum(part is function for part in found) == 1
    assert all(sum(part is one for part in found) == 1 for one in wanted)
    assert not any(part is pytest for part in found)


def test_the_buffer_of_a_file_in_memory_is_part_of_it():
    """Python 3.11 does not have it among what the garbage collector sees, later ones do."""
    content, other = io.BytesIO(), []
    content.write(bytes(1000))
    content.beside = other
    found = list(within(content))
    assert any(part is other for part in found)
    assert not any(isinstance(part, bytes) for part in found)


@pytest.mark.parametrize(
    ("exercise", "use", "nothing"),
    [
        ("14.A", lambda answer, half, notes: answer(half, notes.append), []),
        ("14.C", lambda answer, half, notes: answer(half), []),
        ("15.A", lambda answer, half, notes: answer([half])[0], []),
    ],
    ids=["14.A", "14.C", "15.A"],
)
def test_a_solution_bears_a_gradient_that_does_not_come(exercise, use, nothing):
    """Of the two halves that `chunk` makes one is not used: its hooks are given None."""
    used, unused = (torch.ones(4, requires_grad=True) * 2).chunk(2)
    notes = []
    noted = use(BY_ID[exercise].solution, unused, notes)
    used.sum().backward(retain_graph=True)
    assert (noted if noted is not None else notes) == nothing
    (used.sum() + 3 * unused.sum()).backward()
    assert len(noted if noted is not None else notes) == 1


@pytest.mark.parametrize(("exercise", "answer"), RIGHT)
def test_another_right_way_passes(exercise, answer):
    message = check.exercise(exercise, answer)
    assert message.kind == "right", message


def leaves_global_hooks(model, x):
    modules.register_module_full_backward_hook(lambda *given: None)
    modules.register_module_full_backward_pre_hook(lambda *given: None)
    modules.register_module_forward_pre_hook(lambda *given: None)
    modules.register_module_forward_hook(lambda *given: None)
    return torch.zeros(1)


def test_a_refused_answer_leaves_no_global_hook_and_the_learners_own_stay():
    tables = [getattr(modules, name) for name in vars(modules) if re.fullmatch(r"_global_.*ward.*_hooks", name)]
    own = modules.register_module_forward_hook(lambda *given: None)
    try:
        before = [dict(table) for table in tables]
        assert check.exercise("22.C", leaves_global_hooks).reason == "left_behind"
        assert [dict(table) for table in tables] == before
        assert len(tables) >= 4
    finally:
        own.remove()


@pytest.mark.parametrize("register", [modules.register_module_forward_hook, modules.register_module_full_backward_hook])
@pytest.mark.parametrize("exercise", ["13.B", "21.C", "22.B", "22.C", "24.A", "31.C"])
def test_a_global_hook_of_the_learners_is_not_taken_for_the_answers(exercise, register):
    own = register(lambda *given: None)
    try:
        assert praise.__wrapped__(exercise).kind == "right"
    finally:
        own.remove()


@pytest.mark.parametrize(("exercise", "reason", "answer"), ALSO_WRONG)
def test_an_answer_that_is_right_only_where_it_is_easy_is_refused(exercise, reason, answer):
    message = check.exercise(exercise, answer)
    assert (message.kind, message.reason) == ("wrong", reason), message


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (lambda cause: cause, None),
        (lambda cause: RuntimeError("recomputing failed"), False),
        (lambda cause: raised_from(RuntimeError("recomputing failed"), cause), False),
        (lambda cause: raised_from(RuntimeError("recomputing failed"), None), True),
    ],
    ids=["itself", "in its place", "from it", "from None"],
)
def test_a_cause_that_the_traceback_tells_is_not_called_lost(error, lost):
    def answer(block):
        first, second = buffers_once(block)

        class Second:
            def __enter__(self):
                second.__enter__()

            def __exit__(self, kind, cause, trace):
                second.__exit__()
                if kind is ValueError:
                    raise error(cause)

        return first, Second()

    message = check.exercise("35.C", answer)
    assert message.reason == ("" if lost is None else "recompute_error"), message
    assert ("the cause is lost" in message.en, "没人看得到" in message.zh) == (bool(lost), bool(lost))


def raised_from(error, cause):
    error.__cause__ = cause
    return error


def test_a_store_that_frees_nothing_is_called_so_also_where_every_address_comes_again():
    alive = weakref.WeakValueDictionary()

    def lowest_free(slot, *_):
        number = next(number for number in itertools.count() if number not in alive)
        alive[number] = slot
        return number

    message = check.exercise("34.B", _byte_store(key=lowest_free, drop=lambda held, slot: None))
    assert (message.kind, message.reason) == ("wrong", "never_freed"), message


@pytest.mark.parametrize("answer", [files_in_a_list, deleting_themselves(load=lambda saved: saved.view(7))])
def test_the_folder_of_a_check_goes_after_the_files_of_a_refused_answer(answer, monkeypatch):
    """An error in `__del__` would be printed above the message."""
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    assert check.exercise("34.A", answer).kind == "wrong"
    gc.collect()
    assert not ignored


@pytest.mark.parametrize("item", [item for item in EXERCISES if isfunction(item.solution)], ids=by_id)
def test_an_answer_that_leaves_gradients_off_is_told_so_whatever_follows_from_it(item):
    def answer(*args, **kwargs):
        try:
            return item.solution(*args, **kwargs)
        finally:
            torch.set_grad_enabled(False)

    assert check.exercise(item, answer).reason == "grad_left_off"
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("key", [id, lambda storage: storage.data_ptr()], ids=["id", "data_ptr"])
def test_notes_by_address_are_refused_also_where_freed_places_are_taken_at_once(key):
    """Each call begins by taking the places that a storage, or its memory, has just left."""
    litter = []

    def answer(store):
        pack = _views(key=key, same=lambda known, storage: True, weak=False)(store)

        def littering(tensor):
            litter.extend(torch.empty(1000).untyped_storage() for _ in range(3))
            return pack(tensor)

        return littering

    message = check.exercise("33.C", answer)
    assert (message.kind, message.reason) == ("wrong", "address_reused"), message


# ---- what an answer has changed, though its results are right ----


def other_modes(given):
    for model in given:
        if isinstance(model, torch.nn.Module):
            model.train(not model.training)


def frozen(given):
    for model in given:
        if isinstance(model, torch.nn.Module):
            model.requires_grad_(False)


def without_gradients(given):
    for model in given:
        if isinstance(model, torch.nn.Module):
            model.zero_grad()


def other_values(given):
    for tensor in given:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            with torch.no_grad():
                tensor.mul_(1.5)


def emptied(given):
    for container in given:
        if isinstance(container, list | dict | set):
            container.clear()


def noted(given):
    """What of `given` a damage can change, as text."""
    facts = []
    for one in given:
        if isinstance(one, torch.nn.Module):
            facts += [(module.training,) for module in one.modules()]
            facts += [(param.requires_grad, param.grad is None) for param in one.parameters()]
        elif isinstance(one, torch.Tensor):
            facts.append(None if one.is_meta else one.detach().tolist())
        elif isinstance(one, list | dict | set):
            facts.append(len(one))
    return str(facts)


DAMAGES = (other_modes, frozen, without_gradients, other_values, emptied)
# These run a backward pass of their own: afterwards nobody can tell whose gradients those were.
RUN_BACKWARD = {"13.C", "47.A"}


# Of a model that a damage has frozen.
@pytest.mark.long  # five damages for each exercise
@pytest.mark.filterwarnings("ignore:(Offload|saved_tensors). nothing of the model was saved")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_a_right_answer_that_changes_what_it_was_given_is_refused(exercise, damage):
    if not isinstance(exercise.solution, FunctionType):
        pytest.skip("this one is no function")
    damaged = []

    def answer(*args, **kwargs):
        result = exercise.solution(*args, **kwargs)
        given = (*args, *kwargs.values())
        before = noted(given)
        damage(given)
        damaged.append(noted(given) != before)
        return result

    message = check.exercise(exercise, answer)
    if not any(damaged) or (damage is without_gradients and exercise.id in RUN_BACKWARD):
        assert message.kind == "right"
        return
    assert message.kind == "wrong", "a damage was not noticed"


class Called:
    """An answer that is an object, and one that is a method of it."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)

    def method(self, *args):
        return self.function(*args)


@pytest.mark.parametrize("dress", [Called, lambda function: Called(function).method, partial])
@pytest.mark.parametrize("exercise", ["00.B", "12.B", "21.A"])
def test_an_answer_that_is_no_function_is_watched_too(exercise, dress):
    solution = BY_ID[exercise].solution

    def damaged(model, *given):
        model.eval()
        return solution(model, *given)

    assert check.exercise(exercise, dress(solution)).kind == "right"
    assert check.exercise(exercise, dress(damaged)).reason == "changed_given"


def test_what_the_learner_has_open_is_not_held_against_an_answer():
    by_id = {exercise.id: exercise for exercise in EXERCISES}
    watching = trace(torch.nn.Linear(2, 2))
    assert check.exercise("25.C", by_id["25.C"].solution).kind == "right"
    watching.remove()
    with saved_tensors():
        assert check.exercise("31.A", by_id["31.A"].solution).kind == "right"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_the_solution_passes_in_inference_mode_too(exercise):
    with torch.inference_mode():
        assert check.exercise(exercise, exercise.solution).kind == "right"


@pytest.mark.long
def test_the_solutions_pass_whatever_dtype_and_device_are_the_default():
    script = """
import torch
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
from hooklab.course import check
exercises = [one for one in check.registered() if isinstance(one, check.Exercise)]
messages = [check.exercise(one, one.solution) for one in exercises]
print([str(message) for message in messages if message.kind != "right"], len(messages))
print(check.predict("11.1", [1.0, 2.0], actual=torch.tensor([1.0, 2.0], device="cpu")).kind)
with torch.device("meta"):
    messages = [check.exercise(one, one.solution) for one in exercises[::4]]
print([str(message) for message in messages if message.kind != "right"])
print(torch.get_default_dtype(), torch.get_default_device())
torch.set_default_device(None)
print(torch.get_default_device())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert run.stdout.splitlines() == [f"[] {len(EXERCISES)}", "right", "[]", "torch.float64 meta", "cpu"], run.stderr


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nn.UninitializedParameter(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.ones(0),
    ],
)
def test_a_check_may_give_any_tensor(make):
    def examine(answer):
        assert answer(given) is given

    given = make()
    task = Exercise("99.A", examine, lambda x: x, GOOD)
    assert check.exercise(task, lambda x: x).kind == "right"
