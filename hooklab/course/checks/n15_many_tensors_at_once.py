"""Checks of notebook 15: many tensors at once."""

import copy
import math
import warnings
from functools import partial
from numbers import Real

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from hooklab.course.check import (
    Exercise,
    Prediction,
    refuse,
    refuse_latest_call,
    refuse_other_items,
    refuse_same_object,
)

# ---- 15.A: the global norm of a group, once per backward ----


def record_norms(tensors):
    norms = []

    def measure(grads):
        arrived = [grad.norm() for grad in grads if grad is not None]
        if arrived:
            norms.append(torch.stack(arrived).norm().item())

    return norms, register_multi_grad_hook(tensors, measure)


GRADS = [[2.0, 3.0], [6.0], [8.0, 16.0, 4.0]]  # of norms that no single rule but the right one explains


def examine_record_norms(answer):
    warnings.simplefilter("ignore")  # reading the .grad of a tensor that is no leaf warns
    tensors = [torch.ones(len(grad), requires_grad=True) for grad in GRADS]
    norms, handle = _pair(answer(tensors))
    if norms:
        _refuse_shared()
    _backward(tensors, GRADS)
    _examine_first(norms)
    if any(tensor.grad is None for tensor in tensors):
        refuse(
            "cleared",
            zh="反向之后，有的张量的 `.grad` 是 `None`：你的钩子清空了它。只看，别动 `.grad`。",
            en="After backward the `.grad` of some tensor is `None`: your hook has cleared it. Only look, and leave `.grad` alone.",
        )
    if [tensor.grad.tolist() for tensor in tensors] != GRADS:
        refuse(
            "changed",
            zh=f"梯度被改动了：应当是 `{GRADS}`，现在是 `{[tensor.grad.tolist() for tensor in tensors]}`。名字以 `_` 结尾的方法是原地改的。",
            en=f"The gradients were changed: they should be `{GRADS}`, they are "
            f"`{[tensor.grad.tolist() for tensor in tensors]}`. A method whose name ends in `_` edits in place.",
        )
    _backward(tensors[:2], GRADS[:2])  # the third is not reached
    _backward(tensors, [[2 * number for number in grad] for grad in GRADS])
    _examine_three(norms)
    if [tensor.grad.tolist() for tensor in tensors] != [
        [times * number for number in grad] for grad, times in zip(GRADS, (4, 4, 3), strict=True)
    ]:
        refuse(
            "changed_later",
            zh="第一次反向没动梯度，后来却改动了：有一次反向没到第三个张量。看看那一次你的钩子做了什么。",
            en="The first backward left the gradients alone, a later one did not: one backward did not reach the third tensor. Look at "
            "what your hook does then.",
        )
    _examine_middle(answer, norms)
    _examine_order(answer)
    _backward(tensors, GRADS)
    if len(norms) != 4:
        _refuse_shared()
    handle.remove()
    _backward(tensors, GRADS)
    if len(norms) != 4:
        refuse(
            "not_removed",
            zh="调用 `handle.remove()` 之后又反向了一次，列表还在变长：有的钩子没有取下。",
            en="After `handle.remove()` one more backward ran and the list still grew: some hook is still on.",
        )


def _examine_order(answer):
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    norms, handle = _pair(answer([first, second]))
    (4 * second + 3 * first).backward()  # reaches the second last
    (4 * second).backward()  # and the first not at all
    (0 * first + 0 * second).backward()
    handle.remove()
    for found in norms:
        _expect_number(found)
    found = [round(float(norm), 4) for norm in norms]
    if found == [5, 4]:
        refuse(
            "zero_left_out",
            zh="到达的梯度全是零的那一次没有记。零也是到达的梯度，那一次的范数是 0。",
            en="The backward whose gradients are all zero was not recorded. A zero gradient has arrived, too: the norm is 0 then.",
        )
    if found != [5, 4, 0]:
        refuse(
            "one_order_only",
            zh=f"对张量 `[a, b]` 先后反向三次：`4b + 3a`、`4b`、`0a + 0b`，应当记下 `[5, 4, 0]`，得到 `{found}`。"
            "谁先到、谁不到，由计算图决定，与列表的次序无关。",
            en=f"Three backwards of tensors `[a, b]`, `4b + 3a`, `4b`, `0a + 0b`, should leave `[5, 4, 0]`; found `{found}`. Who arrives "
            "first, and who does not, depends on the graph, not on the order of the list.",
        )


def _backward(tensors, grads):
    loss = sum((tensor * torch.as_tensor(grad)).sum() for tensor, grad in zip(tensors, grads, strict=True))
    loss.backward()


def _norm(grads):
    return math.sqrt(sum(number**2 for grad in grads for number in grad))


def _close(value, wanted):
    return math.isclose(value, wanted, rel_tol=1e-4)


def _what(got):
    """The type of a value, or of the parts of a tuple, in words."""
    return f"({', '.join(map(_what, got))})" if isinstance(got, tuple) else type(got).__name__


def _pair(got):
    if not isinstance(got, tuple | list) or len(got) != 2 or not isinstance(got[0], list):
        refuse(
            "not_a_pair",
            zh=f"应当返回 `(norms, handle)`：先是列表，后是句柄。得到的是 `{_what(got)}`。",
            en=f"Return `(norms, handle)`, the list first, then the handle; found `{_what(got)}`.",
        )
    if not hasattr(got[1], "remove") or isinstance(got[1], list):
        refuse(
            "no_handle",
            zh=f"第二项应当是句柄，用它的 `remove()` 能取下全部钩子；得到的是 `{type(got[1]).__name__}`。",
            en=f"The second item should be a handle whose `remove()` takes off every hook; found "
            f"`{type(got[1]).__name__}`.",
        )
    return got


def _examine_first(norms):
    if not norms:
        refuse(
            "nothing_recorded",
            zh="反向一次之后，`norms` 还是空的。钩子还挂着吗（`with` 一结束就取下了）？往里追加的，是不是你返回的那个列表？",
            en="After one backward `norms` is empty. Is the hook still on (the end of `with` takes it off)? Does it add to "
            "the list that you returned?",
        )
    if len(norms) != 1:
        refuse(
            "one_per_tensor",
            zh=f"反向一次应当只记 1 个数，却记了 {len(norms)} 个。追加的那一行，是每个张量运行一次，还是整组运行一次？",
            en=f"One backward should leave 1 number, there are {len(norms)}. Does the line that appends run once per "
            "tensor, or once for the group?",
        )
    _expect_number(norms[0])
    _examine_value(float(norms[0]))


def _expect_number(found):
    if not isinstance(found, Real | torch.Tensor) or getattr(found, "ndim", 0):  # NumPy's numbers are Real
        shape = f" {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
        refuse(
            "not_a_number",
            zh=f"记下的应当是一个数，得到的是 `{type(found).__name__}{shape}`。",
            en=f"What is recorded should be one number; found `{type(found).__name__}{shape}`.",
        )


def _examine_value(got):
    each = [_norm([grad]) for grad in GRADS]
    if _close(got, _norm(GRADS)):
        return
    if _close(got, sum(each)):
        refuse(
            "sum_of_norms",
            zh=f"得到 {got:.4f}，这是各个范数直接相加。全局范数把所有梯度看作一个长向量。",
            en=f"Found {got:.4f}: the norms themselves were added. The global norm treats all gradients as one long vector.",
        )
    if _close(got, _norm(GRADS) ** 2):
        refuse(
            "no_root",
            zh=f"得到 {got:.4f}，平方和已经有了，还差最后一步。",
            en=f"Found {got:.4f}: the squares are summed, the last step is missing.",
        )
    if any(_close(got, one) for one in each):
        refuse(
            "one_only",
            zh=f"得到 {got:.4f}，这只是其中一个梯度的范数，其余的没有算进去。你的函数收到的是一组梯度，还是一个？",
            en=f"Found {got:.4f}: the norm of one gradient alone, the others are left out. Does your function receive the "
            "group, or one of it?",
        )
    for left_out in range(1, len(GRADS)):
        if _close(got, _norm(GRADS[:left_out] + GRADS[left_out + 1 :])):
            refuse(
                "one_missing",
                zh=f"得到 {got:.4f}，恰好少算了第 {left_out + 1} 个张量的梯度。循环是不是结束得太早？",
                en=f"Found {got:.4f}: exactly the gradient of tensor number {left_out + 1} is missing. Does a loop end too early?",
            )
    if _close(got, _norm(GRADS[1:])):  # `backward` reaches the first tensor last
        refuse(
            "last_missing",
            zh=f"得到 {got:.4f}，恰好少算了最后到的那个梯度。钩子运行时，它在 `.grad` 里吗？",
            en=f"Found {got:.4f}: exactly the gradient that arrived last is missing. Is it in `.grad` when the hook runs?",
        )
    refuse(
        "wrong_norm",
        zh=f"梯度是 `{GRADS}`，全局范数应为 {_norm(GRADS):.4f}，得到的是 {got:.4f}。",
        en=f"The gradients are `{GRADS}`, their global norm is {_norm(GRADS):.4f}; found {got:.4f}.",
    )


def _refuse_shared():
    refuse(
        "shared_list",
        zh="每次调用 `record_norms` 都应当返回一个新的空列表，此后也互不相干；第二次调用影响了第一次的列表，或者拿到的就是同一个。",
        en="Every call of `record_norms` should return a new, empty list, which has nothing to do with those before; the second call has "
        "touched the list of the first, or it is the same one.",
    )


def _examine_three(norms):
    if len(norms) == 1:
        refuse(
            "first_only",
            zh="反向了 3 次，只记下了第 1 次：钩子还挂着吗？",
            en="Of 3 backwards only the 1st was recorded: is the hook still on?",
        )
    if len(norms) != 3:
        refuse(
            "missed_step",
            zh=f"反向了 3 次，其中一次没有用到所有张量；应当有 3 个数，得到 {len(norms)} 个。是不是在等一个不会来的梯度？",
            en=f"Of 3 backwards one did not use every tensor; there should be 3 numbers, there are {len(norms)}. Was a "
            "gradient waited for that never comes?",
        )
    for found in norms:
        _expect_number(found)
    wanted = [_norm(GRADS), _norm(GRADS[:2]), 2 * _norm(GRADS)]
    if not all(_close(float(got), want) for got, want in zip(norms, wanted, strict=True)):
        refuse(
            "other_steps",
            zh="第一次反向对了，后面的混进了别的步骤的梯度。这几步之间没有清过 `.grad`；也看看有没有留到下一步的东西。",
            en="The first backward is right, the later ones contain gradients of other steps. `.grad` was not cleared in "
            "between; look also for what is carried over from step to step.",
        )


def _examine_middle(answer, earlier):
    # Matrices, which `torch.cat` alone cannot join.
    grads = [torch.tensor(GRADS[:1]), torch.tensor(GRADS[1:2]), torch.tensor([[8.0, 16.0], [4.0, 2.0]])]
    middle = [torch.ones_like(grad, requires_grad=True) * 2 for grad in grads]
    norms, handle = _pair(answer(middle))
    if norms or norms is earlier or len(earlier) != 3:
        _refuse_shared()
    _backward(middle, grads)
    handle.remove()
    for norm in norms:
        _expect_number(norm)
    wanted, found = _norm([grad.flatten().tolist() for grad in grads]), [float(norm) for norm in norms]
    if len(found) != 1:
        refuse(
            "leaves_only",
            zh=f"换成中间张量就不对了：反向一次，应当记下 `[{wanted:.4f}]`，得到 `{[round(norm, 4) for norm in found]}`。",
            en=f"It fails for tensors in the middle: one backward should leave `[{wanted:.4f}]`, found "
            f"`{[round(norm, 4) for norm in found]}`.",
        )
    if not _close(found[0], wanted):
        refuse(
            "of_matrices",
            zh=f"换成二维的中间张量就不对了，其中一个的形状是 `(2, 2)`：全局范数应为 {wanted:.4f}，得到的是 {found[0]:.4f}。"
            "范数是对所有元素算的吗？对矩阵，有的函数算的是另一种范数。",
            en=f"It fails for two-dimensional tensors in the middle, one of the shape `(2, 2)`: the global norm is {wanted:.4f}; "
            f"found {found[0]:.4f}. Is the norm taken over all elements? For a matrix some functions give another norm.",
        )


def of_group(measure, **options):
    """An answer that hangs a multi-grad hook with `measure(grads, tensors)`."""

    def answer(tensors):
        norms = []
        handle = register_multi_grad_hook(tensors, lambda grads: norms.append(measure(grads, tensors)), **options)
        return norms, handle

    return answer


def there(grads):
    return [grad for grad in grads if grad is not None]


def from_dot_grad(grads, tensors):
    return nn.utils.get_total_norm(there(tensor.grad for tensor in tensors)).item()


def in_place(grads, tensors):
    return math.sqrt(sum(grad.pow_(2).sum().item() for grad in there(grads)))


class _AsOne:
    def __init__(self, handles):
        self.handles = handles

    def remove(self):
        for handle in self.handles:
            handle.remove()


def counted(tensors):
    norms, arrived = [], []

    def collect(grad):
        arrived.append(grad)
        if len(arrived) == len(tensors):
            norms.append(nn.utils.get_total_norm(arrived).item())
            arrived.clear()

    return norms, _AsOne([tensor.register_hook(collect) for tensor in tensors])


def each_alone(tensors):
    norms = []
    handles = [tensor.register_hook(lambda grad: norms.append(grad.norm().item())) for tensor in tensors]
    return norms, _AsOne(handles)


def never_cleared(tensors):
    norms, arrived = [], []

    def measure(grads):
        arrived.extend(there(grads))
        norms.append(nn.utils.get_total_norm(arrived).item())

    return norms, register_multi_grad_hook(tensors, measure)


def two_hooks_one_handle(tensors):
    norms, _ = record_norms(tensors)
    return norms, tensors[0].register_hook(lambda grad: None)


def one_list_for_all(tensors, norms=[]):  # noqa: B006
    def measure(grads):
        norms.append(nn.utils.get_total_norm(there(grads)).item())

    return norms, register_multi_grad_hook(tensors, measure)


def recorded_once(tensors):
    norms = []

    def measure(grads):
        handle.remove()
        norms.append(nn.utils.get_total_norm(there(grads)).item())

    handle = register_multi_grad_hook(tensors, measure)
    return norms, handle


def of_matrices(grads, tensors):
    return torch.stack([torch.linalg.norm(grad, 2) for grad in there(grads)]).norm().item()


def clears_grad(tensors):
    norms = []

    def measure(grads):
        norms.append(nn.utils.get_total_norm(there(grads)).item())
        for tensor in tensors:
            tensor.grad = None

    return norms, register_multi_grad_hook(tensors, measure)


def when_the_first_comes(tensors):
    norms, arrived = [], []

    def collect(grad, last):
        arrived.append(grad.norm())
        if last:
            norms.append(torch.stack(arrived).norm().item())
            arrived.clear()

    hooks = [partial(collect, last=number == 0) for number in range(len(tensors))]
    return norms, _AsOne([tensor.register_hook(hook) for tensor, hook in zip(tensors, hooks, strict=True)])


def but_zero(tensors):
    norms = []

    def measure(grads):
        if norm := nn.utils.get_total_norm(there(grads)).item():
            norms.append(norm)

    return norms, register_multi_grad_hook(tensors, measure)


def zeroing_where_one_is_missing(grads, tensors):
    norm = nn.utils.get_total_norm(there(grads)).item()
    for grad in there(grads) if None in grads else ():
        grad.zero_()
    return norm


RECORD_NORMS = Exercise(
    "15.A",
    examine_record_norms,
    record_norms,
    {
        "raised": of_group(lambda grads, _: math.sqrt(sum(grad.square().sum().item() for grad in grads))),
        "nothing_recorded": lambda tensors: ([], register_multi_grad_hook(tensors, lambda grads: None)),
        "missed_step": counted,
        "last_missing": of_group(from_dot_grad),
        "one_missing": of_group(lambda grads, _: nn.utils.get_total_norm(there(grads[:-1])).item()),
        "one_only": of_group(lambda grad, _: grad.norm().item(), mode="any"),
        "one_per_tensor": each_alone,
        "sum_of_norms": of_group(lambda grads, _: sum(grad.norm().item() for grad in there(grads))),
        "no_root": of_group(lambda grads, _: sum(grad.square().sum().item() for grad in there(grads))),
        "wrong_norm": of_group(lambda grads, _: sum(grad.sum().item() for grad in there(grads))),
        "not_a_number": of_group(lambda grads, _: [grad.norm().item() for grad in there(grads)]),
        "changed": of_group(in_place),
        "cleared": clears_grad,
        "changed_later": of_group(zeroing_where_one_is_missing),
        "one_order_only": when_the_first_comes,
        "zero_left_out": but_zero,
        "first_only": recorded_once,
        "shared_list": one_list_for_all,
        "other_steps": never_cleared,
        "of_matrices": of_group(of_matrices),
        "leaves_only": lambda tensors: record_norms([tensor for tensor in tensors if tensor.is_leaf]),
        "not_a_pair": lambda tensors: record_norms(tensors)[0],
        "no_handle": lambda tensors: (record_norms(tensors)[0], None),
        "not_removed": two_hooks_one_handle,
    },
    zh="每次反向一个数，没到的不算，也没有碰梯度。训练日志里的 grad norm 就可以这样记。",
    en="One number per backward, what did not arrive left out, no gradient touched. The 'grad norm' of a training log can be taken this way.",
)

# ---- 15.B: the optimizer inside backward ----


def step_in_backward(model, make_optimizer):
    params = [param for param in model.parameters() if param.requires_grad]
    optimizers = {param: make_optimizer([param]) for param in params}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    return [param.register_post_accumulate_grad_hook(step) for param in params]


OPTIMIZERS = [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.05)]


class _Tied(nn.Module):
    """One layer used twice, another with its weight, one parameter frozen, one of the model's own."""

    def __init__(self):
        super().__init__()
        self.tied, self.head, self.again = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 3, bias=False)
        self.again.weight = self.tied.weight
        self.head.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x):
        twice = self.tied(torch.tanh(self.tied(x * self.gain)))
        return self.head(torch.tanh(self.again(torch.tanh(twice))))


def _loss(model, x):
    return model(x).square().sum()


def _twins():
    model = _Tied()
    return model, copy.deepcopy(model), [torch.randn(4, 3) for _ in range(12)]


def _trained(model):
    return [param for param in model.parameters() if param.requires_grad]


def _same(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return [torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in pairs]


def examine_step_in_backward(answer):
    for make_optimizer in OPTIMIZERS:
        model, twin, batches = _twins()
        batches[1] = torch.zeros_like(batches[1])  # a gradient of zeros, of `gain`: momentum goes on
        made = []
        handles = _handles(answer(model, _counting(make_optimizer, made)))
        watching, kept = _watch(model)
        reference = make_optimizer(_trained(twin))
        for number, x in enumerate(batches[:3]):
            before = copy.deepcopy(model)
            _backward_of(model, x)
            _loss(twin, x).backward()
            reference.step()
            reference.zero_grad()
            _examine_step(model, twin, before, number)
            _examine_freed(model, kept)
        for handle in watching:
            handle.remove()
        _examine_removed(handles, model, batches[3])
        _examine_own_optimizers(made)
    _examine_left_out(answer)
    _examine_two_models(lambda model, make_optimizer, count: answer(model, make_optimizer))


def _counting(make_optimizer, made):
    """Notes in `made` each optimizer."""

    def make(params):
        made.append(make_optimizer(params))
        return made[-1]

    return make


def _examine_own_optimizers(made):
    most = max((sum(len(group["params"]) for group in one.param_groups) for one in made), default=0)
    if most > 1:
        refuse(
            "shared_optimizer",
            zh=f"有一个优化器管着 {most} 个参数。取下其中一个的句柄，别的钩子还会更新它；每个参数要有自己的优化器。",
            en=f"One optimizer has {most} parameters. Where the handle of one is removed, the hooks of the others go on updating "
            "it; each parameter is to have an optimizer of its own.",
        )


def _examine_left_out(answer):
    model = _Two()
    answer(model, partial(torch.optim.SGD, lr=0.25))
    model(both=False).backward()
    if model.always.item() != 0.75:
        refuse(
            "waited_for_all",
            zh=f"模型有两个参数，这次反向只用到一个：它收到梯度 1（学习率 0.25），应当从 1.0 到 0.75，现在是 `{model.always.item()}`。"
            "别等其他参数：一存好就更新。",
            en=f"A model has two parameters, and this backward reaches only one: its gradient is 1 (learning rate 0.25), so it should go "
            f"from 1.0 to 0.75; it is `{model.always.item()}`. Wait for no other parameter: update as soon as one is stored.",
        )


def _examine_two_models(answer, counts=(1, 1)):
    """The first goes on training after the second was given, with another learning rate."""
    models, rates, returned = (_Two(), _Two()), (0.25, 0.5), []
    for model, rate, count in zip(models, rates, counts, strict=True):
        returned.append(answer(model, partial(torch.optim.SGD, lr=rate), count))
        for _ in range(count):
            model(both=True).backward()
    refuse_same_object(*returned)
    for model, rate, count in zip(models, rates, counts, strict=True):
        before = model.always.item()
        try:
            for _ in range(count):
                model(both=True).backward()
        except Exception:  # a parameter that the second call's notes do not know
            refuse_latest_call()
        if not math.isclose(before - model.always.item(), rate * count):
            refuse_latest_call()


def _backward_of(model, x):
    try:
        _loss(model, x).backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        refuse(
            "others_updated",
            zh="反向途中，有个参数在计算图用完它之前就被更新了，PyTorch 因此报错。你的 `step()` 只更新自己这一个参数吗？"
            "优化器会更新它名下所有 `.grad` 不是 `None` 的参数。",
            en="During backward a parameter was updated before the graph had done with it, and PyTorch raised. Does your "
            "`step()` update its own parameter only? An optimizer updates all its parameters whose `.grad` is not `None`.",
        )


def _watch(model):
    """At each arrival: is the gradient of another parameter still there? Hung after the answer's hooks."""
    kept, params = [], _trained(model)

    def note(arrived):
        kept.append(any(param.grad is not None for param in params if param is not arrived))

    return [param.register_post_accumulate_grad_hook(note) for param in params], kept


def _handles(got):
    handles = list(got.values()) if isinstance(got, dict) else got
    if not isinstance(handles, list | tuple) or not handles:
        found = repr(got) if got in ([], (), {}) else type(got).__name__
        refuse(
            "no_handles",
            zh=f"应当返回句柄的列表，否则钩子再也取不下来。得到的是 `{found}`。",
            en=f"Return a list of handles, or the hooks can never be taken off. Found `{found}`.",
        )
    refuse_other_items(handles)
    return handles


def _examine_step(model, twin, before, number):
    _examine_frozen(model)
    moved = _moved(model, before)
    if number == 0 and not any(moved):
        refuse(
            "nothing_moved",
            zh="反向一次之后，没有一个参数变了。调用 `step()` 的那一刻，`.grad` 里有值吗？还是说，`step()` 的是上一次调用时那个模型的优化器（默认参数 `={}` 只建一次）？",
            en="After one backward no parameter has changed. At the moment when `step()` is called, is there anything in "
            "`.grad`? Or does the `step()` belong to the model of an earlier call (a default argument `={}` is made only once)?",
        )
    if number == 0:
        _examine_one(moved)
    if number == 0 and not all(moved):
        refuse(
            "some_moved",
            zh=f"反向一次之后，{len(moved)} 个参数里只有 {sum(moved)} 个变了。每个要训练的参数都挂上钩子了吗？更新的那一刻，每个参数的 `.grad` 都已经存好了吗？",
            en=f"After one backward only {sum(moved)} of {len(moved)} parameters have changed. Does every trained parameter have a "
            "hook? At the moment of the update, was the `.grad` of every parameter stored already?",
        )
    if not all(_same(model, twin)):
        refuse(
            *(("first_step",) if number == 0 else ("later_steps",)),
            zh="第一步更新之后，权重就和普通训练的不同。每个参数都恰好更新了一次吗？用的是 `make_optimizer` 造的优化器吗？"
            if number == 0
            else "第一步与普通训练一致，后面就不同了。钩子还挂着吗？动量和 Adam 的状态存在优化器里；还有，上一步的梯度留下来了吗？",
            en="After the very first update the weights differ from ordinary training. Was each parameter updated exactly "
            "once? By an optimizer that `make_optimizer` made?"
            if number == 0
            else "The first step agrees with ordinary training, later ones do not. Is the hook still on? Momentum and Adam's "
            "state live in the optimizer; and is a gradient of the step before still there?",
        )


def _moved(model, before):
    return [not torch.equal(one, two) for one, two in zip(_trained(model), _trained(before), strict=True)]


def _examine_frozen(model):
    if model.head.bias.requires_grad:
        refuse(
            "unfrozen",
            zh="`head.bias` 本来是冻结的，现在它的 `requires_grad` 成了 `True`：冻结的参数不该被你放开。",
            en="`head.bias` was frozen, now its `requires_grad` is `True`: a frozen parameter is not yours to thaw.",
        )


def _examine_one(moved):
    if sum(moved) == 1:
        refuse(
            "one_moved",
            zh=f"更新之后，{len(moved)} 个参数里只有 1 个变了。每个参数都挂上钩子了吗？每个钩子用的都是自己那个优化器吗？闭包里的变量取的是调用时的值。",
            en=f"After the update only 1 of {len(moved)} parameters has changed. Does every parameter have a hook, and each hook an "
            "optimizer of its own? A closure reads a variable when it is called, not when it is made.",
        )


def _examine_freed(model, kept):
    left = [param for param in model.parameters() if param.grad is not None]
    if left and all(not param.grad.any() for param in left):
        refuse(
            "zeros_kept",
            zh="更新对了，可 `.grad` 里留着一个全零的张量，它和梯度占一样多的内存。",
            en="The update is right, but `.grad` keeps a tensor of zeros, which takes as much memory as the gradient did.",
        )
    if left:
        refuse(
            "not_freed",
            zh=f"更新对了，但反向之后还有 {len(left)} 个参数的 `.grad` 留着：内存没有省下，下一次反向还会往上加。",
            en=f"The update is right, but after backward {len(left)} parameters still have a `.grad`: no memory is saved, "
            "and the next backward adds to it.",
        )
    if any(kept):
        refuse(
            "freed_late",
            zh="更新对了，也都释放了，但不是一好就释放：有的梯度一直留到了反向的末尾，峰值内存没有降下来。",
            en="The update is right and all is freed, but not at once: some gradients stayed until the end of backward, "
            "so the peak is as high as before.",
        )


def _examine_removed(handles, model, x, count=1):
    for handle in handles:
        handle.remove()
    before = copy.deepcopy(model)
    for _ in range(count):
        _loss(model, x).backward()
    if not all(_same(model, before)) or any(param.grad is None for param in _trained(model)):
        refuse(
            "not_removed",
            zh="句柄全都 `remove()` 之后，反向仍在更新参数，或者仍在释放梯度：有的钩子没有交回句柄。",
            en="After `remove()` of every handle backward still updates parameters or frees gradients: the handle of some hook "
            "was not returned.",
        )


_HANDLES = []  # of an answer that returns it from every call


def into_one_list(handles):
    _HANDLES[:] = handles
    return _HANDLES


_OPTIMIZERS = {}  # where some keep what they should not share


def on_each(model, make_hook, register="register_post_accumulate_grad_hook"):
    return [getattr(param, register)(make_hook(param)) for param in _trained(model)]


def late_binding(model, make_optimizer, count=1):
    handles, calls = [], dict.fromkeys(_trained(model), 0)
    for param in _trained(model):
        optimizer = make_optimizer([param])

        def step(param):
            calls[param] += 1
            if calls[param] % count == 0:
                optimizer.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023

        handles.append(param.register_post_accumulate_grad_hook(step))
    return handles


def when_all_arrived(model, make_optimizer):
    optimizer = make_optimizer(_trained(model))

    def step(grads):
        optimizer.step()
        optimizer.zero_grad()

    return [register_multi_grad_hook(_trained(model), step)]


def thawing(model, make_optimizer):
    model.requires_grad_(True)
    return step_in_backward(model, make_optimizer)


def with_frozen(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in model.parameters()}
    return [param.register_post_accumulate_grad_hook(lambda param: small[param].step()) for param in small]


def with_tensor_hooks(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in _trained(model)}
    return on_each(model, lambda param: lambda grad: small[param].step(), register="register_hook")


def without_freeing(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in _trained(model)}
    return on_each(model, lambda param: lambda param: small[param].step())


def filling_zeros(model, make_optimizer):
    small = {param: make_optimizer([param]) for param in _trained(model)}

    def step(param):
        small[param].step()
        small[param].zero_grad(set_to_none=False)

    return on_each(model, lambda param: step)


def made_anew(model, make_optimizer):
    def step(param):
        optimizer = make_optimizer([param])
        optimizer.step()
        optimizer.zero_grad()

    return on_each(model, lambda param: step)


def at_the_last(model, make_optimizer):
    optimizer = make_optimizer(_trained(model))
    arrived = []

    def step(param):
        arrived.append(param)
        if len(arrived) == len(_trained(model)):
            optimizer.step()
            optimizer.zero_grad()
            arrived.clear()

    return on_each(model, lambda param: step)


def step_of_the_latest(model, make_optimizer):
    _OPTIMIZERS.clear()
    _OPTIMIZERS.update({param: make_optimizer([param]) for param in _trained(model)})

    def step(param):
        _OPTIMIZERS[param].step()
        _OPTIMIZERS[param].zero_grad()

    return on_each(model, lambda param: step)


def one_optimizer(model, make_optimizer):
    optimizer = make_optimizer(_trained(model))

    def step(param):
        optimizer.step()
        optimizer.zero_grad()

    return on_each(model, lambda param: step)


def hoarding(model, make_optimizer):
    small, kept = {param: make_optimizer([param]) for param in _trained(model)}, {}

    def keep(param):
        kept[param], param.grad = param.grad, None
        if len(kept) == len(small):
            for one, grad in kept.items():
                one.grad = grad
                small[one].step()
                small[one].zero_grad()
            kept.clear()

    return on_each(model, lambda param: keep)


STEP_IN_BACKWARD = Exercise(
    "15.B",
    examine_step_in_backward,
    step_in_backward,
    {
        "raised": with_frozen,
        "nothing_moved": with_tensor_hooks,
        "one_moved": late_binding,
        "some_moved": when_all_arrived,
        "unfrozen": thawing,
        "not_freed": without_freeing,
        "zeros_kept": filling_zeros,
        "later_steps": made_anew,
        "freed_late": at_the_last,
        "no_handles": lambda model, make_optimizer: print(len(step_in_backward(model, make_optimizer))),
        "other_items": lambda model, make_optimizer: list(enumerate(step_in_backward(model, make_optimizer))),
        "same_object": lambda model, make_optimizer: into_one_list(step_in_backward(model, make_optimizer)),
        "shared_optimizer": one_optimizer,
        "waited_for_all": hoarding,
        "not_removed": lambda model, make_optimizer: step_in_backward(model, make_optimizer)[:1],
        "first_step": lambda model, make_optimizer: step_in_backward(model, partial(torch.optim.SGD, lr=1.0)),
        "latest_call": step_of_the_latest,
    },
    zh="权重与普通训练一致，任何时刻都只有刚存好的那个梯度活着。",
    en="The weights are those of ordinary training, and at any time only the gradient just stored is alive.",
)

# ---- 15.C: the same with gradient accumulation ----


def step_every(model, make_optimizer, count):
    params = [param for param in model.parameters() if param.requires_grad]
    optimizers = {param: make_optimizer([param]) for param in params}
    arrived = dict.fromkeys(params, 0)

    def step(param):
        arrived[param] += 1
        if arrived[param] % count == 0:
            optimizers[param].step()
            optimizers[param].zero_grad()

    return [param.register_post_accumulate_grad_hook(step) for param in params]


def examine_step_every(answer):
    for make_optimizer, count in zip(OPTIMIZERS, (2, 3), strict=True):
        model, twin, batches = _twins()
        made = []
        handles = _handles(answer(model, _counting(make_optimizer, made), count))
        reference = make_optimizer(_trained(twin))
        for number, x in enumerate(batches[: 3 * count], start=1):
            before = copy.deepcopy(model)
            _backward_of(model, x)
            _loss(twin, x).backward()
            if number % count == 0:
                reference.step()
                reference.zero_grad()
            _examine_frozen(model)
            if number == count:
                moved = _moved(model, before)
                _examine_one(moved)
                if 1 < sum(moved) < len(moved):
                    refuse(
                        "some_moved",
                        zh=f"第 {number} 次反向（`count` 为 {count}）之后，{len(moved)} 个参数里只有 {sum(moved)} 个更新了。每个要训练的参数都挂上钩子了吗？",
                        en=f"After backward number {number} (`count` is {count}) only {sum(moved)} of {len(moved)} parameters were updated. Does every trained parameter have a hook?",
                    )
            _examine_every(model, twin, before, number, count)
        _examine_removed(handles, model, batches[-1], count)
        _examine_own_optimizers(made)
    _examine_own_count(answer)
    _examine_two_models(answer, counts=(2, 3))


class _Two(nn.Module):
    """Two numbers, of which a forward may leave out the second."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, both):
        return (self.always + (self.sometimes if both else 0)).sum()


def _examine_own_count(answer):
    model = _Two()
    handles = _handles(answer(model, partial(torch.optim.SGD, lr=0.25), 2))
    values, others = [], []
    for both in (False, True, True):
        model(both).backward()
        values.append(model.always.item())
        others.append(model.sometimes.item())
    for handle in handles:
        handle.remove()
    if values != [1.0, 0.5, 0.5] or others != [1.0, 1.0, 0.5]:
        refuse(
            "one_count",
            zh=f"`count` 为 2，学习率 0.25，用到的参数每次收到梯度 1。一个参数 3 次反向都用到，它的值应当是 `[1.0, 0.5, 0.5]`，得到 `{values}`；"
            f"另一个第 1 次没用到，应当是 `[1.0, 1.0, 0.5]`，得到 `{others}`。每个参数各数各的。",
            en=f"With `count` 2, learning rate 0.25 and a gradient of 1 for what is reached: a parameter that 3 backwards reach should have "
            f"the values `[1.0, 0.5, 0.5]`, found `{values}`; another, which the 1st leaves out, `[1.0, 1.0, 0.5]`, found `{others}`. "
            "Each parameter keeps its own count.",
        )


def _examine_every(model, twin, before, number, count):
    same = _same(model, twin)
    if all(same) and number % count == 0 and any(param.grad is not None for param in model.parameters()):
        refuse(
            "not_freed",
            zh="更新的时机和结果都对，但更新之后 `.grad` 还留着：不是零，就会算进下一轮；是零，也照样占内存。",
            en="When and how it updates is right, but after the update `.grad` is still there: if it is not zero it joins the next "
            "round, and zeros take memory too.",
        )
    if all(same):
        return
    if number % count:
        too_early = f"第 {number} 次反向（`count` 为 {count}）之后，有参数已经更新了。"
        refuse(
            "too_early",
            zh=too_early + "每个参数各数各的吗？更新一次之后，计数还对吗？",
            en=f"After backward number {number} (`count` is {count}) some parameter was updated already. Does each "
            "parameter keep its own count? And is the count right after an update?",
        )
    if all(_same(model, before)):
        refuse(
            "never",
            zh=f"第 {number} 次反向（`count` 为 {count}）之后应当更新，参数却没有变。触发第几次时更新？更新过一次之后，计数还对吗？",
            en=f"After backward number {number} (`count` is {count}) an update is due, and no parameter has changed. At "
            "which firing does yours update? And is the count right after an update?",
        )
    refuse(
        "other_sum",
        zh=f"更新的时机对了，权重却和普通训练的不同。用到的是这 {count} 次梯度之和吗？有没有在中途清掉，有没有除以什么？状态存在同一个优化器里吗？",
        en=f"The moment of the update is right, the weights differ from ordinary training. Was the sum of {count} gradients "
        "used, none dropped on the way, not divided by anything? Does one optimizer keep the state?",
    )


def stepping(decide, *, free_always=False, divide=False, free=True):
    """An answer with one small optimizer per parameter that steps where `decide(calls, count)`."""

    def answer(model, make_optimizer, count):
        small = {param: make_optimizer([param]) for param in _trained(model)}
        calls = dict.fromkeys(small, 0)

        def step(param):
            calls[param] += 1
            due = decide(calls, param, count)
            if due:
                if divide:
                    param.grad /= count
                small[param].step()
            if free and (due or free_always):
                small[param].zero_grad()

        return on_each(model, lambda param: step)

    return answer


def one_for_all(model, make_optimizer, count):
    optimizer, calls = make_optimizer(_trained(model)), dict.fromkeys(_trained(model), 0)

    def step(param):
        calls[param] += 1
        if calls[param] % count == 0:
            optimizer.step()
            optimizer.zero_grad()

    return on_each(model, lambda param: step)


def own_turn(calls, param, count):
    return calls[param] % count == 0


def weights_only(model, make_optimizer, count):
    handles = step_every(model, make_optimizer, count)
    for param, handle in zip(_trained(model), handles, strict=True):
        if param.dim() < 2:
            handle.remove()
    return handles


def every_by_the_latest(model, make_optimizer, count):
    calls = dict.fromkeys(_trained(model), 0)
    _OPTIMIZERS.clear()
    _OPTIMIZERS.update({param: make_optimizer([param]) for param in calls})

    def step(param):
        calls[param] += 1
        if calls[param] % count == 0:
            _OPTIMIZERS[param].step()
            _OPTIMIZERS[param].zero_grad()

    return on_each(model, lambda param: step)


def every_twice(model, make_optimizer, count):
    step_every(model, make_optimizer, count)
    return step_every(model, make_optimizer, count)


def one_count_of_backwards(model, make_optimizer, count):
    small, calls = {param: make_optimizer([param]) for param in _trained(model)}, []

    def step(param):
        if len(calls) % count == 0:
            small[param].step()
            small[param].zero_grad()

    counting = register_multi_grad_hook(list(small), calls.append, mode="any")
    return [counting, *on_each(model, lambda param: step)]


def a_hook_on_the_first(model, make_optimizer, count):
    optimizer, calls = make_optimizer(_trained(model)), []

    def step(param):
        calls.append(param)
        if len(calls) % count == 0:
            optimizer.step()
            optimizer.zero_grad()

    return [_trained(model)[0].register_post_accumulate_grad_hook(step)]


STEP_EVERY = Exercise(
    "15.C",
    examine_step_every,
    step_every,
    {
        "too_early": stepping(lambda calls, param, count: sum(calls.values()) % count == 0),
        "other_sum": stepping(own_turn, free_always=True),
        "not_freed": stepping(own_turn, free=False),
        "never": stepping(lambda calls, param, count: calls[param] == count),
        "others_updated": one_for_all,
        "some_moved": weights_only,
        "no_handles": lambda model, make_optimizer, count: print(len(step_every(model, make_optimizer, count))),
        "raised": lambda model, make_optimizer, count: with_frozen(model, make_optimizer),
        "one_moved": lambda model, make_optimizer, count: late_binding(model, make_optimizer, count),
        "unfrozen": lambda model, make_optimizer, count: step_every(model.requires_grad_(True), make_optimizer, count),
        "one_count": one_count_of_backwards,
        "shared_optimizer": a_hook_on_the_first,
        "other_items": lambda model, make_optimizer, count: list(enumerate(step_every(model, make_optimizer, count))),
        "same_object": lambda model, make_optimizer, count: into_one_list(step_every(model, make_optimizer, count)),
        "not_removed": every_twice,
        "latest_call": every_by_the_latest,
    },
    zh="结果与普通的梯度累积一致。内存呢？攒着的时候一点也没省。",
    en="The result is that of ordinary gradient accumulation. And the memory? While gradients add up, none is saved.",
)

CHECKS = [
    Prediction(
        "15.1",
        zh="只有最后到的 `a` 被清零。`b` 和 `c` 的梯度早已存进 `.grad`，而且存的是另一份：钩子手里的那份改了也没用。",
        en="Only `a`, the last to arrive, was zeroed. The gradients of `b` and `c` had been stored in `.grad` before, in memory of their own: editing what the hook holds does nothing to them.",
    ),
    Prediction(
        "15.2",
        zh="钩子攥着全部 8 个梯度，直到最后一个到达；于是先到的 7 个存进 `.grad` 时都被复制了一份：8 + 7。等大家到齐，代价是梯度的内存差不多翻倍。",
        en="The hook holds all 8 gradients until the last has come, so the 7 earlier ones were copied when they were stored in `.grad`: 8 + 7. Waiting for everybody nearly doubles the memory of gradients.",
    ),
    Prediction(
        "15.3",
        zh="每次反向之后都更新了一次：第一次梯度是 2，`w` 变成 0.5；第二次的梯度已经在新的 `w` 上算，是 1，`w` 变成 0.25。梯度累积要攒够了才更新，这个钩子却不等。",
        en="Each backward ended in an update: the first gradient is 2 and `w` becomes 0.5; the second is taken at the new `w`, so it is 1, and `w` becomes 0.25. Gradient accumulation updates when the sum is complete; this hook does not wait for it.",
    ),
    RECORD_NORMS,
    STEP_IN_BACKWARD,
    STEP_EVERY,
]
