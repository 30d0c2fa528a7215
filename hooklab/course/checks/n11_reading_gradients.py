"""Checks of notebook 11: reading gradients."""

import gc
import warnings
import weakref

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, Prediction, expect_like, refuse, refuse_zero_for_none

# ---- 11.A: the gradient of any tensor, without touching a .grad ----


def gradient_of(loss, tensor):
    return torch.autograd.grad(loss, tensor)[0]


def examine_gradient_of(answer):
    for power in (3, 4):
        x = torch.randn(2, 3, requires_grad=True)
        hidden = x * 2
        loss = (hidden**power).sum()
        got = answer(loss, hidden)
        touched = x.grad is not None or loss.retains_grad
        _examine_gradient(got, power * hidden.detach() ** (power - 1), hidden, touched)
    leaf, other = torch.randn(3, requires_grad=True), torch.ones(3, requires_grad=True)
    leaf.grad = torch.full((3,), 7.0)
    got = answer((leaf**2 * other).sum(), leaf)
    kept = leaf.grad is not None and torch.equal(leaf.grad, torch.full((3,), 7.0))
    _examine_gradient(got, 2 * leaf.detach(), leaf, touched=not kept or other.grad is not None)


def _examine_gradient(got, want, tensor, touched):
    if isinstance(got, tuple | list) and all(item is None or isinstance(item, Tensor) for item in got):
        refuse(
            "tuple",
            zh=f"返回的是长度为 {len(got)} 的 `{type(got).__name__}`。`torch.autograd.grad` 给每个输入各返回一个梯度，这里只要一个张量。",
            en=f"Found a `{type(got).__name__}` of {len(got)}. `torch.autograd.grad` returns one gradient per input; "
            "here a single tensor is wanted.",
        )
    if got is None and touched:
        refuse(
            "got_none",
            zh="得到的是 `None`。是不是忘了 `return`？或者返回的是中间张量的 `.grad`：它不是叶子，反向传播之后那里什么也没有。",
            en="Found `None`. Is `return` missing? Or is it the `.grad` of a tensor in the middle? That is no leaf, and after "
            "backward its `.grad` holds nothing.",
        )
    if got is None:
        refuse(
            "returned_nothing",
            zh="函数返回了 `None`：是不是忘了 `return`，或者返回了一个没有人写过的 `.grad`？",
            en="The function returned `None`: is `return` missing, or does it return a `.grad` that nothing has filled?",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading the .grad of a tensor that is no leaf warns
        filled = tensor.retains_grad or (not tensor.is_leaf and tensor.grad is not None)
    if touched or filled:
        refuse(
            "filled_grad",
            zh="有张量的 `.grad` 被写入或者清掉了；如果那是模型的参数，下一次 `optimizer.step()` 就不对了。有一个函数只算梯度，不碰 `.grad`。",
            en="A `.grad` was filled or cleared; were it a parameter's, the next "
            "`optimizer.step()` would go wrong. There is a function that computes and leaves every `.grad` alone.",
        )
    if tensor._backward_hooks:
        refuse(
            "left_behind",
            zh="函数返回以后，`tensor` 上还挂着你的钩子，以后每次反向都会再触发。",
            en="After the function has returned, your hook is still on `tensor` and fires in every later backward.",
        )
    if isinstance(got, Tensor) and got.requires_grad:
        refuse(
            "attached",
            zh="返回的梯度自己还带着计算图；只要它还在，整张图就占着内存。这里不需要再对它求导。",
            en="The gradient carries a graph of its own, and the whole graph stays in memory as long as it does. Nobody "
            "differentiates it again here.",
        )
    expect_like(got, want, "梯度", "the gradient")


def got_none(loss, tensor):
    loss.backward()
    return tensor.grad if tensor.is_leaf else None


def hooked(loss, tensor):
    seen = []
    tensor.register_hook(seen.append)
    torch.autograd.grad(loss, tensor)
    return seen[0]


def filled_only_its_own(loss, tensor):
    loss.backward(inputs=[tensor])
    return tensor.grad


GRADIENT_OF = Exercise(
    "11.A",
    examine_gradient_of,
    gradient_of,
    {
        "wrong_type": lambda loss, tensor: gradient_of(loss, tensor).tolist(),
        "tuple": lambda loss, tensor: torch.autograd.grad(loss, tensor),
        "filled_grad": filled_only_its_own,
        "got_none": got_none,
        "returned_nothing": lambda loss, tensor: print(torch.autograd.grad(loss, tensor)[0].shape),
        "left_behind": hooked,
        "attached": lambda loss, tensor: torch.autograd.grad(loss, tensor, create_graph=True)[0],
        "wrong_values": lambda loss, tensor: torch.ones_like(tensor),
        "wrong_shape": lambda loss, tensor: torch.autograd.grad(loss, tensor)[0].mean(),
    },
    zh="只求了想要的梯度，没有碰任何 `.grad`。",
    en="Just the gradient that was asked for, and no `.grad` was touched.",
)

# ---- 11.B: a list into which every gradient of a tensor is copied ----


def record(tensor):
    gradients = []
    tensor.register_hook(lambda grad: gradients.append(grad.detach().clone()))
    return gradients


FACTORS = (3.0, 0.0, 5.0)


def examine_record(answer):
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = x * 2
    gradients = answer(y)
    if not isinstance(gradients, list):
        refuse(
            "not_a_list",
            zh=f"应当返回一个列表，得到的是 `{type(gradients).__name__}`。",
            en=f"Return a list; found `{type(gradients).__name__}`.",
        )
    if gradients or answer(x * 3) is gradients:
        refuse(
            "shared_list",
            zh="每次调用 `record` 都应当得到一个新的空列表；这一个里面已经有东西，或者就是上次那一个。",
            en="Every call of `record` should return a new, empty list; this one already holds something, or is the one "
            "from the last call.",
        )
    for factor in FACTORS:
        (y * factor).sum().backward(retain_graph=True)
    _examine_recorded(gradients)
    if x.grad.tolist() != [16.0, 16.0]:
        refuse(
            "changed",
            zh=f"记录的同时改掉了梯度：`x.grad` 应为 `[16.0, 16.0]`，现在是 `{x.grad.tolist()}`。钩子的返回值只要不是 `None`，就会顶替梯度；在钩子里原地改它也一样。",
            en=f"Recording has changed the gradient: `x.grad` should be `[16.0, 16.0]`, it is `{x.grad.tolist()}`. "
            "Whatever a hook returns, other than `None`, replaces the gradient; so does an edit in place.",
        )
    _examine_leaf(answer)
    _examine_copy(answer)
    _examine_freed(answer)


def _examine_recorded(gradients):
    if not gradients:
        refuse(
            "nothing_recorded",
            zh="反向传播跑了 3 遍，你返回的那个列表还是空的。钩子还挂着吗？它往里追加的，是不是你返回的那同一个列表？",
            en="Backward ran 3 times and the list you returned is empty. Is the hook still on the tensor? Does it add to "
            "that very list, or to a new one?",
        )
    if gradients[0] is None:
        refuse(
            "read_dot_grad",
            zh="记下来的是 `None`。钩子触发时梯度还在路上，`.grad` 里什么也没有；要记的是传给钩子的那个参数。",
            en="What was recorded is `None`. When the hook fires the gradient is still on its way and `.grad` is empty; "
            "record the argument that the hook is given.",
        )
    if len(gradients) == 2 and all(isinstance(found, Tensor) and found.any() for found in gradients):
        refuse_zero_for_none()
    if len(gradients) != len(FACTORS):
        refuse(
            "only_last",
            zh=f"反向传播跑了 3 遍，应当有 3 项，列表里却有 {len(gradients)} 项。",
            en=f"Backward ran 3 times and should leave 3 entries, but the list has {len(gradients)}.",
        )
    for found, factor in zip(gradients, FACTORS, strict=True):
        want = torch.full((2,), factor, dtype=torch.float64)
        expect_like(found, want, "记下的每个梯度", "each recorded gradient")


def _examine_leaf(answer):
    leaf = torch.ones(2, requires_grad=True)
    gradients = answer(leaf)
    for factor in (3, 5):
        (leaf * factor).sum().backward()
    found = [grad.tolist() if isinstance(grad, Tensor) else grad for grad in gradients]
    if found != [[3.0, 3.0], [5.0, 5.0]]:
        refuse(
            "leaf",
            zh=f"中间张量对了，`tensor` 是叶子时却不对：反向两遍，应当记下 `[[3.0, 3.0], [5.0, 5.0]]`，得到的是 `{found}`。流过叶子的梯度也要记。",
            en=f"Right for a tensor in the middle, wrong where `tensor` is a leaf: two backwards should leave "
            f"`[[3.0, 3.0], [5.0, 5.0]]`; found `{found}`. What passes through a leaf counts as well.",
        )

    if leaf.grad is None or leaf.grad.tolist() != [8.0, 8.0]:
        refuse(
            "leaf_grad",
            zh=f"记下的都对，可是叶子自己的 `.grad` 应当是 `[8.0, 8.0]`，现在是 `{leaf.grad if leaf.grad is None else leaf.grad.tolist()}`：只看，不要动它。",
            en=f"What was recorded is right, but the leaf's own `.grad` should be `[8.0, 8.0]` and is "
            f"`{leaf.grad if leaf.grad is None else leaf.grad.tolist()}`: look, and leave it alone.",
        )


def _examine_copy(answer):
    # Careless neighbours: on the same tensor, on a leaf, on another that is given the same gradient.
    for place in ("middle", "leaf", "beside"):
        leaf = torch.ones(2, requires_grad=True)
        one, other = leaf * 2, leaf * 3
        tensor, careless = {"middle": (one, one), "leaf": (leaf, leaf), "beside": (other, one)}[place]
        gradients = answer(tensor)
        careless.register_hook(lambda grad: grad.mul_(100))
        output = one + other if place == "beside" else tensor
        (output * torch.tensor([3.0, 4.0])).sum().backward()
        if gradients[0].tolist() != [3.0, 4.0]:
            refuse(
                "not_a_copy",
                zh="别的钩子原地改了梯度，你记下的值也跟着变了：要么记下的和往后流的是同一块内存（没有复制，或者把副本又 `return` 了），要么是在那个钩子之后才记的。",
                en="Another hook edited the gradient in place and your record shows it: either what you keep and what flows on are "
                "the same memory (no copy was made, or the hook did `return` the copy), or the note is taken after that hook.",
            )


def _examine_freed(answer):
    y = torch.ones(2, requires_grad=True) * 2
    alive = weakref.ref(y)
    gradients = answer(y)
    (y * 3).sum().backward()
    del y, gradients
    gc.collect()
    if alive() is not None:
        refuse(
            "never_freed",
            zh="张量用完之后没有被释放：有东西还引用着它，多半是钩子自己。这样的循环连 `gc.collect()` 也回收不了。",
            en="The tensor is not freed after use: something still refers to it, most likely the hook itself. Not even "
            "`gc.collect()` breaks such a circle.",
        )


def nothing_recorded(tensor):
    gradients = []

    def hook(grad):
        gradients = [grad.clone()]  # noqa: F841

    tensor.register_hook(hook)
    return gradients


SHARED = []


def shared_list(tensor):
    tensor.register_hook(lambda grad: SHARED.append(grad.clone()))
    return SHARED


def only_last(tensor):
    gradients = []

    def hook(grad):
        gradients[:] = [grad.clone()]

    tensor.register_hook(hook)
    return gradients


def read_dot_grad(tensor):
    gradients = []
    tensor.register_hook(lambda grad: gradients.append(None if tensor.is_leaf else tensor.__dict__.get("grad")))
    return gradients


def changed(tensor):
    gradients, first = [], {}

    def hook(grad):
        gradients.append(grad.clone())
        return first.setdefault("grad", grad)

    tensor.register_hook(hook)
    return gradients


def not_a_copy(tensor):
    gradients = []
    tensor.register_hook(lambda grad: gradients.append(grad))
    return gradients


def never_freed(tensor):
    gradients = []

    def hook(grad):
        assert grad.shape == tensor.shape
        gradients.append(grad.clone())

    tensor.register_hook(hook)
    return gradients


def leaf_grad(tensor):
    gradients = []

    def take(leaf):
        gradients.append(leaf.grad.clone())
        leaf.grad = None

    if not tensor.is_leaf:
        return record(tensor)
    tensor.register_post_accumulate_grad_hook(take)
    return gradients


def middle_only(tensor):
    return record(tensor) if not tensor.is_leaf else []


def zeros_left_out(tensor):
    gradients = []
    tensor.register_hook(lambda grad: gradients.append(grad.clone()) if grad.any() else None)
    return gradients


def record_float32(tensor):
    gradients = []
    tensor.register_hook(lambda grad: gradients.append(grad.clone().float()))
    return gradients


def record_numbers(tensor):
    gradients = []
    tensor.register_hook(lambda grad: gradients.append(grad.tolist()))
    return gradients


RECORD = Exercise(
    "11.B",
    examine_record,
    record,
    {
        "nothing_recorded": nothing_recorded,
        "only_last": only_last,
        "shared_list": shared_list,
        "wrong_type": record_numbers,
        "wrong_dtype": record_float32,
        "leaf": middle_only,
        "leaf_grad": leaf_grad,
        "zero_for_none": zeros_left_out,
        "read_dot_grad": read_dot_grad,
        "changed": changed,
        "not_a_copy": not_a_copy,
        "never_freed": never_freed,
        "not_a_list": lambda tensor: tensor.register_hook(lambda grad: None),
    },
    zh="每一次都记下了副本，梯度没有改动，张量也能照常释放。这正是 `watch` 的核心。",
    en="A copy of every gradient, nothing changed, and the tensor can be freed. This is the heart of `watch`.",
)

# ---- 11.C: which parameters did backward not reach? ----


def without_gradient(model):
    return [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]


class _HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.forgotten, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.dead = nn.Parameter(torch.ones(2))  # reached, with a gradient that is exactly zero
        self.frozen.requires_grad_(False)
        self.own = nn.Parameter(torch.ones(2))  # not used either

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.used(x)) + self.dead * 0


def examine_without_gradient(answer):
    model = _HalfUsed()
    model(torch.randn(4, 2)).sum().backward()
    _examine_names(answer(model))
    if filled := [name for name in ("forgotten.weight", "own") if model.get_parameter(name).grad is not None]:
        refuse(
            "filled_grad",
            zh=f"名字都对，可是 `{filled[0]}` 原来没有 `.grad`，你的函数返回以后有了：只看，不要填。",
            en=f"The names are right, but `{filled[0]}` had no `.grad`, and after your function has returned it has one. Look, do "
            "not fill.",
        )
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other[0](torch.randn(4, 2)).sum().backward()
    found = answer(other)
    if other[1].weight.grad is not None:
        refuse(
            "ran_backward",
            zh="反向已经由调用者跑过了；你的函数又跑了一遍，`1.weight` 本来没有 `.grad`，现在有了。只看，不要再跑。",
            en="The caller has run backward already; your function ran it again, and `1.weight`, which had no `.grad`, now has one. "
            "Only look.",
        )
    if sorted(found) != ["1.bias", "1.weight"]:
        refuse(
            "one_model_only",
            zh=f"换一个模型就不对了：第二层没有用到的 `Sequential`，应当得到 `['1.weight', '1.bias']`，得到的是 `{list(found)}`。里面若有上一个模型的名字：默认参数 `=[]` 只建一次。",
            en="It fails for another model: of a `Sequential` whose second layer is not used, `['1.weight', '1.bias']` "
            f"is wanted; found `{list(found)}`. Names of an earlier model in it? A default argument `=[]` is made only once.",
        )
    deep = answer(nn.Sequential(nn.Sequential(nn.Linear(2, 2))))
    if sorted(deep) != ["0.0.bias", "0.0.weight"]:
        refuse(
            "not_deep_enough",
            zh=f"模型套了两层 `Sequential`，还没有跑过反向，应当得到 `['0.0.weight', '0.0.bias']`，得到的是 `{list(deep)}`：子模块里还有子模块。",
            en=f"Of a `Sequential` inside a `Sequential`, without any backward, `['0.0.weight', '0.0.bias']` is wanted; found "
            f"`{list(deep)}`: submodules have submodules.",
        )


def _examine_names(got):
    if not isinstance(got, list | tuple | set) or any(not isinstance(name, str) for name in got):
        refuse(
            "not_names",
            zh="应当返回参数名（字符串）的列表，例如 `['fc.weight', 'fc.bias']`。",
            en="Return a list of parameter names (strings), such as `['fc.weight', 'fc.bias']`.",
        )
    if any(name.startswith("used") for name in got):
        refuse(
            "data_grad",
            zh="`used` 层的参数收到了梯度，却也在列表里。把它们的 `.grad` 打印出来看看；`.data` 和 `state_dict()` 给的是新张量，没有梯度。",
            en="The parameters of `used` did get a gradient and are listed. Print their `.grad`; `.data` and "
            "`state_dict()` hand out new tensors that have none.",
        )
    if "dead" in got:
        refuse(
            "zero_counted",
            zh="`dead` 收到了梯度，只是恰好为零。“梯度是零”和“没有梯度”是两回事。",
            en="`dead` did receive a gradient, which happens to be zero. 'The gradient is zero' and 'there is no "
            "gradient' are two different things.",
        )
    if any(name.startswith("frozen") for name in got):
        refuse(
            "frozen_counted",
            zh="被冻结的参数（`requires_grad=False`）本来就不该有梯度，列出来会掩盖真正的问题。",
            en="Frozen parameters (`requires_grad=False`) are not meant to have a gradient; listing them hides the real "
            "problem.",
        )
    if sorted(name for name in got if name.startswith("forgotten")) != ["forgotten.bias", "forgotten.weight"]:
        refuse(
            "missed",
            zh=f"`forgotten` 层的两个参数没有收到梯度，应当各列一次；得到的是 `{sorted(got)}`。",
            en=f"Both parameters of `forgotten` got no gradient and should be listed once; found `{sorted(got)}`.",
        )
    if sorted(got) != ["forgotten.bias", "forgotten.weight", "own"]:
        refuse(
            "missed_own",
            zh=f"参数 `own` 直接属于模型，不在任何一层里，它也没有收到梯度，应当以 `own` 这个名字列一次；得到的是 `{sorted(got)}`。",
            en=f"The parameter `own` belongs to the model itself and to no layer; it got no gradient either and should be listed "
            f"once, as `own`; found `{sorted(got)}`.",
        )


def by_layers(model):
    layers = model.named_children()
    return [f"{name}.{missing}" for name, layer in layers for missing in without_gradient(layer)]


def fills_with_zeros(model):
    names = without_gradient(model)
    for name in names:
        param = model.get_parameter(name)
        param.grad = torch.zeros_like(param)
    return names


def run_again(model):
    model(torch.ones(1, 2)).sum().backward()
    return without_gradient(model)


def named(model, is_listed):
    return [name for name, param in model.named_parameters() if is_listed(param)]


def of_direct_children(model):
    found = []
    for name, part in [("", model), *model.named_children()]:
        for own, param in part.named_parameters(prefix=name, recurse=False):
            if param.requires_grad and param.grad is None:
                found.append(own)
    return found


WITHOUT_GRADIENT = Exercise(
    "11.C",
    examine_without_gradient,
    without_gradient,
    {
        "not_deep_enough": of_direct_children,
        "data_grad": lambda model: named(model, lambda param: param.data.grad is None),
        "zero_counted": lambda model: named(model, lambda param: param.grad is None or not param.grad.any()),
        "frozen_counted": lambda model: named(model, lambda param: param.grad is None),
        "ran_backward": run_again,
        "one_model_only": lambda model: ["forgotten.weight", "forgotten.bias", "own"],
        "missed": lambda model: [name for name in without_gradient(model) if name.endswith("weight")],
        "missed_own": by_layers,
        "filled_grad": fills_with_zeros,
        "not_names": lambda model: [param for param in model.parameters() if param.grad is None],
        "raised": lambda model: named(model, lambda param: param.grad.sum() == 0),
    },
    zh="参数训不动，先用这个函数查一遍。",
    en="When a parameter does not train, this function is the first thing to run.",
)

CHECKS = [
    Prediction(
        "11.1",
        zh="`backward()` 往 `.grad` 里加，而不是覆盖：两次反向，读到的是两次之和。训练循环每步都要 `zero_grad()`，原因就在这里。",
        en="`backward()` adds to `.grad` and does not overwrite it: after two of them you read the sum of both. This is "
        "why a training loop calls `zero_grad()` in every step.",
    ),
    Prediction(
        "11.2",
        zh="除法的结果是算出来的，不再是叶子；真正的叶子是那个没有名字的 `torch.ones(3)`。优化器不接受 `scaled`。",
        en="The result of a division is computed, so it is no leaf; the real leaf is the `torch.ones(3)` that has no "
        "name any more. An optimizer refuses `scaled`.",
    ),
    Prediction(
        "11.3",
        zh="函数给 `latest` 赋了值，声明为全局的却是另一个名字。于是函数里的 `latest` 成了局部变量，全局的那个一直是 0.0。",
        en="The function assigns `latest` but declares another name as global, so its `latest` is a local variable and "
        "the global one stays 0.0.",
    ),
    Prediction(
        "11.4",
        zh="字典的键是每次注册的编号，不是函数本身：注册两次，就触发两次。对其中一个句柄调用 `.remove()`，只少触发一次。",
        en="The dictionary's keys are numbers, one per registration, not the functions: registered twice, it fires "
        "twice. `.remove()` of one handle takes off one.",
    ),
    GRADIENT_OF,
    RECORD,
    WITHOUT_GRADIENT,
]
