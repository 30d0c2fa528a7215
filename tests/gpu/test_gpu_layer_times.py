"""The logic of tests/benchmarks/gpu_layer_times.py, on a small model without a GPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long  # `make test-long`
FILE = Path(__file__).parents[1] / "benchmarks" / "gpu_layer_times.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FILE.parent))  # as when it is run: it takes two functions from its neighbour
    spec = importlib.util.spec_from_file_location("gpu_layer_times", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("gpu_offload", None)


def test_every_part_is_timed(benchmark, tmp_path, capsys):
    out = tmp_path / "result.json"
    assert benchmark.main(["--device", "cpu", "--rounds", "2", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    parts = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc", "read"]
    assert list(result["layers_ms"]) == parts
    assert all(row.keys() == {"wall"} and row["wall"] > 0 for row in result["layers_ms"].values())
    assert result["finite"][0]["finite_ms"] > 0
    assert {"torch", "torchvision", "date"} <= result["machine"].keys()
    assert json.loads(capsys.readouterr().out) == result


def test_without_a_gpu_it_says_so_and_writes_nothing(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "result.json"
    assert benchmark.main(["--out", str(out)]) == 1
    assert "no CUDA device here" in capsys.readouterr().err
    assert not out.exists()
