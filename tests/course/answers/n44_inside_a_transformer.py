"""Answers to the exercises of notebook 44: wrong ones by the name of their refusal, and right ones."""

from contextlib import suppress

import torch
from torch.nn import functional as F

from hooklab.course.checks.n44_inside_a_transformer import (
    added_by_heads,
    attention_weights,
    head_outputs,
    weights_from,
)
from hooklab.layers.features import features

# ---- 44.A: attention weights ----


def _from_qkv(finish):
    """An answer that makes something of what `qkv` returns and of the number of heads."""

    def answer(model, block, tokens):
        attention, kept = model.blocks[block].attention, []
        with attention.qkv.register_forward_hook(lambda module, args, output: kept.append(output.detach())):
            model(tokens)
        return finish(kept[0], attention.heads)

    return answer


def _mistaken(**mistake):
    return _from_qkv(lambda qkv, heads: weights_from(qkv, heads, **mistake))


def scores_alone(qkv, heads):
    q, k, _ = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    return q @ k.transpose(-1, -2)


def keeps_the_graph(model, block, tokens):
    attention, kept = model.blocks[block].attention, []
    with attention.qkv.register_forward_hook(lambda module, args, output: kept.append(output)):
        model(tokens)
    return weights_from(kept[0], attention.heads)


def leaves_a_hook(model, block, tokens):
    attention, kept = model.blocks[block].attention, []
    attention.qkv.register_forward_hook(lambda module, args, output: kept.append(output.detach()))
    model(tokens)
    return weights_from(kept[0], attention.heads)


def removes_at_the_end(model, block, tokens):
    attention, kept = model.blocks[block].attention, []
    handle = attention.qkv.register_forward_hook(lambda module, args, output: kept.append(output.detach()))
    model(tokens)
    handle.remove()
    return weights_from(kept[0], attention.heads)


def empties_the_table(model, block, tokens):
    got = attention_weights(model, block, tokens)
    model._forward_pre_hooks.clear()
    return got


def swallows(solution):
    def answer(model, block, tokens):
        with suppress(RuntimeError):
            return solution(model, block, tokens)

    return answer


def runs_twice(solution):
    def answer(model, block, tokens):
        model(tokens)
        return solution(model, block, tokens)

    return answer


def by_features(model, block, tokens):
    name = f"blocks.{block}.attention.qkv"
    with torch.no_grad(), features(model, name) as f:
        model(tokens)
    return weights_from(f[name], model.blocks[block].attention.heads)


def by_replacing_the_function(model, block, tokens):
    calls, real = [], F.scaled_dot_product_attention

    def instead(q, k, v, **kwargs):
        calls.append((q.detach(), k.detach()))
        return real(q, k, v, **kwargs)

    F.scaled_dot_product_attention = instead
    try:
        model(tokens)
    finally:
        F.scaled_dot_product_attention = real
    q, k = calls[block]
    later = torch.ones(q.shape[-2], q.shape[-2], device=q.device).triu(1).bool()
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1)


# ---- 44.B: what each head adds ----


def _from_out(finish):
    """An answer that makes something of what goes into `out`, of its weight and of the number of heads."""

    def answer(model, block, tokens):
        attention, kept = model.blocks[block].attention, []
        with attention.out.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach())):
            model(tokens)
        return finish(kept[0], attention.out.weight.detach(), attention.heads)

    return answer


def graph_of_the_weight(model, block, tokens):
    attention, kept = model.blocks[block].attention, []
    with attention.out.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach())):
        model(tokens)
    with torch.enable_grad():
        return added_by_heads(kept[0], attention.out.weight, attention.heads)


def leaves_a_pre_hook(model, block, tokens):
    attention, kept = model.blocks[block].attention, []
    attention.out.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
    model(tokens)
    return added_by_heads(kept[0], attention.out.weight.detach(), attention.heads)


def removes_the_pre_hook_at_the_end(model, block, tokens):
    attention, kept = model.blocks[block].attention, []
    handle = attention.out.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
    model(tokens)
    handle.remove()
    return added_by_heads(kept[0], attention.out.weight.detach(), attention.heads)


def takes_off_others(model, block, tokens):
    got = head_outputs(model, block, tokens)
    model._forward_pre_hooks.clear()
    return got


def slices_the_output(mixed, weight, heads):
    return (mixed @ weight.T).unflatten(-1, (heads, -1)).transpose(1, 2)


def shares_equally(mixed, weight, heads):
    return (mixed @ weight.T / heads).unsqueeze(1).repeat(1, heads, 1, 1)


def by_einsum(mixed, weight, heads):
    own, columns = mixed.unflatten(-1, (heads, -1)), weight.unflatten(-1, (heads, -1))
    return torch.einsum("nphd,whd->nhpw", own, columns)


WRONG = {
    "44.A": {
        "ran_twice": runs_twice(attention_weights),
        "keeps_graph": keeps_the_graph,
        "dict_or_list": _from_qkv(lambda qkv, heads: {"weights": weights_from(qkv, heads)}),
        "two_heads": _from_qkv(lambda qkv, heads: weights_from(qkv, 2)),
        "cannot_split": _from_qkv(lambda qkv, heads: weights_from(qkv, 5)),
        "left_behind": leaves_a_hook,
        "left_after_error": removes_at_the_end,
        "removed_others": empties_the_table,
        "swallowed": swallows(attention_weights),
        "averaged": _from_qkv(lambda qkv, heads: weights_from(qkv, heads).mean(1)),
        "before_softmax": _from_qkv(scores_alone),
        "not_scaled": _mistaken(scale=1),
        "whole_width": _mistaken(scale=24**0.5),
        "not_masked": _mistaken(causal=False),
        "masked_late": _from_qkv(lambda qkv, heads: weights_from(qkv, heads, causal=False).tril()),
        "split_wrongly": _mistaken(split=False),
        "swapped": _mistaken(parts=(1, 0)),
        "other_block": lambda model, block, tokens: attention_weights(model, 2 - block, tokens),
        "not_rebuilt": _mistaken(parts=(0, 2)),
    },
    "44.B": {
        "ran_twice": runs_twice(head_outputs),
        "keeps_graph": graph_of_the_weight,
        "dict_or_list": lambda model, block, tokens: list(head_outputs(model, block, tokens).unbind(1)),
        "two_heads": _from_out(lambda mixed, weight, heads: added_by_heads(mixed, weight, 2)),
        "cannot_split": _from_out(
            lambda mixed, weight, heads: added_by_heads(mixed.unflatten(-1, (5, -1)).flatten(2), weight, heads)
        ),
        "left_behind": leaves_a_pre_hook,
        "left_after_error": removes_the_pre_hook_at_the_end,
        "removed_others": takes_off_others,
        "swallowed": swallows(head_outputs),
        "not_multiplied": _from_out(lambda mixed, weight, heads: mixed.unflatten(-1, (heads, -1)).transpose(1, 2)),
        "sliced_output": _from_out(slices_the_output),
        "summed": _from_out(lambda mixed, weight, heads: mixed @ weight.T),
        "rows": _from_out(lambda mixed, weight, heads: added_by_heads(mixed, weight, heads, dim=0)),
        "shared_equally": _from_out(shares_equally),
        "other_order": lambda *given: head_outputs(*given).transpose(1, 2),
        "other_block": lambda model, block, tokens: head_outputs(model, 2 - block, tokens),
    },
}

ALSO_WRONG = [
    ("44.B", "other_order", lambda *given: head_outputs(*given).transpose(0, 1)),
    ("44.A", "wrong_type", lambda model, block, tokens: print(attention_weights(model, block, tokens).shape)),
    ("44.B", "wrong_type", lambda model, block, tokens: print(head_outputs(model, block, tokens).shape)),
    ("44.A", "wrong_dtype", lambda *given: attention_weights(*given).float()),
]

RIGHT = [
    ("44.A", by_features),
    ("44.A", by_replacing_the_function),
    ("44.B", _from_out(by_einsum)),
]
