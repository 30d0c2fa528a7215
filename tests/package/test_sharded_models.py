"""Models whose parameters are shared among processes, here with one process."""

import pytest
import torch
from torch import nn

from hooklab import checkpoint_segments, clip_gradients, features, hooks_on, no_leftovers, updates

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


def test_features_of_a_sharded_model_are_kept_but_run_is_refused():
    """FSDP frees the gathered parameters after the forward of a module: one that stops early would keep them."""
    model, x = fully_sharded(), torch.ones(6, 8)
    with no_leftovers(model), torch.no_grad(), features(model, "0.0") as f:
        with pytest.raises(RuntimeError, match=r"this model is sharded.*call the model itself"):
            f.run(x)
        model(x)
        assert torch.equal(f["0.0"].tanh(), model[0](x))


def test_sharded_parameters_are_not_clipped_but_refused():
    with pytest.raises(ValueError, match=r"are sharded.*never fire.*clip_grad_value_"):
        clip_gradients(fully_sharded(), -1, 1)


def test_updates_of_sharded_parameters_are_refused():
    model = fully_sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"updates: the parameters of .* are sharded \(FSDP\)"):
        updates(model, optimizer)
    assert hooks_on(optimizer) == []


@pytest.mark.filterwarnings("ignore")  # PyTorch would rather see fully_shard
def test_wrapped_parameters_are_refused_where_hooks_on_them_never_fire():
    for own_names in (True, False):
        model = wrapped(own_names)
        with no_leftovers(model), pytest.raises(ValueError, match=r"FullyShardedDataParallel are sharded"):
            clip_gradients(model, -1, 1)


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
