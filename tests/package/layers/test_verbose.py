"""verbose: a line for each layer that finishes, the last one for the layer that fails."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest
import torch
from models import NESTED, Returns, Twice, Unhookable, mlp, same_state, state_of
from torch import nn
from torch._utils import ExceptionWrapper
from torch.utils.checkpoint import checkpoint

from hooklab import features, hooks_on, layer_statistics, no_leftovers, verbose


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 3)), nn.Softmax(-1))


def lines_of(model, *args, patterns=(), **options):
    lines = []
    with verbose(model, *patterns, write=lines.append, **options):
        model(*args)
    return lines


def test_the_layers_directly_in_the_model_have_a_line_each(model, capsys):
    with verbose(model):
        model(torch.ones(2, 4))
    assert capsys.readouterr().out == "0  Linear      [2, 5]\n1  Sequential  [2, 3]\n2  Softmax     [2, 3]\n"


def test_a_forward_interrupted_from_the_keyboard_does_not_number_the_next(model):
    def interrupt(*args):
        raise KeyboardInterrupt

    lines = []
    with verbose(model, write=lines.append):
        with model[1].register_forward_hook(interrupt), pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 4))
        assert [line.split()[0] for line in lines] == ["0", "1"]
        lines.clear()
        model(torch.ones(2, 4))
    assert [line.split()[:2] for line in lines] == [["0", "Linear"], ["1", "Sequential"], ["2", "Softmax"]]


def test_deeper_layers_come_before_the_one_around_them(model):
    names = [line.split()[0] for line in lines_of(model, torch.ones(2, 4), depth=2)]
    assert names == ["0", "1.0", "1.1", "1", "2"]


def test_depth_0_is_the_model_as_a_whole_and_so_is_a_model_without_layers(model):
    assert lines_of(model, torch.ones(2, 4), depth=0) == ["Sequential  Sequential  [2, 3]"]
    assert lines_of(nn.Linear(4, 3), torch.ones(2, 4)) == ["Linear  Linear  [2, 3]"]


def test_patterns_choose_the_layers(model):
    lines = lines_of(model, torch.ones(2, 4), patterns=("**1", nn.Softmax))
    assert lines == ["1.1  Linear      [2, 3]", "1    Sequential  [2, 3]", "2    Softmax     [2, 3]"]


@pytest.mark.parametrize(
    ("places", "label"),
    [(2, "0 = 1"), (3, "0 = 1 = 2"), (4, "0 = 1 = … (4 names)"), (12, "0 = 1 = … (12 names)")],
)
def test_a_layer_with_many_names_shows_the_first_of_them(places, label):
    shared = nn.Tanh()
    lines = lines_of(nn.Sequential(*[shared] * places), torch.ones(2))
    assert lines[0].split("  ")[0] == label
    assert [line.split("  ")[0] for line in lines[1:]] == [
        f"{label} #{call}" for call in range(2, places + 1)
    ]


def test_containers_that_are_never_called_are_passed_over_and_are_no_level():
    model = Returns(lambda x: model.parts[0](model.blocks["a"][0](x)))
    model.parts = nn.ModuleList([nn.Sequential(nn.ReLU())])
    model.blocks = nn.ModuleDict({"a": nn.ModuleList([nn.Tanh()])})
    names = ["blocks.a.0", "parts.0"]
    assert [line.split()[0] for line in lines_of(model, torch.ones(2))] == names
    assert [line.split()[0] for line in lines_of(model, torch.ones(2), depth=2)] == [
        "blocks.a.0",
        "parts.0.0",
        "parts.0",
    ]
    assert lines_of(model, torch.ones(2), depth=0) == ["Returns  Returns  [2]"]


@pytest.mark.parametrize("name", NESTED)
def test_nested_outputs_show_the_shape_of_each_tensor(name):
    build, text = NESTED[name]
    (line,) = lines_of(nn.Sequential(Returns(build)), torch.arange(6.0).reshape(2, 3))
    assert line == f"0  Returns  {text}"


def test_a_failed_layer_is_named_that_has_no_name_or_was_given_keywords():
    model = Returns(lambda x: nn.Linear(3, 3)(x))  # made in the forward
    lines = []
    with pytest.raises(RuntimeError), verbose(model, write=lines.append):
        model(torch.ones(1, 2))
    assert lines[-1].startswith("Linear  Linear  failed on [1, 2]: ")
    model.mixed = nn.Bilinear(2, 2, 2)
    model.build = lambda x: model.mixed(x, input2=torch.ones(1, 3))
    with pytest.raises(RuntimeError), verbose(model, write=lines.append):
        model(torch.ones(1, 2))
    assert lines[-1].startswith("mixed  Bilinear  failed on ([1, 2], {'input2': [1, 3]}): ")


def test_nested_tensors_show_what_is_known_of_their_shape():
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    assert lines_of(nn.Sequential(nn.ReLU()), ragged) == ["0  ReLU  [2, *, 3]"]


def test_a_second_call_in_one_forward_is_numbered_and_a_new_forward_begins_anew():
    model = Twice()
    for _ in range(2):
        names = [line.partition("  ")[0] for line in lines_of(model, torch.ones(2, 3))]
        assert names == ["step = again", "step = again #2", "last"]


def test_layers_called_by_themselves_are_not_numbered(model):
    lines = []
    with verbose(model, write=lines.append):
        model[0](torch.ones(2, 4))
        model[0](torch.ones(2, 4))
    assert lines == ["0  Linear      [2, 5]"] * 2


def test_each_thread_counts_for_itself():
    model, lines = Twice(), []
    with verbose(model, "step", write=lines.append):
        threads = [threading.Thread(target=model, args=(torch.ones(1, 3),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum("#2" in line for line in lines) == 4
    assert not any("#3" in line for line in lines)


def test_lines_come_while_the_forward_runs(model):
    seen = []
    model[2].register_forward_pre_hook(lambda module, args: seen.append(len(lines)))
    lines = []
    with verbose(model, write=lines.append):
        model(torch.ones(2, 4))
    assert seen == [2]


def test_a_forward_that_calls_none_of_the_layers_says_so():
    attention, x = nn.MultiheadAttention(4, 2), torch.ones(5, 1, 4)
    assert lines_of(attention, x, x, x) == [
        "MultiheadAttention  MultiheadAttention  ([5, 1, 4], [1, 5, 5])  (none of the chosen layers was called)"
    ]


def test_a_call_of_the_model_inside_its_own_forward_is_not_one_without_layers():
    model = Returns(lambda x: model.layer(model(x[0])) if x.dim() > 1 else x)
    model.layer = nn.Tanh()
    assert lines_of(model, torch.ones(1, 2)) == ["layer  Tanh  [2]"]


# ---- failures ----


def test_the_last_line_is_the_layer_that_failed(model):
    model[1][1] = nn.Linear(7, 3)
    lines = []
    with no_leftovers(model), pytest.raises(RuntimeError), verbose(model, write=lines.append):
        model(torch.ones(2, 4))
    assert lines[0] == "0  Linear      [2, 5]"
    assert lines[1].startswith("1.1  Linear  failed on [2, 5]: RuntimeError: ")
    assert "(2x5 and 7x3)" in lines[1]
    assert len(lines) == 2


def test_a_failure_in_the_forward_of_the_model_itself_names_the_model():
    def broken(x):
        return model.layer(x) + torch.ones(9)

    model = Returns(broken)
    model.layer = nn.Linear(4, 2)
    lines = []
    with pytest.raises(RuntimeError), verbose(model, write=lines.append):
        model(torch.ones(2, 4))
    assert lines[0] == "layer  Linear  [2, 2]"
    assert lines[1].startswith("Returns  Returns  failed on [2, 4]: RuntimeError: ")
    assert len(lines) == 2


def test_a_layer_that_fails_on_several_inputs_shows_each():
    model, lines = nn.Bilinear(2, 2, 2), []
    with pytest.raises(RuntimeError), verbose(model, write=lines.append):
        model(torch.ones(1, 2), torch.ones(1, 3))
    assert lines[-1].startswith("Bilinear  Bilinear  failed on ([1, 2], [1, 3]): RuntimeError")


def test_a_call_with_wrong_arguments_shows_what_was_given():
    model, lines = nn.Sequential(nn.Linear(2, 2)), []
    with pytest.raises(TypeError), verbose(model, write=lines.append):
        model(torch.ones(2), mask=torch.ones(3))
    assert lines[-1].startswith("Sequential  Sequential  failed on ([2], {'mask': [3]}): TypeError: ")


def test_a_hook_of_the_users_that_raises_is_the_failure_of_its_layer(model):
    def broken(module, args, output):
        raise ValueError("from a hook\nsecond line")

    model[1].register_forward_hook(broken)
    lines = []
    with pytest.raises(ValueError, match="from a hook"), verbose(model, write=lines.append):
        model(torch.ones(2, 4))
    assert lines[-1] == "1  Sequential  failed on [2, 5]: ValueError: from a hook"
    assert hooks_on(model)[0].owner == "user"
    assert len(hooks_on(model)) == 1


def test_a_failure_that_the_model_handles_is_written_and_the_forward_goes_on():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(9, 2), nn.Linear(4, 2)

        def forward(self, x):
            try:
                return self.wide(x)
            except RuntimeError:
                return self.narrow(x)

    lines = lines_of(Careful(), torch.ones(1, 4))
    assert lines[0].startswith("wide  Linear  failed on [1, 4]: RuntimeError")
    assert lines[1:] == ["narrow  Linear  [1, 2]"]


def test_a_layer_that_failed_was_called_too():
    class Lenient(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(9, 2)

        def forward(self, x):
            with suppress(RuntimeError):
                self.wide(x)
            return x

    (line,) = lines_of(Lenient(), torch.ones(1, 4))
    assert line.startswith("wide  Linear  failed on [1, 4]: RuntimeError")


def test_an_error_is_not_kept_after_its_forward(model):
    x = torch.ones(2, 9)
    gone = weakref.ref(x)  # the frames of the error hold it
    with verbose(model, write=lambda line: None):
        with pytest.raises(RuntimeError):
            model(x)
        del x
        gc.collect()
        assert gone() is None


def test_a_forward_interrupted_from_the_keyboard_does_not_spoil_the_next(model):
    def interrupt(*args):
        raise KeyboardInterrupt

    lines = []
    with verbose(model, write=lines.append):
        with model[2].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 4))
        lines.clear()
        model(torch.ones(2, 4))
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]


def test_a_layer_that_handles_an_interrupt_inside_it_has_its_line():
    def interrupt(x):
        raise KeyboardInterrupt

    def patient(x):
        with suppress(KeyboardInterrupt):
            layer.inner(x)
        return x

    layer, lines = Returns(patient), []
    layer.inner = Returns(interrupt)
    with verbose(nn.Sequential(layer), depth=2, write=lines.append):
        layer(torch.ones(2))
        layer(torch.ones(2))
    assert lines == ["0        Returns  [2]"] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_block_ends_with_the_layer_that_was_running(model, error):
    def stop(x):
        raise error

    model[1][0] = Returns(stop)
    lines = []
    with no_leftovers(model), pytest.raises(error), verbose(model, write=lines.append):
        model(torch.ones(2, 4))
    assert lines == ["0  Linear      [2, 5]", f"1.0  Returns  failed on [2, 5]: {error.__name__}"]


def test_a_hook_behind_ours_on_the_model_that_raises_has_a_line(model):
    def broken(module, args, output):
        raise ValueError("from a hook")

    lines = []
    with pytest.raises(ValueError, match="from a hook"), verbose(model, "2", write=lines.append):
        model.register_forward_hook(broken)
        model(torch.ones(2, 4))
    assert lines == [
        "2  Softmax  [2, 3]",
        "Sequential  Sequential  failed on [2, 4]: ValueError: from a hook",
    ]
    assert len(hooks_on(model)) == 1


def test_what_fails_after_the_forward_has_no_line(model):
    def stop(x):
        if torch._C._current_graph_task_id() != -1:
            raise KeyboardInterrupt
        return x.exp()

    def again(x):
        return checkpoint(model[1][0], x, use_reentrant=False)

    model[1][0], lines = Returns(stop), []
    model[1].insert(1, Returns(again))
    with pytest.raises(KeyboardInterrupt), verbose(model, write=lines.append):
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="batch"), verbose(model, write=lines.append):
        nn.CrossEntropyLoss()(model(torch.ones(2, 4)), torch.ones(5, dtype=torch.long))
    assert [line.split()[0] for line in lines] == ["0", "1", "2"] * 2
    assert not any("failed" in line for line in lines)


def test_a_failure_told_in_other_words_has_one_line(model):
    """By the layer around it; where something else fails while a failure is handled, that has its own."""

    def tells(x):
        try:
            return model[1](x)
        except RuntimeError as error:
            raise ValueError("the middle failed") from error

    def tries_another(x):
        try:
            return model[1](x)
        except RuntimeError:
            return model[0](x)

    def tries_another_and_tells(x):
        try:
            return model[1](x)
        except RuntimeError as error:
            why.append(error)
            return second(x)

    def also_failed(x):
        raise RuntimeError("so did this") from why[0]

    model.second = second = Returns(also_failed)
    model[1][1], failed, why = nn.Linear(7, 3), [], []
    for forward in (tells, tries_another, tries_another_and_tells):
        lines = []
        model.forward = forward
        with pytest.raises((RuntimeError, ValueError)), verbose(model, write=lines.append):
            model(torch.ones(2, 5))
        failed.append([line.split()[0] for line in lines if "failed on [2, 5]: RuntimeError" in line])
        assert len(failed[-1]) == len(lines)
    assert failed == [["1.1"], ["1.1", "0"], ["1.1", "second"]]


def test_the_same_error_in_two_forwards_has_a_line_in_each(model):
    def broken(x):
        raise error

    error, lines = ValueError("noted before"), []
    model[1] = Returns(broken)
    with verbose(model, write=lines.append):
        for _ in range(2):
            with pytest.raises(ValueError, match="noted before"):
                model(torch.ones(2, 4))
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5))
    assert [line.split()[0] for line in lines if "failed" in line] == ["1", "1", "0"]


def test_an_older_error_that_ends_the_block_has_no_line(model):
    with pytest.raises(RuntimeError) as older:
        model(torch.ones(2, 9))
    lines = []
    with pytest.raises(RuntimeError), verbose(model, write=lines.append):
        model(torch.ones(2, 4))
        raise older.value
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]


def test_a_line_that_cannot_be_written_replaces_no_error_and_leaves_no_hook(model):
    def closed(line):
        raise BrokenPipeError("closed")

    def stop(x):
        raise KeyboardInterrupt

    model[0] = Returns(stop)
    with no_leftovers(model), pytest.raises(KeyboardInterrupt) as raised, verbose(model, write=closed):
        model(torch.ones(2, 4))
    assert raised.value.__notes__ == [
        "hooklab.verbose: the line for this error could not be written: BrokenPipeError"
    ]


def test_nested_blocks_each_write_the_failure(model):
    model[2], inner, outer = nn.Linear(7, 3), [], []
    with (
        pytest.raises(RuntimeError) as caught,
        verbose(model, write=outer.append),
        verbose(model, write=inner.append),
    ):
        model(torch.ones(2, 4))
    assert inner == outer
    assert inner[-1].startswith("2  Linear  failed on [2, 3]: RuntimeError")
    assert type(pickle.loads(pickle.dumps(caught.value))) is RuntimeError


def test_a_forward_that_was_stopped_early_has_not_failed(model):
    lines = []
    with verbose(model, write=lines.append), features(model, "0") as f:
        f.run(torch.ones(2, 4))
    assert lines == ["0  Linear      [2, 5]"]
    lines.clear()
    with verbose(model, "2", write=lines.append), features(model, "0") as f:
        f.run(torch.ones(2, 4))
    assert lines == []


def test_the_layer_that_ends_a_run_has_its_line_in_a_block_inside_the_run(model):
    lines = []

    def run_and_write(x):
        with verbose(model, write=lines.append):
            return model(x)

    around = Returns(run_and_write)
    around.model = model
    with features(around, "model.0") as f:
        f.run(torch.ones(2, 4))
    assert lines == ["0  Linear      [2, 5]"]


# ---- beside other things ----


def test_recomputation_under_checkpointing_is_not_written():
    block = mlp(4, 4, 4)
    for reentrant in (False, True):
        model = Returns(lambda x, again=reentrant: checkpoint(block, x, use_reentrant=again))
        model.block, lines = block, []
        with verbose(model, depth=2, write=lines.append):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
            assert [line.split()[0] for line in lines] == ["block.0", "block.1", "block.2", "block"]
            for _ in range(2):
                lines.clear()
                block(torch.ones(2, 4))
        assert [line.split("  ")[0] for line in lines] == ["block.0", "block.1", "block.2", "block"]


def test_recomputation_inside_a_call_of_the_same_layer_is_not_written():
    class Slope(nn.Module):
        def forward(self, x, inner=False):
            if inner:
                return x.sin()
            (slope,) = torch.autograd.grad(checkpoint(self, x, True, use_reentrant=False).sum(), x)
            return slope

    lines = lines_of(nn.Sequential(Slope()), torch.ones(2, requires_grad=True))
    assert lines == ["0  Slope  [2]", "0 #2  Slope  [2]"]


def test_after_the_block_the_model_is_as_before(model):
    before, plain = state_of(model), pickle.dumps(model)
    lines_of(model, torch.ones(2, 4), depth=3)
    assert same_state(before, state_of(model))
    assert pickle.dumps(model) == plain
    assert hooks_on(copy.deepcopy(model)) == []


def test_contexts_nest_and_repeat(model):
    outer, inner = [], []
    with verbose(model, write=outer.append):
        with verbose(model, write=inner.append):
            model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    assert outer == inner * 2
    assert hooks_on(model) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"depth": -1}, ValueError, r"verbose\(depth=-1\): expected 0 or more"),
        ({"depth": 1.5}, TypeError, r"verbose\(depth=...\): expected a whole number, found float"),
        (
            {"write": "out.txt"},
            TypeError,
            r"verbose\(write=...\): expected something that can be called.*found str",
        ),
    ],
)
def test_bad_options_are_refused_and_no_hook_stays(model, options, error, words):
    with pytest.raises(error, match=words):
        verbose(model, **options)
    assert hooks_on(model) == []


def test_what_is_no_module_is_refused_without_patterns_too():
    with pytest.raises(TypeError, match="verbose: expected a module, found dict"):
        verbose({"fc": nn.Linear(1, 1)})


@pytest.mark.parametrize("watch", [verbose, features, layer_statistics])
def test_a_layer_that_takes_no_hook_leaves_none_on_the_others(watch):
    model = nn.Sequential(nn.Linear(2, 2), Unhookable(2, 2))
    with no_leftovers(model), pytest.raises(ValueError, match="no hooks here"):
        watch(model, "*")


@pytest.mark.parametrize("watch", [partial(verbose, write=[].append), features, layer_statistics])
def test_a_model_may_be_copied_while_it_is_watched(watch):
    model = mlp(4, 5, 2)
    with watch(model, "*"):
        twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(1, 4)), model(torch.ones(1, 4)))


class InThreads(nn.Module):
    """As nn.DataParallel does it: replicas of the module, each in a thread of its own."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        results, parts = {}, x.chunk(2)

        def work(number):
            together.wait()
            try:
                results[number] = replicas[number](parts[number])
            except RuntimeError:
                results[number] = ExceptionWrapper(where=f"in replica {number}")

        replicas, together = [_replica(self.module) for _ in parts], threading.Barrier(len(parts))
        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results.values():
            if isinstance(result, ExceptionWrapper):
                result.reraise()
        return torch.cat(list(results.values()))


def _replica(module):
    replica = module._replicate_for_data_parallel()
    replica._parameters = module._parameters
    replica._modules = {name: _replica(part) for name, part in module._modules.items()}
    return replica


def test_replicas_in_other_threads_are_seen_and_named():
    model, lines = InThreads(mlp(4, 5, 2)), []
    with verbose(model, "module.1", write=lines.append):
        model(torch.ones(4, 4))
    assert [line.split()[0] for line in lines] == ["module.1", "module.1"]
    lines.clear()
    model.module[2] = nn.Linear(3, 2)
    with (
        verbose(model, write=lines.append),
        pytest.raises(RuntimeError, match="Caught RuntimeError in replica"),
    ):
        model(torch.ones(4, 4))
    assert len(lines) == 2
    assert all(line.startswith("module.2  Linear  failed on [2, 5]: RuntimeError: ") for line in lines)


def test_an_error_from_elsewhere_that_is_raised_anew_has_its_line(model):
    """As one of a DataLoader's worker is: no layer has failed before it."""

    def broken(x):
        try:
            raise RuntimeError("in a worker")
        except RuntimeError:
            there = ExceptionWrapper(where="in DataLoader worker process 0")
        there.reraise()

    model[1], lines = Returns(broken), []
    with verbose(model, write=lines.append), pytest.raises(RuntimeError, match="in a worker"):
        model(torch.ones(2, 4))
    assert (
        lines[-1]
        == "1  Returns  failed on [2, 5]: RuntimeError: Caught RuntimeError in DataLoader worker process 0."
    )


def test_a_pre_hook_that_raises_has_a_line(model):
    def refuse(module, args):
        raise ValueError("no")

    lines = []
    with (
        model.register_forward_pre_hook(refuse),
        verbose(model, write=lines.append),
        pytest.raises(ValueError, match="no"),
    ):
        model(torch.ones(3, 4))
    assert lines == [f"{type(model).__name__}  {type(model).__name__}  failed on [3, 4]: ValueError: no"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "look", [verbose, partial(layer_statistics, of="grad_output"), layer_statistics, features]
)
def test_layers_that_quantization_puts_in_place_of_others_run(look):
    """They get the hooks of the layers that they replace, without their options."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2))
    model.qconfig, x = torch.ao.quantization.get_default_qat_qconfig("x86"), torch.ones(2, 1, 5, 5)
    arguments = {"write": lambda line: None} if look is verbose else {}
    with look(model, "**", **arguments):
        model(x)
        torch.ao.quantization.fuse_modules_qat(model, [["0", "1", "2"]], inplace=True)
        torch.ao.quantization.prepare_qat(model, inplace=True)
        model(x).sum().backward()
    model(x).sum().backward()
    assert type(model[0]).__module__.startswith("torch.ao")


def test_the_columns_make_room_for_the_number_of_a_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf, self.b = nn.Linear(2, 2), nn.Tanh()

        def forward(self, x):
            return self.b(self.leaf(self.leaf(self.b(x))))

    model, lines = Twice(), []
    with verbose(model, write=lines.append):
        model(torch.ones(1, 2))
    assert lines == [
        "b     Tanh    [1, 2]",
        "leaf  Linear  [1, 2]",
        "leaf #2  Linear  [1, 2]",
        "b #2     Tanh    [1, 2]",
    ]
