"""select: layers by name, by pattern, by class; and what a wrong one is told."""

import re

import pytest
import torch
from torch import nn

import hooklab
from hooklab import select


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 3, 1), nn.ReLU())
        self.relu = nn.ReLU6()


@pytest.fixture
def model():
    tree = nn.Module()
    tree.relu = nn.ReLU()
    tree.layer1, tree.layer2 = nn.Sequential(Block(), Block()), nn.Sequential(Block())
    tree.fc = nn.Linear(3, 2)
    return tree


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("fc", ["fc"]),
        ("layer1.0.relu", ["layer1.0.relu"]),
        ("*", ["relu", "layer1", "layer2", "fc"]),
        ("layer*", ["layer1", "layer2"]),
        ("layer*.0", ["layer1.0", "layer2.0"]),
        ("layer*.*.relu", ["layer1.0.relu", "layer1.1.relu", "layer2.0.relu"]),
        ("**.relu", ["relu", "layer1.0.relu", "layer1.1.relu", "layer2.0.relu"]),
        ("layer2.**", ["layer2.0", "layer2.0.0", "layer2.0.1", "layer2.0.relu"]),
        ("**1.relu", ["layer1.1.relu"]),
        (nn.Linear, ["fc"]),
        (nn.ReLU6, ["layer1.0.relu", "layer1.1.relu", "layer2.0.relu"]),
        (nn.Sequential, ["layer1", "layer1.0", "layer1.1", "layer2", "layer2.0"]),
    ],
)
def test_a_pattern_finds_these_layers(model, pattern, names):
    assert list(select(model, pattern)) == names


def test_everything_but_the_model_itself_matches_two_stars(model):
    assert list(select(model, "**")) == [name for name, _ in model.named_modules() if name]


def test_the_model_itself_has_the_empty_name(model):
    assert select(model, "") == {"": model}
    assert list(select(nn.Linear(2, 2), nn.Linear)) == [""]


def test_the_order_is_that_of_the_patterns_and_each_name_comes_once(model):
    assert list(select(model, "fc", "layer*", "*")) == ["fc", "layer1", "layer2", "relu"]


def test_the_modules_are_those_of_the_model(model):
    assert select(model, "layer1.0")["layer1.0"] is model.layer1[0]


def test_a_shared_module_is_found_under_each_of_its_names():
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "other": nn.ReLU()})
    model["decoder"] = model["encoder"]
    found = select(model, nn.Linear)
    assert list(found) == ["encoder", "decoder"]
    assert found["encoder"] is found["decoder"]


def test_characters_that_mean_something_elsewhere_mean_themselves():
    model = nn.Module()
    for name in ("a+b", "a[0]", "ab", "a*"):
        model.add_module(name, nn.ReLU())
    assert list(select(model, "a+b")) == ["a+b"]
    assert list(select(model, "a[0]")) == ["a[0]"]
    assert list(select(model, "a*")) == ["a*"]  # an exact name comes before a pattern


def test_a_compiled_model_is_searched_inside(model):
    assert list(select(torch.compile(model), "fc", "layer*")) == ["fc", "layer1", "layer2"]


@pytest.mark.parametrize("function", ["select", "features", "layer_statistics", "verbose"])
@pytest.mark.parametrize(
    ("patterns", "error", "words"),
    [
        (("layer5",), KeyError, ["no layer matches 'layer5'", "layer2", "layer1"]),
        (("fc", "layer3.relu"), KeyError, ["no layer matches 'layer3.relu'", "layer1.0.relu"]),
        (("model.fc",), KeyError, ["no layer matches 'model.fc'", "fc"]),
        (("nothing*.x",), KeyError, ["no layer matches", "close: "]),
        (("0.relu",), KeyError, ["'0.relu'", "close: layer1.0.relu, ", "(deeper inside: '**.0.relu')"]),
        (("1.*elu",), KeyError, ["close: layer1.1.relu", "(deeper inside: '**.1.*elu')"]),
        ((nn.Conv3d,), KeyError, ["no layer matches class Conv3d", "Conv2d"]),
        ((["fc", "relu"],), TypeError, ["found list", "*names"]),
        ((3,), TypeError, ["found int; other arguments go by name: keep=, depth=, bins="]),
        (("fc", print), TypeError, ["found builtin_function_or_method; other arguments go by name"]),
        ((torch.Tensor,), TypeError, ["found the class Tensor, which is no nn.Module"]),
    ],
)
def test_a_wrong_pattern_is_refused_with_the_way_out_and_no_hook_stays(model, function, patterns, error, words):
    with pytest.raises(error) as raised:
        getattr(hooklab, function)(model, *patterns)
    for word in [function, *words]:
        assert word in str(raised.value)
    assert hooklab.hooks_on(model) == []


@pytest.mark.parametrize("function", ["select", "features", "layer_statistics"])
def test_no_pattern_at_all_is_refused(model, function):
    with pytest.raises(ValueError, match=rf"{function}: no pattern was given.*'\*\*' for every layer"):
        getattr(hooklab, function)(model)


def test_a_module_instead_of_a_name_is_told_its_name_or_that_it_is_a_stranger(model):
    with pytest.raises(TypeError, match=r"found Linear; here its name is 'fc'"):
        select(model, model.fc)
    with pytest.raises(TypeError, match="found Linear; it is not part of this model"):
        select(model, nn.Linear(3, 2))


def test_a_pattern_of_a_class_that_is_no_pattern_is_told_its_class_alone(model):
    with pytest.raises(TypeError, match=r"found Pattern$"):
        select(model, re.compile("fc"))


@pytest.mark.parametrize("function", ["select", "features", "layer_statistics", "verbose"])
def test_what_is_no_module_is_refused(function):
    with pytest.raises(TypeError, match=f"{function}: expected a module, found dict"):
        getattr(hooklab, function)({"fc": nn.Linear(1, 1)}, "fc")


def test_a_model_without_layers_says_so():
    with pytest.raises(KeyError, match="no layers inside"):
        select(nn.Linear(2, 2), "weight")


def test_a_module_inside_itself_is_refused_in_words():
    parent, child = nn.Sequential(nn.Linear(1, 1)), nn.ReLU()
    parent.append(child)
    child.parent = parent
    with pytest.raises(
        RecursionError, match=r"this model has a .* inside itself; keep a reference to a parent in a list"
    ):
        select(parent, "*")
    with pytest.raises(RecursionError, match=r"this model has a .* inside itself"):
        hooklab.verbose(parent)


def test_a_name_inside_a_layer_compiled_by_itself_is_given():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    model[1] = torch.compile(model[1], backend="eager")
    with pytest.raises(KeyError, match=r"close: 1\._orig_mod\.0 \(compiled by itself\)"):
        select(model, "1.0")


class Delegating(nn.Module):
    """Asks the module inside for what it lacks, as wrappers for adapters do."""

    def __init__(self, base):
        super().__init__()
        self.base, self.head = base, nn.Linear(2, 2)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


def test_a_wrapper_that_delegates_is_not_taken_for_what_is_inside():
    wrapper = Delegating(torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager"))
    assert list(select(wrapper, "head")) == ["head"]
    assert list(select(wrapper, nn.Linear)) == ["base._orig_mod.0", "head"]


def test_a_module_that_answers_any_name_is_no_other_module():
    class Anything(nn.Linear):
        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return lambda *args: None

    model = nn.Linear(2, 2)
    model.__class__ = Anything
    assert select(model, "") == {"": model}
    with hooklab.clip_gradients(model, -1, 1):
        (model(torch.ones(1, 2)) * 9).sum().backward()
    assert model.weight.grad.tolist() == [[1, 1], [1, 1]]


def test_a_model_without_layers_is_told_how_it_is_called_itself():
    layer = nn.Linear(1, 1)
    with pytest.raises(KeyError, match='the model has no layers inside, give "" for itself'):
        select(layer, "**")
    assert list(select(layer, "").values()) == [layer]


@pytest.mark.parametrize("function", ["features", "layer_statistics", "verbose"])
def test_a_torchscript_module_takes_no_hook_and_is_refused(function):
    scripted = torch.jit.script(nn.Linear(2, 2))
    call = getattr(hooklab, function)
    with pytest.raises(
        ValueError,
        match=f"{function}: '1' is a .*, a TorchScript module, which is not hooked; take the eager",
    ):
        call(nn.Sequential(nn.ReLU(), scripted), "1")
    with pytest.raises(ValueError, match=f"{function}: '' is a .*, a TorchScript module"):
        call(scripted, "")
