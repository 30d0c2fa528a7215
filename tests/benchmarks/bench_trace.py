"""What `trace` costs per event (under 20 us) and on ResNet-18, and `hooks_on` on ResNet-50 (under 50 ms)."""

import sys

import torch
from interleaved import medians, report
from torchvision.models import resnet18, resnet50

from hooklab import hooks_on, trace

BUDGET_PER_EVENT_US = 20
BUDGET_HOOKS_ON_MS = 50


def tracing() -> bool:
    torch.manual_seed(0)
    model, batch = resnet18().eval(), torch.randn(1, 3, 64, 64)

    def plain():
        model(batch).sum().backward()

    def traced():
        with trace(model) as events:
            plain()
        return events

    events = sum(not event.inferred for event in traced().events)
    seconds = medians({"plain": plain, "traced": traced}, rounds=15, repeat=2)
    print(f"ResNet-18, 1x3x64x64, forward and backward, {torch.get_num_threads()} thread: {events} events")
    print("  " + "   ".join(f"{name} {value * 1e3:.1f} ms" for name, value in seconds.items()), end="   ")
    print(f"traced / plain {seconds['traced'] / seconds['plain']:.2f} x")
    return report("trace, per event", (seconds["traced"] - seconds["plain"]) / events * 1e6, BUDGET_PER_EVENT_US, "us")


def listing() -> bool:
    model = resnet50()
    for module in model.modules():
        module.register_forward_hook(lambda *args: None)
    seconds = medians({"hooks_on": lambda: hooks_on(model)}, rounds=15, repeat=2)
    return report(
        f"hooks_on, ResNet-50 with {len(hooks_on(model))} hooks",
        seconds["hooks_on"] * 1e3,
        BUDGET_HOOKS_ON_MS,
        "ms",
    )


if __name__ == "__main__":
    kept = [tracing(), listing()]
    sys.exit(not all(kept))
