"""grad_samples: gradients of single samples as backward has them, and DP-SGD as in one process."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

import weft
from weft.errors import ContractError
from weft.grads import add_noise, grad_samples
from weft.keyed_random.elements import normal_block
from weft.rng import mix
from weft.tensors.blocks import whole
from weft.testing import largest_difference, run_ranks

CLIP, NOISE, EXPECTED, SAMPLES = 0.5, 0.8, 6, 40


class Net(nn.Module):
    """Tied and frozen weights, and a norm whose samples are independent."""

    def __init__(self):
        super().__init__()
        self.words, self.frozen = nn.Embedding(9, 6), nn.Linear(6, 6).requires_grad_(False)
        self.inner, self.norm, self.head = nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.inner(self.frozen(self.words(x).mean(1))))))


def _net():
    torch.manual_seed(0)
    return Net().double()


def _data():
    draw = torch.Generator().manual_seed(1)
    return torch.randint(9, (SAMPLES, 4), generator=draw), torch.randint(9, (SAMPLES,), generator=draw)


def loss_of(model, x, y):
    return cross_entropy(model(x), y)


def _one_by_one(model, x, y):
    found = []
    for row in range(len(x)):
        model.zero_grad()
        loss_of(model, x[row : row + 1], y[row : row + 1]).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_each_gradient_is_that_of_a_backward_pass(chunk_size):
    model, (x, y) = _net(), _data()
    expected = _one_by_one(model, x[:7], y[:7])
    found = grad_samples(model, weft.local(), loss_of, x[:7], y[:7], chunk_size=chunk_size)
    assert list(found) == list(expected) and "frozen.weight" not in found and "head.weight" not in found
    assert largest_difference(found, expected) < 1e-12
    assert all(p.grad is None for p in model.parameters())
    nested = grad_samples(model, weft.local(), lambda model, batch: loss_of(model, **batch), {"x": x[:7], "y": y[:7]})
    assert largest_difference(nested, expected) < 1e-12


def test_a_batch_without_samples():
    model, (x, y) = _net(), _data()
    found = grad_samples(model, weft.local(), loss_of, x[:0], y[:0])
    assert {name: tuple(g.shape) for name, g in found.items()} == {
        name: (0, *p.shape) for name, p in model.named_parameters() if p.requires_grad
    }


def _drawn(ctx, step, rate):
    ids = torch.arange(SAMPLES)
    return ids[weft.rng.keyed_uniform(ids, seed=ctx.seed, epoch=step) < rate]


def _privately(ctx, stage, rate):
    model, (x, y), sizes = _net(), _data(), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    if stage:
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=stage)
    else:
        model, ctx = weft.replicate(model, ctx)
    optimizer, ctx = weft.grad_chain(optimizer, ctx, add_noise(NOISE * CLIP / EXPECTED))
    for step in range(5):
        mine = _drawn(ctx, step, rate)[ctx.data_rank :: ctx.data_size]
        sizes.append(len(mine))
        samples = grad_samples(model, ctx, loss_of, x[mine], y[mine], chunk_size=2)
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in samples.values()]).norm(dim=0)
        factors = (CLIP / norms).clamp(max=1)
        for name, gradient in samples.items():
            clipped = torch.einsum("n,n...->...", factors, gradient)
            model.get_parameter(name).grad = weft.reduce(clipped, ctx) / EXPECTED
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, sizes


def _plainly(rate):
    model, (x, y), ctx = _net(), _data(), weft.local()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(5):
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
        for row in _drawn(ctx, step, rate).tolist():
            one = _one_by_one(model, x[row : row + 1], y[row : row + 1])
            norm = torch.stack([gradient.norm() for gradient in one.values()]).norm()
            for name, gradient in one.items():
                total[name] += gradient[0] * (CLIP / norm).clamp(max=1)
        for name, gradient in total.items():
            noise = normal_block(whole(gradient.shape), gradient.shape, mix(0, step, 0, name, "noise"), gradient.device)
            model.get_parameter(name).grad = (gradient + noise * NOISE * CLIP) / EXPECTED
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "stage", "rate"),
    [
        (1, 0, EXPECTED / SAMPLES),
        (2, 0, EXPECTED / SAMPLES),
        pytest.param(4, 1, EXPECTED / SAMPLES, marks=pytest.mark.variant),
        pytest.param(4, 0, 0.02, marks=pytest.mark.variant),  # ranks without samples
    ],
)
def test_dp_sgd_is_that_of_one_process_sample_by_sample(ranks, stage, rate):
    expected, sizes = _plainly(rate), []
    for found, own in run_ranks(_privately, ranks, stage, rate):
        assert largest_difference(found, expected) < 1e-12
        sizes += own
    assert len(set(sizes)) > 1 and (0 in sizes) == (rate < 0.1)


# -- what is refused ---------------------------------------------------------------------------------


def mean(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("model", "loss", "text"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), mean, "1: BatchNorm1d"),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), mean, "1: Dropout"),
        (nn.Linear(3, 3), lambda model, x: dropout(model(x), 0.5).mean(), "a random operation in forward"),
        (weft.with_precision(nn.Linear(3, 3), weft.local(), "fp16")[0], mean, "found: *fp16"),
        (weft.recompute(nn.Sequential(nn.Linear(3, 3)), weft.local(), blocks="0")[0], mean, "found: *recompute"),
    ],
)
def test_samples_that_depend_on_others_or_on_more_than_themselves(model, loss, text):
    with pytest.raises(ContractError, match=f"(?s)grad_samples: .*{text}"):
        grad_samples(model, weft.local(), loss, torch.ones(2, 3))
    if isinstance(model, nn.Sequential) and text.startswith("1"):
        assert len(grad_samples(model.eval(), weft.local(), loss, torch.ones(2, 3))) > 1


@pytest.mark.parametrize("batch", [(), (torch.ones(2, 3), torch.ones(3)), (torch.ones(()),)])
def test_batches_without_a_number_of_samples(batch):
    with pytest.raises(ValueError, match="the batch has no number of samples"):
        grad_samples(nn.Linear(3, 3), weft.local(), mean, *batch)


def test_an_error_of_the_loss_is_not_hidden():
    with pytest.raises(RuntimeError, match="scalar"):
        grad_samples(nn.Linear(3, 3), weft.local(), lambda model, x: model(x), torch.ones(2, 3))


def _sharded(ctx):
    model, ctx = weft.fully_shard(_net(), ctx)
    with pytest.raises(ContractError, match="(?s)grad_samples: .*words.weight .sharded."):
        grad_samples(model, ctx, loss_of, *_data())


def test_sharded_parameters():
    run_ranks(_sharded, 2)
