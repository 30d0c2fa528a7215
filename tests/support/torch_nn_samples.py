"""One sample of every module in torch.nn: how to build it and what to call it with.

`ABSTRACT` holds what cannot be called, with the reason; tests/package/test_every_layer.py demands that nothing is missing.
"""

import torch
from torch import nn


def image(channels=4, side=6):
    return torch.randn(2, channels, side, side, requires_grad=True)


def line(channels=4, length=8):
    return torch.randn(2, channels, length, requires_grad=True)


def block(channels=2, side=4):
    return torch.randn(2, channels, side, side, side, requires_grad=True)


def rows(columns=4, number=3):
    return torch.randn(number, columns, requires_grad=True)


def shares(columns=4, number=3):
    return torch.rand(number, columns).clamp(0.1, 0.9).requires_grad_()


def signs(*shape):
    return torch.randint(0, 2, shape) * 2.0 - 1


def classes(number=3, of=4):
    return torch.randint(0, of, (number,))


def sequence():
    return torch.randn(5, 2, 4, requires_grad=True)


ELEMENTWISE = [
    "AlphaDropout", "CELU", "Dropout", "ELU", "FeatureAlphaDropout", "GELU", "GLU", "Hardshrink", "Hardsigmoid",
    "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "LogSoftmax", "Mish", "PReLU", "RReLU", "ReLU",
    "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax", "Softmin", "Softplus", "Softshrink", "Softsign", "Tanh",
    "Tanhshrink", "Flatten",
]  # fmt: skip
PAIRS = [
    "HuberLoss",
    "L1Loss",
    "MSELoss",
    "SmoothL1Loss",
    "PoissonNLLLoss",
    "KLDivLoss",
    "CosineSimilarity",
    "PairwiseDistance",
]
ANY = {1: line, 2: image, 3: block}

SAMPLES = {name: (getattr(nn, name), lambda: (rows(),)) for name in ELEMENTWISE}
SAMPLES |= {name: (getattr(nn, name), lambda: (rows(), torch.rand(3, 4))) for name in PAIRS}
for dims, make in ANY.items():
    channels = 2 if dims == 3 else 4
    SAMPLES |= {
        f"{kind}{dims}d": (
            lambda kind=kind, dims=dims, given=given: getattr(nn, f"{kind}{dims}d")(*given),
            lambda make=make: (make(),),
        )
        for kind, given in {
            "AdaptiveAvgPool": (2,), "AdaptiveMaxPool": (2,), "AvgPool": (2,), "MaxPool": (2,), "LPPool": (2, 2),
            "BatchNorm": (channels,), "InstanceNorm": (channels,), "Dropout": (0.5,),
            "CircularPad": (1,), "ConstantPad": (1, 3.5), "ReflectionPad": (1,), "ReplicationPad": (1,), "ZeroPad": (1,),
            "Conv": (channels, 3, 2), "ConvTranspose": (channels, 3, 2),
            "LazyBatchNorm": (), "LazyInstanceNorm": (), "LazyConv": (3, 2), "LazyConvTranspose": (3, 2),
        }.items()
    }  # fmt: skip
    SAMPLES[f"MaxUnpool{dims}d"] = (
        lambda dims=dims: getattr(nn, f"MaxUnpool{dims}d")(2),
        lambda dims=dims, make=make: getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)(make()),
    )
SAMPLES |= {
    "AdaptiveLogSoftmaxWithLoss": (lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6]), lambda: (rows(), classes(of=10))),
    "BCELoss": (nn.BCELoss, lambda: (shares(), torch.rand(3, 4))),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, lambda: (rows(), torch.rand(3, 4))),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 2), lambda: (rows(), rows())),
    "CTCLoss": (nn.CTCLoss, lambda: (sequence().log_softmax(-1), *map(torch.tensor, ([[1] * 3] * 2, [5, 5], [2, 2])))),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), lambda: (image(),)),
    "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss, lambda: (rows(), rows(), signs(3))),
    "CrossEntropyLoss": (nn.CrossEntropyLoss, lambda: (rows(), classes())),
    "CrossMapLRN2d": (lambda: nn.CrossMapLRN2d(2), lambda: (image(),)),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(4, 2)), lambda: (rows(),)),
    "Embedding": (lambda: nn.Embedding(10, 3), lambda: (classes(of=10),)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 3), lambda: (torch.randint(0, 10, (3, 2)),)),
    "Fold": (lambda: nn.Fold((4, 4), 2), lambda: (torch.randn(2, 8, 9, requires_grad=True),)),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, output_size=3), lambda: (image(),)),
    "FractionalMaxPool3d": (lambda: nn.FractionalMaxPool3d(2, output_size=2), lambda: (block(),)),
    "GRU": (lambda: nn.GRU(4, 3), lambda: (sequence(),)),
    "GRUCell": (lambda: nn.GRUCell(4, 3), lambda: (rows(),)),
    "GaussianNLLLoss": (nn.GaussianNLLLoss, lambda: (rows(), torch.rand(3, 4), shares())),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda: (image(),)),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, lambda: (rows(), signs(3, 4))),
    "LSTM": (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True), lambda: (sequence(),)),
    "LSTMCell": (lambda: nn.LSTMCell(4, 3), lambda: (rows(),)),
    "LayerNorm": (lambda: nn.LayerNorm(4), lambda: (rows(),)),
    "LazyLinear": (lambda: nn.LazyLinear(2), lambda: (rows(),)),
    "Linear": (lambda: nn.Linear(4, 2), lambda: (rows(),)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), lambda: (image(),)),
    "MarginRankingLoss": (nn.MarginRankingLoss, lambda: (rows(), rows(), signs(3, 4))),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss, lambda: (rows(), torch.tensor([[1, -1, 0, 0]] * 3))),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss, lambda: (rows(), torch.ones(3, 4))),
    "MultiMarginLoss": (nn.MultiMarginLoss, lambda: (rows(), classes())),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), lambda: (sequence(),) * 3),
    "NLLLoss": (nn.NLLLoss, lambda: (rows(), classes())),
    "NLLLoss2d": (nn.NLLLoss2d, lambda: (image(), torch.randint(0, 4, (2, 6, 6)))),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), lambda: (image(),)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), lambda: (image(),)),
    "RMSNorm": (lambda: nn.RMSNorm(4), lambda: (rows(),)),
    "RNN": (lambda: nn.RNN(4, 3), lambda: (sequence(),)),
    "RNNCell": (lambda: nn.RNNCell(4, 3), lambda: (rows(),)),
    "Sequential": (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)), lambda: (rows(),)),
    "SoftMarginLoss": (nn.SoftMarginLoss, lambda: (rows(), signs(3, 4))),
    "Softmax2d": (nn.Softmax2d, lambda: (image(),)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), lambda: (image(),)),  # of one process: a batch norm as any other
    "Threshold": (lambda: nn.Threshold(0.1, 0.0), lambda: (rows(),)),
    "Transformer": (lambda: nn.Transformer(4, 2, 1, 1, 8), lambda: (sequence(), sequence())),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 2), lambda: (sequence(), sequence()),
    ),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(4, 2, 8), lambda: (sequence(), sequence())),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2), lambda: (sequence(),),
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), lambda: (sequence(),)),
    "TripletMarginLoss": (nn.TripletMarginLoss, lambda: (rows(), rows(), rows())),
    "TripletMarginWithDistanceLoss": (nn.TripletMarginWithDistanceLoss, lambda: (rows(), rows(), rows())),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 2)), lambda: (rows(),)),
    "Unfold": (lambda: nn.Unfold(2), lambda: (image(),)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), lambda: (image(),)),
    "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), lambda: (image(),)),
    "UpsamplingNearest2d": (lambda: nn.UpsamplingNearest2d(scale_factor=2), lambda: (image(),)),
}  # fmt: skip
if hasattr(nn, "LinearCrossEntropyLoss"):
    SAMPLES["LinearCrossEntropyLoss"] = (
        lambda: nn.LinearCrossEntropyLoss(4, 5),
        lambda: (rows(), classes(of=5)),
    )

ABSTRACT = {
    "Container": "has no forward; a deprecated base class",
    "Module": "has no forward",
    "ModuleDict": "has no forward",
    "ModuleList": "has no forward",
    "ParameterDict": "has no forward",
    "ParameterList": "has no forward",
    "RNNBase": "has no forward; the base of RNN, LSTM and GRU",
    "RNNCellBase": "has no forward; the base of the cells",
}
