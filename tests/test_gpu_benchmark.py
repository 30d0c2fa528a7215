"""The logic of tests/benchmarks/gpu_offload.py, on a small model without a GPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from fake_device import SlowDevice, SlowMemory

FILE = Path(__file__).parent / "benchmarks" / "gpu_offload.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("gpu_offload", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_offload"] = module
    spec.loader.exec_module(module)
    return module


def test_every_strategy_has_the_gradients_of_stock_and_its_figures(benchmark, tmp_path, capsys):
    out = tmp_path / "result.json"
    assert benchmark.main(["--device", "cpu", "--rounds", "1", "--steps", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    names = [run["name"] for run in result["runs"]]
    assert names == list(result["gradients_bit_equal"])
    assert all(result["gradients_bit_equal"].values())
    assert all(run["seconds"] > 0 and run["first_seconds"] > 0 for run in result["runs"])
    moved = {run["name"]: run["moved_bytes"] for run in result["runs"]}
    assert moved["Offload, keep 0 GB"] > moved["Offload, keep 20 GB"]
    assert 0 < moved["checkpoint_segments + Offload, keep 0 GB"] < moved["Offload, keep 0 GB"] * 0.6
    assert result["link"] is None
    assert "verdict" not in result  # it is about a GPU
    capsys.readouterr()


def test_without_a_gpu_nothing_is_measured(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = benchmark.RESULT.exists()
    assert benchmark.main([]) == 1
    assert "nothing was measured" in capsys.readouterr().err
    assert benchmark.RESULT.exists() == before


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_gradients_agree_through_a_device_that_is_slow(benchmark):
    device = SlowDevice()
    task = benchmark.Task("resnet18", 2, 32, "cpu", lambda: SlowMemory(device, in_flight=50_000), unit=10**4)
    assert all(benchmark.gradients_agree(task).values())
    assert device.copies > 0
    assert device.hazards == 0


def run(name, seconds, peak):
    return {"name": name, "seconds": seconds, "peak_allocated": peak * 10**9}


def test_the_verdict_compares_at_no_more_memory(benchmark):
    found = benchmark.verdict(
        [
            run("stock", 1.0, 46),
            run("save_on_cpu, pinned", 10.0, 4),
            run("checkpoint, every block", 1.3, 10),
            run("Offload, keep 0 GB", 6.0, 5),
            run("checkpoint_segments + Offload, keep 0 GB", 1.4, 3.9),
            run("checkpoint_segments + Offload, keep 3 GB", 1.35, 6),
        ]
    )
    assert found["6.5 GB at 1.5x reached by"] == [
        "checkpoint_segments + Offload, keep 0 GB", "checkpoint_segments + Offload, keep 3 GB",
    ]  # fmt: skip
    assert found["faster at no more memory than"] == {
        "save_on_cpu, pinned": True,
        "checkpoint, every block": False,
    }
