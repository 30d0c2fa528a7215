"""Answers to the exercises of notebook 45: wrong ones by the name of their refusal, and right ones."""

from functools import partial

import torch

from answers.around import clearing, swallowing
from hooklab import features, patch
from hooklab.course.checks.n45_patching import patched, trace_table

# ---- 45.A: another value in the place of what a layer receives ----


def _with_hook(put, run=lambda model, x: model(x), clean=True):
    """An answer whose pre-hook returns `put(args, position, value)`."""

    def answer(model, layer, position, value, x):
        handle = model.get_submodule(layer).register_forward_pre_hook(lambda module, args: put(args, position, value))
        try:
            return run(model, x)
        finally:
            if clean:
                handle.remove()

    return answer


def _copied(args, index, value):
    first = args[0].clone()
    first[index] = value
    return first, *args[1:]


def _in_place(args, position, value):
    args[0][:, position] = value


def _on_the_output(model, layer, position, value, x):
    with patch(model, layer, value, at=(slice(None), position)):
        return model(x)


def _one_sample(args, position, value):
    return _copied(args, (0, position), value if isinstance(value, float) or value.dim() < 2 else value[0])


def _everywhere(args, position, value):
    return _copied(args, ..., value if isinstance(value, float) or value.dim() < 2 else value[:, None])


def leaves_hook_after_an_error(model, layer, position, value, x):
    handle = model.get_submodule(layer).register_forward_pre_hook(
        lambda module, args: _copied(args, (slice(None), position), value)
    )
    output = model(x)
    handle.remove()
    return output


def _places(args, position, value):
    return _copied(args, (slice(None), position), value)


def only_a_tensor_as_value(model, layer, position, value, x):
    return patched(model, layer, abs(position), value, x)


def switches_to_eval(model, layer, position, value, x):
    return patched(model.eval(), layer, position, value, x)


def run_twice(model, layer, position, value, x):
    model(x)
    return patched(model, layer, position, value, x)


# ---- 45.B: the causal trace ----


def _trace(
    cell=lambda now, high, low: (now - low) / (high - low),
    of="output",
    at=lambda position: (slice(None), position),
    swap=False,
    runs=None,
    table=torch.tensor,
):
    """An answer that is right but for what is given."""

    @torch.no_grad()
    def answer(model, layers, clean, corrupt, lead):
        source, into = (corrupt, clean) if swap else (clean, corrupt)
        with features(model, *layers, of=of) as kept:
            model(source)
        high, low = float(lead(model(clean))), float(lead(model(corrupt)))
        rows = []
        for layer in layers:
            rows.append([])
            for position in range(clean.shape[1]):
                place = at(position)
                with patch(model, layer, kept[layer][place], at=place, of=of):
                    now = float(lead(model(into if runs is None else runs(clean, corrupt))))
                rows[-1].append(cell(now, high, low))
        return table(rows)

    return answer


@torch.no_grad()
def in_a_kept_tensor(model, layers, clean, corrupt, lead):
    """Writes into the kept activations of the corrupt run, one position after another."""
    with features(model, *layers) as good:
        high = float(lead(model(clean)))
    with features(model, *layers) as bad:
        low = float(lead(model(corrupt)))
    rows = []
    for layer in layers:
        new, row = bad[layer].clone(), []
        for position in range(clean.shape[1]):
            new[:, position] = good[layer][:, position]
            with patch(model, layer, new):
                row.append((float(lead(model(corrupt))) - low) / (high - low))
        rows.append(row)
    return torch.tensor(rows)


@torch.no_grad()
def averages_the_batch(model, layers, clean, corrupt, lead):
    """Puts the mean over the batch in."""
    with features(model, *layers) as good:
        high = float(lead(model(clean)))
    low = float(lead(model(corrupt)))
    rows = []
    for layer in layers:
        row = []
        for position in range(clean.shape[1]):
            at = (slice(None), position)
            with patch(model, layer, good[layer].mean(0)[position], at=at):
                row.append((float(lead(model(corrupt))) - low) / (high - low))
        rows.append(row)
    return torch.tensor(rows)


@torch.no_grad()
def another_order(model, layers, clean, corrupt, lead):
    """Keeps the activations of a batch in reverse order."""
    with features(model, *layers) as good:
        model(clean.flip(0))
    high, low = float(lead(model(clean))), float(lead(model(corrupt)))
    rows = []
    for layer in layers:
        row = []
        for position in range(clean.shape[1]):
            at = (slice(None), position)
            with patch(model, layer, good[layer][at], at=at):
                row.append((float(lead(model(corrupt))) - low) / (high - low))
        rows.append(row)
    return torch.tensor(rows)


def of_probabilities(model, layers, clean, corrupt, lead):
    return trace_table(model, layers, clean, corrupt, lambda output: lead(output.softmax(-1)))


_TABLES = {}


def from_a_cache(model, layers, clean, corrupt, lead):
    """Keeps what the first call has found, whatever the model."""
    if "table" not in _TABLES or not isinstance(model.get_submodule(layers[0]), torch.nn.Embedding):
        table = trace_table(model, layers, clean, corrupt, lead)
        _TABLES.setdefault("table", table)
        return table if layers[0] == "embed" else _TABLES["table"][:2, :4]
    return _TABLES["table"]


def leaves_hooks(model, layers, clean, corrupt, lead):
    features(model, *layers)
    return trace_table(model, layers, clean, corrupt, lead)


def in_eval_mode(model, layers, clean, corrupt, lead):
    return trace_table(model.eval(), layers, clean, corrupt, lead)


def leaves_hooks_after_an_error(model, layers, clean, corrupt, lead):
    kept = features(model, *layers)
    model(clean)
    kept.remove()
    return trace_table(model, layers, clean, corrupt, lead)


WRONG = {
    "45.A": {
        "returned_nothing": lambda *given: print(patched(*given)),
        "not_run": lambda model, layer, position, value, x: model.head(model.embed(x)),
        "ran_twice": run_twice,
        "edited_in_place": _with_hook(_in_place),
        "not_patched": _with_hook(lambda args, position, value: _places(args, position, value) and None),
        "patched_output": _on_the_output,
        "lost_arguments": _with_hook(lambda args, position, value: _places(args, position, value)[0]),
        "wrong_axis": _with_hook(lambda args, position, value: _copied(args, position, value)),
        "one_sample": _with_hook(_one_sample),
        "everywhere": _with_hook(_everywhere),
        "other_place": only_a_tensor_as_value,
        "mode_changed": switches_to_eval,
        "hooks_left": _with_hook(_places, clean=False),
        "hooks_left_after_error": leaves_hook_after_an_error,
        "removed_others": clearing(patched),
        "swallowed": swallowing(patched, None),
    },
    "45.B": {
        "no_table": _trace(table=list),
        "transposed": _trace(table=lambda rows: torch.tensor(rows).T),
        "other_shape": _trace(table=lambda rows: torch.tensor(rows).flatten()),
        "by_the_lead": _trace(cell=lambda now, high, low: (now - low) / high),
        "leads": _trace(cell=lambda now, high, low: now),
        "not_divided": _trace(cell=lambda now, high, low: now - low),
        "lost": _trace(cell=lambda now, high, low: (high - now) / (high - low)),
        "noised": _trace(cell=lambda now, high, low: (high - now) / (high - low), swap=True),
        "into_clean": _trace(runs=lambda clean, corrupt: clean),
        "from_corrupt": _trace(swap=True, runs=lambda clean, corrupt: corrupt),
        "adds_up": in_a_kept_tensor,
        "patched_input": _trace(of="input"),
        "one_sample": _trace(at=lambda position: (0, position)),
        "wrong_shares": another_order,
        "other_model": from_a_cache,
        "mode_changed": in_eval_mode,
        "hooks_left": leaves_hooks,
        "hooks_left_after_error": leaves_hooks_after_an_error,
        "removed_others": clearing(trace_table),
        "swallowed": swallowing(trace_table, torch.zeros(1, 5)),
    },
}

ALSO_WRONG = [
    ("45.B", "wrong_shares", averages_the_batch),
    ("45.B", "wrong_shares", of_probabilities),
]


def by_patch(model, layer, position, value, x):
    with patch(model, layer, value, at=(slice(None), position), of="input"):
        return model(x)


def with_keyword_arguments(model, layer, position, value, x):
    def put(module, args, kwargs):
        return _places(args, position, value), kwargs

    with model.get_submodule(layer).register_forward_pre_hook(put, with_kwargs=True):
        return model(x)


def _put(module, args, position, value):
    return _places(args, position, value)


def by_partial(model, layer, position, value, x):
    hook = partial(_put, position=position, value=value)
    with model.get_submodule(layer).register_forward_pre_hook(hook, prepend=True):
        return model(x)


RIGHT = [
    ("45.A", by_patch),
    ("45.A", with_keyword_arguments),
    ("45.A", by_partial),
    ("45.B", _trace()),
    ("45.B", _trace(table=lambda rows: torch.tensor(rows, dtype=torch.float64))),
    ("45.B", torch.enable_grad()(_trace())),
]
