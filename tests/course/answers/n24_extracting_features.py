"""Answers to the exercises of notebook 24: wrong ones by the name of their refusal, and right ones."""

from contextlib import ExitStack, suppress

import torch
from torch import Tensor, nn

from answers.around import clearing, gradients_off, modes_of, swallowing
from hooklab import features
from hooklab.course.checks.n24_extracting_features import embed, feature, overwritten

# ---- 24.A: the output of one layer, by hand ----


def _copy(output):
    return output.detach().clone()


def _feature_with(keep, *, clean=True, run=lambda model, x: model(x), give=lambda output: None):
    """A wrong answer that keeps `keep(output)`; `clean` takes the hook off, which returns `give(output)`."""

    def answer(model, name, x):
        kept = {}

        def hook(module, args, output):
            kept[name] = keep(output)
            return give(output)

        handle = model.get_submodule(name).register_forward_hook(hook)
        try:
            run(model, x)
        finally:
            if clean:
                handle.remove()
        return kept[name]

    return answer


def _hooked(model, name, kept):
    """The handle of a hook that keeps a copy of the output in a dict."""
    return model.get_submodule(name).register_forward_hook(
        lambda module, args, output: kept.update({name: _copy(output)})
    )


_STALE = {}


def stale(model, name, x):
    with _hooked(model, name, _STALE):
        model(x)
    return _STALE[name]


def left_after_error(model, name, x):
    kept = {}
    handle = _hooked(model, name, kept)
    model(x)
    handle.remove()
    return kept[name]


def off_after_value_error(model, name, x):
    """Takes the hook off after one kind of error."""
    kept = {}
    handle = _hooked(model, name, kept)
    try:
        model(x)
    except ValueError:
        handle.remove()
        raise
    handle.remove()
    return kept[name]


def index_error(model, name, x):
    kept = {}
    with _hooked(model, name, kept):
        model(x)
    return list(kept.values()).pop()


def no_error(model, name, x):
    kept = {}
    with _hooked(model, name, kept):
        model(x)
    return kept.get(name)


def hid_error(model, name, x):
    kept = {}
    with _hooked(model, name, kept), suppress(Exception):
        model(x)
    return kept[name]


def feature_or_key_error(model, name, x):
    """Takes every error for a layer that was not reached."""
    kept = {}
    with _hooked(model, name, kept):
        try:
            model(x)
        except Exception:
            raise KeyError(name) from None
    return kept[name]


def cleared_after_error(model, name, x):
    """Takes off all hooks, its own or not, when the model raises."""
    try:
        return feature(model, name, x)
    except RuntimeError:
        model.get_submodule(name)._forward_hooks.clear()
        raise


def ran_twice(model, name, x):
    model(x)
    return feature(model, name, x)


def mode_changed(model, name, x):
    return feature(model.eval(), name, x)


def edited_input(model, name, x):
    try:
        return feature(model, name, x)
    finally:
        x.zero_()


def not_in_place(model, name, x, then=False):
    """Switches off what works in place; `then` is what it leaves."""
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    try:
        return _feature_with(Tensor.detach)(model, name, x)
    finally:
        for module in model.modules():
            if hasattr(module, "inplace"):
                module.inplace = then


def grad_switched_on(model, name, x):
    torch.set_grad_enabled(False)
    try:
        return feature(model, name, x)
    finally:
        torch.set_grad_enabled(True)


def with_features(model, name, x):
    with features(model, name, keep=_copy) as f:
        model(x)
    return f[name]


def by_ending_the_forward(model, name, x):
    class Enough(Exception):
        pass

    kept = {}

    def keep(module, args, output):
        kept[name] = _copy(output)
        raise Enough

    with model.get_submodule(name).register_forward_hook(keep), suppress(Enough):
        model(x)
    return kept[name]


# ---- 24.B: embeddings, batch by batch ----


def _restoring(run):
    """A wrong answer: `run` in evaluation mode, and every flag restored."""

    def answer(model, name, batches):
        restore = modes_of(model)
        model.eval()
        try:
            return run(model, name, batches)
        finally:
            restore(model)

    return answer


def _spatial(output):
    return output.mean((2, 3))


def _means(model, name, batches, keep=_spatial):
    with features(model, name, keep=keep) as f:
        return [f.run(batch)[name] for batch in batches]


def _joined(keep):
    return lambda *given: torch.cat(_means(*given, keep=keep))


@_restoring
@torch.no_grad()
def mean_afterwards(model, name, batches):
    kept, rows = {}, []
    with model.get_submodule(name).register_forward_hook(lambda m, a, output: kept.update({name: output})):
        for batch in batches:
            model(batch)
            rows.append(_spatial(kept[name]))
    return torch.cat(rows)


def unfroze(model, name, batches):
    with torch.no_grad():
        rows = _means(model.eval(), name, batches)
    model.train()
    return torch.cat(rows)


@_restoring
@torch.no_grad()
def embed_left_behind(model, name, batches):
    f = features(model, name, keep=_spatial)
    return torch.cat([f.run(batch)[name] for batch in batches])


@torch.no_grad()
def train_mode(model, name, batches):
    return torch.cat(_means(model, name, batches))


@_restoring
@torch.no_grad()
def last_batch_only(model, name, batches):
    with features(model, name, keep=_spatial) as f:
        for batch in batches:
            model(batch)
    return f[name]


def part_left_in_eval(model, name, batches):
    training = model.training
    try:
        return embed(model.eval(), name, batches)
    finally:
        model.training = training


def dropout_on(model, name, batches):
    restore = modes_of(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    with torch.no_grad():
        rows = _means(model, name, batches)
    restore(model)
    return torch.cat(rows)


def embed_thawed(model, name, batches):
    try:
        return embed(model.requires_grad_(False), name, batches)
    finally:
        model.requires_grad_(True)


def embed_switched_on(model, name, batches):
    try:
        return embed(model, name, batches)
    finally:
        torch.set_grad_enabled(True)


def embed_counting_first(model, name, batches):
    return torch.cat([embed(model, name, [batches[number]]) for number in range(len(batches))])


def embed_into_zeros(model, name, batches):
    rows = [embed(model, name, [batch]) for batch in batches]
    joined = torch.zeros(sum(map(len, rows)), rows[0].shape[1])
    joined[:] = torch.cat(rows)
    return joined


@_restoring
@torch.no_grad()
def embed_without_finally(model, name, batches):
    rows = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, a, output: rows.append(_spatial(output)))
    for batch in batches:
        model(batch)
    handle.remove()
    return torch.cat(rows)


def embed_restoring_last(model, name, batches):
    restore = modes_of(model)
    with torch.no_grad():
        got = torch.cat(_means(model.eval(), name, batches))
    restore(model)
    return got


def mean_of_all(model, name, batches):
    """One number for all images."""
    restore = modes_of(model)
    with torch.no_grad():
        means = _means(model.eval(), name, batches, torch.mean)
    restore(model)
    return sum(means) / len(means)


_ROWS = []


def rows_of_all_calls(model, name, batches):
    """Joins what earlier calls have left too."""
    _ROWS.extend(embed(model, name, [batch]) for batch in batches)
    return torch.cat(_ROWS)


def embed_skipping(model, name, batches):
    rows = []
    for batch in batches:
        try:
            rows.append(embed(model, name, [batch]))
        except RuntimeError:
            continue
    return torch.cat(rows)


# ---- 24.C: whose output was overwritten later ----


def _recording(model, x, note, judge, names=nn.Module.named_modules, clean=True):
    """A wrong answer: `note(output)` in a hook of each layer, then those for which `judge` says so."""
    seen, handles = [], []
    for name, module in names(model):

        def keep(module, args, output, name=name):
            seen.append((name, output, note(output)))

        handles.append(module.register_forward_hook(keep))
    model(x)
    for handle in handles if clean else ():
        handle.remove()
    return list(dict.fromkeys(name for name, output, noted in seen if judge(output, noted)))


def _edited(output, version):
    return output._version != version


def _by_version(names=nn.Module.named_modules, **options):
    return lambda model, x: _recording(model, x, lambda output: output._version, _edited, names, **options)


def last_name(model, x):
    seen, handles = [], []
    for name, module in model.named_modules():

        def keep(module, args, output):
            seen.append((output, output._version, lambda: name))  # noqa: B023

        handles.append(module.register_forward_hook(keep))
    model(x)
    for handle in handles:
        handle.remove()
    return [named() for output, version, named in seen if output._version != version]


def relu_only(model, x):
    found, outputs, handles = [], {}, []
    for name, module in model.named_modules():

        def before(module, args, name=name):
            if getattr(module, "inplace", False):
                found.extend(other for other, output in outputs.items() if output is args[0])

        def after(module, args, output, name=name):
            outputs[name] = output

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def last_call(model, x):
    noted = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            note = lambda _, args, output, name=name: noted.update({name: (output, output._version)})  # noqa: E731
            hooks.enter_context(module.register_forward_hook(note))
        model(x)
    return [name for name, (output, version) in noted.items() if output._version != version]


def every_call(model, x, run=lambda model, x: model(x)):
    seen = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            note = lambda _, args, output, name=name: seen.append((name, output, output._version))  # noqa: E731
            hooks.enter_context(module.register_forward_hook(note))
        run(model, x)
    return [name for name, output, version in seen if output._version != version]


def overwritten_by_default(model, x, seen=[]):  # noqa: B006
    seen += overwritten(model, x)
    return list(dict.fromkeys(seen))


def ran_twice_overwritten(model, x):
    model(x)
    return overwritten(model, x)


def names_on_modules(model, x):
    for name, module in model.named_modules():
        module.name = name
    return overwritten(model, x)


def _pieces(model):
    return [(name, module) for name, module in model.named_modules() if not list(module.children())]


WRONG = {
    "24.A": {
        "ready_made": with_features,
        "stopped": by_ending_the_forward,
        "overwritten": _feature_with(Tensor.detach),
        "keeps_graph": _feature_with(Tensor.clone),
        "requires_grad": lambda *given: feature(*given).requires_grad_(),
        "left_behind": _feature_with(_copy, clean=False),
        "left_after_error": left_after_error,
        "removed_others": clearing(feature),
        "stale": stale,
        "other_error": index_error,
        "no_error": no_error,
        "replaced_output": _feature_with(_copy, give=_copy),
        "cut_in_place": _feature_with(lambda output: output.detach_().clone()),
        "returned_nothing": lambda model, name, x: print(end=str(feature(model, name, x))[:0]),
        "not_called": lambda model, name, x: model.get_submodule(name).forward(x).detach(),
        "by_forward": _feature_with(_copy, run=lambda model, x: model.forward(x)),
        "ran_twice": ran_twice,
        "mode_changed": mode_changed,
        "grad_left_off": gradients_off(feature),
        "hid_error": hid_error,
        "edited_input": edited_input,
        "changed_attributes": not_in_place,
        "overwritten_by_hand": lambda model, name, x: not_in_place(model, name, x, then=True),
        "float32_only": _feature_with(lambda output: _copy(output).float()),
        "grad_switched_on": grad_switched_on,
        "froze": lambda model, name, x: feature(model.requires_grad_(False), name, x),
        "wrong_shape": lambda model, name, x: model(x).detach(),
        "wrong_type": lambda model, name, x: {name: feature(model, name, x)},
    },
    "24.B": {
        "train_mode": train_mode,
        "left_in_eval": lambda model, name, batches: embed(model.eval(), name, batches),
        "unfroze": unfroze,
        "overwritten": mean_afterwards,
        "keeps_graph": _restoring(_joined(_spatial)),
        "graph_built": _restoring(_joined(lambda t: _spatial(t.detach()))),
        "requires_grad": lambda *given: embed(*given).requires_grad_(),
        "last_batch_only": last_batch_only,
        "not_joined": _restoring(torch.no_grad()(_means)),
        "not_batch_by_batch": lambda model, name, batches: embed(model, name, [torch.cat(batches)]),
        "grad_left_off": _restoring(gradients_off(_joined(_spatial))),
        "froze": lambda model, name, batches: embed(model.requires_grad_(False), name, batches),
        "thawed": embed_thawed,
        "part_left_in_eval": part_left_in_eval,
        "dropout_on": dropout_on,
        "first_call_only": lambda model, name, batches: embed(model, "norm", batches),  # whatever the name
        "walked_twice": embed_counting_first,
        "float32_only": embed_into_zeros,
        "grad_switched_on": embed_switched_on,
        "left_behind": embed_left_behind,
        "hooks_left_after_error": embed_without_finally,
        "mode_after_error": embed_restoring_last,
        "swallowed": embed_skipping,
        "removed_others": clearing(embed),
        "wrong_shape": _restoring(torch.no_grad()(_joined(_copy))),
        "returned_nothing": lambda model, name, batches: print(end=str(embed(model, name, batches))[:0]),
        "not_called": lambda model, name, batches: torch.zeros(9, 6),
        "raised": _restoring(torch.no_grad()(_joined(lambda t: _spatial(t).squeeze()))),
    },
    "24.C": {
        "counted_culprit": lambda model, x: _recording(model, x, id, lambda output, _: output._version > 0),
        "only_culprits": lambda model, x: [
            name for name, module in model.named_modules() if getattr(module, "inplace", False)
        ],
        "nothing_found": lambda model, x: _recording(
            model, x, Tensor.detach, lambda output, noted: not torch.equal(output, noted)
        ),
        "by_values": lambda model, x: _recording(
            model, x, torch.clone, lambda output, before: not torch.equal(output, before)
        ),
        "relu_only": relu_only,
        "last_name": last_name,
        "children_only": _by_version(nn.Module.named_children),
        "wrong_names": _by_version(_pieces),
        "left_behind": _by_version(clean=False),
        "left_after_error": _by_version(),
        "hid_error": swallowing(overwritten, []),
        "removed_others": clearing(overwritten),
        "one_call": last_call,
        "name_twice": every_call,
        "from_before": overwritten_by_default,
        "ran_twice": ran_twice_overwritten,
        "by_forward": lambda model, x: every_call(model, x, run=lambda model, x: model.forward(x)),
        "mode_changed": lambda model, x: overwritten(model.eval(), x),
        "grad_left_off": gradients_off(overwritten),
        "changed_attributes": names_on_modules,
        "not_a_list": lambda model, x: ", ".join(overwritten(model, x)),
        "not_names": lambda model, x: [model.get_submodule(name) for name in overwritten(model, x)],
        "returned_nothing": lambda model, x: print(end=str(overwritten(model, x))[:0]),
    },
}

ALSO_WRONG = [
    ("24.A", "hid_error", feature_or_key_error),
    ("24.A", "removed_others", cleared_after_error),
    ("24.A", "left_after_error", off_after_value_error),
    ("24.B", "wrong_shape", mean_of_all),
    ("24.B", "first_call_only", rows_of_all_calls),
]

RIGHT = []
