"""Pictures of what layers return: gradient flow, activations, feature maps; and their facts."""

import base64
import io
import math
import re
import sys
import threading
import warnings
from collections import OrderedDict
from itertools import pairwise

import matplotlib
import pytest
import torch
from matplotlib import image
from models import mlp
from torch import nn

from hooklab import draw, layer_statistics
from hooklab.draw import colours


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp(4, 5, 6, 2)


@pytest.fixture
def gradients(model):
    with layer_statistics(model, "*", of="grad_output") as stats:
        model(torch.ones(3, 4)).square().sum().backward()
    return stats


@pytest.fixture
def outputs(model):
    with layer_statistics(model, "0", "1", bins=4, range=(-1, 1)) as stats:
        for scale in (1.0, 1000.0):
            model(torch.ones(3, 4) * scale)
    return stats


def words(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def pixels(svg):
    """The pictures inside the SVG as arrays of colours, upright."""
    found = re.findall(r'<image xlink:href="data:image/png;base64,([^"]*)"[^>]* transform="matrix\(\S+ 0 0 (-?)', svg)
    stored = [(image.imread(io.BytesIO(base64.b64decode(data))), flipped) for data, flipped in found]
    return [each[::-1] if flipped else each for each, flipped in stored]


def test_gradient_flow_says_how_large_the_gradient_of_each_layer_is(model, gradients):
    lines = draw.gradient_flow(gradients).facts.splitlines()
    assert lines[0].split() == ["layer", "rms", "max"]
    hidden = model[:3](torch.ones(3, 4))
    (grad,) = torch.autograd.grad(model[3:](hidden).square().sum(), hidden)
    assert lines[3].split() == ["2", f"{grad.square().mean().sqrt():.1e}", f"{grad.abs().max():.1e}"]


def test_gradient_flow_names_every_layer_in_the_picture(gradients):
    assert set("01234") <= set(words(draw.gradient_flow(gradients).svg))


def test_gradient_flow_writes_its_scale_as_numbers(gradients):
    picture = draw.gradient_flow(gradients)
    scale = [word.replace("\N{MINUS SIGN}", "-") for word in words(picture.svg)]
    powers = [float(word) for word in scale if re.fullmatch(r"1(e[-+]\d+)?", word)]
    assert len(powers) > 1
    assert "$" not in "".join(scale)


def test_gradient_flow_shows_what_is_zero_or_not_finite(model):
    with torch.no_grad():
        model[4].weight.zero_()
    with layer_statistics(model, "*", of="grad_output") as stats:
        (model(torch.ones(3, 4)) * torch.tensor([math.inf, 1.0])).sum().backward()
    picture = draw.gradient_flow(stats)
    assert "3 inf" in picture.facts
    assert any("NaN or inf" in word for word in words(picture.svg))


def test_gradient_flow_of_all_zeros_is_drawn(model):
    with layer_statistics(model, "*", of="grad_output") as stats:
        (model(torch.ones(3, 4)) * 0).sum().backward()
    assert any("all 0" in word for word in words(draw.gradient_flow(stats).svg))


def test_activations_say_what_is_zero_and_what_falls_outside(outputs):
    lines = draw.activations(outputs).facts.splitlines()
    assert lines[0].split() == ["layer", "calls", "mean", "std", "zeros", "below", "above"]
    figures = outputs["0"]
    shares = (figures.zeros, figures.below / 30, figures.above / 30)
    expected = [f"{figures.mean:.4f}", f"{figures.std:.4f}", *(f"{share:.1%}" for share in shares)]
    assert lines[1].split() == ["0", "2", *expected]
    assert figures.below + figures.above > 0


def test_activations_draw_a_map_for_each_layer_with_a_column_for_each_call(outputs):
    picture = draw.activations(outputs)
    assert {"0", "1"} <= set(words(picture.svg))
    assert len(pixels(picture.svg)) == 2


def test_activations_of_many_layers_with_long_names_can_be_read():
    names = [f"stage_{number}.a_block_with_a_long_name.attention.projection" for number in range(70)]
    net = torch.nn.Sequential()
    for name in names:
        net.add_module(name.replace(".", "_"), torch.nn.Identity())
    with layer_statistics(net, "*", bins=2) as stats:
        net(torch.ones(1, 2))
    picture = draw.activations(stats)
    assert picture.facts.splitlines()[-1] == "drawn: the first 60 of 70 layers; choose fewer for the others"
    assert len(picture.facts.splitlines()) == 72
    titles = [word for word in words(picture.svg) if "…" in word]
    assert len(set(titles)) == len(titles) == 60
    assert max(map(len, titles)) == 36


def test_gradient_flow_shortens_long_names():
    name = "a_layer_with_a_name_of_its_own_" * 5
    net = torch.nn.Sequential()
    net.add_module(name, torch.nn.Linear(2, 2))
    with layer_statistics(net, "*", of="grad_output") as stats:
        net(torch.ones(1, 2)).sum().backward()
    picture = draw.gradient_flow(stats)
    assert name in picture.facts
    assert [len(word) for word in words(picture.svg) if "…" in word] == [48]


def test_feature_maps_are_a_mosaic_each_map_from_dark_to_bright():
    tensor = torch.stack([torch.zeros(8, 8), torch.arange(64.0).reshape(8, 8)])
    picture = draw.feature_maps(tensor)
    assert picture.facts == "2 of 2 maps, 8 x 8; values from 0.0000 to 63.0000; the same everywhere: 1"
    (mosaic,) = pixels(picture.svg)
    left, right = mosaic[:, : mosaic.shape[1] * 8 // 17], mosaic[:, mosaic.shape[1] * 9 // 17 + 1 :]
    assert left[..., 0].std() < 0.02
    assert right[-1, -1, 1] > right[0, 0, 1] + 0.5


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 5), "1 of 1 maps, 3 x 5"),
        ((2, 3, 4, 5), "3 of 3 maps, 4 x 5"),
        ((1, 100, 4, 4), "64 of 100 maps, 4 x 4"),
    ],
)
def test_feature_maps_take_an_image_a_stack_or_a_batch(shape, words):
    assert draw.feature_maps(torch.randn(shape, requires_grad=True)).facts.startswith(words)


def test_feature_maps_of_a_sparse_tensor_are_drawn():
    maps = torch.arange(8.0).reshape(2, 2, 2)
    assert draw.feature_maps(maps.to_sparse()).facts == draw.feature_maps(maps).facts


def test_feature_maps_of_complex_and_of_very_large_numbers():
    assert "values from 5.0000 to 13.0000" in draw.feature_maps(torch.tensor([[3 + 4j, 5 - 12j]])).facts
    huge = draw.feature_maps(torch.tensor([[1e39, 2e39]], dtype=torch.float64)).facts
    assert "NaN" not in huge
    assert "no finite" not in huge


def test_feature_maps_with_nan_and_in_half_precision_are_drawn():
    tensor = torch.full((2, 4, 4), math.nan, dtype=torch.bfloat16)
    tensor[1, 0, 0] = 1
    picture = draw.feature_maps(tensor)
    assert picture.svg
    assert "values from 1.0000 to 1.0000; NaN or infinite: 31" in picture.facts


def test_the_same_input_gives_the_same_bytes(gradients, outputs):
    maps = torch.arange(32.0).reshape(2, 4, 4)
    for picture, of in (
        (draw.gradient_flow, gradients),
        (draw.activations, outputs),
        (draw.feature_maps, maps),
    ):
        assert picture(of).svg == picture(of).svg


def test_without_matplotlib_the_facts_and_the_way_out_are_shown(gradients, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = draw.gradient_flow(gradients)
    assert picture.svg is None
    assert "pip install matplotlib" in str(picture)
    assert "rms" in str(picture)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda o: draw.gradient_flow(o), ValueError, "statistics of outputs.*of='grad_output'"),
        (
            lambda o: draw.gradient_flow([1]),
            TypeError,
            "expected what hooklab.layer_statistics returns, found list",
        ),
        (lambda o: draw.activations({"a": 1}), TypeError, "expected what hooklab.layer_statistics returns"),
        (lambda o: draw.activations({}), ValueError, "nothing has been counted yet"),
        (lambda o: draw.feature_maps([1]), TypeError, "expected one tensor, found list"),
        (lambda o: draw.feature_maps(torch.ones(3)), ValueError, r"found shape \(3,\); choose a layer"),
        (lambda o: draw.feature_maps(torch.ones(0, 2, 2)), ValueError, "found shape"),
        (
            lambda o: draw.feature_maps(torch.ones(2, 2, 2, device="meta")),
            ValueError,
            "it is on the meta device",
        ),
        (
            lambda o: draw.feature_maps(torch.nested.nested_tensor([torch.ones(2, 2)])),
            ValueError,
            "it is nested",
        ),
        (
            lambda o: draw.feature_maps(torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.quint8)),
            ValueError,
            "it is quantized",
        ),
    ],
)
def test_bad_input_is_refused(outputs, call, error, words):
    with pytest.raises(error, match=words):
        call(outputs)


def test_activations_without_a_histogram_are_refused(model):
    with layer_statistics(model, "0") as stats:
        model(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"no histogram.*bins=40"):
        draw.activations(stats)


def test_a_layer_that_saw_nothing_but_empty_tensors_is_drawn():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.all, self.none = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.all(x), self.none(x[:0])

    net = Net()
    with layer_statistics(net, "*", bins=4) as stats:
        net(torch.ones(1, 2))
    line = draw.activations(stats).facts.splitlines()[2]
    assert line.split()[:4] == ["none", "1", "-", "-"]
    assert "nan" not in line


def test_gradient_flow_of_numbers_whose_squares_are_too_large():
    model = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    with layer_statistics(model, "", of="grad_output") as stats:
        (
            model(torch.ones(1, 1, dtype=torch.float64)) * torch.tensor([1e200, -1e200], dtype=torch.float64)
        ).sum().backward()
    assert "1.0e+200" in draw.gradient_flow(stats).facts


def test_feature_maps_are_drawn_whatever_the_default_device():
    maps = torch.rand(2, 4, 4)
    with torch.device("meta"):
        picture = draw.feature_maps(maps)
    assert picture.facts == draw.feature_maps(maps).facts


@pytest.mark.parametrize("shape", [(1, 1000), (4, 4096), (64, 1, 2000), (2000, 1), (300, 1)])
def test_maps_that_are_lines_can_be_seen(shape):
    """As `f["fc"]` of one image is."""
    svg = draw.feature_maps(torch.randn(shape)).svg
    width, height = (float(re.search(rf'{side}="([\d.]+)pt"', svg)[1]) for side in ("width", "height"))
    assert "<image" in svg
    assert min(width, height) >= 36
    assert max(width, height) <= 650


def test_facts_of_small_and_large_values_tell_them_apart():
    maps = torch.tensor([[[-2e-7, 1e-7]]])
    assert "values from -2.0e-07 to 1.0e-07" in draw.feature_maps(maps).facts
    assert "values from -2.0e+12 to 1.0e+12" in draw.feature_maps(maps.double() * 1e19).facts


def test_a_single_call_has_a_single_tick(model):
    with layer_statistics(model, "0", bins=5) as stats:
        model(torch.ones(1, 4))
    ticks = re.findall(r">([\d.]+)</text>", draw.activations(stats).svg)
    assert "1" in ticks
    assert not any(0 < float(tick) < 2 and "." in tick for tick in ticks)


def test_layers_with_other_ranges_have_axes_of_their_own(model):
    with (
        layer_statistics(model, "0", bins=10, range=(-10, 10)) as wide,
        layer_statistics(model, "1", bins=10, range=(0, 1)) as narrow,
    ):
        model(torch.randn(9, 4))
    svg = draw.activations({**wide, **narrow}).svg
    # Each axis covers the bins that have entries.
    assert ">10</text>" not in svg
    assert ">1.0</text>" in svg


def test_an_axis_covers_what_has_entries_and_outside_shares_are_written_in():
    values = nn.Identity()
    with layer_statistics(values, "", bins=100, range=(-10, 10)) as stats:
        values(torch.tensor([0.05, 0.15, 0.25, 0.35, 2000.0, 3000.0, -50.0, 0.05]))
    svg = draw.activations(stats).svg
    assert {"25.0% above 10, up to 3e+03", "12.5% below -10, down to -50"} <= set(words(svg))
    numbers = [float(word.replace("\N{MINUS SIGN}", "-")) for word in words(svg) if re.fullmatch(r"\W?[\d.]+", word)]
    assert max(numbers) < 2  # the ticks
    (heat,) = pixels(svg)
    assert heat.shape[:2] == (2, 1)  # bins that have entries, calls


def test_a_layer_that_lies_outside_is_no_blank_panel():
    values = nn.Identity()
    with layer_statistics(values, "", bins=100) as stats:
        values(torch.full((7,), 1e9))
    assert "100.0% above 10, up to 1e+09" in words(draw.activations(stats).svg)


def test_activations_have_a_scale(outputs):
    shown = words(draw.activations(outputs).svg)
    assert {"0%", "1%", "10%", "50%", "100%", "entries, as a share of the fullest field of the layer"} <= set(shown)


def test_a_layer_that_no_gradient_reaches_has_a_row_that_says_so():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with layer_statistics(model, "*", of="grad_output") as stats:
        model[2](model[1](model[0](torch.ones(1, 2))).detach()).sum().backward()
    picture = draw.gradient_flow(stats)
    assert [line.split()[:1] + line.split()[3:] for line in picture.facts.splitlines()[1:]] == [
        ["0", "no", "gradient"],
        ["1", "no", "gradient"],
        ["2"],
    ]
    assert words(picture.svg).count("no gradient") == 2


def test_a_module_with_layers_inside_stays_out_of_the_line_through_the_layers():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    with layer_statistics(model, "**", of="grad_output") as stats:
        model(torch.ones(1, 2)).sum().backward()
    assert list(stats) == ["0", "0.0", "0.1", "1"]
    picture = draw.gradient_flow(stats)
    (line,) = re.findall(rf'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: {colours.BLUE}', picture.svg)
    assert len(re.findall(r"[ML] ", line)) == 3  # points: not that of "0"
    assert "that of a module with layers inside" in words(picture.svg)
    with layer_statistics(model, "0.*", "1", of="grad_output") as stats:
        model(torch.ones(1, 2)).sum().backward()
    assert "that of a module with layers inside" not in words(draw.gradient_flow(stats).svg)


@pytest.mark.parametrize(("number", "named"), [(60, 60), (150, 150), (400, 200)])
def test_every_row_is_named_or_told_on_hover(number, named):
    model = nn.Sequential(OrderedDict({f"n{row}": nn.Identity() for row in range(number)}))
    with layer_statistics(model, "*", of="grad_output") as stats:
        model(torch.ones(2, requires_grad=True)).sum().backward()
    svg = draw.gradient_flow(stats).svg
    assert len(set(words(svg)) & set(stats)) == named
    assert re.findall(r"<title>(.*)</title>", svg) == list(stats)
    assert any("one row in 2 is named, all of them in .facts" in word for word in words(svg)) is (named < number)


def test_many_rows_with_the_same_remark_have_it_once():
    model = nn.Sequential(*[nn.Identity() for _ in range(200)])
    x = torch.ones(2, requires_grad=True)
    with layer_statistics(model, "*", of="grad_output") as stats:
        y = model(x)
        (y * torch.tensor([math.nan, 1.0])).sum().backward()
    remarks = [word for word in words(draw.gradient_flow(stats).svg) if "NaN" in word]
    assert remarks == ["NaN or inf: 200 layers"]


def test_no_call_and_no_bin_is_left_out_of_a_long_history():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    explosions = set(range(25, 500, 50))
    with layer_statistics(model, "*", bins=240, range=(-4, 4)) as stats:
        for call in range(500):
            model(torch.full((1000,), 3.5) if call in explosions else torch.zeros(1000))
    first, second = pixels(draw.activations(stats).svg)
    assert (first == second).all()
    assert first.shape[0] <= 110
    assert first.shape[1] <= 200
    dark = first[..., 3] > 0.1  # the others let the ground through
    upper, middle = dark[: len(dark) // 4].any(0), dark[len(dark) // 4 :].any(0)
    assert len("".join("#" if one else " " for one in upper).split()) == len(explosions)
    assert middle.sum() >= 0.9 * dark.shape[1]


@pytest.mark.parametrize(
    "shape", [(6, 28, 28), (64, 1, 1), (64, 112, 112), (64, 1, 2000), (64, 7, 7), (64, 2000, 1), (1, 1000, 2)]
)
def test_every_map_has_its_number(shape):
    number = shape[0]
    svg = draw.feature_maps(torch.randn(shape)).svg
    assert words(svg) == [str(channel) for channel in range(number)]
    left, top = zip(
        *((float(x), float(y)) for x, y in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"', svg)), strict=True
    )
    assert len(set(zip(left, top, strict=True))) == number
    assert all(later - earlier >= 7 for earlier, later in pairwise(sorted(set(left))))
    assert all(later - earlier >= 7 for earlier, later in pairwise(sorted(set(top))))  # points: none covers another


def test_no_pixel_is_left_out_of_large_maps():
    maps = torch.zeros(64, 224, 224)
    places = torch.randint(0, 224, (64, 2), generator=torch.Generator().manual_seed(0))
    maps[range(64), places[:, 0], places[:, 1]] = 1
    (mosaic,) = pixels(draw.feature_maps(maps).svg)
    assert mosaic.shape[0] <= 560
    assert mosaic.shape[1] <= 820
    assert ((mosaic[..., 0] > 0.9) & (mosaic[..., 1] > 0.8) & (mosaic[..., 2] < 0.2)).sum() == 64
    equal = (torch.arange(224) % 3).double().expand(2, 224, 224).clone()
    equal[1, 0, 0] = math.nan  # not shown, and spoils none of its neighbours
    (mosaic,) = pixels(draw.feature_maps(equal).svg)
    half = (mosaic.shape[1] - 224 // 16) // 2 if mosaic.shape[1] > 448 else mosaic.shape[1] // 2
    left, right = mosaic[:, :half], mosaic[:, -half:]
    assert (left == right).all(-1).mean() > 0.99


def test_a_line_keeps_what_stands_in_its_short_side():
    stripes = torch.ones(2000, 4)
    stripes[:, 1::2] = -1
    (picture,) = pixels(draw.feature_maps(stripes).svg)
    assert picture.shape[0] <= 540
    assert [column[0] > 0.5 for column in picture[0]] == [True, False, True, False]


FOREIGN = {
    "text.usetex": True,
    "image.origin": "lower",
    "axes.grid": True,
    "axes.formatter.use_mathtext": True,
    "svg.image_inline": False,
    "axes.titlesize": 30,
    "ytick.labelsize": 30,
}


def test_settings_of_the_users_change_no_picture_and_stay(gradients, outputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn = [
        lambda: draw.gradient_flow(gradients),
        lambda: draw.activations(outputs),
        lambda: draw.feature_maps(torch.arange(24.0).reshape(2, 3, 4)),
    ]
    plain = [picture().svg for picture in drawn]
    with matplotlib.rc_context(FOREIGN):
        assert [picture().svg for picture in drawn] == plain
        assert all(matplotlib.rcParams[name] == value for name, value in FOREIGN.items())
    assert list(tmp_path.iterdir()) == []


def test_threads_that_draw_leave_the_settings_as_they_were():
    before, filters = dict(matplotlib.rcParams), list(warnings.filters)
    maps = torch.arange(32.0).reshape(2, 4, 4)
    threads = [threading.Thread(target=draw.feature_maps, args=(maps,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(matplotlib.rcParams) == before
    assert list(warnings.filters) == filters
