"""verbose: a line for each layer that finishes, the last one for the layer that fails."""

import copy
import gc
import io
import multiprocessing
import pickle
import weakref
from contextlib import suppress
from functools import partial

import pytest
import torch
from models import NESTED, Returns, Twice, Unhookable, mlp
from torch import nn
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
    assert [line.split("  ")[0] for line in lines[1:]] == [f"{label} #{call}" for call in range(2, places + 1)]


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


@pytest.mark.parametrize("name", [name for name in NESTED if name not in ("pytree", "choosy")])
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


def test_nested_blocks_each_write_the_failure(model):
    model[2], inner, outer = nn.Linear(7, 3), [], []
    with (
        pytest.raises(RuntimeError),
        verbose(model, write=outer.append),
        verbose(model, write=inner.append),
    ):
        model(torch.ones(2, 4))
    assert inner == outer
    assert inner[-1].startswith("2  Linear  failed on [2, 3]: RuntimeError")


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


# ---- told once ----


def test_a_failure_told_in_other_words_has_one_line(model):
    def tells(x):
        try:
            return model[1](x)
        except RuntimeError as error:
            raise ValueError("the middle failed") from error

    model[1][1], model.forward, lines = nn.Linear(7, 3), tells, []
    with pytest.raises(ValueError, match="the middle failed"), verbose(model, write=lines.append):
        model(torch.ones(2, 5))
    (line,) = lines
    assert line.startswith("1.1  Linear  failed on [2, 5]: RuntimeError")


def test_a_layer_that_is_tried_again_after_its_failure_has_both_lines(model):
    def tries_again(x):
        try:
            return model[0](x[:, 1:])
        except RuntimeError:
            return model[0](x)

    model.forward = tries_again
    failed, finished = lines_of(model, torch.ones(2, 4))
    assert failed.startswith("0  Linear  failed on [2, 3]: RuntimeError")
    assert finished == "0  Linear      [2, 5]"


def test_what_fails_after_the_forward_has_no_line(model):
    lines = []
    with pytest.raises(ValueError, match="batch"), verbose(model, write=lines.append):
        nn.CrossEntropyLoss()(model(torch.ones(2, 4)), torch.ones(5, dtype=torch.long))
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]


def test_an_interrupt_has_no_line_and_the_next_forward_is_written_as_ever(model):
    """PyTorch calls no hook after Ctrl-C."""

    def interrupt(*args):
        raise KeyboardInterrupt

    lines = []
    with verbose(model, write=lines.append):
        with model[1].register_forward_hook(interrupt), pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 4))
        assert [line.split()[0] for line in lines] == ["0", "1"]
        lines.clear()
        model(torch.ones(2, 4))
    assert lines == ["0  Linear      [2, 5]", "1  Sequential  [2, 3]", "2  Softmax     [2, 3]"]


def test_a_hook_behind_ours_that_raises_has_no_line(model):
    """It is called when the line of the model has been passed already."""

    def broken(module, args, output):
        raise ValueError("from a hook")

    lines = []
    with verbose(model, "2", write=lines.append):
        model.register_forward_hook(broken)
        with pytest.raises(ValueError, match="from a hook"):
            model(torch.ones(2, 4))
    assert lines == ["2  Softmax  [2, 3]"]


# ---- put on twice, copied, freed ----


def test_the_same_verbose_twice_warns_that_every_line_will_come_twice(model):
    lines = []
    with verbose(model, write=lines.append):
        with pytest.warns(UserWarning, match=r"every line will come twice; call \.remove\(\) on the first") as caught:
            second = verbose(model, write=lines.append)
        assert caught[0].filename == __file__
        model(torch.ones(2, 4))
        second.remove()
    assert lines[::2] == lines[1::2]


@pytest.mark.filterwarnings("error")
def test_another_verbose_on_the_model_is_no_mistake(model):
    outer, inner = [], []
    with verbose(model, write=outer.append):
        with verbose(model, write=inner.append), verbose(model, "0", write=[].append):
            model(torch.ones(2, 4))
        with verbose(copy.deepcopy(model), write=outer.append):
            model(torch.ones(2, 4))
    verbose(model).remove()
    verbose(model).remove()
    assert outer == inner * 2
    assert hooks_on(model) == []


def test_its_repr_names_the_layers_and_whether_it_is_on(model):
    shown = verbose(model, write=[].append)
    assert repr(shown) == "Verbose(on; layers: 0, 1, 2)"
    shown.remove()
    assert repr(shown) == "Verbose(removed; layers: 0, 1, 2)"
    many = verbose(nn.Sequential(*[nn.ReLU() for _ in range(200)]))
    assert repr(many) == "Verbose(on; layers: 0, 1, 2, 3, 4, … and 195 more)"


def test_the_model_is_freed_with_its_hooks_on_and_after_they_are_removed():
    gc.collect()
    gc.disable()
    try:
        for removed in (False, True):
            model = mlp(4, 5, 2)
            shown = verbose(model, write=[].append)
            model(torch.ones(1, 4))
            if removed:
                shown.remove()
            gone = weakref.ref(model)
            del model
            assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("watch", [partial(verbose, write=[].append), layer_statistics])
def test_a_watched_model_is_copied_and_saved_without_the_watching(watch):
    model, x, file = mlp(4, 5, 2), torch.ones(1, 4), io.BytesIO()
    with watch(model, "*"):
        model.watch = watch(model, "0")  # also as a part of the model
        torch.save(model, file)
        file.seek(0)
        twins = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
        ]
        assert all(torch.equal(twin(x), model(x)) for twin in twins)


def test_a_watched_model_runs_in_a_spawned_process():
    model, lines = mlp(4, 5, 2).requires_grad_(False), []
    with (
        verbose(model, write=lines.append),
        layer_statistics(model, "*") as stats,
        multiprocessing.get_context("spawn").Pool(1) as pool,
    ):
        there = pool.apply(model, (torch.ones(1, 4),))
    assert torch.equal(there, model(torch.ones(1, 4)))
    assert (lines, len(stats)) == ([], 0)


def test_lazy_layers_are_written_as_what_they_become():
    assert lines_of(nn.Sequential(nn.LazyLinear(3)), torch.ones(2, 4)) == ["0  Linear      [2, 3]"]


@pytest.mark.parametrize("shape", [(1, 3, 32, 32), [1, 3], torch.ones(1, 3)])
def test_an_input_or_its_shape_in_place_of_a_name_is_told_to_run_the_model(model, shape):
    with pytest.raises(TypeError, match=r"verbose: .*no input or its shape: run the model yourself, inside the block"):
        verbose(model, shape)


# ---- what is refused ----


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
