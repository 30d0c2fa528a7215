"""Checks of notebook 43: what a layer costs."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from hooklab.course.check import Exercise, refuse, refuse_first
from hooklab.course.checks.models import Before, fails, refuse_hooks

# ---- 43.A: FLOPs of attention, from shapes ----


def attention_flops(module, query, key):
    size, first = module.embed_dim, module.batch_first
    batch, steps = query.shape[:2] if first else query.shape[1::-1]
    others = key.shape[1] if first else key.shape[0]
    inputs = (steps + 2 * others) * size * size
    products = 2 * steps * others * size
    output = steps * size * size
    return 2 * batch * (inputs + products + output)


FLOPS = [  # `got` is not what is wanted; `inputs`, `products` and `output` are the three parts of that
    ("no_number", lambda t: not isinstance(t.got, int | float) or isinstance(t.got, bool)),
    ("half", lambda t: 2 * t.got == t.want),
    ("no_products", lambda t: t.got == t.want - t.products),
    ("one_product", lambda t: t.got == t.want - t.products // 2),
    ("each_head", lambda t: t.got == t.want + (t.heads - 1) * t.products),
    ("no_output", lambda t: t.got == t.want - t.output),
    ("no_inputs", lambda t: t.got == t.want - t.inputs),
    ("one_input", lambda t: t.got == t.want - t.inputs + t.output),
    ("no_batch", lambda t: t.got * t.batch == t.want),
    ("other_dimension", lambda t: t.got == sum(_parts(t.size, t.steps, t.batch, t.batch))),
    ("same_steps", lambda t: t.got == sum(_parts(t.size, t.batch, t.steps, t.steps))),
    ("wrong_number", lambda t: True),
]

CASES = [  # embed_dim, heads, batch, steps of the query and of the key, batch_first
    (8, 2, 3, 5, 5, True),
    (12, 4, 3, 5, 5, False),
    (12, 1, 2, 7, 7, True),
    (8, 4, 3, 5, 7, True),
    (8, 4, 2, 9, 4, False),
]


def _parts(size, batch, steps, others):
    """The projections of the inputs, the two products, and the projection of the output."""
    inputs = 2 * batch * (steps + 2 * others) * size * size
    return inputs, 4 * batch * steps * others * size, 2 * batch * steps * size * size


def examine_attention_flops(answer):
    for size, heads, batch, steps, others, first in CASES:
        module, ran = nn.MultiheadAttention(size, heads, batch_first=first), []
        module.register_forward_pre_hook(lambda module, args, ran=ran: ran.append(1))
        query, key = (torch.ones((batch, n, size) if first else (n, batch, size)) for n in (steps, others))
        got = answer(module, query, query if others == steps else key)
        if ran:
            refuse("ran")
        facts = {"size": size, "heads": heads, "batch": batch, "steps": steps, "first": first}
        inputs, products, output = parts = _parts(size, batch, steps, others)
        facts.update(inputs=inputs, products=products, output=output, want=sum(parts))
        if isinstance(got, Tensor) or got != sum(parts):
            refuse_first(FLOPS, got=got, **facts)


ATTENTION_FLOPS = Exercise("43.A", examine_attention_flops, attention_flops)

# ---- 43.B: own seconds by class ----


def seconds_by_type(model, run, clock):
    running, own = [], defaultdict(float)

    def begin(module, args):
        running.append([clock(), 0])

    def end(module, args, output):
        start, inside = running.pop()
        whole = clock() - start
        own[type(module).__name__] += whole - inside
        if running:
            running[-1][1] += whole

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(begin))
        handles.append(module.register_forward_hook(end, always_call=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return dict(own)


class _Clock:
    """Tells the seconds that layers have worked."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Work(nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        self.clock.now += self.seconds
        return x


class Block(nn.Module):
    """Works for a second before the layers inside, and for one after them."""

    def __init__(self, clock, *layers):
        super().__init__()
        self.clock, self.layers = clock, nn.ModuleList(layers)

    def forward(self, x):
        self.clock.now += 1
        for layer in self.layers:
            x = layer(x)
        self.clock.now += 1
        return x


class Spare(nn.Module):
    """Is never called."""


class Net(Block):
    def __init__(self, clock, *layers):
        super().__init__(clock, *layers)
        self.spare = Spare()


class Again(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, x, more=2):
        self.clock.now += 3
        if more:
            self(x, more - 1)
        self.clock.now += 4
        return x


class Broken(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, x):
        self.clock.now += 2
        raise RuntimeError("the data has ended")


class Careful(Block):
    """Goes on without a layer that raises."""

    def forward(self, x):
        self.clock.now += 1
        for layer in self.layers:
            try:
                x = layer(x)
            except RuntimeError:
                self.clock.now += 1
        return x


def _net(clock):
    shared = Work(clock, 4)
    return Net(clock, Block(clock, Block(clock, Work(clock, 2)), shared), Block(clock, shared))


SECONDS = [  # `got` is a dictionary from words to numbers
    ("ran_twice", lambda t: len(t.runs) > 1),
    ("not_run", lambda t: not t.runs),
    ("module_names", lambda t: t.got.keys() & {"", "layers.0", "layers.1"}),
    ("from_before", lambda t: t.name),
    ("not_called", lambda t: t.got.keys() & {"Spare", "ModuleList"}),
    ("other_clock", lambda t: all(0 <= seconds < 0.5 for seconds in t.got.values())),
    ("absolute", lambda t: max(t.got.values()) > 50),
    ("inclusive", lambda t: t.got.get("Net") == 18),
    ("grandchildren", lambda t: t.got.get("Net", 2) < 2),
    ("negative", lambda t: min(t.got.values()) < 0),
    ("last_call", lambda t: t.got.get("Work") == 4),
    ("shared_once", lambda t: t.got.get("Work") == 6),
    ("nested_class", lambda t: t.got.get("Work") == 10 and t.got.get("Block", 6) < 6),
    ("wrong_seconds", lambda t: t.got != {"Net": 2, "Block": 6, "Work": 10}),
]


def examine_seconds_by_type(answer):
    clock, runs, x = _Clock(), [], torch.ones(1)
    model = _net(clock)
    model.register_forward_hook(_look)

    def run():
        runs.append(1)
        model(x)

    before = Before(model)
    got = _seconds(answer(model, run, clock))
    refuse_hooks(before, "hooks_left")
    foreign = got.keys() & {"Again", "Broken", "Careful"}
    refuse_first(SECONDS, got=got, runs=runs, name=min(foreign, default=""))
    _examine_others(answer, clock, x)
    part = _seconds(answer(model, lambda: model.layers[1](x), clock))
    if part != {"Block": 2, "Work": 4}:
        refuse("ran_the_model", got=part)
    broken = Block(clock, Work(clock, 1), Broken(clock))
    with fails(broken):
        answer(broken, lambda: broken(x), clock)


def _examine_others(answer, clock, x):
    again = Again(clock)
    got = _seconds(answer(again, lambda: again(x), clock))
    if foreign := got.keys() - {"Again"}:
        refuse("from_before", name=min(foreign))
    if got != {"Again": 21}:
        refuse("calls_itself", got=got)
    careful = Careful(clock, Broken(clock), Work(clock, 5))
    got = _seconds(answer(careful, lambda: careful(x), clock))
    if got != {"Careful": 2, "Broken": 2, "Work": 5}:
        refuse("error_inside", got=got)


def _seconds(got):
    if not isinstance(got, dict) or not got:
        refuse("no_dict", got=got)
    for name, seconds in got.items():
        if not isinstance(name, str):
            refuse("no_words", item=name)
        if not isinstance(seconds, int | float):
            refuse("no_seconds", item=seconds)
    return {name: round(seconds, 6) for name, seconds in got.items()}


def _look(*args):
    """A hook that changes nothing."""


SECONDS_BY_TYPE = Exercise("43.B", examine_seconds_by_type, seconds_by_type)

EXERCISES = [ATTENTION_FLOPS, SECONDS_BY_TYPE]
