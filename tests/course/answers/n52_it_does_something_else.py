"""Answers to the exercises of notebook 52: wrong ones by the name of their refusal, and right ones."""

import torch

from hooklab.course.checks.n52_it_does_something_else import counts, mean_square

# ---- 52.A: does what the hook returns count? ----


def _same(plain, hooked):
    return torch.allclose(plain, hooked, rtol=0, atol=0, equal_nan=True)


def _changes(hook=lambda *args: args[-1] + 1, same=_same, keep=False):
    """A wrong answer: another hook, another comparison, a hook that stays."""

    def answer(register, run):
        plain = run()
        handle = register(hook)
        try:
            return not same(plain, run())
        finally:
            if not keep:
                handle.remove()

    return answer


def counts_calls(register, run):
    calls = []
    with register(lambda *args: calls.append(1)):
        run()
    return bool(calls)


def hook_in_both(register, run):
    with register(lambda *args: args[-1] + 1):
        return not _same(run(), run())


def nan_is_the_same(plain, hooked):
    return _same(plain, hooked) or bool(plain.isnan().any())


def not_after_error(register, run):
    plain = run()
    handle = register(lambda *args: args[-1] + 1)
    hooked = run()
    handle.remove()
    return not _same(plain, hooked)


def hides_the_error(register, run):
    try:
        return counts(register, run)
    except RuntimeError:
        return False


def forward_hooks_of_three(register, run):
    plain = run()
    with register(lambda module, args, output: output + 1):
        return not _same(plain, run())


def only_forward(register, run):
    """Leaves tensors alone, and so finds nothing there."""
    return counts(register, run) if isinstance(getattr(register, "__self__", None), torch.nn.Module) else False


def cleans_modules_only(register, run):
    plain = run()
    handle = register(lambda *args: args[-1] + 1)
    try:
        return not _same(plain, run())
    finally:
        if isinstance(register.__self__, torch.nn.Module):
            handle.remove()


def clears_the_table(register, run):
    try:
        return _changes(keep=True)(register, run)
    finally:
        register.__self__._forward_hooks.clear()


# ---- 52.B: a mean of squares over all batches ----


def _measured(per_output, reduce, **options):
    """A wrong answer: `per_output` of each output, reduced at the end."""

    def answer(model, layer, batches):
        parts = []
        with layer.register_forward_hook(lambda module, args, output: parts.append(per_output(output.detach()))):
            for batch in batches:
                model(batch)
        return float(reduce(parts))

    return answer


def _mean(numbers):
    return sum(numbers) / len(numbers)


def _sums(square=lambda y: y.double().square(), size=lambda y: y.numel()):
    return _measured(
        lambda y: (square(y).sum().item(), size(y)),
        lambda parts: sum(total for total, _ in parts) / sum(count for _, count in parts),
    )


def mean_of_batches(model, layer, batches):
    means = []
    for batch in batches:
        means.append(mean_square(model, layer, [batch]))
    return _mean(means)


def last_of_each_batch(model, layer, batches):
    last, total, count = [None], 0.0, 0
    with layer.register_forward_hook(lambda module, args, output: last.__setitem__(0, output.detach().double())):
        for batch in batches:
            model(batch)
            total, count = total + last[0].square().sum().item(), count + last[0].numel()
    last.clear()
    return total / count


def keeps_outputs(model, layer, batches):
    outputs = []
    with layer.register_forward_hook(lambda module, args, output: outputs.append(output)):
        for batch in batches:
            model(batch)
    return torch.cat(outputs).double().square().mean().item()


def keeps_the_graph(model, layer, batches):
    total, count = torch.zeros((), dtype=torch.double), 0

    def add(module, args, output):
        nonlocal total, count
        total = total + output.double().square().sum() + 0 * output.square().sum()
        count += output.numel()

    with layer.register_forward_hook(add):
        for batch in batches:
            model(batch)
    return (total / count).item()


def replaces(model, layer, batches):
    sums = torch.zeros(2, dtype=torch.double)

    def add(module, args, output):
        return sums.add_(torch.tensor([output.detach().double().square().sum(), output.numel()]))

    with layer.register_forward_hook(add):
        for batch in batches:
            model(batch)
    return (sums[0] / sums[1]).item()


def squares_in_place(model, layer, batches):
    total, count = 0.0, 0

    def add(module, args, output):
        nonlocal total, count
        with torch.no_grad():
            total += output.pow_(2).double().sum().item()
        count += output.numel()

    with layer.register_forward_hook(add):
        for batch in batches:
            model(batch)
    return total / count


def returns_the_sum(model, layer, batches):
    sums, counts = [], []

    def add(module, args, output):
        sums.append(output.detach().double().square().sum().item())
        counts.append(output.numel())
        return sums[-1]

    with layer.register_forward_hook(add):
        for batch in batches:
            model(batch)
    return sum(sums) / sum(counts)


def stays(model, layer, batches):
    layer.register_forward_hook(lambda *args: None)
    return mean_square(model, layer, batches)


def stays_after_error(model, layer, batches):
    handle = layer.register_forward_hook(lambda *args: None)
    mean = mean_square(model, layer, batches)
    handle.remove()
    return mean


def swallows(model, layer, batches):
    try:
        return mean_square(model, layer, batches)
    except RuntimeError:
        return 0.0


def clears(model, layer, batches):
    mean = mean_square(model, layer, batches)
    layer._forward_hooks.clear()
    return mean


WRONG = {
    "52.A": {
        "no_bool": lambda register, run: print(counts(register, run)),
        "never": hook_in_both,
        "counted_calls": counts_calls,
        "always": lambda register, run: (
            True if not counts(register, run) and not counts_calls(register, run) else counts(register, run)
        ),
        "multiplied": _changes(lambda *args: 2 * args[-1]),
        "nan": _changes(same=torch.equal),
        "nan_hides": _changes(same=nan_is_the_same),
        "too_lenient": _changes(same=lambda a, b: torch.allclose(a, b, equal_nan=True)),
        "hooks_left": _changes(keep=True),
        "removed_others": clears_the_table,
        "forward_only": forward_hooks_of_three,
        "tensor_hook": only_forward,
        "tensor_hook_left": cleans_modules_only,
        "swallowed": hides_the_error,
        "left_after_error": not_after_error,
    },
    "52.B": {
        "mean_of_means": _measured(lambda y: y.double().square().mean().item(), _mean),
        "mean_of_batches": mean_of_batches,
        "last_batch": _measured(lambda y: y.double().square().mean().item(), lambda parts: parts[-1]),
        "last_call": last_of_each_batch,
        "by_sample": _sums(size=len),
        "not_divided": _measured(lambda y: y.double().square().sum().item(), sum),
        "not_squared": _sums(square=lambda y: y.double()),
        "rooted": lambda model, layer, batches: mean_square(model, layer, batches) ** 0.5,
        "squared_mean": lambda model, layer, batches: _sums(square=lambda y: y.double())(model, layer, batches) ** 2,
        "wrong_mean": lambda model, layer, batches: mean_square(model, layer, batches) + 1,
        "overflow": _sums(square=lambda y: y.square()),
        "kept": keeps_outputs,
        "changed_output": replaces,
        "no_float": lambda model, layer, batches: torch.tensor(mean_square(model, layer, batches)),
        "not_all_run": lambda model, layer, batches: mean_square(model, layer, batches[:-1]),
        "hooks_left": stays,
        "left_after_error": stays_after_error,
        "swallowed": swallows,
        "removed_others": clears,
    },
}

ALSO_WRONG = [
    ("52.B", "kept", keeps_the_graph),
    ("52.B", "changed_output", squares_in_place),
    ("52.B", "changed_output", returns_the_sum),
    ("52.B", "last_batch", _measured(lambda y: y.double().square().mean().item(), lambda parts: parts[0])),
]


def with_equal(register, run):
    plain = run()
    handle = register(lambda *args: args[-1] + 1)
    try:
        hooked = run()
    finally:
        handle.remove()
    return not torch.equal(plain.nan_to_num(nan=7), hooked.nan_to_num(nan=7))


def without_grad(model, layer, batches):
    sums = []

    @torch.no_grad()
    def add(module, args, output):
        sums.append((output.to(torch.float64).pow(2).sum().item(), output.nelement()))

    handle = layer.register_forward_hook(add)
    try:
        for batch in batches:
            model(batch)
    finally:
        handle.remove()
    return sum(total for total, _ in sums) / sum(count for _, count in sums)


class Running:
    __slots__ = ("count", "total")

    def __init__(self):
        self.total, self.count = 0.0, 0

    def __call__(self, module, args, output):
        self.total += output.detach().float().square().sum().item()
        self.count += output.numel()


def by_class(model, layer, batches):
    running = Running()
    with layer.register_forward_hook(running, prepend=True):
        outputs = [model(batch) is None for batch in batches]
    del outputs
    return running.total / running.count


RIGHT = [
    ("52.A", with_equal),
    ("52.B", without_grad),
    ("52.B", by_class),
]
