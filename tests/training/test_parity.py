"""Parity: training on several ranks, in windows, gives the parameters of plain torch in one process.

The one truth is a plain loop over the global batch of each window. Sequences differ in length and
the loss is a mean over tokens, so that every split into ranks and micro-batches has other weights.

Tolerances, for AdamW at lr = 2e-3 and 20 steps:

*   float64: 1e-12.
*   float32: twice the noise floor, the difference that plain torch in one process shows when its
    batches are split in the same way; measured here, and at least one unit in the last place.
*   bfloat16 and float16: a step of AdamW moves a weight by about lr whatever the size of its
    gradient. A gradient near zero may round to the other sign, in each step anew, so that weights
    may differ by 2 * lr * steps = 0.08 at the worst; their mean, over weights with independent
    signs, by lr * steps * 2**-8 (bf16) or 2**-11 (fp16), the relative rounding error, times 10 for
    the depth of the model: 0.0016 and 0.0002.
"""

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import weft
from tests.variants import variants
from weft.testing import largest_difference, run_ranks

_VOCABULARY, _WIDTH, _PAD = 11, 8, -100
_LR, _STEPS, _CLIP = 2e-3, 20, 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        # No bias: that of the keys has a gradient of zero but for rounding, and AdamW divides by it.
        self.mix = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.wide, self.narrow = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Language(nn.Module):
    """A small language model: embedding tied to the head, causal attention, layer norms."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        """[batch, length] to logits [batch, length, vocabulary]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to train: what it is, and how it is split up."""

    accumulate: int = 1
    precision: str | None = None
    dtype: torch.dtype = torch.float64
    optimizer: str = "adamw"
    flat: bool = False
    fuse: bool = False
    reduce: str = "last"


_SAMPLES, _GLOBAL_BATCH = 27, 8  # batches of 8, 8, 8 and 3


def _model(dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Language().to(dtype)


# A scale that does not overflow here: a skipped step would be right, but not what is compared.
_POLICIES = {
    "bf16": "bf16",
    "fp16": weft.Precision(
        param=torch.float32,
        compute=torch.float16,
        output=torch.float32,
        scaling=weft.precision.LossScaling(init=2.0**10),
    ),
}


def _sequences():
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(0, _VOCABULARY, (2 + (5 * i) % 9,), generator=draw) for i in range(_SAMPLES)]


def _collate(sequences):
    """Pad to the longest: inputs [batch, length - 1] and targets, of which padding does not count."""
    if not sequences:
        return torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 1, dtype=torch.long)
    ids = pad_sequence([s[:-1] for s in sequences], batch_first=True)
    return ids, pad_sequence([s[1:] for s in sequences], batch_first=True, padding_value=_PAD)


def _tokens(batch):
    return batch[1] != _PAD


def _loss_sum(model, batch):
    ids, targets = batch
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=_PAD, reduction="sum")


def _optimizer(config, model):
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.1)


def _finish(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    optimizer.step()
    optimizer.zero_grad()


@functools.cache
def _plain(config, splits=1):
    """Plain torch in one process; each global batch in `splits` pieces."""
    model, data = _model(config.dtype), _sequences()
    optimizer = _optimizer(config, model)
    starts = list(range(0, _SAMPLES, _GLOBAL_BATCH))
    windows = [starts[i : i + config.accumulate] for i in range(0, len(starts), config.accumulate)]
    for window in itertools.islice(itertools.cycle(windows), _STEPS):
        batches = [data[start : start + _GLOBAL_BATCH] for start in window]
        pieces = [[batch[i] for i in part] for batch in batches for part in _cut(len(batch), splits)]
        collated = [_collate(piece) for piece in pieces if piece]
        tokens = sum(int(_tokens(batch).sum()) for batch in collated)
        for batch in collated:
            (_loss_sum(model, batch) / tokens).backward()
        _finish(model, optimizer)
    return [p.detach() for p in model.parameters()]


def _exact(config):
    """The one truth: float64, no splits; the same however the run under test is laid out."""
    return _plain(Config(accumulate=config.accumulate, optimizer=config.optimizer))


def _split(config, n):
    """Plain torch in the dtype of `config`, with batches split for `n` ranks."""
    return _plain(Config(accumulate=config.accumulate, optimizer=config.optimizer, dtype=config.dtype), splits=n)


def _cut(count, pieces):
    return [part.tolist() for part in torch.arange(count).tensor_split(pieces)]


def _weft(ctx, config):
    torch.manual_seed(ctx.rank)
    loader = DataLoader(_sequences(), batch_size=_GLOBAL_BATCH // ctx.world_size, collate_fn=_collate)
    loader, ctx = weft.shard_data(loader, ctx, uneven="empty")
    model = _model(config.dtype)
    if config.precision:
        model, ctx = weft.with_precision(model, ctx, _POLICIES[config.precision])
    model, ctx = weft.replicate(model, ctx, flat=config.flat)
    optimizer = _optimizer(config, model)
    if config.precision:
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    if config.fuse:
        optimizer, ctx = weft.fuse_step(optimizer, ctx)
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=config.accumulate, reduce=config.reduce)
    for window in itertools.islice(itertools.chain.from_iterable(itertools.repeat(windows)), _STEPS):
        tokens = window.denominator(_tokens)
        for batch in window:
            (_loss_sum(model, batch) / tokens).backward()
        _finish(model, optimizer)
        if config.precision:
            assert not weft.was_skipped(optimizer)
    return [p.detach().clone() for p in model.parameters()]


def _all(ctx, configs):
    return [_weft(ctx, config) for config in configs]


def _run(n, configs):
    """Parameters per config; the same bits on all ranks."""
    by_rank = run_ranks(_all, n, configs)
    for found in by_rank[1:]:
        assert largest_difference(found, by_rank[0]) == 0
    return by_rank[0]


_WAYS = [{}, {"flat": True, "fuse": True}]
_WINDOWS = [1, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, *variants(1, 4)])
def test_float64_parameters_equal_those_of_one_process(n):
    configs = [Config(accumulate=k, **way) for k in _WINDOWS for way in _WAYS]
    configs += [Config(accumulate=3, optimizer="sgd", **way) for way in _WAYS]
    configs += [Config(accumulate=4, reduce="every"), Config(accumulate=3, flat=True)]
    for config, found in zip(configs, _run(n, configs), strict=True):
        difference = largest_difference(found, _exact(config))
        assert difference < 1e-12, f"{config}: {difference}"


@pytest.mark.parametrize("n", variants(2, 4))
def test_float32_parameters_are_within_twice_the_noise_floor(n):
    configs = [Config(accumulate=k, dtype=torch.float32, **way) for k in _WINDOWS for way in _WAYS]
    configs += [Config(accumulate=3, dtype=torch.float32, optimizer="sgd", **way) for way in _WAYS]
    for config, found in zip(configs, _run(n, configs), strict=True):
        exact = _exact(config)
        floor = max(largest_difference(_split(config, n), exact), torch.finfo(torch.float32).eps)
        difference = largest_difference(found, exact)
        assert difference <= 2 * floor, f"{config}: {difference}, noise floor {floor}"


@pytest.mark.parametrize("n", variants(2, 4))
def test_sixteen_bit_parameters_are_within_their_tolerance(n):
    kinds = {"bf16": 2.0**-8, "fp16": 2.0**-11}
    configs = [
        Config(accumulate=k, dtype=torch.float32, precision=precision, flat=flat)
        for precision, (k, flat) in itertools.product(kinds, [(1, True), (3, False), (4, False)])
    ]
    for config, found in zip(configs, _run(n, configs), strict=True):
        exact = _exact(config)
        worst = largest_difference(found, exact)
        mean = torch.cat([(a - b).abs().flatten() for a, b in zip(found, exact, strict=True)]).mean().item()
        assert worst < 2 * _LR * _STEPS, f"{config}: {worst}"
        assert mean < 10 * _LR * _STEPS * kinds[config.precision], f"{config}: {mean}"
        assert worst > 0, f"{config}: nothing was rounded"


def test_the_reference_is_not_blind():
    """The differences above mean something: a mean of means is far off, and the weights do move."""
    config = Config(accumulate=4)
    start = [p.detach() for p in _model(config.dtype).parameters()]
    assert largest_difference(_plain(config), start) > 0.01
    assert largest_difference(_plain(config), _plain(Config(accumulate=3))) > 1e-3
    assert largest_difference(run_ranks(_mean_of_means, 2)[0], _plain(config)) > 1e-3


def _mean_of_means(ctx):
    """What plain DDP and a loss with reduction="mean" would do."""
    loader = DataLoader(_sequences(), batch_size=_GLOBAL_BATCH // ctx.world_size, collate_fn=_collate)
    loader, ctx = weft.shard_data(loader, ctx)
    model, ctx = weft.replicate(_model(torch.float64), ctx)
    optimizer = _optimizer(Config(), model)
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=4)
    for _ in range(_STEPS):
        for window in windows:
            for batch in window:
                (_loss_sum(model, batch) / _tokens(batch).sum() / len(window)).backward()
            _finish(model, optimizer)
    return [p.detach().clone() for p in model.parameters()]


# -- two contexts with all kinds of state, and what must not change ------------------------------------


def _train_some(parts, turns):
    model, optimizer, windows = parts
    for window in itertools.islice(itertools.chain.from_iterable(itertools.repeat(windows)), turns):
        tokens = window.denominator(_tokens)
        for batch in window:
            (_loss_sum(model, batch) / tokens).backward()
        _finish(model, optimizer)
        yield


def _build(ctx, precision, steps):
    loader = DataLoader(_sequences(), batch_size=4, shuffle=True, collate_fn=_collate)
    loader, ctx = weft.shard_data(loader, ctx, uneven="empty", seed=0)  # all of them read the same order
    model, ctx = weft.with_precision(_model(torch.float32), ctx, precision)
    model, ctx = weft.replicate(model, ctx, flat=precision == "fp32")
    optimizer = _optimizer(Config(), model)
    optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    return model, optimizer, windows


def _alternately(ctx):
    """A1 on two ranks; on one rank see test_failures.py."""
    settings = (("fp32", 1), ("bf16", 4), ("fp16", 3))
    alone = []
    for precision, steps in settings:
        parts = _build(ctx, precision, steps)
        list(_train_some(parts, 8))
        alone.append([p.detach().clone() for p in parts[0].parameters()])
    state = torch.get_rng_state()
    together = [_build(ctx, *setting) for setting in settings]
    for _ in zip(*(_train_some(parts, 8) for parts in together), strict=True):
        pass
    assert torch.equal(torch.get_rng_state(), state)
    return largest_difference(alone, [[p.detach() for p in parts[0].parameters()] for parts in together])


def test_three_contexts_trained_alternately_on_two_ranks_are_bitwise_those_alone():
    assert run_ranks(_alternately, 2) == [0, 0]
