"""Every strategy x optimizer x accumulation x clipping x recomputing equals one process.

The reference is plain torch in one process on the global batch. `STRATEGIES=all pytest --timeout 0` tries
the whole product instead of a cover of its pairs.
"""

import functools
import itertools
import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from weft.testing import largest_difference, run_ranks

VOCABULARY, WIDTH, LENGTH, BATCH = 13, 6, 3, 8
STRATEGIES = ("replicate", "fully_shard", "keep", "hybrid", "zero1", "zero2", "zero3")
OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon")
if os.environ.get("STRATEGIES") == "all":
    OPTIMIZERS += ("nadam", "rmsprop")


@dataclass(frozen=True)
class Case:
    strategy: str
    optimizer: str = "adamw"
    steps: int = 1
    reduce: str = "last"
    clip: str = "off"
    recompute: str = "off"
    dtype: torch.dtype = torch.float64
    updates: int = 2

    @property
    def training(self):
        """What it is in one process."""
        return replace(self, strategy="none", reduce="last", recompute="off")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.by_hand = False

    def _inner(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        return checkpoint(self._inner, x, use_reentrant=False) if self.by_hand else self._inner(x)


class Net(nn.Module):
    """A little language model: tied weights, an odd vocabulary, a number as parameter, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, tokens):
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


def make_model(case):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Net().to(case.dtype)
    if case.optimizer == "muon":
        for p in model.parameters():
            p.requires_grad_(p.dim() == 2)
    return model


def make_optimizer(case, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(
            [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3}],
            lr=1e-2,
            eps=1e-3,
            weight_decay=0.1,
        )
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    if case.optimizer == "adafactor":
        return torch.optim.Adafactor(parameters, lr=1e-2, weight_decay=0.1)
    if case.optimizer == "nadam":
        return torch.optim.NAdam(parameters, lr=1e-2, eps=1e-3)
    if case.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=1e-2, eps=1e-3, centered=True, momentum=0.9)
    return torch.optim.Muon(parameters, lr=1e-2)


def clip(case, model, ctx):
    if case.clip == "norm" and (ctx is None or torch.__version__ >= "2.10"):  # 2.9 rounds norms of shards to float32
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    if case.clip == "weft" and ctx is None:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    if case.clip in ("norm", "weft"):
        return weft.clip_grads(model, ctx, max_norm=0.05)
    if case.clip == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return torch.zeros(())


@functools.cache
def batches(count):
    draw = torch.Generator().manual_seed(6)
    return [torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=draw) for _ in range(count)]


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@functools.cache
def reference(case):
    """Parameters and norms of the naive loop."""
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    norms = []
    for step in range(case.updates):
        for batch in batches(case.updates * case.steps)[step * case.steps : (step + 1) * case.steps]:
            (loss_of(model, batch) / case.steps).backward()
        norms.append(clip(case, model, None))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], norms


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def apply(case, model, ctx):
    """The strategy of a case on model and optimizer."""
    if case.recompute == "weft":
        model, ctx = weft.recompute(model, ctx, blocks=Block)
    if case.strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    elif case.strategy in ("fully_shard", "hybrid"):
        model, ctx = weft.fully_shard(model, ctx, units=Block)
    elif case.strategy == "keep":
        model, ctx = weft.fully_shard(model, ctx, reshard_after_forward=False)
    optimizer = make_optimizer(case, model)
    if case.strategy.startswith("zero"):
        options = {"units": Block} if case.strategy != "zero1" else {}
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(case.strategy[4:]), **options)
    elif case.optimizer in ("adafactor", "muon") and case.strategy != "replicate":
        optimizer, ctx = weft.gather_step(optimizer, ctx)
    return model, optimizer, ctx


def train(ctx, case):
    """The same as `reference`, by the strategy of the case."""
    model = make_model(case)
    for block in model.blocks:
        block.by_hand = case.recompute == "torch"
    model, optimizer, ctx = apply(case, model, ctx)
    loader = batches(case.updates * case.steps)
    if case.steps > 1:
        model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=case.steps, reduce=case.reduce)
    norms = []
    for window in loader:
        for batch in window if case.steps > 1 else [window]:
            mine = batch.chunk(ctx.world_size)[ctx.rank]
            (loss_of(model, mine) / case.steps).backward()
        norms.append(whole(clip(case, model, ctx)))
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p.detach()).clone() for p in model.parameters()], norms


def train_all(ctx, cases):
    return [train(ctx, case) for case in cases]


def cover(strategies):
    """A sample in which nearly every two values of different options meet; or all of them."""
    options = list(
        itertools.product(
            [(1, "last"), (4, "last"), (4, "every")], ["off", "norm", "weft", "value"], ["off", "weft", "torch"]
        )
    )
    cases = []
    for row, (strategy, optimizer) in enumerate(itertools.product(strategies, OPTIMIZERS)):
        chosen = options if os.environ.get("STRATEGIES") == "all" else options[7 * row % 36 :: 36]
        cases += [Case(strategy, optimizer, steps, reduce, *rest) for (steps, reduce), *rest in chosen]
    return cases


def check(cases, found, tolerance=1e-12):
    wrong = []
    for rank, results in enumerate(found):
        for case, result in zip(cases, results, strict=True):
            difference = largest_difference(result, reference(case.training))
            if not difference <= tolerance:
                wrong.append((rank, case, difference))
    assert not wrong, "\n".join(map(str, wrong))


def check_on(n, cases, mesh=None):
    for start in range(0, len(cases), 100):
        part = cases[start : start + 100]
        check(part, run_ranks(train_all, n, part, mesh=mesh, timeout_s=600))


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.variant)])
def test_a_strategy_equals_one_process(n):
    cases = cover([s for s in STRATEGIES if s != "hybrid"])
    if not os.environ.get("STRATEGIES"):
        cases = cases[n // 4 :: 2]  # each case on 2 or on 4 ranks
    check_on(n, cases)


def test_a_hybrid_mesh_equals_one_process():
    cases = [*cover(["hybrid"]), Case("zero1"), Case("zero3", "sgd"), Case("zero3", "adafactor", steps=4)]
    check_on(4, cases, mesh={"replica": 2, "shard": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"data": 2}, pytest.param({"replica": 2, "shard": 2}, marks=pytest.mark.variant)], ids=str
)
def test_twenty_steps_in_float32_stay_within_the_noise(mesh):
    """The noise: by how much one process in float32 is off, from float64."""
    strategies = ["hybrid", "zero1"] if len(mesh) > 1 else [s for s in STRATEGIES if s != "hybrid"]
    cases = [Case(s, steps=2, clip="norm", recompute="weft", dtype=torch.float32, updates=20) for s in strategies]
    exact = reference(replace(cases[0], dtype=torch.float64).training)[0]
    floor = largest_difference(reference(cases[0].training)[0], exact)
    for results in run_ranks(train_all, 2 * len(mesh), cases, mesh=mesh):
        for case, (parameters, _) in zip(cases, results, strict=True):
            assert largest_difference(parameters, exact) <= 2 * floor, case


def test_twenty_steps_in_float64_equal_one_process():
    cases = [Case(s, optimizer, updates=20) for s in ("fully_shard", "zero1") for optimizer in ("adamw", "sgd")]
    check(cases, run_ranks(train_all, 2, cases))
