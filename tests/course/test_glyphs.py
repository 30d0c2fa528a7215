"""The digits that notebooks train on."""

import torch
from torch import nn

from hooklab import lesson


def test_images_and_labels_have_the_promised_shapes_and_values():
    images, labels = lesson.glyphs(30, size=12)
    assert images.shape == (30, 1, 12, 12)
    assert images.dtype == torch.float32
    assert images.min() == 0
    assert 0.5 < images.max() <= 1
    assert labels.shape == (30,)
    assert set(labels.tolist()) <= set(range(10))
    assert (images.flatten(1).sum(1) > 3).all(), "something is drawn in each"


def test_the_seed_alone_decides_what_is_drawn():
    torch.manual_seed(0)
    first = lesson.glyphs(20, seed=3)
    state = torch.random.get_rng_state()
    assert all(map(torch.equal, first, lesson.glyphs(20, seed=3)))
    assert torch.equal(torch.random.get_rng_state(), state), "the generator of the notebook is left alone"
    assert not torch.equal(first[1], lesson.glyphs(20, seed=4)[1])


def test_a_digit_lies_in_the_middle_give_or_take_two_pixels():
    images, _ = lesson.glyphs(100)
    for image in images[:, 0]:
        for side in (image.amax(0), image.amax(1)):
            drawn = side.gt(0.3).nonzero()
            assert 11 <= drawn.min() + drawn.max() <= 19, "the sum is 15 in the very middle"


def test_a_small_network_learns_to_read_them():
    torch.manual_seed(0)
    images, labels = lesson.glyphs(700)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[:500]), labels[:500]).backward()
        optimizer.step()
    assert (model(images[500:]).argmax(1) == labels[500:]).float().mean() > 0.6
