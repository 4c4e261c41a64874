"""The cross-entropy of logits that are divided by vocabulary, against torch's of the whole ones."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import weft
from weft.collectives import vocab_cross_entropy
from weft.testing import run_ranks


def whole(vocabulary, dtype=torch.float64):
    draw = torch.Generator().manual_seed(3)
    logits = 5 * torch.randn(2, 7, vocabulary, generator=draw, dtype=torch.float64).to(dtype)
    target = torch.randint(0, vocabulary, (2, 7), generator=draw)
    target[0, 2] = -100
    return logits, target


def parts(ctx, vocabulary, reduction, dtype):
    logits, target = whole(vocabulary, dtype)
    length = -(-vocabulary // ctx.world_size)
    mine = logits[..., ctx.rank * length : (ctx.rank + 1) * length].clone().requires_grad_()
    loss = vocab_cross_entropy(mine, target, ctx, reduction=reduction)
    (loss * torch.arange(1.0, loss.numel() + 1).view(loss.shape)).sum().backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 33), (4, 9), (4, 32)], ids=str)
def test_loss_and_gradients_are_those_of_the_whole_vocabulary(ranks, vocabulary, reduction):
    logits, target = whole(vocabulary)
    logits.requires_grad_()
    expected = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
    expected = expected.view(target.shape) if reduction == "none" else expected
    (expected * torch.arange(1.0, expected.numel() + 1).view(expected.shape)).sum().backward()
    found = run_ranks(parts, ranks, vocabulary, reduction, torch.float64, mesh={"tensor": ranks})
    assert all((loss - expected).abs().max() < 1e-12 for loss, _ in found)
    assert (torch.cat([gradient for _, gradient in found], -1) - logits.grad).abs().max() < 1e-12


def test_16_bit_logits_are_computed_with_in_float32():
    logits, target = whole(33, torch.bfloat16)
    expected = cross_entropy(logits.float().flatten(0, 1), target.flatten())
    for loss, gradient in run_ranks(parts, 2, 33, "mean", torch.bfloat16, mesh={"tensor": 2}):
        assert loss.dtype is torch.float32 and abs(loss - expected) < 1e-6 and gradient.dtype is torch.bfloat16


def wrong(ctx):
    texts = []
    for logits, target in [
        (torch.zeros(2, 3), torch.tensor([0, 6])),
        (torch.zeros(2, 3), torch.tensor([0, 1, 2])),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 1])),
    ]:
        with pytest.raises((ValueError, TypeError)) as error:
            vocab_cross_entropy(logits, target, ctx)
        texts.append(str(error.value))
    return texts


def test_what_cannot_be_computed_is_refused():
    for texts in run_ranks(wrong, 2, mesh={"tensor": 2}):
        assert "outside the vocabulary" in texts[0] and "[6]" in texts[0]
        assert "do not fit" in texts[1] and "not logits" in texts[2]


def test_one_rank_is_torch():
    logits, target = whole(9)
    expected = cross_entropy(logits.flatten(0, 1), target.flatten())
    assert torch.equal(vocab_cross_entropy(logits, target, weft.local()), expected)
