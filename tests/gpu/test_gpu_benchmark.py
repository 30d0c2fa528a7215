"""The logic of tests/benchmarks/gpu_offload.py, on small models without a GPU; and the cells that show its result."""

import gc
import importlib.util
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import matplotlib
import pytest
import torch
import torchvision
from fake_device import SlowDevice, SlowMemory
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hooklab import lesson, saved_tensors
from hooklab.course import environment

pytestmark = pytest.mark.long  # `make test-long`
FILE = Path(__file__).parents[1] / "benchmarks" / "gpu_offload.py"
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "36_the_memory_budget.ipynb"
COMMON = [
    "stock",
    "save_on_cpu, pinned",
    "checkpoint, every block",
    "checkpoint, stem and every block",
    "segments 1/2/6/3",
    "segments 2/3/3/0",
    "regrouped 1/3/4/0",
    "regrouped 1/0/3/0",
]
OURS, SEGMENTS, THEIRS = "Offload", "segments 1/2/6/3 + Offload", "torchtune OffloadActivations"
COMPOSED = [
    *(f"{SEGMENTS}, keep {keep} GB" for keep in (0, 2)),
    "regrouped 1/3/4/0 + Offload, keep 2 GB",
    "regrouped 1/3/4/0 + Offload, keep 2 GB, SGD in backward",
    "regrouped 0/1/2/1 + Offload, keep 0 GB, SGD in backward",
]
ON_CPU = [*COMMON, *(f"{OURS}, keep {keep} GB" for keep in (0, 20)), *COMPOSED]
ON_CUDA = [*COMMON, *(f"{OURS}, keep {keep} GB" for keep in (0, 15, 30)), *COMPOSED, THEIRS]


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """The benchmark collects garbage often; what was there before need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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
    assert names == list(result["gradients_bit_equal"]) == ON_CPU
    assert all(result["gradients_bit_equal"].values())
    assert all(run["seconds"] > 0 and run["first_seconds"] > 0 for run in result["runs"])
    moved = {run["name"]: run["moved_bytes"] for run in result["runs"]}
    assert moved["Offload, keep 0 GB"] > moved["Offload, keep 20 GB"]
    assert 0 < moved["segments 1/2/6/3 + Offload, keep 0 GB"] < moved["Offload, keep 0 GB"] * 0.6
    assert 0 < moved["regrouped 1/3/4/0 + Offload, keep 2 GB"] < moved["segments 1/2/6/3 + Offload, keep 2 GB"]
    assert result["link"] is None
    assert (result["left_out"], result["failed"], result["rounds"], result["steps"]) == ({}, {}, 1, 1)
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
    failed: dict[str, str] = {}
    agree = benchmark.gradients_agree(task, benchmark.strategies(False)[0], failed)
    assert list(agree) == ON_CPU
    assert all(agree.values())
    assert failed == {}
    assert device.copies > 0
    assert device.hazards == 0


# ---- a device that says it is CUDA ----


class Tiny(nn.Module):
    """Has the four layers that the strategies know, and takes no time.

    No Linear: `save_on_cpu(pin_memory=True)` gives its weight back with other strides, and the last bit may differ.
    """

    def __init__(self, weights: None = None):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.Identity()
        for name in ("layer1", "layer2", "layer3", "layer4"):
            blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(6)]
            setattr(self, name, nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.Sequential(nn.Conv2d(4, 1000, 1), nn.AdaptiveAvgPool2d(1)), nn.Identity()

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class OffloadActivations(saved_tensors_hooks):
    """Takes torchtune's place: it too moves what is no parameter and not small, as often as it is saved."""

    def __init__(self, use_pin_memory: bool, use_streams: bool):
        assert use_pin_memory
        assert use_streams
        self.tracker, self.count = {}, 0
        super().__init__(self.pack, lambda number: self.tracker.pop(number)[0])

    def pack(self, tensor: torch.Tensor) -> int:
        assert len(self.tracker) < 1000
        self.count += 1
        moves = tensor.nbytes >= 1024 and not isinstance(tensor, nn.Parameter)
        self.tracker[self.count] = tensor.clone() if moves else tensor.detach(), moves
        return self.count


class Cuda(SimpleNamespace):
    """`peak` grows with every asking; a test may look around when the cache of pinned memory is emptied."""

    peak = 0

    def when_emptied(self) -> None:
        pass

    def memory(self) -> int:
        self.peak += 10**9
        return self.peak


@pytest.fixture
def cuda(benchmark, monkeypatch) -> Cuda:
    found = Cuda()
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, found.memory)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU of no make")
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: found.when_emptied(), raising=False)
    monkeypatch.setattr(benchmark, "link", lambda device: {"to_host_GBps": 50.0})
    monkeypatch.setattr(benchmark, "driver", lambda: "1.2")
    monkeypatch.setattr(torchvision.models, "tiny", Tiny, raising=False)
    torchtune, training = ModuleType("torchtune"), ModuleType("torchtune.training")
    torchtune.training, training.OffloadActivations = training, OffloadActivations
    monkeypatch.setitem(sys.modules, "torchtune", torchtune)
    monkeypatch.setitem(sys.modules, "torchtune.training", training)
    return found


def fake_task(benchmark, store: Callable[[], Any] | None = None) -> Any:
    task = benchmark.Task("tiny", 4, 16, "cpu", store or benchmark.Copies, unit=2 * 10**4)
    task.device = SimpleNamespace(type="cuda")
    return task


def results(benchmark, rounds: int = 1, only: str = "", **options: Any) -> list[dict[str, Any]]:
    """After every round, as they stand in the file."""
    task = fake_task(benchmark, **options)
    found = benchmark.run(task, lambda: fake_task(benchmark), rounds, 2, only)
    return [json.loads(json.dumps(one)) for one in found]


def breaks(benchmark, monkeypatch, name: str, at: int, error: BaseException | None = None) -> list[Any]:
    """That contender raises in the forward of its step number `at`; the list: what the step has made by then."""
    whole, steps, made = benchmark.strategies, [], []

    class Thing:
        pass

    def strategies(*arguments: Any) -> Any:
        found, left_out = whole(*arguments)
        begin = found[name].begin

        def context(give: Callable[[], Any]) -> Any:
            steps.append(1)
            if len(steps) < at:
                return give()
            thing = Thing()
            thing.itself = thing  # nothing but a collection ends it
            made.append(weakref.ref(thing))
            raise error or torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")

        def begin_it(task: Any) -> Callable[[], Any]:
            give = begin(task)
            return lambda: context(give)

        found[name] = found[name]._replace(begin=begin_it)
        return found, left_out

    monkeypatch.setattr(benchmark, "strategies", strategies)
    return made


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_every_contender_takes_part_on_a_gpu_and_what_it_moves_is_counted(benchmark, cuda):
    (result,) = results(benchmark)
    assert [run["name"] for run in result["runs"]] == list(result["gradients_bit_equal"]) == ON_CUDA
    assert all(result["gradients_bit_equal"].values())
    assert (result["left_out"], result["failed"]) == ({}, {})
    assert result["verdict"]["not compared"] == []
    moved = {run["name"]: run["moved_bytes"] for run in result["runs"]}
    assert [name for name in ON_CUDA if not moved[name]] == [name for name in COMMON if "save" not in name]
    for ours in (OURS, SEGMENTS):
        sizes = [moved[name] for name in ON_CUDA if name.startswith(f"{ours}, ")]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == len(sizes)

    task = fake_task(benchmark)
    with saved_tensors(task.model) as saved:
        loss = nn.functional.cross_entropy(task.model(task.x), task.labels)
    loss.backward()
    assert moved["save_on_cpu, pinned"] == saved.total_bytes
    assert moved[THEIRS] == sum(record.bytes for record in saved if record.bytes >= 1024 and not record.owner)
    assert moved[THEIRS] < moved["save_on_cpu, pinned"]


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_who_should_move_something_and_does_not_fails(benchmark, cuda):
    task, failed = fake_task(benchmark), {}
    task.unit = 10**9  # all is small now
    agree = benchmark.gradients_agree(task, benchmark.strategies(True)[0], failed)
    assert failed == {}
    assert [name for name in agree if not agree[name]] == [name for name in ON_CUDA if "Offload, " in name]


def test_what_is_not_known_is_not_zero(benchmark, cuda):
    begin = benchmark.torchtune_offloading()
    context = begin(fake_task(benchmark))()
    with context:
        pass
    assert context.moved_bytes == 0
    del context.tracker
    with context:
        pass
    assert context.moved_bytes is None


def test_pinned_memory_lives_for_one_turn(benchmark, cuda):
    stores, alive = [], []

    def store() -> Any:
        made = benchmark.Copies()
        stores.append(weakref.ref(made))
        alive.append(sum(reference() is not None for reference in stores))
        return made

    left = []
    cuda.when_emptied = lambda: left.append(sum(reference() is not None for reference in stores))
    results(benchmark, rounds=2, store=store, only="segments.*Offload")
    assert len(stores) == 2 * 2  # one for all steps of a turn
    assert set(alive) == {1}
    assert len(left) == 2 + 3 * 3  # of the link, after the gradients, and of each: in the gradients, in two rounds
    assert set(left) == {0}


def test_nothing_else_is_there_when_memory_counts(benchmark, cuda, monkeypatch):
    make, turn, models, alive = benchmark.Task, benchmark.turn, [], []

    def noted(*arguments, **options):
        made = make(*arguments, **options)
        models.append(weakref.ref(made.model))
        return made

    def counted(*arguments):
        gc.collect()
        alive.append([model() is not None for model in models])
        turn(*arguments)

    monkeypatch.setattr(benchmark, "Task", noted)
    monkeypatch.setattr(benchmark, "turn", counted)
    results(benchmark, only="save")
    assert alive == [[True, False]] * 2  # of the task and of the small one, in the turns of two strategies


def test_a_step_says_what_the_host_took_and_how_often_memory_was_asked_for(benchmark, cuda, monkeypatch):
    task, asked = fake_task(benchmark), [7]
    seconds = iter([0.0, 2.0, 5.0])

    def step(context):
        asked[0] += 3
        return 100

    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_device_alloc": asked[0]})
    monkeypatch.setattr(task, "step", step)
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    assert task.timed(None) == (5.0, 2.0, 3, 100)


@pytest.mark.parametrize("there", [{}, {"num_device_alloc": 1}])
def test_who_counts_no_allocations_says_none(benchmark, cuda, monkeypatch, there):
    task = fake_task(benchmark)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: there)
    monkeypatch.setattr(task, "step", lambda context: 0)
    assert task.timed(None).allocations == (0 if there else None)


@pytest.mark.parametrize("breaks_off", [False, True])
def test_no_collection_falls_into_a_step(benchmark, cuda, monkeypatch, breaks_off):
    task, seen = fake_task(benchmark), []

    def timed(context):
        seen.append(gc.isenabled())
        if breaks_off and len(seen) == 2:
            raise torch.OutOfMemoryError
        return benchmark.Timed(1.0, 0.5, None, 0)

    monkeypatch.setattr(task, "timed", timed)
    failed: dict[str, str] = {}
    list(benchmark.measure(task, {"stock": benchmark.Strategy()}, 1, 2, failed))
    assert seen == [False] * (2 if breaks_off else 3)
    assert gc.isenabled()
    assert list(failed) == ["stock"] * breaks_off


def test_sgd_in_backward_does_what_sgd_does_and_frees_the_gradients(benchmark, cuda):
    weights, held = [], []
    for in_backward in (False, True):
        task = fake_task(benchmark)
        parameters = list(task.model.parameters())

        def note(_, parameters=parameters):
            held.append(sum(one.grad is not None for one in parameters))

        task.model.conv1.weight.register_post_accumulate_grad_hook(note)  # where backward ends
        strategy = benchmark.Strategy(in_backward=in_backward)
        with strategy.around(task):
            for _ in range(2):
                task.step(strategy.begin(task)())
        weights.append(parameters)
        loss = nn.functional.cross_entropy(task.model(task.x), task.labels)
        loss.backward()
        assert all(one.grad is not None for one in parameters)  # no hook has stayed
    assert all(map(torch.equal, *weights))
    # The weight of conv1 has its gradient; its bias may be next.
    assert all(count >= len(parameters) - 1 for count in (held[0], held[1]))
    assert all(count <= 2 for count in (held[3], held[4]))


def test_regrouped_it_is_the_same_model(benchmark):
    task = benchmark.Task("resnet50", 2, 32, "cpu", benchmark.Copies)
    modules = {id(module) for module in task.model.modules() if not list(module.children())}
    regrouped = [module for module in task.regrouped.modules() if not list(module.children())]
    assert {id(module) for module in regrouped if not isinstance(module, nn.Flatten)} == modules
    assert sum(isinstance(module, nn.Flatten) for module in regrouped) == 1
    task.model.eval()
    assert torch.equal(task.model(task.x), task.regrouped(task.x))
    assert [len(getattr(task.regrouped, name)) for name in ("wide", "layer2", "layer3", "layer4")] == [
        5,
        3,
        6,
        3,
    ]


def test_the_cache_of_pinned_memory_has_another_name_in_older_versions(benchmark, cuda, monkeypatch):
    emptied = []
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(1), raising=False)
    benchmark.release(fake_task(benchmark))
    assert emptied == [1]


# In the gradients, in a first step, in a timed one, in the second round.
@pytest.mark.parametrize(("step", "rounds"), [(1, 0), (2, 0), (3, 0), (5, 1)])
def test_who_fails_is_recorded_and_the_others_go_on(benchmark, cuda, monkeypatch, capsys, step, rounds):
    name = "Offload, keep 0 GB"
    made, left = breaks(benchmark, monkeypatch, name, step), []
    cuda.when_emptied = lambda: left.extend(thing() for thing in made)
    first, second = results(benchmark, rounds=2, only="save|Offload, keep 0")
    why = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    assert second["failed"] == {name: why}
    assert first["failed"] == ({} if rounds else {name: why})
    assert f"{name} failed: {why}" in capsys.readouterr().err
    others = ["stock", "save_on_cpu, pinned", f"{SEGMENTS}, keep 0 GB", COMPOSED[-1]]
    assert [run["name"] for run in second["runs"]] == others
    assert (name in [run["name"] for run in first["runs"]]) == bool(rounds)
    assert set(second["verdict"]["not compared"]) == set(ON_CUDA) - set(others)
    assert set(left) == {None}  # nothing holds what the step has made when memory is released
    assert len(made) == 1  # and it is not tried again


def test_without_stock_nothing_is_claimed(benchmark, cuda, monkeypatch):
    breaks(benchmark, monkeypatch, "stock", 1)
    (result,) = results(benchmark, only="segments")
    assert result["verdict"]["6.5 GB at 1.5x reached by"] == []
    assert result["verdict"]["not compared"][-1] == "stock"
    assert not any(result["gradients_bit_equal"].values())


@pytest.mark.parametrize("broken", ["torchtune", "torchtune.training"])
def test_who_cannot_be_imported_is_left_out_and_it_says_why(benchmark, cuda, monkeypatch, capsys, broken):
    monkeypatch.delitem(sys.modules, "torchtune.training")
    monkeypatch.setitem(sys.modules, broken, None)
    (result,) = results(benchmark, only="save|torchtune")
    assert set(result["left_out"]) == set(ON_CUDA[2:])
    assert result["left_out"][THEIRS].startswith("ModuleNotFoundError: ")
    assert "torchtune" in result["left_out"][THEIRS]
    assert f"{THEIRS} is left out: {result['left_out'][THEIRS]}" in capsys.readouterr().err
    assert THEIRS in result["verdict"]["not compared"]
    assert [run["name"] for run in result["runs"]] == ON_CUDA[:2]


def test_some_by_their_names(benchmark, cuda):
    (result,) = results(benchmark, only="save|2/3/3")
    chosen = ["stock", "save_on_cpu, pinned", "segments 2/3/3/0"]
    assert [run["name"] for run in result["runs"]] == chosen
    assert set(result["left_out"]) == set(ON_CUDA) - set(chosen)
    assert set(result["left_out"].values()) == {"does not match --only save|2/3/3"}
    assert result["verdict"]["not compared"] == list(result["left_out"])


def test_the_file_is_written_after_every_round_and_at_once(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torchvision.models, "resnet18", Tiny)
    out = tmp_path / "new" / "result.json"
    quick = ["--device", "cpu", "--only", "save", "--steps", "1", "--out", str(out), "--rounds"]
    # Somebody ends it in the second round: in the fourth step of stock, after the gradients and two of the first round.
    with monkeypatch.context() as here:
        breaks(benchmark, here, "stock", 4, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            benchmark.main([*quick, "3"])
    result = json.loads(out.read_text())
    assert result["rounds"] == 1
    assert [run["name"] for run in result["runs"]] == ON_CPU[:2]
    whole = out.read_text()
    with monkeypatch.context() as here:
        here.setattr(Path, "replace", lambda *paths: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            benchmark.main([*quick, "1"])
    assert out.read_text() == whole
    assert benchmark.main([*quick, "2"]) == 0
    assert json.loads(out.read_text())["rounds"] == 2
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    capsys.readouterr()


def test_a_part_does_not_take_the_place_of_the_whole(benchmark, cuda, monkeypatch, tmp_path, capsys):
    out = tmp_path / "result.json"
    given = []
    monkeypatch.setattr(benchmark, "RESULT", out)
    monkeypatch.setattr(benchmark, "Task", lambda *arguments, **options: given.append(arguments))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = {"gradients_bit_equal": {"stock": True}, "failed": {}}
    monkeypatch.setattr(benchmark, "run", lambda task, small, *rest: iter([result, small()][:1]))
    assert benchmark.main(["--only", "2/3/3"]) == 0
    assert not out.exists()
    assert benchmark.main([]) == 0
    assert json.loads(out.read_text()) == result
    assert given == [("resnet152", 256, 224, "cuda"), ("resnet50", 4, 96, "cuda")] * 2
    capsys.readouterr()


def test_the_exit_code_tells_of_a_failure(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(torchvision.models, "resnet18", Tiny)
    few = ["--device", "cpu", "--rounds", "1", "--steps", "1", "--only", "save"]
    assert benchmark.main(few) == 0
    with monkeypatch.context() as here:
        breaks(benchmark, here, "save_on_cpu, pinned", 2)
        assert benchmark.main(few) == 1
    with monkeypatch.context() as here:
        here.setattr(benchmark, "gradients_agree", lambda *arguments: {"stock": True, "another": False})
        assert benchmark.main(few) == 1
    for none in ("--rounds", "--steps"):
        with pytest.raises(SystemExit):
            benchmark.main([*few, none, "0"])
    capsys.readouterr()


def test_a_driver_without_a_name(benchmark, monkeypatch):
    answer = SimpleNamespace(returncode=0, stdout="580.1\n580.1\n")
    monkeypatch.setattr(benchmark.subprocess, "run", lambda *arguments, **options: answer)
    assert benchmark.driver() == "580.1"
    answer.stdout = "\n"
    assert benchmark.driver() == "unknown"
    answer.stdout, answer.returncode = "NVIDIA-SMI has failed", 9
    assert benchmark.driver() == "unknown"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    assert benchmark.driver() == "unknown"


def test_figures_are_medians_and_the_worst_peak(benchmark):
    row = {"name": "it", "first": [9.0, 4.0], "peaks": [5, 7], "reserved": [8, 6]}
    row["steps"] = [benchmark.Timed(seconds, 0.5, number, None) for number, seconds in enumerate((3.0, 1.0, 2.5, 2.0))]
    found = benchmark.finished(row, benchmark.segments("1/0/3/0", True, benchmark.offload(2, in_flight=1)))
    assert (found["first_seconds"], found["seconds"]) == (4.0, 2.25)
    assert (found["fastest"], found["slowest"]) == (1.0, 3.0)
    assert [*found["step_seconds"]] == [3.0, 1.0, 2.5, 2.0]
    assert ([*found["step_host_seconds"]], [*found["step_allocations"]]) == ([0.5] * 4, [0, 1, 2, 3])
    assert (found["peak_allocated"], found["peak_reserved"], found["moved_bytes"]) == (7, 8, None)
    assert (found["ours"], found["plan"]) == (True, {"wide": 1, "layer3": 3})
    assert found["settings"] == {"keep": 2, "in_flight": 1}
    assert not benchmark.finished(row, benchmark.Strategy())["ours"]


# ---- the verdict ----


def run(name, seconds, peak, ours=False):
    return {"name": name, "seconds": seconds, "peak_allocated": peak * 10**9, "ours": ours}


def test_the_verdict_compares_at_no_more_memory(benchmark):
    found = benchmark.verdict(
        [
            run("stock", 1.0, 46),
            run("save_on_cpu, pinned", 10.0, 4),
            run("checkpoint, every block", 1.3, 10),
            run("Offload, keep 0 GB", 6.0, 5, True),
            run("segments + Offload, keep 0 GB", 1.4, 3.9, True),
            run("segments + Offload, keep 3 GB", 1.35, 6, True),
        ],
        ["torchtune OffloadActivations"],
    )
    reached = ["segments + Offload, keep 0 GB", "segments + Offload, keep 3 GB"]
    assert found["6.5 GB at 1.5x reached by"] == reached
    assert found["faster at no more memory than"] == {
        "save_on_cpu, pinned": True,
        "checkpoint, every block": False,
    }
    assert found["not compared"] == ["torchtune OffloadActivations"]


# ---- the cells of notebook 36 ----


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys) -> Callable[[dict[str, Any]], tuple[list[str], Any]]:
    """Runs the cells that show a result, in a folder with that result: the lines printed, and the axes drawn."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = {cell.get("id"): "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]}

    def show(result: dict[str, Any]) -> tuple[list[str], Any]:
        monkeypatch.setattr(environment, "DATA", tmp_path)
        lesson.data("gpu_offload.json").write_text(json.dumps(result), encoding="utf-8")
        names: dict[str, Any] = {"lesson": lesson}
        for cell in ("answer-load", "answer-picture", "answer-facts", "measured-facts"):
            exec(cells[cell], names)
        return capsys.readouterr().out.splitlines(), plt.gcf().axes

    yield show
    plt.close("all")


def test_the_notebook_shows_what_was_measured(benchmark, cuda, capsys, shown):
    (result,) = results(benchmark)
    capsys.readouterr()
    runs = result["runs"]
    for number, found in enumerate(runs):
        moved = None if found["name"] == THEIRS else number * 10**9
        found |= {"seconds": 0.25 + number / 40, "moved_bytes": moved, "peak_allocated": (40 - number) * 10**9}
    lines, (memory, time) = shown(result)
    assert [run["name"] for run in runs] == ON_CUDA
    way = ["stock", "segments 1/2/6/3", *COMPOSED[:1], *COMPOSED[2:4], "save_on_cpu, pinned"]
    places = [ON_CUDA.index(name) for name in way]
    assert [bar.get_width() for bar in memory.patches] == [40 - place for place in places]
    assert [bar.get_width() for bar in time.patches] == pytest.approx([1 + place / 10 for place in places])
    assert lines[1] == f"{'1 recompute':22} 36.00 GB   1.40x"
    start = lines.index(f"{'':59}     peak    moved   time")
    head = " ".join(lines[6:start])
    assert head.startswith(f"tiny, batch 4, 16 x 16, float32, SGD | torch {torch.__version__} | ")
    assert " | gpu a GPU of no make | driver 1.2 | " in head
    assert lines[start + 1] == f" 1 {'stock':56} 40.00 GB   0.0 GB  1.00x"
    assert lines[-1] == f"17 {THEIRS:56} 24.00 GB     - GB  2.60x"


def test_what_the_notebook_says_is_what_was_measured():
    result = json.loads(lesson.data("gpu_offload.json").read_text("utf-8"))
    runs = {run["name"]: run for run in result["runs"]}
    stock = runs["stock"]["seconds"]
    cells = {one["id"]: "".join(one["source"]) for one in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]}

    def both_say(cell, *figures):
        for half in cells[cell].split('<div lang="en">'):
            assert [figure for figure in figures if figure not in half] == []

    def gigabytes(name, digits=1):
        return f"{runs[name]['peak_allocated'] / 1e9:.{digits}f}"

    def times(name, digits=2):
        return f"{runs[name]['seconds'] / stock:.{digits}f}"

    pinned, blocks = "save_on_cpu, pinned", "checkpoint, every block"
    moved, goal = "segments 1/2/6/3 + Offload, keep 0 GB", "regrouped 1/3/4/0 + Offload, keep 2 GB"
    named, most = f"{goal}, SGD in backward", "regrouped 0/1/2/1 + Offload, keep 0 GB, SGD in backward"
    both_say("answer", f"{gigabytes(named, 2)} GB", times(named))
    both_say("answer-after", times(pinned, 1))
    both_say("hide", times(moved), f"{runs['segments 1/2/6/3']['seconds'] / stock - 1:.2f}")
    both_say("regroup-after", times(goal))
    both_say("free", f"{runs[goal]['peak_allocated'] / 1e9 - 6.5:.1f} GB")
    both_say("free-after", f"{gigabytes(named, 2)} GB", times(named))
    less = (runs[goal]["peak_allocated"] - runs[named]["peak_allocated"]) / 1e9
    assert f"{less:.2f}" == "0.24"  # the gradients, as the section says
    assert result["verdict"]["6.5 GB at 1.5x reached by"] == [named]
    assert runs[named]["slowest"] <= 1.5 * stock

    both_say("measured", f"{runs[named]['peak_reserved'] / 1e9:.1f} GB")
    both_say("measured", f"{max(run['peak_reserved'] for run in result['runs']) / 1e9:.0f} GB")
    both_say("measured-others", gigabytes(blocks), times(blocks), gigabytes("regrouped 1/0/3/0"))
    both_say("measured-others", times("regrouped 1/0/3/0"), gigabytes(most), times(most, 1), times(pinned, 1))
    assert times(blocks) == times("segments 2/3/3/0")  # 'as fast'
    both_say("measured-others", f"{float(gigabytes(blocks, 2)) - float(gigabytes('segments 2/3/3/0', 2)):.1f} GB")
    assert all(result["verdict"]["faster at no more memory than"].values())

    link = [f"{result['link'][way]:.1f}" for way in ("to_host_GBps", "to_device_GBps")]
    both_say("model", f"{stock * 1000:.0f} ms", *link, times(pinned, 1), times("Offload, keep 0 GB", 1))
    both_say("model", times(moved), f"{gigabytes(moved)} GB")
    slow, before = runs[pinned], {run["name"]: run for run in result["again"]["runs"]}
    both_say("first-step", f"{slow['first_seconds']:.0f} ", f"{slow['first_seconds'] / stock:.0f} ")
    both_say("first-step", f"{slow['first_seconds'] - slow['seconds']:.0f} ")
    for found in (runs, before):
        ends = [found[named][end] / found["stock"]["seconds"] for end in ("fastest", "slowest")]
        both_say("varies", *(f"{end:.2f}" for end in ends))
    both_say("varies", f"{before[named]['seconds'] / before['stock']['seconds']:.2f}")


def test_the_committed_figures_are_of_the_whole_task_and_the_notebook_shows_them(shown):
    result = json.loads(lesson.data("gpu_offload.json").read_text("utf-8"))
    assert result["task"] == "resnet152, batch 256, 224 x 224, float32, SGD"
    assert {"gpu", "driver", "cuda", "cudnn", "torch", "torchvision", "date"} <= set(result["machine"])
    assert [run["name"] for run in result["runs"]] == ON_CUDA
    assert (result["failed"], result["left_out"]) == ({}, {})
    assert all(run["fastest"] <= run["seconds"] <= run["slowest"] for run in result["runs"])
    # Its weight comes back with other strides.
    assert [name for name, equal in result["gradients_bit_equal"].items() if not equal] == ["save_on_cpu, pinned"]
    lines, _ = shown(result)
    stored = {cell["id"]: cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]}
    facts = [stored[cell]["outputs"][0]["text"] for cell in ("answer-facts", "measured-facts")]
    assert lines == "".join("".join(text) for text in facts).splitlines()
