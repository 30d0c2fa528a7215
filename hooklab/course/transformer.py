"""A transformer of two blocks that learns in about two seconds to look something up."""

import torch
from torch import Tensor, nn

__all__ = ["TinyTransformer", "recall", "trained_transformer"]

KEYS, PAIRS = 6, 3  # tokens 0 to 5 are keys, 6 to 11 are values
BATCH = 64


class Embedding(nn.Module):
    """What a token is, plus where it stands."""

    def __init__(self, vocabulary: int, length: int, width: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(places)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyTransformer(nn.Module):
    """A causal transformer like GPT, with a module at every place that one wants to hook.

    Args:
        vocabulary: how many different tokens there are.
        length: how many tokens a sequence has at most.
        width: how many numbers stand for a token inside.
        heads: how many heads each attention has; they divide `width` among them.
        blocks: how many blocks follow each other.

    Example:
        >>> from hooklab import lesson
        >>> model = lesson.TinyTransformer()
        >>> model(torch.zeros(5, 7, dtype=torch.long)).shape  # sequences, positions, tokens
        torch.Size([5, 7, 12])
    """

    def __init__(
        self, vocabulary: int = 2 * KEYS, length: int = 2 * PAIRS + 1, width: int = 32, heads: int = 2, blocks: int = 2
    ):
        super().__init__()
        self.embed = Embedding(vocabulary, length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.unembed = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.unembed(self.norm(self.blocks(self.embed(tokens))))


def recall(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences "k1 v1 k2 v2 k3 v3 k?" that ask for the value of one of their three keys.

    Keys are the tokens 0 to 5, values 6 to 11. The keys of a sequence differ; values may repeat.

    Args:
        count: how many.
        seed: the same seed draws the same sequences; `trained_transformer` learned from the negative ones.

    Returns:
        `tokens`, of shape (count, 7); `answers`, the token that should come next; and `asked`, which pair is
        asked for: 0, 1 or 2. The last two have the shape (count,).

    Example:
        >>> from hooklab import lesson
        >>> tokens, answers, asked = lesson.recall(2)
        >>> tokens
        tensor([[ 2,  6,  3,  9,  4, 10,  4],
                [ 4,  8,  5,  6,  2,  6,  4]])
        >>> answers, asked
        (tensor([10,  8]), tensor([2, 0]))
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(count, KEYS, generator=generator).argsort(1)[:, :PAIRS]
    values = torch.randint(KEYS, 2 * KEYS, (count, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (count, 1), generator=generator)
    pairs = torch.stack([keys, values], 2).flatten(1)
    return torch.cat([pairs, keys.gather(1, asked)], 1), values.gather(1, asked)[:, 0], asked[:, 0]


def trained_transformer(seed: int = 0, steps: int = 200, heads: int = 2, blocks: int = 2) -> TinyTransformer:
    """A `TinyTransformer` that has learned `recall`, in float64 and in eval mode; it takes about two seconds.

    Args:
        seed: what the parameters start from.
        steps: how many steps of AdamW, each on 64 new sequences.
        heads: how many heads each attention has.
        blocks: how many blocks follow each other; with one alone the task cannot be learned.

    Example:
        >>> from hooklab import lesson
        >>> model = lesson.trained_transformer()
        >>> tokens, answers, _ = lesson.recall(500)
        >>> (model(tokens)[:, -1].argmax(1) == answers).double().mean()
        tensor(1., dtype=torch.float64)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TinyTransformer(heads=heads, blocks=blocks).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), fused=True)
    threads = torch.get_num_threads()
    # With tensors this small several threads mostly wait for each other.
    torch.set_num_threads(1)
    try:
        for step in range(1, steps + 1):
            tokens, answers, _ = recall(BATCH, seed=-step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens)[:, -1], answers).backward()
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    return model.eval()
