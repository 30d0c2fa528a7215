"""A training step of ResNet-18 under `finite` against the plain one, on the CPU: at most 1.4x."""

import sys

import torch
import torchvision
from interleaved import medians, report

from hooklab import finite

BUDGET = 1.4
BATCH = 4


def main() -> bool:
    torch.manual_seed(0)
    model, batch = torchvision.models.resnet18(), torch.randn(BATCH, 3, 224, 224)
    target = torch.randint(1000, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()

    def looked_at():
        with finite(model):
            step()

    seconds = medians({"plain": step, "finite": looked_at}, rounds=11, repeat=1)
    print(f"ResNet-18, batch {BATCH} of 224 x 224, forward, backward and step, {torch.get_num_threads()} thread")
    print("  " + "   ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
    return report("finite / plain", seconds["finite"] / seconds["plain"], BUDGET)


if __name__ == "__main__":
    sys.exit(not main())
