"""Checks of notebook 44: inside a transformer."""

import torch
from torch import Tensor

from hooklab.course.check import Exercise, expect_like, refuse, refuse_first
from hooklab.course.checks.calls import close
from hooklab.course.checks.models import Before, fails, refuse_hooks
from hooklab.course.transformer import TinyTransformer, recall

# ---- what both exercises share ----

CASES = [(3, 1, 7), (4, 0, 5), (1, 2, 6)]  # heads, the block that is asked for, and positions
WIDTH = 24

RUN = [
    ("ran_twice", lambda t: t.runs > 1),
    ("keeps_graph", lambda t: isinstance(t.got, Tensor) and t.got.requires_grad),
    ("dict_or_list", lambda t: isinstance(t.got, dict | list | tuple)),
    ("two_heads", lambda t: isinstance(t.got, Tensor) and t.heads != 2 and t.got.shape == _with_two_heads(t.want)),
]


def _model(heads: int) -> TinyTransformer:
    model = TinyTransformer(width=WIDTH, heads=heads, blocks=3).double().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(4)  # so that no position is looked at as much as the next
    return model


def _with_two_heads(want: Tensor) -> torch.Size:
    return torch.Size([want.shape[0], 2, *want.shape[2:]])


def _examine(answer, solution, mistakes):
    for heads, block, positions in CASES:
        model, tokens, runs = _model(heads), recall(6)[0][:, -positions:], []
        model.register_forward_pre_hook(lambda module, args, runs=runs: runs.append(1))
        kept = _kept(model, block, tokens)
        want = solution(model, block, tokens)
        runs.clear()
        before = Before(model)
        try:
            got = answer(model, block, tokens.clone())
        except RuntimeError as error:
            refuse("cannot_split", heads=heads, error=error)
        refuse_hooks(before, "left_behind")
        refuse_first(RUN, runs=len(runs), got=got, want=want, heads=heads)
        refuse_first(mistakes, got=got, want=want, heads=heads, block=block, model=model, tokens=tokens, **kept)
        expect_like(got, want)
    _examine_failing(answer)


def _kept(model, block, tokens):
    """What goes through the attention of that block, by PyTorch's own hooks."""
    attention, kept = model.blocks[block].attention, {}
    attention.qkv.register_forward_hook(lambda module, args, output: kept.update(qkv=output.detach()))
    attention.out.register_forward_pre_hook(lambda module, args: kept.update(mixed=args[0].detach()))
    attention.register_forward_hook(lambda module, args, output: kept.update(output=output.detach()))
    model(tokens)
    attention.qkv._forward_hooks.clear()
    attention.out._forward_pre_hooks.clear()
    attention._forward_hooks.clear()
    return kept


def _examine_failing(answer):
    model = _model(2)

    def fail(module, args):
        raise RuntimeError("this model always fails")

    model.norm.register_forward_pre_hook(fail)
    with fails(model, swallowed="swallowed", left="left_after_error"):
        answer(model, 0, recall(2)[0])


# ---- 44.A: attention weights ----


def attention_weights(model, block, tokens):
    kept = []

    def keep(module, args, output):
        kept.append(output.detach())

    attention = model.blocks[block].attention
    with attention.qkv.register_forward_hook(keep):
        model(tokens)
    return weights_from(kept[-1], attention.heads)


def weights_from(qkv, heads, *, split=True, scale=None, causal=True, parts=(0, 1)):
    """The weights, or those that come of a usual mistake."""
    q, k = (_split(qkv.chunk(3, -1)[part], heads, split) for part in parts)
    scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5 if scale is None else scale)
    if causal:
        later = torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1)


def _split(part, heads, right=True):
    if not right:
        return part.reshape(part.shape[0], heads, part.shape[1], -1)
    return part.unflatten(-1, (heads, -1)).transpose(1, 2)


def _is(**mistake):
    return lambda t: close(t.got, weights_from(t.qkv, t.heads, **mistake))


def _other_block(t):
    return any(close(t.got, attention_weights(t.model, block, t.tokens)) for block in range(3) if block != t.block)


def _error(t):
    values = _split(t.qkv.chunk(3, -1)[2], t.heads)
    mixed = (t.got.detach() @ values).transpose(1, 2).flatten(2)
    return (t.model.blocks[t.block].attention.out(mixed) - t.output).abs().max().item()


WEIGHTS = [
    ("averaged", lambda t: close(t.got, t.want.mean(1)) and t.heads > 1),
    ("before_softmax", lambda t: isinstance(t.got, Tensor) and t.got.shape == t.want.shape and (t.got < 0).any()),
    ("not_scaled", _is(scale=1)),
    ("whole_width", lambda t: t.heads > 1 and _is(scale=WIDTH**0.5)(t)),
    ("not_masked", _is(causal=False)),
    ("masked_late", lambda t: close(t.got, weights_from(t.qkv, t.heads, causal=False).tril())),
    ("split_wrongly", lambda t: t.heads > 1 and _is(split=False)(t)),
    ("swapped", _is(parts=(1, 0))),
    ("other_block", _other_block),
]


def examine_weights(answer):
    _examine(answer, attention_weights, [*WEIGHTS, ("not_rebuilt", _not_rebuilt)])


def _not_rebuilt(t):
    fits = isinstance(t.got, Tensor) and t.got.shape == t.want.shape and t.got.dtype == t.want.dtype
    if fits and (error := _error(t)) > 1e-4:
        refuse("not_rebuilt", error=error)
    return False


WEIGHTS_OF = Exercise("44.A", examine_weights, attention_weights)

# ---- 44.B: what each head adds ----


def head_outputs(model, block, tokens):
    kept = []

    def keep(module, args):
        kept.append(args[0].detach())

    attention = model.blocks[block].attention
    with attention.out.register_forward_pre_hook(keep):
        model(tokens)
    return added_by_heads(kept[-1], attention.out.weight.detach(), attention.heads)


def added_by_heads(mixed, weight, heads, *, dim=1):
    """What each head adds; with `dim=0` by the rows of the weight instead of its columns."""
    both = zip(mixed.chunk(heads, -1), weight.chunk(heads, dim), strict=True)
    return torch.stack([own @ (part.T if dim else part) for own, part in both], 1)


def _weight(t):
    return t.model.blocks[t.block].attention.out.weight.detach()


HEADS = [
    ("not_multiplied", lambda t: close(t.got, _split(t.mixed, t.heads)) and t.heads > 1),
    ("sliced_output", lambda t: close(t.got, _split(t.output, t.heads)) and t.heads > 1),
    ("summed", lambda t: close(t.got, t.output)),
    ("rows", lambda t: close(t.got, added_by_heads(t.mixed, _weight(t), t.heads, dim=0))),
    ("shared_equally", lambda t: t.heads > 1 and close(t.got, (t.output / t.heads).unsqueeze(1).expand_as(t.want))),
    ("other_order", lambda t: any(close(t.got, t.want.transpose(1, other)) for other in (0, 2) if t.heads > 1)),
    (
        "other_block",
        lambda t: any(close(t.got, head_outputs(t.model, block, t.tokens)) for block in range(3) if block != t.block),
    ),
]


def examine_heads(answer):
    _examine(answer, head_outputs, HEADS)


HEADS_OF = Exercise("44.B", examine_heads, head_outputs)

EXERCISES = [WEIGHTS_OF, HEADS_OF]
