"""What a model may save, in every way that a tensor may lie in memory: functions of a leaf of shape (6, 8, 4, 4)."""

import torch
from torch import nn

VIEWS = {
    "as it is": lambda x: x * x,
    "transposed": lambda x: x.transpose(0, 1).exp() * x.transpose(0, 1),
    "a slice of rows": lambda x: x[1:3] * x[2:4],
    "a slice of columns": lambda x: x[:, 1:5] * x[:, 2:6],
    "a step slice": lambda x: x[:, ::2] * x[:, 1::2],
    "two slices that overlap": lambda x: x[:, :5] * x[:, :5] * x[:, 1:6],
    "expanded": lambda x: x[:1, :1].expand(6, 8, 4, 4) * x,
    "expanded slice": lambda x: x[:, ::2, :1].expand(6, 4, 4, 4) * x[:, 1::2],
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last).exp().sin(),
    "windows": lambda x: x.unfold(2, 2, 1) * x.unfold(2, 2, 1),
    "as_strided": lambda x: torch.as_strided(x, (4, 4), (1, 3)) * torch.as_strided(x, (4, 4), (2, 5)),
    "one element": lambda x: x[0, 0, 0, 0] * x[1, 1, 1, 1],
    "flipped": lambda x: x.flip(0) * x,
    "conv": lambda x: nn.functional.conv2d(x, torch.ones(3, 8, 2, 2)).relu().pow(3),
    "max pool": lambda x: nn.functional.max_pool2d(x.tanh(), 2),
    "softmax": lambda x: x.softmax(1).log() * x,
    "index": lambda x: x[torch.tensor([0, 2, 2])].exp() * x[[1, 1, 0]],
    "where": lambda x: torch.where(x > 0, x.exp(), x.sin()),
    "dropout": lambda x: nn.functional.dropout(x, 0.0).exp(),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x.exp(), x.sin()),
}  # fmt: skip
