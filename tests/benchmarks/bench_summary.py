"""`summary` beside torchinfo on ten models: equal parameters, and mult-adds that are exactly explained.

torchinfo counts a multiplication and an addition as one, and counts from parameters: those of a convolution at every
position, biases among them; those of every other layer once a sample, also of a Linear that is applied at many
positions. It counts the parameters of norms, and no product of two activations.
"""

import ast
import importlib
import math
import sys
import warnings

import torch
from torch import nn
from torchvision import models

from hooklab import summary

NAMES = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "mobilenet_v3_small", "regnet_y_400mf",
    "resnet50", "swin_t", "vit_b_32",
)  # fmt: skip


def from_rows(s, model: nn.Module) -> int:
    """The mult-adds of torchinfo, from what `summary` says of the layers."""
    found = 0
    for name, row in s.items():
        module = model.get_submodule(name)
        if row.calls and not module._modules:
            size, own = ast.literal_eval(row.output) if row.output[0] == "[" else [0], dict(module.named_parameters())
            if isinstance(module, nn.Conv2d):
                bias = own["bias"].numel() if "bias" in own else 0
                found += row.operations // 2 + bias * math.prod(size[:1] + size[2:])
            else:
                found += size[0] * sum(own[part].numel() for part in ("weight", "bias") if part in own)
    return found


def main() -> bool:
    torchinfo, equal = importlib.import_module("torchinfo"), []
    print(f"{'model':20} {'parameters':>12} {'operations / 2':>16} {'torchinfo':>16}")
    for name in NAMES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = getattr(models, name)(**({"init_weights": False} if name == "googlenet" else {})).eval()
        x = torch.zeros(2, 3, 224, 224)
        theirs = torchinfo.summary(model, input_data=x, verbose=0, depth=20)
        s = summary(model, x)
        parameters = s.total.parameters == theirs.total_params == sum(p.numel() for p in model.parameters())
        explained = from_rows(s, model) == theirs.total_mult_adds
        equal.append(parameters and explained)
        verdict = f"parameters {'equal' if parameters else 'DIFFER'}, mult-adds {'' if explained else 'NOT '}explained"
        halves = f"{s.total.operations // 2:16,} {theirs.total_mult_adds:16,}"
        print(f"{name:20} {s.total.parameters:12,} {halves}  {verdict}")
    return all(equal)


if __name__ == "__main__":
    sys.exit(not main())
