"""Every check passes its own solution and refuses every wrong answer for the reason it names."""

import ast
import gc
import html
import io
import itertools
import re
import subprocess
import sys
import tempfile
import uuid
import weakref
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from functools import cache, partial
from inspect import isfunction
from pathlib import Path
from types import FunctionType

import notebook_form
import numpy as np
import pytest
import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint

from hooklab import Offload, check, clip, features, saved_tensors, select, trace
from hooklab.course.check import Exercise, Prediction, expect_like, refuse, registered
from hooklab.course.checks import n15_many_tensors_at_once as n15
from hooklab.course.checks import n21_forward_hooks as n21
from hooklab.course.checks import n22_backward_hooks as n22
from hooklab.course.checks import n23_watching_a_model_run as n23
from hooklab.course.checks import n31_what_autograd_saves as n31
from hooklab.course.checks import n32_pack_and_unpack as n32
from hooklab.course.checks import n33_offloading_to_cpu as n33
from hooklab.course.checks import n34_offloading_to_disk as n34
from hooklab.course.checks import n35_checkpointing as n35
from hooklab.course.reachable import within
from hooklab.stores import Disk

EXERCISES = [item for item in registered() if isinstance(item, Exercise)]
PREDICTIONS = [item for item in registered() if isinstance(item, Prediction)]
BY_ID = {item.id: item for item in EXERCISES}
WRONG = [(item, reason) for item in EXERCISES for reason in item.wrong]
HALVES = re.compile(
    r'<div class="hooklab-message hooklab-\w+"><div lang="zh">(.+)</div><div lang="en">(.+)</div></div>'
)


@cache
def refusal(exercise, reason):
    """The message for a wrong answer; several tests look at it."""
    return check.exercise(exercise, BY_ID[exercise].wrong[reason])


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


@pytest.mark.parametrize(("item", "reason"), WRONG, ids=by_id)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_wrong_answer_is_refused_for_its_own_reason(item, reason):
    message = refusal(item.id, reason)
    assert (message.kind, message.reason) == ("wrong", reason), message
    again = check.exercise(item, item.wrong[reason])
    assert again.reason == reason, "when the learner runs the check again: " + str(again)


@pytest.mark.parametrize("item", EXERCISES, ids=by_id)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_each_wrong_answer_gets_a_message_of_its_own(item):
    assert len(item.wrong) >= 3
    messages = [refusal(item.id, reason) for reason in item.wrong]
    assert len({message.zh for message in messages}) == len({message.en for message in messages}) == len(messages)


@pytest.mark.parametrize("item", EXERCISES, ids=by_id)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_no_message_gives_the_answer_away(item):
    lines = {line.strip() for line in notebook_solutions()[item.id].splitlines()[1:]}
    told = {re.sub(r"^(return|\w+ \S?=) ", "", line) for line in lines}
    # What says how: a call with arguments, or arithmetic. Every answer has to run the model.
    steps = {line for line in told if len(line) >= 8 and re.search(r"[-+*/<>\[]|\w\(.*\w.*\)", line)}
    for reason in item.wrong:
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
    messages += [refusal(item.id, reason) for item, reason in WRONG]
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


@pytest.mark.parametrize("exercise", ["31.A", "33.A"])
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
    own = Exercise("99.A", lambda answer: drawn.append(torch.randn(3)), 1, {}, zh="", en="")
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
            refuse("off_by_one", zh="少数了一个。", en="One too few.")
        expect_like(torch.tensor(answer), torch.tensor(4), "答案", "the answer")

    own = Exercise("99.A", examine, 4, {"off_by_one": 3, "wrong_values": 5}, zh="是四。", en="It is four.")
    assert check.exercise(own, 4).en == "Right. It is four."
    assert check.exercise(own, 3).zh == "还不对。少数了一个。"
    assert check.exercise(own, 5).reason == "wrong_values"


def test_the_check_printed_in_contributing_works_as_it_stands():
    printed = (notebook_form.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    namespace = {}
    exec(re.search(r"```python\n(.*?)```", printed, re.DOTALL)[1], namespace)
    example = namespace["DOUBLE"]
    assert check.exercise(example, example.solution).kind == "right"
    for reason, answer in example.wrong.items():
        assert check.exercise(example, answer).reason == reason


# ---- predictions ----


@pytest.mark.parametrize(
    ("guess", "actual", "right"),
    [
        (2, 2, True),
        (2.0, torch.tensor(2), True),
        ([1, 2], torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0], True),
        (0.333, torch.tensor([1 / 3]), True),
        (0.3, 1 / 3, False),
        ([1, 2, 3], torch.tensor([1.0, 2.0]), False),
        (float("nan"), torch.tensor(float("nan")), True),
        (2.01, torch.tensor(2), True),
        (0.001, 1 / 1024, True),
        ([0, 0, 0], torch.tensor([1, -1, 1]) / 1024, False),
        ([1, -0.5, 0.01], [1, -0.5, 0.0101], True),
        (0, 1e-5, False),
        (0, 1e-7, True),
        (3, 2, False),
        ("0.0", 0.0, True),
        ("[2, 4]", torch.tensor([2.0, 4.0]), True),
        (torch.tensor(False), False, True),
        (np.bool_(True), True, True),
        (np.float32(2), 2.0, True),
        ("other words", [1.0], False),
        (True, True, True),
        (True, False, False),
        (1, True, False),
        ("true", True, True),
        ("None", None, True),
        (0, None, False),
        (" Tensor Hook ", "tensor hook", True),
        ("hook", "tensor hook", False),
        ({"x", "y"}, {"y", "x"}, True),
        (["X", "y"], {"y", "x"}, True),
        ("x, y", {"y", "x"}, True),
        ("x", {"y", "x"}, False),
        (3, {"y", "x"}, False),
        (["a", "b"], ["a", "b"], True),
        (["b", "a"], ["a", "b"], False),
        (2, ["a", "b"], False),
        (10**400, 1.0, False),
        (object(), 1.0, False),
        ([[1], [2, 3]], 1.0, False),
        ((24, 0), 24_000, True),  # 24,000 without quotes
        ("24,000", 24_000, True),
        ((25, 690, 624), torch.tensor(25_690_624), True),
        ((-4, 0), -4_000.0, True),
        ((25, 0), 24_000, False),
        ([24, 0], 24_000, False),
        ((8, 0), [8, 0], True),
        ("8, 0", [8, 0], True),
        ({"Linear", "Sequential"}, ["Linear", "Sequential"], False),  # a set has no order
        ({"Linear"}, ["Linear"], True),
        ('{"tensor hook"}', {"tensor hook"}, True),
        ("['tensor hook']", {"tensor hook"}, True),
        ("x和y", {"y", "x"}, True),
        ("x and y", {"y", "x"}, True),
        ({"tensor hook"}, "tensor hook", True),
        (["tensor hook"], "Tensor hook", True),
        ({"tensor hook", "pre-hook"}, "tensor hook", False),
    ],
)
def test_a_guess_is_compared_by_its_meaning(guess, actual, right):
    assert check.predict("11.1", guess, actual=actual).kind == ("right" if right else "wrong")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0"), (2.2e-07, "2.2e-07"), (1 / 3, "0.3333"), (float("nan"), "nan"), (torch.tensor([1.0, 2.0]), "[1.0, 2.0]"),
     ({"b", "a"}, "a, b"), (set(), "set()"), (True, "True"), (None, "None"),
     (16384.0, "16384.0"), (9999.6, "10000.0"), (4e6, "4000000.0"), (25000.6, "25000.0"), (1e12, "1e+12")],
)  # fmt: skip
def test_a_value_is_shown_as_one_would_write_it(value, text):
    assert f"it is `{text}`" in check.predict("11.1", "no such thing", actual=value).en


def test_a_missing_guess_is_not_attempted_whatever_happened():
    assert {check.predict("11.1", guess, actual=None).kind for guess in (None, ...)} == {"todo"}


def test_a_wrong_guess_is_shown_beside_what_happened_and_explained():
    assert check.predict("11.4", (25, 0), actual=24_000).en.startswith("You said `25000`; it is `24000`.")
    message = check.predict(Prediction("99.4", zh="解释。", en="The reason."), 1, actual=2)
    assert message.en == "You said `1`; it is `2`. The reason."
    assert message.zh == "你猜的是 `1`，实际是 `2`。解释。"


# ---- answers that are right on what is easy alone ----


@contextmanager
def seeded(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def checkpoint_by_seed(block, x):
    """Right in the first step, where the seed is the state."""
    return n35._by_hand(block, x, seeded(torch.initial_seed()))


def dropped_twice(block, x):
    return torch.nn.functional.dropout(n35.faithful(block, x), getattr(block.drop, "p", 0.0))


def seeds_in_pack(block, x):
    state, number = torch.get_rng_state(), itertools.count()

    def pack(tensor):
        torch.set_rng_state(state)
        return next(number)

    with saved_tensors_hooks(pack, lambda index: torch.zeros(())):
        return block(x)


def only_divisors(count, layers, budget):
    """Tries no plan in which the last segment of a layer is a shorter one."""
    sizes = [[0, *(size for size in range(1, n + 1) if n % size == 0)] for n in layers.values()]
    plans = [
        {name: size for name, size in zip(layers, each, strict=True) if size} for each in itertools.product(*sizes)
    ]
    fitting = [plan for plan in plans if count(plan)[1] <= budget]
    if not fitting:
        raise ValueError("no plan fits")
    return min(fitting, key=lambda plan: (count(plan)[2], count(plan)[1]))


class ShortIndices:
    """Counts as far as 32,767."""

    def write(self, tensor):
        content = tensor.clone()
        bits = content.view(torch.uint8).view(len(content), -1).any(1) if len(content) else content.bool()
        places = bits.nonzero()[:, 0]
        return places.to(torch.int16), content[places], len(content)

    def read(self, slot):
        places, values, length = slot
        whole = torch.zeros(length, dtype=values.dtype)
        whole[places.long()] = values
        return whole


def calls_what_can_be_called(pack, unpack, least):
    """Mistakes what an inner pair has packed for its own."""

    def small_or(tensor):
        if tensor.numel() >= least:
            return pack(tensor)
        held, version = tensor.detach(), tensor._version
        return lambda: refuse_edited(held, version)

    return small_or, lambda packed: packed() if callable(packed) else unpack(packed)


def refuse_edited(tensor, version):
    if tensor._version != version:
        raise RuntimeError("modified by an inplace operation")
    return tensor


def feature_or_key_error(model, name, x):
    """Takes every error for a layer that was not reached."""
    kept = {}
    keep = model.get_submodule(name).register_forward_hook(
        lambda module, args, output: kept.update(out=output.detach().clone())
    )
    try:
        model(x)
    except Exception:
        raise KeyError(name) from None
    finally:
        keep.remove()
    return kept["out"]


def first_nan_inside(model, x):
    """Forgets that the model itself may make it."""
    return n23._first(n23._collect(model, x, [named for named in model.named_modules() if named[0]]))


_ROWS = []


def rows_of_all_calls(model, name, batches):
    """Joins what earlier calls have left too."""
    for batch in batches:
        _ROWS.append(BY_ID["24.B"].solution(model, name, [batch]))
    return torch.cat(_ROWS)


def without_a_batch(model, loss_fn, inputs, targets, max_norm):
    """Gives the model single samples, without the dimension of the batch."""
    single = lambda output, target: loss_fn(output[0], target[0])  # noqa: E731
    BY_ID["25.C"].solution(model, single, inputs, targets, max_norm)


def another_loss(model, loss_fn, inputs, targets, max_norm):
    BY_ID["25.C"].solution(model, torch.nn.functional.mse_loss, inputs, targets, max_norm)


def longest_is_max_norm(model, loss_fn, inputs, targets, max_norm):
    """Caps the factor at `max_norm`, where 1 is meant."""
    params = [param for param in model.parameters() if param.requires_grad]
    totals = [torch.zeros_like(param) for param in params]
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        grads = torch.autograd.grad(loss_fn(model(x), y), params)
        factor = (max_norm / torch.nn.utils.get_total_norm(grads)).clamp(max=max_norm)
        totals = [total + grad * factor for total, grad in zip(totals, grads, strict=True)]
    for param, total in zip(params, totals, strict=True):
        param.grad = total


def children_alone(model, bound):
    """Sees no layer inside another."""
    grads = [param.grad for child in model.children() for param in child.parameters(recurse=False)]
    grads = torch.cat([grad.flatten() for grad in grads if grad is not None])
    return (grads.abs() > bound).double().mean()


def cleared_after_error(model, name, x):
    """Takes off all hooks, its own or not, when the model raises."""
    try:
        return BY_ID["24.A"].solution(model, name, x)
    except RuntimeError:
        model.get_submodule(name)._forward_hooks.clear()
        raise


def off_after_value_error(model, name, x):
    """Takes the hook off after one kind of error."""
    kept = {}
    handle = model.get_submodule(name).register_forward_hook(
        lambda module, args, output: kept.update({name: output.detach().clone()})
    )
    try:
        model(x)
    except ValueError:
        handle.remove()
        raise
    handle.remove()
    return kept[name]


def test_a_refused_answer_that_edits_the_input_does_not_spoil_the_next_check():
    def zeroed(model, name, x):
        try:
            return BY_ID["24.A"].solution(model, name, x)
        finally:
            x.zero_()

    assert check.exercise("24.A", zeroed).reason == "edited_input"
    assert check.exercise("24.A", BY_ID["24.A"].solution).kind == "right"


def modes_of_children(model, x):
    """Puts back the modes of the children, and with them those of all that is inside."""
    training, modes = model.training, {child: child.training for child in model.children()}
    try:
        return n23.output_shapes(model, x)
    finally:
        model.train(training)
        for child, mode in modes.items():
            child.train(mode)


def none_is_the_only_other(model, x):
    """Takes all that is neither a tuple nor None for a tensor."""

    def shape(output):
        if isinstance(output, tuple):
            return tuple(map(shape, output))
        return None if output is None else tuple(output.shape)

    keep = lambda shapes, name: lambda module, args, output: shapes.update({name: shape(output)})  # noqa: E731
    return n21._shapes_by_hand(keep)(model, x)


def tidies_up_after_runtime_errors(model, x):
    """Any other error leaves the hooks."""
    shapes, handles = {}, []
    for name, layer in n21._leaves(model, model.named_modules()).items():
        handles.append(layer.register_forward_hook(partial(n21._keep, shapes, name)))
    try:
        model(x)
    except RuntimeError:
        [handle.remove() for handle in handles]
        raise
    [handle.remove() for handle in handles]
    return shapes


def normalise_every_such(module, mean, std):
    """All modules of the same class."""
    return modules.register_module_forward_pre_hook(
        lambda other, args: ((args[0] - mean) / std, *args[1:]) if type(other) is type(module) else None
    )


def first_child(model, x):
    return dict([next(iter(n23.output_shapes(model, x).items()))])


def detached(module, strength):
    return module.register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))


def switches_x_on(model, x):
    """And off again, but not when the forward raises."""
    grad = n22.guided_on_x(model, x)
    x.requires_grad_(False)
    return grad


def mean_of_all(model, name, batches):
    """One number for all images."""
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad(), features(model.eval(), name, keep=torch.mean) as f:
        means = [f.run(batch)[name] for batch in batches]
    for module, training in modes.items():
        module.training = training
    return sum(means) / len(means)


def shapes_in_training(model, x):
    """Puts the statistics back, but not when the forward raises."""
    state = {key: value.clone() for key, value in model.state_dict().items()}
    handles, shapes = [], {}
    for name, child in model.named_children():
        noting = partial(lambda name, module, args, output: shapes.update({name: tuple(output.shape)}), name)
        handles.append(child.register_forward_hook(noting))
    try:
        model(x)
    finally:
        [handle.remove() for handle in handles]
    model.load_state_dict(state)
    return shapes


def masks_in_a_closure(packed_too=False):
    """32.D with functions for what is packed: the mask as it is, or as bits."""
    pack_bits, unpack_bits = BY_ID["32.D"].solution()

    def pack(tensor):
        kept = tensor.detach().clone()
        packed = pack_bits(kept) if packed_too else kept
        return lambda: packed

    return pack, lambda give: unpack_bits(give()) if packed_too else give()


class WithSlots:
    __slots__ = ("__weakref__", "content", "filled")


def zeros_left_out(in_slots):
    """33.C with a slot that is a function, or an object without a dictionary."""

    class Store:
        def write(self, tensor):
            filled = tensor.view(torch.uint8).view(len(tensor), -1).any(1).bool()
            slot = WithSlots()
            slot.filled, slot.content = filled, tensor[filled]
            content = slot.content
            return slot if in_slots else lambda: (filled, content)

        def read(self, slot):
            filled, content = (slot.filled, slot.content) if in_slots else slot()
            tensor = content.new_zeros(len(filled))
            tensor[filled] = content
            return tensor

    return Store()


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


def bytes_for_a_mask(fill):
    """33.C with a mask in `uint8`, filled by `fill(mask, values)`."""

    def write(tensor):
        mask = tensor.view(torch.uint8).view(len(tensor), -1).any(1)
        return mask, tensor[mask.bool()]

    return n33._store(write, lambda slot: fill(*slot))


class Around:
    """A store that leaves the work to a `Disk`."""

    def __init__(self, folder):
        self.disk = Disk(folder)

    def write(self, tensor):
        return self.disk.write(tensor)

    def read(self, slot):
        return self.disk.read(slot)


def on_disk(store, **options):
    """34.D with a store of one's own around a `Disk`."""

    class OnDisk(n34._Wrapper):
        def context(self):
            return Offload(self.module, to=store(self.folder), min_bytes=4096, **options)

    return OnDisk


def turned_after_reading():
    """33.C: the second reading gives something, and something else."""

    class Store:
        def write(self, tensor):
            return list(n33.zeros_store().write(tensor))

        def read(self, slot):
            tensor = n33.zeros_store().read(slot)
            slot[1] = slot[1].flip(0)
            return tensor

    return Store()


class Compressed:
    """33.C with a slot that is a file in memory."""

    def write(self, tensor):
        content = io.BytesIO()
        np.savez_compressed(content, octets=tensor.view(torch.uint8).numpy())
        return content, tensor.dtype

    def read(self, slot):
        slot[0].seek(0)
        return torch.from_numpy(np.load(slot[0])["octets"]).view(slot[1])


class FreedWithItsSlot:
    """33.C with the content in the store, where it goes when the slot goes."""

    def __init__(self):
        self.held = {}

    def write(self, tensor):
        slot = WithSlots()
        self.held[id(slot)] = n33.zeros_store().write(tensor)
        weakref.finalize(slot, self.held.pop, id(slot))
        return slot

    def read(self, slot):
        return n33.zeros_store().read(self.held[id(slot)])


class ValuesInTheStore:
    """33.C: where the elements are is in the slot, what they are stays for ever."""

    def __init__(self):
        self.values = []

    def write(self, tensor):
        filled, values, dtype = n33.zeros_store().write(tensor)
        self.values.append(values)
        return filled, len(self.values) - 1, dtype

    def read(self, slot):
        filled, number, dtype = slot
        return n33.zeros_store().read((filled, self.values[number], dtype))


class TinyIsZero(FreedWithItsSlot):
    """33.C with what is nearly 0 taken for 0."""

    def write(self, tensor):
        near = tensor.abs() < 1e-12 if tensor.is_floating_point() else torch.zeros(len(tensor), dtype=torch.bool)
        return super().write(tensor.masked_fill(near & ~tensor.signbit(), 0))


def booked_and_kept(make, given):
    """What the right pair packs, as a copy, in a list that the pair keeps."""
    (pack, unpack), kept = make(given), []

    def pack_index(tensor):
        packed = pack(tensor)
        kept.append((packed[0].clone(), *packed[1:]) if isinstance(packed, tuple) else packed.clone())
        return len(kept) - 1

    return pack_index, lambda index: unpack(kept[index])


def rounded_in_a_list(model):
    """As many bytes as before, where the graph does not own them."""
    pack, kept = BY_ID["32.C"].solution(model)[0], []

    def pack_index(tensor):
        packed, dtype = pack(tensor)
        if packed.dtype == dtype:
            return packed
        kept.append(packed.to(dtype))
        return len(kept) - 1

    return pack_index, lambda packed: kept[packed] if isinstance(packed, int) else packed


def masks_as_text():
    return n32.packing_masks(
        lambda mask: ("".join("01"[bit] for bit in mask.flatten().tolist()), mask.shape),
        lambda packed: torch.tensor([bit == "1" for bit in packed[0]], dtype=torch.bool).view(packed[1]),
    )()


def masks_as_numbers():
    return n32.packing_masks(
        lambda mask: (mask.flatten().tolist(), mask.shape),
        lambda packed: torch.tensor(packed[0], dtype=torch.bool).view(packed[1]),
    )()


def masks_by_their_dtype():
    """Takes every `uint8` for a mask of its own."""
    pack, unpack = BY_ID["32.D"].solution()

    def pack_octets(tensor):
        if tensor.dtype != torch.bool:
            return tensor.detach()
        octets, octets.of = pack(tensor)[0], tensor.shape
        return octets

    return pack_octets, lambda kept: unpack((kept, kept.of)) if kept.dtype == torch.uint8 else kept


def misreads(folder):
    pack, unpack = BY_ID["34.A"].solution(folder)
    return pack, lambda file: unpack(file).view(7)


def deleting_themselves(keep=lambda file: None, load=lambda saved: saved):
    """34.A with files that take their folder to be there, and one thing changed."""

    def answer(folder):
        class File:
            def __init__(self, saved):
                self.path = Path(folder, str(uuid.uuid4()))
                torch.save(saved.detach().clone(), self.path)
                keep(self)

            def __del__(self):
                self.path.unlink()

        return File, lambda file: load(torch.load(file.path, weights_only=True))

    return answer


def files_in_a_list(folder):
    return deleting_themselves(keep=[].append)(folder)


def buffers_in_a_list(keep, *, now=None, restores="finally"):
    """35.D with the buffers themselves in a closure; what is kept of each, and when it is put back, is given."""

    def answer(block):
        buffers, found = list(block.buffers()), []

        def put(values):
            with torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(torch.as_tensor(value))

        @contextmanager
        def first():
            found.extend(map(keep, buffers))
            yield

        class Second:
            def __enter__(self):
                self.now = list(map(now or keep, buffers))
                put(found)

            def __exit__(self, kind, *_):
                if restores == "finally" or (restores == "without error" and kind is None):
                    put(self.now)

        return first(), Second()

    return answer


def small_pairs(pack, unpack, least):
    """Takes every pair that ends in a number for its own."""

    def small_or(tensor):
        return (tensor.detach(), tensor._version) if tensor.numel() < least else pack(tensor)

    def give(packed):
        if isinstance(packed, tuple) and len(packed) == 2 and isinstance(packed[1], int):
            return refuse_edited(*packed)
        return unpack(packed)

    return small_or, give


def sizes_beyond_the_layer(count, layers, budget):
    """One segment of six blocks, in a layer of two, is one segment of two."""
    most, fitting = max(layers.values()), []
    for sizes in itertools.product(range(most, -1, -1), repeat=len(layers)):
        plan = {name: size for name, size in zip(layers, sizes, strict=True) if size}
        _, peak, work = count(plan)
        if peak <= budget:
            fitting.append((work, peak, len(fitting), plan))
    if not fitting:
        raise ValueError("nothing fits")
    return min(fitting)[-1]


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


def halved_in_numpy(model):
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor):
        if tensor.dtype != torch.float32 or tensor.untyped_storage().data_ptr() in own:
            return tensor.detach()
        return tensor.detach().bfloat16().view(torch.int16).numpy()

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        return torch.from_numpy(packed).view(torch.bfloat16).float()

    return pack, unpack


def integers_and_a_scale(model, *, scale):
    """32.C in `int8`, with the largest value beside it."""

    def pack(tensor):
        if n32._in_model(tensor, model) or not tensor.numel():
            return tensor.detach()
        largest = tensor.detach().abs().max()
        return (tensor.detach() / largest * 127).round().to(torch.int8), scale(largest)

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else (packed[0].double() / 127 * packed[1]).float()

    return pack, unpack


def floats_of_numpy(model):
    def pack(tensor):
        return tensor.detach() if n32._in_model(tensor, model) else tensor.detach().half().numpy()

    return (
        pack,
        lambda packed: packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed).float(),
    )


def notes_with_slots(store):
    """Each note holds its slot for as long as the storage lives, whether or not anybody wants it."""
    notes = weakref.WeakKeyDictionary()

    def pack(tensor):
        storage, shape = tensor.untyped_storage(), (tensor.shape, tensor.stride(), tensor.storage_offset())
        if storage not in notes or notes[storage][0] != tensor._version:
            slot = store.write(torch.empty(0, dtype=torch.uint8).set_(storage))
            notes[storage] = tensor._version, slot
        slot, dtype = notes[storage][1], tensor.dtype
        return lambda: store.read(slot).view(dtype).as_strided(*shape)

    return pack


def copies_kept(folder):
    pack, unpack = n34._to_files(folder)
    cache = []

    def pack_and_keep(saved):
        cache.append(saved.clone())
        return pack(saved)

    return pack_and_keep, unpack


class BitsInAList:
    """A list of as many items as the tensor has elements: 8 bytes each, larger than the tensor."""

    def write(self, tensor):
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        bits = tensor.contiguous().view(integers).flatten()
        return (bits != 0).tolist(), bits[bits != 0], tensor.dtype

    def read(self, slot):
        there, bits, dtype = slot
        whole = torch.zeros(len(there), dtype=bits.dtype)
        whole[torch.tensor(there, dtype=torch.bool)] = bits
        return whole.view(dtype)


def normalises_safely(module, mean, std):
    return module.register_forward_pre_hook(lambda module, args: ((args[0] - mean) / (std + 1e-6), *args[1:]))


def keeps_the_edge(tensor):
    seen, edge = [], get_gradient_edge(tensor)

    def note(grads):
        if grads[edge.output_nr] is not None:
            seen.append(grads[edge.output_nr].clone())

    edge.node.register_prehook(note)
    return seen


def norms_by_numpy(model, loss_fn):
    return {name: np.float32(norm) for name, norm in BY_ID["22.B"].solution(model, loss_fn).items()}


def noisy(output):
    return output + 0.5 * torch.randn_like(output)


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        ("00.B", lambda model, name, x: list(BY_ID["00.B"].solution(model, name, x))),
        ("14.B", lambda function, model: tuple(BY_ID["14.B"].solution(function, model))),
        ("14.C", keeps_the_edge),
        ("15.B", lambda model, make: dict(enumerate(BY_ID["15.B"].solution(model, make)))),
        ("21.A", normalises_safely),
        ("21.B", lambda module, std: module.register_forward_hook(
            lambda module, args, output: noisy(output) if module.training else None, prepend=True)),
        ("21.B", lambda module, std: modules.register_module_forward_hook(
            lambda other, args, output: noisy(output) if other is module and module.training else None)),
        ("22.A", lambda module, strength: modules.register_module_full_backward_hook(
            lambda other, grad_input, _: tuple(grad if grad is None else (grad * -strength).to(grad.dtype)
                                               for grad in grad_input) if other is module else None)),
        ("22.B", norms_by_numpy),
        ("31.A", lambda function, x: torch.tensor(n31.held_bytes(function, x))),
        ("31.D", lambda x, *given: torch.cat(
            [checkpoint(n31.wasteful, part, *given, use_reentrant=False) for part in x.split(1000)])),
        ("31.D", lambda *given: checkpoint(n31.lean, *given, use_reentrant=False)),
        ("32.C", halved_in_numpy),
        ("32.D", partial(masks_in_a_closure, packed_too=True)),
        ("33.A", lambda *given: torch.tensor(n33.step_seconds(*given))),
        ("33.A", lambda *given: Fraction(n33.step_seconds(*given))),
        ("33.C", partial(zeros_left_out, in_slots=False)),
        ("33.C", partial(zeros_left_out, in_slots=True)),
        ("33.C", Compressed),
        ("33.C", bytes_for_a_mask(lambda mask, values: n33._fill(mask.bool(), values))),
        ("33.C", FreedWithItsSlot),
        ("34.A", lambda folder: in_a_folder_of_its_own(folder)),
        ("34.D", on_disk(n34._Copying)),
        ("34.D", on_disk(Around)),
        ("35.D", buffers_in_a_list(torch.Tensor.tolist)),
        ("35.B", sizes_beyond_the_layer),
    ],
    ids=["00.B-list", "14.B-tuple", "14.C-edge", "15.B-dict", "21.A-eps", "21.B-prepend", "21.B-global", "22.A-global",
         "22.B-numpy", "31.A-tensor", "31.D-parts", "31.D-again", "32.C-numpy", "32.D-closure", "33.A-tensor", "33.A-fraction",
         "33.C-closure", "33.C-slots", "33.C-file", "33.C-bytes", "33.C-finalize", "34.A-folder",
         "34.D-copies", "34.D-around", "35.D-lists", "35.B-beyond"],
)  # fmt: skip
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


def by_layers(step_in_backward):
    """Has no eyes for parameters of the model itself."""
    return lambda model, make: [hook for layer in model.children() for hook in step_in_backward(layer, make)]


def normalises_keywords(module, mean, std):
    def hook(module, args, kwargs):
        first, *rest = args
        kwargs = {
            key: (value - mean) / std if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()
        }
        return ((first - mean) / std, *rest), kwargs

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def unfreezes(first):
    """Switches gradients of all parameters on, whatever they were."""

    def answer(model, *given):
        model.requires_grad_(True)
        return first(model, *given)

    return answer


def share_inside_children(model, bound):
    grads = [param.grad for child in model.children() for param in child.parameters()]
    grads = torch.cat([grad.flatten() for grad in grads if grad is not None])
    return (grads.abs() > bound).double().mean().item()


def clips_leaf_modules(model, bounds):
    handles = []
    for pattern, bound in bounds.items():
        for layer in select(model, pattern).values():
            leaves = [module for module in layer.modules() if not list(module.children())]
            params = [param for leaf in leaves for param in leaf.parameters() if param.requires_grad]
            handles += [param.register_hook(clip(-bound, bound)) for param in params]
    return handles


def zeros_of_float32():
    """Looks at the bits where they have four bytes only."""

    class Store:
        def write(self, tensor):
            filled = tensor.view(torch.int32) != 0 if tensor.dtype == torch.float32 else tensor != 0
            return filled, tensor[filled]

        def read(self, slot):
            return n33._fill(*slot)

    return Store()


def signs_of_real_numbers():
    """Keeps -0.0, but not inside a complex number."""

    class Store:
        def write(self, tensor):
            filled = tensor != 0
            if tensor.is_floating_point():
                filled |= torch.signbit(tensor)
            return filled, tensor[filled]

        def read(self, slot):
            return n33._fill(*slot)

    return Store()


def in_a_folder_of_its_own(folder):
    """34.A where other people's files cannot come in the way."""
    own = tempfile.mkdtemp(dir=folder)

    class File:
        def __init__(self, tensor):
            self.name = Path(own, uuid.uuid4().hex)
            torch.save(tensor.detach().clone(), self.name)

        def __del__(self):
            self.name.unlink()

    return File, lambda file: torch.load(file.name)


def first_pattern_wins(model, bounds):
    done, handles = set(), []
    for pattern, bound in bounds.items():
        for layer in select(model, pattern).values():
            for param in layer.parameters():
                if param.requires_grad and param not in done:
                    done.add(param)
                    handles.append(param.register_hook(clip(-bound, bound)))
    return handles


def nan_of_tensors_and_nothing_else(model, x):
    """Knows of `None` among tensors, and of no number."""

    def has_nan(value):
        if value is None:
            return False
        return any(map(has_nan, value)) if isinstance(value, tuple) else bool(torch.isnan(value).any())

    found = []
    with ExitStack() as stack:
        for name, layer in model.named_modules():
            hook = lambda module, args, output, name=name: found.append(name) if has_nan(output) else None  # noqa: E731
            stack.enter_context(layer.register_forward_hook(hook))
        model(x)
    return found[0] if found else None


def names_left_after_an_error(solution, model, x):
    """Writes names on the layers, and tidies up where nothing raises."""
    for name, layer in model.named_modules():
        layer.written = name
    result = solution(model, x)
    for layer in model.modules():
        del layer.written
    return result


def hooked_everywhere(model, name, x):
    """Takes its global hook off, but not after an error."""
    shapes, child = [], model.get_submodule(name)
    handle = modules.register_module_forward_hook(
        lambda module, args, output: shapes.append(tuple(output.shape)) if module is child else None
    )
    output = model(x)
    handle.remove()
    return output, shapes[0]


def never_put_back(model, name, x):
    shapes, child = [], model.get_submodule(name)
    run = type(child).forward

    def forward(*args):
        output = run(child, *args)
        shapes.append(tuple(output.shape))
        return output

    child.forward = forward
    return model(x), shapes[0]


def hooked_on_the_model(model, name, x):
    """Finds out on the model itself when the run is over."""
    handle = model.register_forward_hook(lambda *given: None)
    result = BY_ID["00.B"].solution(model, name, x)
    handle.remove()
    return result


def in_a_default(model, found=[]):  # noqa: B006
    found += BY_ID["11.C"].solution(model)
    return found


def by_shape(model, strength):
    params = {param.shape: param for param in model.parameters() if param.requires_grad}

    def hook(grad):
        return grad + strength * params[grad.shape].detach()

    return [param.register_hook(hook) for param in model.parameters() if param.requires_grad]


_LATEST = {}


def hangs_the_latest(module, hook):
    _LATEST["hook"] = hook

    def hang(module, args, output):
        if output.requires_grad:
            output.register_hook(_LATEST["hook"])

    return module.register_forward_hook(hang)


def asks_the_weight(module, hook):
    def hang(module, args, output):
        if output.requires_grad and module.weight.requires_grad:
            output.register_hook(hook)

    return module.register_forward_hook(hang)


def row_norms(tensors):
    norms = []

    def measure(grads):
        each = [grad.norm(dim=-1).sum() for grad in grads if grad is not None]
        norms.append(torch.stack(each).norm().item())

    return norms, torch.autograd.graph.register_multi_grad_hook(tensors, measure)


def optimizers_by_name(model, make_optimizer, known={}):  # noqa: B006
    handles = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            known.setdefault(name, make_optimizer([param]))

            def step(param, name=name):
                known[name].step()
                known[name].zero_grad()

            handles.append(param.register_post_accumulate_grad_hook(step))
    return handles


def steps_once(model, make_optimizer):
    optimizers, handles = {}, {}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()
        handles[param].remove()

    for param in model.parameters():
        if param.requires_grad:
            optimizers[param] = make_optimizer([param])
            handles[param] = param.register_post_accumulate_grad_hook(step)
    return list(handles.values())


def counts_to_the_latest(model, make_optimizer, count):
    _LATEST["count"] = count
    optimizers = {param: make_optimizer([param]) for param in model.parameters() if param.requires_grad}
    arrived = dict.fromkeys(optimizers, 0)

    def step(param):
        arrived[param] += 1
        if arrived[param] % _LATEST["count"] == 0:
            optimizers[param].step()
            optimizers[param].zero_grad()

    return [param.register_post_accumulate_grad_hook(step) for param in optimizers]


def nothing_for_none(model, x):
    """Writes an empty tuple for an output that is None."""
    keep = lambda shapes, name: lambda module, args, output: shapes.update({name: n21._shape(output) or ()})  # noqa: E731
    return n21._shapes_by_hand(keep)(model, x)


def of_the_original(tensor):
    """Keeps the gradient itself, and lets a copy flow on."""
    gradients = []

    def hook(grad):
        gradients.append(grad)
        return grad.clone()

    tensor.register_hook(hook)
    return gradients


def one_group_after_another(model, make_optimizer):
    first, *others = n15._trained(model)
    optimizer = make_optimizer([first])
    for param in others:
        optimizer.add_param_group({"params": [param]})

    def step(param):
        optimizer.step()
        optimizer.zero_grad()

    return n15.on_each(model, lambda param: step)


def unless_zero(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in n15._trained(model)}

    def step(param):
        if param.grad.any():
            small[param].step()
        small[param].zero_grad()

    return n15.on_each(model, lambda param: step)


def counting_all(model, make_optimizer, count):
    small, calls = {param: make_optimizer([param]) for param in n15._trained(model)}, []

    def step(param):
        calls.append(param)
        if len(calls) % (count * len(small)) == 0:
            for optimizer in small.values():
                optimizer.step()
                optimizer.zero_grad()

    return n15.on_each(model, lambda param: step)


@pytest.mark.parametrize(
    ("exercise", "answer", "reason"),
    [
        ("00.B", hooked_everywhere, "left_after_error"),
        ("00.B", hooked_on_the_model, "left_after_error"),
        ("00.B", never_put_back, "forward_replaced"),
        ("11.C", in_a_default, "one_model_only"),
        ("12.B", by_shape, "last_one"),
        ("13.B", hangs_the_latest, "latest_call"),
        ("13.B", asks_the_weight, "asks_parameters"),
        ("15.A", row_norms, "of_matrices"),
        ("15.B", optimizers_by_name, "nothing_moved"),
        ("15.B", steps_once, "later_steps"),
        ("15.C", counts_to_the_latest, "latest_call"),
        ("21.C", nothing_for_none, "wrong_shape"),
        ("15.B", by_layers(BY_ID["15.B"].solution), "some_moved"),
        ("21.A", normalises_keywords, "keywords_lost"),
        ("22.B", unfreezes(BY_ID["22.B"].solution), "changed_model"),
        ("22.C", unfreezes(BY_ID["22.C"].solution), "changed_model"),
        ("25.A", share_inside_children, "wrong_share"),
        ("25.B", clips_leaf_modules, "missed"),
        ("21.A", normalise_every_such, "another_module"),
        ("21.C", none_is_the_only_other, "nested"),
        ("21.C", tidies_up_after_runtime_errors, "left_after_error"),
        ("22.A", detached, "no_gradient"),
        ("22.C", switches_x_on, "switched_input"),
        ("23.A", modes_of_children, "flags"),
        ("23.A", first_child, "wrong_names"),
        ("23.A", shapes_in_training, "statistics"),
        ("23.A", partial(names_left_after_an_error, BY_ID["23.A"].solution), "attribute_left"),
        ("23.C", partial(names_left_after_an_error, BY_ID["23.C"].solution), "attribute_left"),
        ("23.C", nan_of_tensors_and_nothing_else, "raised"),
        ("24.A", feature_or_key_error, "hid_error"),
        ("23.C", first_nan_inside, "the_model"),
        ("24.A", cleared_after_error, "removed_others"),
        ("24.A", off_after_value_error, "left_after_error"),
        ("24.B", mean_of_all, "wrong_shape"),
        ("24.B", rows_of_all_calls, "first_call_only"),
        ("25.A", children_alone, "wrong_share"),
        ("25.B", first_pattern_wins, "wrong_values"),
        ("25.C", without_a_batch, "raised"),
        ("25.C", another_loss, "wrong_values"),
        ("25.C", longest_is_max_norm, "wrong_values"),
        ("31.A", lambda function, x: torch.tensor(float(n31.held_bytes(function, x))), "not_a_number"),
        ("31.A", lambda function, x: n31.held_bytes(function, x) > 0, "not_a_number"),
        ("31.D", n31._product_kept, "saved_again"),
        ("31.D", n31._FormulaWithGraph.apply, "saved_again"),
        ("32.D", masks_in_a_closure, "not_smaller"),
        ("33.C", ShortIndices, "other_content"),
        ("33.C", bytes_for_a_mask(lambda mask, values: values if mask.bool() else mask), "raised"),
        ("33.C", bytes_for_a_mask(lambda mask, values: n33._fill(-mask.bool(), values)), "raised"),
        ("33.C", bytes_for_a_mask(lambda mask, values: mask.double().masked_fill(mask.long(), 1)), "raised"),
        ("33.C", bytes_for_a_mask(lambda mask, values: values.masked_select(mask)), "mask_of_bytes"),
        ("33.C", turned_after_reading, "read_once"),
        ("34.C", small_pairs, "not_restored"),
        ("34.C", calls_what_can_be_called, "not_restored"),
        ("33.C", BitsInAList, "too_large"),
        ("33.D", notes_with_slots, "keeps_slot"),
        ("35.A", lambda block, x: checkpoint(lambda: block(x), use_reentrant=False), "ready_made"),
        ("35.A", checkpoint_by_seed, "wrong_mask"),
        ("35.A", dropped_twice, "other_dropout"),
        ("35.A", seeds_in_pack, "other_numbers"),
        ("35.B", only_divisors, "gave_up"),
        ("35.C", n35._frugal_list(lambda again, index: [again[index]]), "no_tensor"),
        ("35.C", n35._frugal_list(lambda again, index: again[0]), "other_shape"),
        ("32.A", partial(booked_and_kept, BY_ID["32.A"].solution), "kept_elsewhere"),
        ("32.C", lambda model: booked_and_kept(BY_ID["32.C"].solution, model), "kept_elsewhere"),
        ("32.C", rounded_in_a_list, "kept_elsewhere"),
        ("32.C", partial(integers_and_a_scale, scale=lambda largest: np.float32(largest)), "wrong_values"),
        ("32.C", partial(integers_and_a_scale, scale=torch.Tensor.double), "wrong_values"),
        ("32.C", partial(integers_and_a_scale, scale=torch.Tensor.half), "wrong_values"),
        ("32.C", floats_of_numpy, "other_precision"),
        ("32.D", masks_as_text, "not_smaller"),
        ("32.D", masks_as_numbers, "not_smaller"),
        ("32.D", masks_by_their_dtype, "raised"),
        ("33.C", ValuesInTheStore, "left_in_store"),
        ("33.C", TinyIsZero, "lossy"),
        ("33.D", n33._views(flat=lambda tensor: tensor.flatten().view(torch.uint8)), "part_only"),
        ("34.A", n34._cleaning_up_first, "touched_others"),
        ("34.B", n34._byte_store(key=lambda slot, held, tensor: tensor.data_ptr()), "same_key"),
        (
            "34.B",
            n34._byte_store(take=torch.clone, give=lambda held, slot: held[slot.key].clone()),
            "not_bytes",
        ),
        ("33.C", zeros_of_float32, "lost_sign"),
        ("33.C", signs_of_real_numbers, "lost_sign"),
        ("34.A", misreads, "raised"),
        ("34.A", copies_kept, "copy_in_memory"),
        ("34.A", files_in_a_list, "leaked"),
        ("34.C", n34._safe(lambda saved, least: saved.nbytes >= 4 * least), "other_threshold"),
        (
            "34.C",
            n34._safe(lambda saved, least: saved.untyped_storage().nbytes() >= 4 * least),
            "other_threshold",
        ),
        ("34.D", n34._NoThreshold, "moved_small"),
        ("34.D", n34._CopiesAll, "moved_own"),
        ("34.D", on_disk(n34._Copying, keep=4096), "kept_some"),
        ("34.D", on_disk(Around, keep=4096), "kept_some"),
        ("35.D", n35.by_state_dict, "wrong_gradients"),
        ("35.D", buffers_in_a_list(torch.Tensor.tolist, restores="never"), "wrong_buffers"),
        ("35.D", buffers_in_a_list(torch.Tensor.tolist, restores="without error"), "wrong_buffers"),
        ("35.D", buffers_in_a_list(lambda buffer: buffer.numpy().copy(), restores="never"), "wrong_buffers"),
        ("35.D", buffers_in_a_list(torch.Tensor.numpy), "start_not_copied"),
        ("35.D", buffers_in_a_list(torch.Tensor.tolist, now=torch.Tensor.numpy), "now_not_copied"),
        ("35.D", buffers_in_a_list(torch.clone, now=torch.Tensor.detach), "now_not_copied"),
        ("11.B", of_the_original, "not_a_copy"),
        ("15.B", one_group_after_another, "shared_optimizer"),
        ("15.B", unless_zero, "later_steps"),
        ("15.C", counting_all, "one_count"),
    ],
)
def test_an_answer_that_is_right_only_where_it_is_easy_is_refused(exercise, answer, reason):
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
        first, second = n35.buffers_once(block)

        class Second:
            def __enter__(self):
                second.__enter__()

            def __exit__(self, kind, cause, trace):
                second.__exit__()
                if kind is ValueError:
                    raise error(cause)

        return first, Second()

    message = check.exercise("35.D", answer)
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

    message = check.exercise("34.B", n34._byte_store(key=lowest_free, drop=lambda held, slot: None))
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
        pack = n33._views(key=key, same=lambda known, storage: True, weak=False)(store)

        def littering(tensor):
            litter.extend(torch.empty(1000).untyped_storage() for _ in range(3))
            return pack(tensor)

        return littering

    message = check.exercise("33.D", answer)
    assert (message.kind, message.reason) == ("wrong", "address_reused"), message


MODULES = sorted((notebook_form.ROOT / "hooklab" / "course" / "checks").glob("n*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_refusal_has_a_wrong_answer_and_nothing_is_left_over(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    reasons = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refuse" and node.args
        if isinstance(node.args[0], ast.Constant)
    }
    shipped = {reason for item in EXERCISES if item.id[:2] == path.stem[1:3] for reason in item.wrong}
    assert len(reasons) > 10
    assert reasons <= shipped
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= set(re.findall(r"\w+", Path(__file__).read_text(encoding="utf-8"))) | {"CHECKS"}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert defined <= used


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
# This runs a backward of its own: afterwards nobody can tell whose gradients those were.
RUN_BACKWARD = {"13.C"}


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
    task = Exercise("99.A", examine, lambda x: x, {}, zh="好", en="Good")
    assert check.exercise(task, lambda x: x).kind == "right"
