"""keyed_dropout: a run with dropout is that of one process, on any mesh; its masks follow from the samples."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (as everywhere)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import weft
from tests.fix_lines.told import told
from tests.variants import variant_cases, variants
from weft.engines.torch.engine import TorchEngine
from weft.keyed_random.philox import keep_mask, line_keys
from weft.testing import run_ranks

PLACES, WIDTH, WORDS = 8, 16, 17
PLAN = {"blocks.*.attention.[qkv]": "column", "blocks.*.attention.out": "row"}
PLAN |= {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}
NORMS = {"blocks.*.first": "sequence", "blocks.*.second": "sequence"}


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        rows, places, _ = x.shape
        q = self.q(x).view(rows, places, -1, 4).transpose(1, 2)
        k = self.k(x).view(rows, places, -1, 4).transpose(1, 2)
        v = self.v(x).view(rows, places, -1, 4).transpose(1, 2)
        if self.kind == "eager":
            scores = (q @ k.transpose(-1, -2) / 2).masked_fill(torch.ones(places, places).tril() == 0, -torch.inf)
            y = F.dropout(scores.softmax(-1), 0.2, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(rows, places, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, 32), nn.Dropout(0.2), nn.Linear(32, WIDTH)

    def forward(self, x):
        return F.dropout(self.down(self.drop(F.gelu(self.up(x)))), 0.1, self.training)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.attention, self.drop = nn.LayerNorm(WIDTH), Attention(kind), nn.Dropout(0.1)
        self.second, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        x = x + self.drop(self.attention(self.first(x)))
        return x + self.mlp(self.second(x))


class Net(nn.Module):
    """Words [rows, places], and perhaps their places, to scores [rows, places, words]."""

    units = Block

    def __init__(self, kind="sdpa"):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.drop, self.blocks = nn.Dropout(0.1), nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        if kind == "tied":
            self.head.weight = self.words.weight

    def forward(self, words, position_ids=None):
        at = torch.arange(words.shape[1])[None] if position_ids is None else position_ids
        x = self.drop(self.words(words) + self.places(at))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Torchs(nn.Module):
    """Layers of torch, with places in the first dimension, and rows and places folded together."""

    units = nn.TransformerEncoderLayer

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.needs = nn.Embedding(WORDS, WIDTH), kind == "weights"
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.1)
        self.attention, self.drop = nn.MultiheadAttention(WIDTH, 2, dropout=0.3), nn.AlphaDropout(0.2)
        self.channels, self.head = nn.Dropout1d(0.3), nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.layer(self.words(words).transpose(0, 1))
        x = (x + self.attention(x, x, x, need_weights=self.needs)[0]).transpose(0, 1)
        x = torch.dropout(self.channels(x.transpose(1, 2)).transpose(1, 2), 0.1, self.training)
        torch.dropout_(x, 0.1, self.training)
        branch = x.new_empty(len(x), 1, 1).bernoulli_(0.8) if self.training else 1.0
        return self.head(self.drop(x.flatten(0, 1)).view_as(x) * branch)


class MLP6(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU())


@dataclasses.dataclass(frozen=True)
class Compiles(TorchEngine):
    """An engine with the name of that of torch-xla."""

    name: str = "xla"


class Texts(Dataset):
    def __init__(self, places=PLACES):
        self.places = places

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return torch.randint(0, WORDS, (self.places,), generator=torch.Generator().manual_seed(index))


def _loss(scores, words):
    return F.cross_entropy(scores.flatten(0, 1), words.flatten())


def _parts(ctx, kind, strategy, options, *, ragged, seed):
    """Model, loader, optimizer and context."""
    model = (Torchs if kind in ("torch", "weights") else Net)(kind).double()
    loader = DataLoader(Texts(6 if type(model) is Torchs else PLACES), batch_size=8, shuffle=True, drop_last=not ragged)
    loader, ctx = weft.shard_data(loader, ctx, mode="split", seed=5)
    model, loader, ctx = weft.keyed_dropout(model, loader, ctx, seed=seed)
    if "recompute" in strategy:
        model, ctx = weft.recompute(model, ctx, blocks=Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    if "tensor" in strategy:
        plan = PLAN | (NORMS if "sequence" in strategy else {})
        sliced = "sequence" in strategy
        model, ctx = weft.tensor_parallel(model, ctx, plan=plan, sequence=sliced, rebind=optimizer)
    if "context" in strategy:
        model, ctx = weft.context_parallel(model, ctx, **options)
    if "pipeline" in strategy:
        model, ctx = weft.pipeline(model, ctx, loss=_loss, micro_batches=2, rebind=optimizer)
    if "fully_shard" in strategy:
        model, ctx = weft.fully_shard(model, ctx, units=type(model).units, rebind=optimizer)
    elif "zero" in strategy:
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)
    else:
        model, ctx = weft.replicate(model, ctx)
    return model, loader, optimizer, ctx


def _train(ctx, kind, strategy, options=None, *, steps=4, ragged=True, windows=False, folder=None, seed=None):
    """Train, and return all parameters as one tensor; with a folder, save at the end, and begin where another saved."""
    model, loader, optimizer, ctx = _parts(ctx, kind, strategy, options or {}, ragged=ragged, seed=seed)
    if windows:
        model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    done = {"steps": 0}
    parts = {"model": model, "optimizer": optimizer, "loader": loader, "done": done}
    state, ctx = weft.checkpointable(parts, ctx)
    if folder is not None and folder.exists():
        weft.restore(state, folder, ctx)

    def step(words, share):
        if "pipeline" in strategy:
            loss = model(words, words)
        elif "context" in strategy:
            order = (options or {}).get("order", "zigzag")
            words, wanted, at = weft.data.split_sequence((words, words, torch.arange(PLACES)[None]), ctx, order=order)
            loss = _loss(model(words, at), wanted)
        else:
            loss = _loss(model(words), words)
        (loss * share).backward()

    while done["steps"] < steps:
        for item in loader:
            for words in item if windows else [item]:
                step(words, item.share if windows else loader.share)
            optimizer.step()
            optimizer.zero_grad()
            done["steps"] += 1
            if done["steps"] == steps:
                break
    if folder is not None:
        weft.save(state, folder, done["steps"], ctx)
    if "pipeline" in strategy:
        model, ctx = weft.undo(model, ctx, rebind=optimizer)
    with weft.full_params(model, ctx):
        return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def _check_equal(kind, ranks, strategy, mesh=None, options=None, **more):
    (one,) = run_ranks(_train, 1, kind, "", **more)
    for found in run_ranks(_train, ranks, kind, strategy, options, mesh=mesh, **more):
        torch.testing.assert_close(found, one, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "ranks", "strategy"),
    [
        ("sdpa", 2, "fully_shard recompute"),
        ("torch", 4, "replicate"),
        *variant_cases(
            ("sdpa", 4, "fully_shard"),
            ("eager", 2, "zero"),
            ("eager", 2, "replicate recompute"),
            ("torch", 2, "fully_shard"),
            ("weights", 2, "replicate"),
            ("weights", 4, "zero"),
        ),
    ],
)
def test_a_run_on_several_ranks_is_that_of_one(kind, ranks, strategy):
    _check_equal(kind, ranks, strategy)


@pytest.mark.parametrize(
    ("ranks", "mesh", "strategy", "kind", "options"),
    [
        (2, {"data": 1, "tensor": 2}, "tensor sequence", "sdpa", {}),
        *variant_cases(
            (4, {"data": 1, "context": 2, "tensor": 2}, "context tensor", "sdpa", {}),
            (2, {"data": 1, "tensor": 2}, "tensor", "eager", {}),
            (4, {"data": 1, "tensor": 4}, "tensor recompute", "sdpa", {}),
            (4, {"data": 2, "tensor": 2}, "tensor fully_shard", "sdpa", {}),
            (2, {"data": 1, "context": 2}, "context", "sdpa", {"method": "gather"}),
            (2, {"data": 1, "context": 2}, "context", "sdpa", {"method": "gather", "order": "contiguous"}),
            (4, {"data": 1, "context": 4}, "context recompute", "sdpa", {}),
            (4, {"data": 2, "context": 2}, "context fully_shard", "sdpa", {}),
        ),
    ],
)
def test_ranks_that_share_a_model_drop_their_parts_of_the_masks_of_one(ranks, mesh, strategy, kind, options):
    _check_equal(kind, ranks, strategy, mesh, options)


@pytest.mark.parametrize(
    ("ranks", "mesh", "strategy", "kind"),
    [
        (2, {"data": 1, "pipeline": 2}, "pipeline recompute", "tied"),
        *variant_cases(
            (4, {"data": 2, "pipeline": 2}, "pipeline fully_shard", "tied"),
            (4, {"data": 1, "pipeline": 2, "tensor": 2}, "pipeline tensor", "sdpa"),
            (4, {"data": 1, "pipeline": 2, "tensor": 2}, "pipeline tensor sequence", "sdpa"),
        ),
    ],
)
def test_micro_batches_of_a_pipeline_have_the_masks_of_their_rows(ranks, mesh, strategy, kind):
    _check_equal(kind, ranks, strategy, mesh, ragged=False)


@pytest.mark.parametrize("ranks", [1, *variants(2)])
def test_windows_have_the_masks_of_their_micro_batches(ranks):
    _check_equal("sdpa", ranks, "fully_shard", windows=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "replicate", None), (4, "fully_shard", None)),
        *variant_cases(
            ((4, "tensor", {"data": 2, "tensor": 2}), (2, "zero", None)),
            ((1, "", None), (2, "context", {"data": 1, "context": 2})),
            ((2, "fully_shard", None), (1, "recompute", None)),
        ),
    ],
)
def test_a_run_that_is_resumed_on_another_mesh_drops_the_same(before, after, tmp_path):
    (one,) = run_ranks(_train, 1, "sdpa", "", steps=5)
    for (ranks, strategy, mesh), steps in ((before, 2), (after, 5)):
        found = run_ranks(_train, ranks, "sdpa", strategy, mesh=mesh, steps=steps, folder=tmp_path / "run")
    for each in found:
        torch.testing.assert_close(each, one, rtol=0, atol=1e-12)


def _alone(p=0.5, module=None, **options):
    """A module, its loader and context, in one process."""
    loader, ctx = weft.shard_data(DataLoader(torch.ones(8, 6), batch_size=4, **options), weft.local())
    return weft.keyed_dropout(nn.Dropout(p) if module is None else module, loader, ctx)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_torch_computes_again_drops_the_same(reentrant):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
            self.again = False

        def forward(self, x):
            for _ in range(2):  # one module, two masks
                x = checkpoint(self.part, x, use_reentrant=reentrant) if self.again else self.part(x)
            return x

    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model, loader, _ = _alone(module=Twice())
        model.double().again = again
        first, second = [
            model(x.double().requires_grad_()).sum() for x in loader
        ]  # both batches, before a backward pass
        first.backward()
        (second * 2).backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_masks_differ_between_samples_epochs_calls_modules_and_seeds():
    seen = []
    for seed in (0, 1):
        loader, ctx = weft.shard_data(DataLoader(torch.ones(4, 64), batch_size=4), weft.local())
        model, loader, ctx = weft.keyed_dropout(
            nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)]), loader, ctx, seed=seed
        )
        for _ in range(2):
            for x in loader:
                seen += [*model[0](x), *model[0](x), *model[1](x)]
    masks = {tuple(row.tolist()) for row in seen}
    assert len(masks) == len(seen) == 48


def test_the_chance_of_dropping_is_the_one_asked_for():
    ids = torch.arange(1000)
    for keep in (0.1, 0.5, 0.9):
        kept = keep_mask(line_keys(ids, [torch.arange(10)]), range(100), 7, keep).double()
        assert kept.mean() == pytest.approx(keep, abs=0.003)
        for dim in range(3):  # and no line of elements differs from the others by more than chance
            others = [other for other in range(3) if other != dim]
            error = (kept.mean(others) - keep).abs().max() / (keep * (1 - keep) * kept.shape[dim] / 1e6) ** 0.5
            assert error < 5
        assert torch.corrcoef(kept.reshape(1000, -1)[:, :50].T).fill_diagonal_(0).abs().max() < 0.2


def test_part_of_a_mask_is_the_mask_of_the_part():
    ids, places = torch.tensor([5, 2**40, 3]), [torch.arange(4), torch.arange(6)]
    whole = keep_mask(line_keys(ids, places), range(11), 9, 0.5)
    part = keep_mask(line_keys(ids[1:], [places[0][2:], places[1][[0, 5]]]), range(3, 10), 9, 0.5)
    assert torch.equal(part, whole[1:, 2:][:, :, [0, 5], 3:10])


def test_evaluation_and_random_states_are_untouched():
    model, loader, ctx = _alone(module=nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)))
    before = torch.get_rng_state()
    for x in loader:
        model(x)
    assert torch.equal(torch.get_rng_state(), before)
    plain = copy.deepcopy(model)
    assert torch.equal(model.eval()(torch.ones(3, 6)), plain.eval()(torch.ones(3, 6)))
    model, ctx = weft.undo(model.train(), ctx)
    torch.manual_seed(1)
    wanted = F.dropout(plain[0](torch.ones(3, 6)), 0.5)
    torch.manual_seed(1)
    assert torch.equal(model(torch.ones(3, 6)), wanted)


def test_tensors_made_of_those_of_the_loader_are_found_by_the_order_of_calls():
    (noted, loader, _), (made, other, _) = _alone(), _alone()
    first, second = [noted(x) for x in loader], [made(x * 1.0) for x in other]
    assert torch.equal(torch.stack(first), torch.stack(second))
    model, loader, _ = _alone()
    read = list(loader)
    assert torch.equal(model(read[1]), first[1]) and torch.equal(model(read[0]), first[0])
    model, loader, _ = _alone()
    with told("engines/torch/keyed_dropout/keyed.py", "it is not known which samples") as error:
        [model(x * 1.0) for x in list(loader)]
    assert "a call for each batch of the loader" in str(error.error)
    model, loader, _ = _alone()
    error.run(model=model, loader=[(x, None) for x in []])
    with pytest.raises(weft.errors.ContractError, match="not known which samples"):
        _alone()[0](torch.ones(4, 6))


def test_rows_that_cannot_be_told_apart_are_refused():
    class Pooled(nn.Module):
        def forward(self, x):
            return F.dropout(x.flatten()[:7], 0.5, self.training)

    model, loader, _ = _alone(module=Pooled())
    with told("engines/torch/keyed_dropout/keyed.py", "which elements of a tensor") as error:
        [model(x) for x in loader]
    assert "sizes [7]" in str(error.error)
    assert error.run(x=torch.ones(8, 3), rows=4)["x"].shape == (8, 3)


def test_as_many_places_as_rows_are_refused_where_the_model_has_places_first():
    model, loader, _ = _alone(module=nn.TransformerEncoderLayer(6, 2, 6))
    with pytest.raises(weft.errors.ContractError, match=r"which elements .*\n.*sizes \[4, 4, 6\]"):
        [model(x.expand(4, 4, 6)) for x in loader]
    model(torch.ones(5, 4, 6))
    model(torch.ones(4, 4, 6))  # as before


def test_a_block_that_is_computed_again_with_another_random_state_is_refused():
    class Forgets(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return checkpoint(self.drop, x * 1.0, use_reentrant=False, preserve_rng_state=False)

    model, loader, _ = _alone(module=Forgets())
    with told("engines/torch/keyed_dropout/keyed.py", "with another random state") as error:
        [model(x.requires_grad_()).sum().backward() for x in loader]
    assert "keep_rng=True" in error.fix and "preserve_rng_state=True" in error.fix


def test_dropout_in_a_function_that_is_computed_again_is_refused():
    class Inline(nn.Module):
        def forward(self, x):
            def drop(x):
                return F.dropout(x * 1.0, 0.5, self.training)

            return checkpoint(drop, x, use_reentrant=False) if x.requires_grad else drop(x)

    model, loader, _ = _alone(module=nn.Sequential(nn.Linear(6, 6), Inline()))
    with told("engines/torch/keyed_dropout/keyed.py", "a function in the forward") as error:
        [model(x).sum().backward() for x in loader]
    assert "Inline" not in error.fix and "'1'" in str(error.error)


def test_other_random_numbers_of_a_forward_are_told():
    class Noisy(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training) + torch.rand(6)

    model, loader, ctx = _alone(module=Noisy(), shuffle=True)
    with told("engines/torch/keyed_dropout/keyed.py", "are not those of dropout") as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, other = [model(x) for x in loader]
    assert not torch.equal(one, other)
    loader, ctx = weft.shard_data(DataLoader(torch.ones(8, 6), batch_size=4), weft.local(), with_ids=True)
    for _, rows in loader:
        found.run(rows=rows, ctx=ctx)


def test_recurrent_layers_with_dropout_inside_are_refused():
    with told("transforms/keyed_dropout.py", "recurrent layers drop") as error:
        _alone(module=nn.LSTM(6, 6, num_layers=2, dropout=0.5))
    assert "dropout between them" in str(error.error)
    model, loader, _ = _alone(module=nn.GRU(6, 6, num_layers=2))
    assert model(next(iter(loader)))[0].shape == (4, 6)


def test_a_loader_that_knows_no_samples_is_refused():
    loader, ctx = DataLoader(torch.ones(4, 2)), weft.local()
    with told("transforms/keyed_dropout.py", "does not say which samples") as error:
        weft.keyed_dropout(nn.Dropout(), loader, ctx)
    names = error.run(loader=loader, ctx=ctx)
    weft.keyed_dropout(nn.Dropout(), names["loader"], names["ctx"])


def test_a_seed_below_zero_is_refused():
    loader, ctx = weft.shard_data(DataLoader(torch.ones(4, 2)), weft.local())
    with told("transforms/keyed_dropout.py", "chosen, least=0") as error:
        weft.keyed_dropout(nn.Dropout(), loader, ctx, seed=-1)
    error.run(model=nn.Dropout(), loader=loader, ctx=ctx)


def test_an_engine_that_compiles_every_step_is_refused():
    loader, ctx = weft.shard_data(DataLoader(torch.ones(4, 2)), weft.local(engine=Compiles()))
    with told("transforms/keyed_dropout.py", "not with torch-xla") as error:
        weft.keyed_dropout(nn.Dropout(), loader, ctx)
    assert error.fix == 'weft.start(engine="torch")'


def test_compiled_blocks_drop_the_same():
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model, loader, ctx = _alone(module=nn.Sequential(MLP6(), MLP6()))
        if compiles:
            model, ctx = weft.compile(model, ctx, backend="eager", blocks=MLP6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler looks at `.grad` where it resumes
            found.append(torch.stack([model(x) for x in loader]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.slow
def test_rehearsal_draws_without_values():
    def program(ctx):
        model, loader, optimizer, _ = _parts(ctx, "sdpa", "fully_shard", {}, ragged=True, seed=None)

        def step():
            words = next(iter(loader))
            (_loss(model(words), words) * loader.share).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    assert weft.rehearse(program, 2).step_peak
