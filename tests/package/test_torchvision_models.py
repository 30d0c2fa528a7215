"""features on torchvision's classification models: as cloning hooks by hand, and as torchvision's own extractor."""

import warnings

import pytest
import torch
import torchvision
from torchvision import models
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names
from torchvision.models.regnet import BlockParams

from hooklab import features, no_leftovers
from hooklab._support.nested import tensors_in

pytestmark = pytest.mark.long  # `make test-long`

# One of each family and size that a forward of which takes no more than a fraction of a second; side in pixels.
SIDES = {
    "alexnet": 64, "convnext_tiny": 32, "densenet121": 32, "efficientnet_b0": 32,
    "efficientnet_b1": 32, "googlenet": 32,
    "mnasnet0_5": 32, "mnasnet0_75": 32, "mnasnet1_0": 32, "mnasnet1_3": 32, "mobilenet_v2": 32,
    "mobilenet_v3_large": 32, "mobilenet_v3_small": 32, "regnet_x_400mf": 32, "regnet_x_800mf": 32,
    "regnet_y_400mf": 32, "regnet_y_800mf": 32, "resnet18": 32, "resnet34": 32, "resnet50": 32,
    "resnext50_32x4d": 32, "shufflenet_v2_x0_5": 32, "shufflenet_v2_x1_0": 32, "shufflenet_v2_x1_5": 32,
    "squeezenet1_0": 64, "squeezenet1_1": 64, "swin_t": 32, "swin_v2_t": 64, "vgg11": 32, "vit_b_32": 32,
}  # fmt: skip
# The models in which the extractor of torchvision returns every layer it knows as the layer left it: in the others
# a later layer works in place, on the very tensor that the extractor keeps.
AGREES = {
    "convnext_tiny", "efficientnet_b0", "efficientnet_b1", "mobilenet_v2", "regnet_x_400mf",
    "regnet_x_800mf", "regnet_y_400mf", "regnet_y_800mf", "swin_t", "vit_b_32",
}  # fmt: skip


def build(name):
    options = {"googlenet": {"init_weights": True}, "vgg11": {"init_weights": False}}.get(name, {})
    options |= {"image_size": 32} if name.startswith("vit") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = getattr(models, name)(**options).eval()
    return model, torch.randn(1, 3, SIDES[name], SIDES[name])


def by_hand(model, names, x):
    """The last output of each layer, cloned by hooks written here."""
    kept, handles = {}, []
    for name in names:

        def hook(module, args, output, name=name):
            kept[name] = [tensor.clone() for tensor in tensors_in(output)]

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    model(x)
    for handle in handles:
        handle.remove()
    return kept


def test_there_are_at_least_thirty_models():
    assert len(SIDES) >= 30


@pytest.mark.parametrize("name", SIDES)
def test_features_are_what_hooks_by_hand_and_the_extractor_of_torchvision_find(name):
    model, x = build(name)
    names = [layer for layer, _ in model.named_modules() if layer]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that train mode has other nodes
        nodes = set(get_graph_node_names(model)[1])
    extractor = create_feature_extractor(model, [layer for layer in names if layer in nodes]).eval()
    with torch.no_grad(), no_leftovers(model):
        plain, expected = model(x), by_hand(model, names, x)
        with (
            features(model, *names, keep=lambda tensor: tensor.detach().clone()) as copies,
            features(model, *names) as f,
        ):
            model(x)
            before = {layer for layer in expected if can_be_read(f, layer)}
            watched = model(x)
        extracted = extractor(x)
    assert all(map(torch.equal, tensors_in(plain), tensors_in(watched)))
    assert set(copies) == set(expected)
    differ = []
    for layer, tensors in expected.items():
        assert all(map(torch.equal, tensors_in(copies[layer]), tensors)), layer
        # The extractor knows a layer's first call by its name, and takes the second of `ln_1, ln_2` for `ln_1`.
        if layer in extracted and not layer.endswith("ln_1"):
            same = all(map(torch.equal, tensors_in(extracted[layer]), tensors_in(copies.calls[layer][0])))
            differ += [] if same else [layer]
        try:
            assert torch.equal(next(tensors_in(f[layer])), tensors[0]), layer
        except RuntimeError:  # overwritten, and said so
            continue
        assert layer not in differ
    assert {layer for layer in expected if can_be_read(f, layer)} == before
    assert (not differ) == (name in AGREES)


def can_be_read(f, layer):
    try:
        return bool(f.calls[layer])
    except RuntimeError:  # overwritten
        return False


def overwritten(model, x):
    """The layers whose outputs the extractor of torchvision would return as a later step has left them."""
    *_, (last, _) = model.named_children()
    extractor = create_feature_extractor(model, [last], suppress_diff_warning=True)
    versions = {}
    can_be_had = {node.target for node in extractor.graph.nodes if node.op == "call_module"}
    for name in can_be_had:

        def hook(module, args, output, name=name):
            versions.setdefault(name, [(tensor, tensor._version) for tensor in tensors_in(output)])

        extractor.get_submodule(name).register_forward_hook(hook)
    with torch.no_grad():
        extractor(x)
    return {name for name, kept in versions.items() if any(t._version != version for t, version in kept)}


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_how_many_models_the_extractor_of_torchvision_returns_overwritten_values_of(monkeypatch):
    """The figures of 24. An edit in place counts as one on the `meta` device, too, where nothing is computed."""
    own = BlockParams.from_init_params

    def on_the_cpu(*args, **kwargs):  # a RegNet computes its sizes with tensors
        with torch.device("cpu"):
            return own(*args, **kwargs)

    monkeypatch.setattr(BlockParams, "from_init_params", on_the_cpu)
    every, found = models.list_models(module=models), set()
    for name in every:
        with torch.device("meta"):
            model, x = models.get_model(name).eval(), torch.empty(1, 3, 224, 224)
        if overwritten(model, x):
            found.add(name)
    assert SIDES.keys() - found == AGREES
    if torchvision.__version__.startswith("0.29."):
        assert (len(found), len(every)) == (40, 80)


def test_the_extractor_of_torchvision_takes_one_layer_for_another():
    """Why 24 warns: in a vision transformer its `ln_1` is the layer `ln_2`."""
    model = models.VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16).eval()
    x = torch.randn(1, 3, 32, 32)
    block = "encoder.layers.encoder_layer_0"
    with torch.no_grad(), features(model, f"{block}.ln_*") as f:
        model(x)
        extracted = create_feature_extractor(model, [f"{block}.ln_1"]).eval()(x)[f"{block}.ln_1"]
    assert torch.equal(extracted, f[f"{block}.ln_2"])
    assert not torch.allclose(extracted, f[f"{block}.ln_1"])


def test_the_extractor_of_torchvision_hands_out_overwritten_values():
    model, x = build("resnet18")
    with torch.no_grad(), features(model, "bn1", keep=lambda tensor: tensor.detach().clone()) as f:
        model(x)
        extracted = create_feature_extractor(model, ["bn1", "layer1"]).eval()(x)["bn1"]
    assert f["bn1"].min() < 0
    assert torch.equal(extracted, f["bn1"].relu())
    with torch.inference_mode(), features(model, "bn1") as copied:  # by default
        model(x)
    assert torch.equal(copied["bn1"], f["bn1"])
