"""Models whose parameters are shared among processes, here with one process."""

import pytest
import torch
from torch import nn

from hooklab import checkpoint_segments, clip_gradients, features, no_leftovers

if not torch.distributed.is_available():
    pytest.skip("this PyTorch knows no other processes", allow_module_level=True)

from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


@pytest.fixture(autouse=True)
def _process_group(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/here", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def fully_sharded():
    torch.manual_seed(0)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    return model


def wrapped(own_names):
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(nn.Linear(2, 2), use_orig_params=own_names, device_id=cpu)


def test_looking_at_a_layer_by_run_leaves_no_stale_parameters():
    """FSDP lets the gathered ones go after the forward of a module: one that is ended early keeps them."""

    def losses(look):
        model = fully_sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(1)
        x, found = torch.randn(6, 8), []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.item())
            if look:
                with torch.no_grad(), features(model, "0.0") as f:
                    assert f.run(x)["0.0"].shape == (6, 8)
            optimizer.step()
            optimizer.zero_grad()
        return found, {type(parameter.data) for parameter in model[0].parameters()}

    assert losses(look=True) == losses(look=False)


def test_a_run_to_the_end_keeps_first_outputs_as_one_that_stops():
    class Twice(nn.Sequential):
        def forward(self, x):
            return self[1](self[2](self[1](self[0](x))))

    torch.manual_seed(0)
    model, x = Twice(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.ones(1, 4)
    with torch.no_grad():
        expected = features(model, "1").run(x)["1"]
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with features(model, "1") as found:
            found.run(x)
            assert torch.equal(found["1"], expected)
            assert len(found.calls["1"]) == 1
            model(x)
            assert len(found.calls["1"]) == 2


def test_sharded_parameters_are_not_clipped_but_refused():
    with pytest.raises(ValueError, match=r"are sharded.*never fire.*clip_grad_value_"):
        clip_gradients(fully_sharded(), -1, 1)


@pytest.mark.filterwarnings("ignore")  # PyTorch would rather see fully_shard
def test_wrapped_parameters_are_refused_where_hooks_on_them_never_fire():
    model = wrapped(own_names=True)
    with no_leftovers(model), pytest.raises(ValueError, match=r"FullyShardedDataParallel are sharded"):
        clip_gradients(model, -1, 1)
    model = wrapped(own_names=False)
    with clip_gradients(model, -0.5, 0.5):
        model(torch.ones(1, 2)).sum().backward()
    assert {parameter.grad.abs().max().item() for parameter in model.parameters()} == {0.5}


def _each_unit(model):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for unit in (*model[0], model):
        fully_shard(unit, mesh=mesh)
    return model


def test_segments_of_units_that_are_sharded_one_by_one_are_refused_in_backward():
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(3)]
    model = _each_unit(nn.Sequential(nn.Sequential(*blocks), nn.Linear(4, 1)))
    with checkpoint_segments(model, {"0": 2}):
        loss = model(torch.randn(6, 4)).sum()
        with pytest.raises(RuntimeError, match=r"is another tensor than in forward .*fully_shard"):
            loss.backward()
