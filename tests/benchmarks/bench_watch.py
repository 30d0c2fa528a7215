"""`watch` against the same hooks written by hand: at most 1.10x."""

import sys

import torch
from interleaved import medians, report

from hooklab import watch

BUDGET = 1.10


def network(layers: int = 24, width: int = 16) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [layer for _ in range(layers) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*blocks), torch.randn(8, width)


def main() -> bool:
    model, batch = network()
    params = dict(model.named_parameters())

    def plain():
        model(batch).sum().backward()

    def by_hand():
        history, order, handles = {name: [] for name in params}, [], []
        for name, param in params.items():

            def record(grad, name=name):
                history[name].append(grad.detach().clone())
                order.append(name)

            handles.append(param.register_hook(record))
        model(batch).sum().backward()
        for handle in handles:
            handle.remove()

    def by_watch():
        with watch(**params):
            model(batch).sum().backward()

    seconds = medians({"plain": plain, "by hand": by_hand, "watch": by_watch}, rounds=60, repeat=10)
    print(f"24 x (Linear, ReLU), 48 parameters watched, forward and backward, {torch.get_num_threads()} thread")
    print("  " + "   ".join(f"{name} {value * 1e6:.0f} us" for name, value in seconds.items()))
    return report("watch / the same hooks by hand", seconds["watch"] / seconds["by hand"], BUDGET)


if __name__ == "__main__":
    sys.exit(not main())
