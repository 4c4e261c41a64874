"""tensor_parallel: outputs of which each rank has a part are used in the part that made them, or are told."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.told import printed
from weft.errors import ProbeFailed
from weft.testing import run_ranks

from .attempts import attempt, check_exact, check_refused, fit

PLAN = {"block.attention.[qkv]": "column", "block.attention.o": "row"}


class Attention(nn.Module):
    """Returns what one process has whole, and each rank for its own heads: the weights, keys and values."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), weights, {"cache": (k, v)}


class Block(nn.Module):
    """What is done with them outside of the attention."""

    def __init__(self, use):
        super().__init__()
        self.attention, self.use = Attention(), use

    def forward(self, x):
        y, weights, cache = self.attention(x)
        return self.use(x, y, weights, *cache["cache"])


class Net(nn.Module):
    """A block and a head; the loss is that of the outputs, and a penalty."""

    def __init__(self, use):
        super().__init__()
        self.block, self.head = Block(use), nn.Linear(8, 3)

    def forward(self, x):
        y, penalty = self.block(x)
        return self.head(y), penalty


def made(use):
    torch.manual_seed(0)
    return Net(use).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


def loss_of(module, x):
    y, penalty = module(x)
    return y.square().mean() + (penalty if isinstance(penalty, torch.Tensor) else 0.0)


PAIRS = {
    "entropy of the weights": (
        lambda x, y, w, k, v: (y, -(w * w.log()).sum() / w.numel()),
        lambda x, y, w, k, v: (y, (y * y).mean()),
    ),
    "weights used once more": (lambda x, y, w, k, v: (y + w.mean(1) @ x, None), lambda x, y, w, k, v: (y + x, None)),
    "norm of the keys": (lambda x, y, w, k, v: (y, k.square().mean()), lambda x, y, w, k, v: (y, [k, v])),
    "values of the first head": (
        lambda x, y, w, k, v: (y + nn.functional.pad(v[:, 0], (0, 6)), None),
        lambda x, y, w, k, v: (y, [v[:, 0].detach()]),
    ),
}


def train(ctx, use, watch=None):
    module, ctx = weft.tensor_parallel(made(use), ctx, plan=PLAN)
    return fit(module, batches(), loss_of, watch)


def both(ctx, name):
    unsound, sound = PAIRS[name]
    return train(ctx, sound), attempt(train, ctx, unsound)


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_of_what_each_rank_has_of_its_heads_is_refused(name):
    expected = fit(made(PAIRS[name][1]), batches(), loss_of)
    found = run_ranks(both, 2, name, mesh={"tensor": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])
    assert "of which each rank has a part, past the row layer" in found[0][1].text


# -- other ways out of a part --------------------------------------------------------------------------


KEPT = []


class Feedforward(nn.Module):
    """Layers between which `keep` sees what each rank has."""

    def __init__(self, keep):
        super().__init__()
        self.up, self.act, self.down, self.keep = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), keep

    def forward(self, x):
        h = self.act(self.up(x))
        self.keep(self, h)
        return x + self.down(h)


class Stack(nn.Module):
    """Two of them."""

    def __init__(self, keep):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Feedforward(keep) for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x):
        KEPT.clear()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def nothing(layer, h):
    pass


def doubled(layer, h):
    if h.requires_grad:
        h.register_hook(lambda gradient: 2 * gradient)


def keep_attribute(layer, h):
    layer.aux = h.square().mean()


def keep_value(layer, h):
    layer.aux = h.detach().square().mean()


def keep_output(layer, h):
    layer.aux = layer.down(h).square().mean()


def keep_in_list(layer, h):
    KEPT.append(h.square().sum())


def of_attributes(module):
    return sum(layer.aux for layer in module.layers)


def of_list(module):
    return sum(KEPT[-2:])


def _hooked(part):
    def prepare(module):
        for layer in module.layers:
            getattr(layer, part).register_forward_hook(lambda m, args, output: KEPT.append(output.square().mean()))

    return prepare


SIDES = {  # what keeps something, what is hooked, and the term of the loss; the sound twin
    "an attribute": ((keep_attribute, None, of_attributes), (keep_value, None, of_attributes)),
    "a list": ((keep_in_list, None, of_list), (doubled, None, None)),
    "a hook on the column layer": ((nothing, "up", of_list), (nothing, "down", of_list)),
    "a hook in between": ((nothing, "act", of_list), (keep_output, None, of_attributes)),
}


def fit_stack(ctx, keep, part, term, watch=None):
    torch.manual_seed(0)
    module = Stack(keep).double()
    if ctx is not None:
        module, ctx = weft.tensor_parallel(module, ctx, plan={"layers.*.up": "column", "layers.*.down": "row"})
    if part is not None:
        _hooked(part)(module)

    def loss(module, x):
        value = module(x).square().mean()
        return value if term is None else value + term(module)

    return fit(module, batches(), loss, watch)


def both_sides(ctx, name):
    unsound, sound = SIDES[name]
    return fit_stack(ctx, *sound), attempt(fit_stack, ctx, *unsound)


@pytest.mark.parametrize("name", SIDES)
def test_a_loss_of_what_was_kept_between_the_layers_is_refused(name):
    expected = fit_stack(None, *SIDES[name][1])
    found = run_ranks(both_sides, 2, name, mesh={"tensor": 2})
    check_exact([one for one, _ in found], expected)
    check_refused([one for _, one in found])


class Sharing(nn.Module):
    """Two attentions that share the keys and values of the first, each rank those of its heads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention()
        del self.second.k, self.second.v

    def forward(self, x):
        y, _, cache = self.first(x)
        k, v = cache["cache"]
        x = x + y
        q = self.second.q(x).unflatten(-1, (-1, 2)).transpose(1, 2)
        attended = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + self.second.o(attended.transpose(1, 2).flatten(2)), None


def fit_sharing(ctx):
    torch.manual_seed(0)
    module = Sharing().double()
    if ctx is not None:
        plan = {"first.[qkv]": "column", "first.o": "row", "second.q": "column", "second.o": "row"}
        module, ctx = weft.tensor_parallel(module, ctx, plan=plan)
    return fit(module, batches(), lambda module, x: module(x)[0].square().mean())


def test_keys_that_two_layers_share_are_no_loss_of_a_part():
    check_exact(run_ranks(fit_sharing, 2, mesh={"tensor": 2}), fit_sharing(None))


# -- heads ---------------------------------------------------------------------------------------------


class Language(nn.Module):
    """Layers and a head side by side in one module, which may return the hidden states besides."""

    def __init__(self, besides=False, classes=7):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(classes, 4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.head, self.besides = nn.Linear(4, classes), besides

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(self.up(x).relu())
        return (x, self.head(x)) if self.besides else self.head(x)


def language(besides=False, classes=7):
    torch.manual_seed(0)
    return Language(besides, classes).double()


def tokens():
    return torch.arange(12).view(3, 4) % 5


LAYERS = {"up": "column", "down": "row"}


def heads(ctx):
    for besides in (False, True):
        model, after = weft.tensor_parallel(language(besides, 8), ctx, plan={**LAYERS, "head": "column"})
        with pytest.raises(ProbeFailed, match='"head": "gather"}  # or "vocab"'), torch.no_grad():
            model(tokens())
    model, after = weft.tensor_parallel(language(), ctx, plan={**LAYERS, "head": "gather"})
    losses = [nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())]
    model, after = weft.tensor_parallel(language(), ctx, plan={**LAYERS, "head": "vocab"})
    logits = model(tokens())
    losses += [weft.collectives.vocab_cross_entropy(logits, tokens(), after)]
    assert logits.argmax(-1).full_tensor().equal(language()(tokens()).argmax(-1))
    with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens().flatten())
    return [loss.item() for loss in losses]


def test_a_head_whose_logits_stay_divided_says_so():
    expected = nn.functional.cross_entropy(language()(tokens()).flatten(0, 1), tokens().flatten()).item()
    for found in run_ranks(heads, 2, mesh={"tensor": 2}):
        assert found == pytest.approx([expected, expected], abs=1e-12)


def ordinary_loss(ctx):
    model, ctx = weft.tensor_parallel(language(), ctx, plan={**LAYERS, "head": "vocab"})
    nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())


def test_an_ordinary_loss_of_divided_logits_ends_with_the_line_to_write():
    with pytest.raises(weft.testing.RanksFailed) as caught:
        run_ranks(ordinary_loss, 2, mesh={"tensor": 2})
    # `heads` above is what the line says.
    assert (
        "vocab_cross_entropy(logits"
        in printed("engines/torch_errors.py", "computes with tensors of one kind", str(caught.value)).fix
    )
