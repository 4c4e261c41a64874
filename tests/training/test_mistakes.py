"""The likely mistakes of a program on several ranks: each is told, with its cause and the line to write.

docs/mistakes.md lists them; a test compares the two.
"""

import pathlib
import random
import re
import tempfile
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import weft
from tests.variants import slow_cases
from weft.testing import RanksFailed, run_ranks

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "mistakes.md"


def _net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def _loader(samples=16, **options):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 4, generator=generator), torch.randn(samples, 2, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=2, **options)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def _begin(ctx, strategy=weft.replicate, samples=16, steps=None):
    """Model, optimizer, loader, or windows, and context of a program without a mistake."""
    loader, ctx = weft.shard_data(_loader(samples), ctx)
    model, ctx = strategy(_net(), ctx)
    optimizer = _sgd(model)
    if steps is not None:
        model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    return model, optimizer, loader, ctx


def _train(model, optimizer, loader, *, weighed=True, clears=True):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        (loss * loader.share if weighed else loss).backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()


# -- data ----------------------------------------------------------------------------------------------


def loader_not_sharded(ctx, strategy):
    model, _ = strategy(_net(), ctx)
    _train(model, _sgd(model), _loader(), weighed=False)


def split_twice(ctx):
    data = _loader().dataset
    weft.shard_data(DataLoader(data, sampler=DistributedSampler(data, ctx.world_size, ctx.rank)), ctx)


def order_from_entropy(ctx):
    """Each rank shuffles by itself."""
    order = list(range(16))
    random.SystemRandom().shuffle(order)
    loader, ctx = weft.shard_data(_loader(sampler=order), ctx)
    model, ctx = weft.replicate(_net(), ctx)
    _train(model, _sgd(model), loader)


def mean_losses_of_no_rows(ctx):
    model, _, _, ctx = _begin(ctx, weft.fully_shard)
    loader, ctx = weft.shard_data(_loader(samples=5), ctx, uneven="empty")
    with torch.no_grad():
        for x, y in loader:
            mse_loss(model(x), y)


def share_forgotten(ctx):
    model, optimizer, loader, ctx = _begin(ctx, samples=15)
    _train(model, optimizer, loader, weighed=False)


# -- model and strategy --------------------------------------------------------------------------------


def no_strategy(ctx):
    loader, ctx = weft.shard_data(_loader(), ctx)
    model = _net()
    _train(model, _sgd(model), loader)


def part_without_strategy(ctx, added):
    model, optimizer, loader, ctx = _begin(ctx)
    head = nn.Linear(2, 2)
    for step, (x, y) in enumerate(loader):
        if step == added:
            optimizer.add_param_group({"params": head.parameters()})
        loss = mse_loss(head(model(x)), y)
        (loss * loader.share).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_changed_on_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    if ctx.is_main:
        model.load_state_dict({name: tensor + 1 for name, tensor in _net().state_dict().items()})
    _train(model, optimizer, loader)


def whole_weights_into_shards(ctx):
    model, ctx = weft.fully_shard(_net(), ctx)
    model.load_state_dict(_net().state_dict())


def converted(ctx, change):
    model, optimizer, loader, ctx = _begin(ctx)
    change(model)
    dtype = model[0].weight.dtype
    _train(model, optimizer, ((x.to(dtype), y.to(dtype)) for x, y in loader), weighed=False)


def _there_and_back(model):
    kept = model.double()[0].weight.data  # so that the memory cannot be the same
    model.float()
    return kept


def other_weights(ctx, strategy, with_gradients):
    model, ctx = strategy(_net(), ctx)
    with torch.set_grad_enabled(with_gradients):
        weights = {name: p * 2 for name, p in model.named_parameters()}
        torch.func.functional_call(model, weights, (torch.ones(1, 4),))


def data_assigned(ctx):
    model, optimizer, loader, ctx = _begin(ctx, weft.fully_shard)
    for p in model.parameters():
        p.data = p.data.clamp(-1, 1)
    _train(model, optimizer, loader)


def samples_of_parts(ctx):
    model, ctx = weft.tensor_parallel(_net(), ctx, plan={"0": "column", "2": "row"})
    torch.func.vmap(torch.func.jacrev(model))(torch.ones(2, 4))


def ddp_around(ctx):
    model, _, loader, ctx = _begin(ctx)
    model = DistributedDataParallel(model)
    _train(model, _sgd(model), loader)


def ddp_inside(ctx):
    weft.replicate(DistributedDataParallel(_net()), ctx)


def part_called(ctx, strategy):
    model, _, _, _ = _begin(ctx, strategy)
    model[2](torch.ones(1, 8)).sum().backward()


class _TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x)


def unused_parameters(ctx):
    model, ctx = weft.replicate(_TwoHeads(), ctx)
    model(torch.ones(1, 4)).sum().backward()


# -- transforms ----------------------------------------------------------------------------------------


def result_not_unpacked(ctx):
    model = weft.replicate(_net(), ctx)
    weft.accumulate_grads(model, _loader(), ctx, steps=2)


def old_context(ctx):
    model, _ = weft.replicate(_net(), ctx)
    weft.accumulate_grads(model, _loader(), ctx, steps=2)


# -- optimizers ----------------------------------------------------------------------------------------


def optimizer_before_fully_shard(ctx):
    model = _net()
    optimizer = _sgd(model)
    model, ctx = weft.fully_shard(model, ctx)
    optimizer.step()


def optimizer_of_another_model(ctx, strategy):
    optimizer = _sgd(_net())
    loader, ctx = weft.shard_data(_loader(), ctx)
    model, ctx = strategy(_net(), ctx)
    _train(model, optimizer, loader)


def gradients_not_cleared(ctx, strategy):
    model, optimizer, loader, ctx = _begin(ctx, strategy)
    _train(model, optimizer, loader, clears=False)


def fp16_without_skipping(ctx):
    loader, ctx = weft.shard_data(_loader(), ctx)
    model, ctx = weft.with_precision(_net(), ctx, "fp16")
    model, ctx = weft.replicate(model, ctx)
    _train(model, _sgd(model), loader)


def schedule_by_own_loss(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(4):
        _train(model, optimizer, loader)
        scheduler.step(1.0 if ctx.rank else 1.0 / (epoch + 1))


# -- windows -------------------------------------------------------------------------------------------


def window_as_batch(ctx):
    _, _, windows, _ = _begin(ctx, steps=2)
    for x, y in windows:
        raise AssertionError(x, y)


def windows_not_used(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    model, _, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    _train(model, optimizer, loader)


def backward_on_one_rank_in_windows(ctx):
    model, optimizer, windows, ctx = _begin(ctx, samples=32, steps=2)
    for window in windows:
        for x, y in window:
            loss = mse_loss(model(x), y) * window.share
            if ctx.is_main:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _in_windows(ctx, samples=16, *, weigh=lambda window: window.share, before=None, after=None):
    model, optimizer, windows, ctx = _begin(ctx, samples=samples, steps=2)
    for window in windows:
        for x, y in window:
            if before:
                before(optimizer)
            (mse_loss(model(x), y) * weigh(window)).backward()
            if after:
                after(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def divided_by_length(ctx):
    _in_windows(ctx, 15, weigh=lambda window: 1 / len(window))


def not_divided(ctx):
    _in_windows(ctx, weigh=lambda window: 1.0)


def step_in_window(ctx):
    _in_windows(ctx, after=lambda model, optimizer: optimizer.step())


def clipped_in_window(ctx):
    _in_windows(ctx, after=lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))


def cleared_in_window(ctx):
    _in_windows(ctx, before=lambda optimizer: optimizer.zero_grad())


# -- one rank only -------------------------------------------------------------------------------------


def backward_on_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        if ctx.is_main:
            loss.backward()
        optimizer.step()


def evaluated_on_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx, weft.fully_shard)
    if ctx.is_main:
        with torch.no_grad():
            model(torch.ones(1, 4))
    _train(model, optimizer, loader)


def eval_mode_on_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    for _ in range(2):
        _train(model, optimizer, loader)
        if ctx.is_main:
            model.eval()


def saved_on_one_rank(ctx):
    model, _, _, ctx = _begin(ctx)
    state, ctx = weft.checkpointable({"model": model}, ctx)
    if ctx.is_main:
        weft.save(state, tempfile.mkdtemp(), 1, ctx)
    weft.barrier(ctx)


def loop_left_by_one_rank(ctx):
    model, optimizer, loader, ctx = _begin(ctx)
    for step, (x, y) in enumerate(loader):
        if ctx.rank == 1 and step == 2:
            break
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- files and values ----------------------------------------------------------------------------------


def state_dict_of_shards(ctx):
    model, ctx = weft.fully_shard(_net(), ctx)
    torch.save(model.state_dict(), f"{tempfile.mkdtemp()}/model.pt")


def optimizer_state_of_parts(ctx, strategy):
    loader, ctx = weft.shard_data(_loader(), ctx)
    model = _net()
    if strategy is weft.fully_shard:
        model, ctx = strategy(model, ctx)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    else:
        model, optimizer, ctx = strategy(model, torch.optim.AdamW(model.parameters(), 0.1), ctx, stage=1)
    _train(model, optimizer, loader)
    torch.save(optimizer.state_dict(), f"{tempfile.mkdtemp()}/optimizer.pt")


def checkpoint_of_another_model(ctx, folder):
    for width in (8, 9):
        model, _ = weft.replicate(_net(width), ctx)
        state, own = weft.checkpointable({"model": model}, ctx.on("data"))
        weft.save(state, folder, 1, own) if width == 8 else weft.restore(state, folder, own)


def gathered_with_gradients(ctx):
    weft.gather(_net()(torch.ones(1, 4)), ctx)


CASES = [
    (loader_not_sharded, (weft.replicate,), UserWarning, "replicate: all 2 ranks compute the same batches"),
    (loader_not_sharded, (weft.fully_shard,), UserWarning, "fully_shard: all 2 ranks compute the same batches"),
    (split_twice, (), ValueError, "shard_data: this loader cannot be split over the ranks"),
    (
        order_from_entropy,
        (),
        weft.errors.ContextError,
        "shard_data: the ranks read what list yields in",
    ),
    (share_forgotten, (), UserWarning, "shard_data: a step on an unweighted loss"),
    (mean_losses_of_no_rows, (), UserWarning, "shard_data: an evaluation got a batch without rows"),
    (no_strategy, (), UserWarning, "shard_data: ranks train apart"),
    (part_without_strategy, (0,), UserWarning, "shard_data: ranks train apart"),
    (part_without_strategy, (1,), UserWarning, "shard_data: ranks train apart"),
    (weights_changed_on_one_rank, (), weft.errors.NotSynchronized, "replicate: weights of Sequential differ"),
    (whole_weights_into_shards, (), weft.errors.ContractError, "fully_shard: load_state_dict was given whole tensors"),
    (converted, (nn.Module.double,), weft.errors.ContractError, "replicate: Sequential was moved or converted after"),
    (converted, (_there_and_back,), weft.errors.ContractError, "replicate: Sequential was moved or converted after"),
    (ddp_around, (), weft.errors.AlreadyApplied, "replicate: torch's DistributedDataParallel reduces gradients of"),
    (
        ddp_inside,
        (),
        weft.errors.AlreadyApplied,
        "replicate: torch's DistributedDataParallel already reduces these gradients",
    ),
    (
        other_weights,
        (weft.fully_shard, False),
        weft.errors.ContractError,
        "fully_shard: Sequential is called with other",
    ),
    (other_weights, (weft.replicate, True), weft.errors.ContractError, "replicate: Sequential is called with other"),
    (data_assigned, (), weft.errors.ContractError, "fully_shard: .data of sharded parameters of Sequential was"),
    (samples_of_parts, (), weft.errors.ContractError, "tensor_parallel: Sequential is called inside torch.func"),
    (part_called, (weft.replicate,), weft.errors.NotSynchronized, "replicate: a gradient reached '2.bias' of"),
    (part_called, (weft.fully_shard,), weft.errors.ContractError, "fully_shard: '2.weight' of Sequential is used past"),
    (unused_parameters, (), weft.errors.UnusedParameters, "replicate: 2 parameter(s) of _TwoHeads got no gradient"),
    (result_not_unpacked, (), TypeError, "accumulate_grads: the result of replicate was not unpacked"),
    (old_context, (), weft.errors.StaleContext, "accumulate_grads: the context does not know what was done to this"),
    (optimizer_before_fully_shard, (), weft.errors.OrderError, "fully_shard: 1 optimizer(s) hold parameters of"),
    (optimizer_of_another_model, (weft.replicate,), weft.errors.ContractError, "replicate: SGD updates none of the"),
    (optimizer_of_another_model, (weft.fully_shard,), weft.errors.ContractError, "fully_shard: SGD updates none of"),
    (gradients_not_cleared, (weft.replicate,), UserWarning, "replicate: a backward pass adds to gradients of"),
    (gradients_not_cleared, (weft.fully_shard,), UserWarning, "fully_shard: a backward pass adds to gradients of"),
    (fp16_without_skipping, (), weft.errors.ContractError, "with_precision: parameters of Sequential were updated by"),
    (schedule_by_own_loss, (), weft.errors.ContextError, "of SGD: the ranks do not agree"),
    (window_as_batch, (), TypeError, "a window was unpacked like a batch"),
    (windows_not_used, (), UserWarning, "shard_data: a step in a loop over a loader whose windows nobody uses"),
    (divided_by_length, (), UserWarning, "accumulate_grads: mean losses divided by len(window)"),
    (not_divided, (), UserWarning, "accumulate_grads: the losses of the micro-batches of this window are not weighted"),
    (step_in_window, (), weft.errors.NotSynchronized, "replicate: a step on gradients of Sequential before they were"),
    (clipped_in_window, (), weft.errors.NotSynchronized, "replicate: gradients of Sequential were changed in the"),
    (cleared_in_window, (), UserWarning, "replicate: gradients of Sequential were cleared in the middle"),
    *slow_cases(
        (backward_on_one_rank, (), weft.errors.PeerError, "replicate: optimizer.step() without a backward pass")
    ),
    (backward_on_one_rank_in_windows, (), UserWarning, "replicate: a rank makes no backward pass through"),
    (evaluated_on_one_rank, (), weft.errors.NotSynchronized, "fully_shard: the ranks gather different units"),
    (eval_mode_on_one_rank, (), weft.errors.ContextError, "of SGD: the ranks do not agree"),
    (saved_on_one_rank, (), weft.errors.ContextError, "save: the ranks do not agree"),
    *slow_cases((loop_left_by_one_rank, (), weft.errors.PeerError, "left the job while others still work")),
    (state_dict_of_shards, (), weft.errors.ContractError, "fully_shard: the state_dict of a sharded module cannot be"),
    (optimizer_state_of_parts, (weft.fully_shard,), weft.errors.ContractError, "fully_shard: the state_dict of AdamW"),
    (
        optimizer_state_of_parts,
        (weft.zero_partition,),
        weft.errors.ContractError,
        "zero_partition: the state_dict of A",
    ),
    (checkpoint_of_another_model, ("folder",), weft.errors.CheckpointError, "restore: "),
    (gathered_with_gradients, (), TypeError, "gather: a tensor requires grad"),
]


def _warned(ctx, mistake, args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mistake(ctx, *args)
    return [str(one.message) for one in caught if one.category is UserWarning]


@pytest.mark.parametrize(("mistake", "args", "kind", "text"), CASES)
def test_a_mistake_is_told(mistake, args, kind, text, tmp_path):
    args = tuple(str(tmp_path) if one == "folder" else one for one in args)
    if kind is UserWarning:
        told = [said for rank in run_ranks(_warned, 2, mistake, args) for said in rank]
        assert told and all(said.startswith(text) for said in told)
    else:
        mesh = {"tensor": 2} if mistake is samples_of_parts else None
        with pytest.raises(RanksFailed) as caught:
            run_ranks(mistake, 2, *args, mesh=mesh)
        errors = caught.value.errors.values()
        told = [str(error) for error in errors if isinstance(error, kind) and text in str(error)]
        assert told, errors
        assert len(errors) == 2 or mistake is loop_left_by_one_rank  # the other rank had ended
    assert any(re.search(r"fix: |if weft\.collectives\.any_rank", said) for said in told)


@pytest.mark.parametrize("strategy", [weft.replicate, weft.fully_shard])
def test_a_program_without_mistakes_is_told_nothing(strategy):
    assert run_ranks(_warned, 2, _no_mistake, (strategy,)) == [[], []]
    for freezes in (False, True):
        assert run_ranks(_warned, 2, _loss_through_another_model, (strategy, freezes)) == [[], []]


def _no_mistake(ctx, strategy):
    model, optimizer, loader, _ = _begin(ctx, strategy, samples=15)
    for set_to_none in (True, False):
        for x, y in loader:
            loss = mse_loss(model(x), y) * loader.share
            optimizer.zero_grad(set_to_none=set_to_none)  # between forward and backward, as many programs do
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    model, optimizer, windows, ctx = _begin(ctx, strategy, samples=15, steps=2)
    for window in windows:
        for x, y in window:
            (mse_loss(model(x), y) * window.share).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    other, optimizer, loader, ctx = _begin(ctx, strategy, samples=15)
    for x, y in loader:  # sums that are divided by what all ranks have
        total = mse_loss(other(x), y, reduction="sum")
        (total / weft.metrics.denominator(len(x), ctx)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _loss_through_another_model(ctx, strategy, freezes):
    """An actor whose loss flows through a critic, and gradients that are cleared before each backward pass."""
    for set_to_none in (True, False):
        actor, ctx = strategy(_net(), ctx)
        critic, ctx = strategy(_net(), ctx)
        actor_optimizer, critic_optimizer = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
        for _ in range(4):
            x = torch.randn(3, 4) + ctx.rank
            critic_optimizer.zero_grad(set_to_none=set_to_none)
            critic(torch.cat([x[:, :2], actor(x).detach()], 1)).square().mean().backward()
            critic_optimizer.step()
            critic.requires_grad_(not freezes)
            actor_optimizer.zero_grad(set_to_none=set_to_none)
            critic(torch.cat([x[:, :2], actor(x)], 1)).mean().backward()
            actor_optimizer.step()
            critic.requires_grad_(True)


def test_the_page_lists_every_mistake():
    heads = re.findall(r"^\| .*? \| `(.*?)` \| .* \|$", PAGE.read_text(), re.MULTILINE)
    values = [getattr(case, "values", case) for case in CASES]
    missing = [text for _, _, _, text in values if not any(head in text or text in head for head in heads)]
    assert not missing
    unknown = [head for head in heads if not any(head in text or text in head for _, _, _, text in values)]
    assert not unknown and len(heads) >= 30
