"""local_steps: equal to one process that plays all workers, resumed bit for bit, and as few bytes as promised."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import weft
from tests.variants import variant_cases, variants
from weft.errors import ContextError, ContractError, OrderError
from weft.testing import largest_difference, run_ranks
from weft.transforms.local_steps import averaged

STEPS, ROWS = 10, 8  # of all workers together
nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
sgd = partial(torch.optim.SGD, lr=0.1)


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def _data():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 8, generator=draw, dtype=torch.float64) for _ in range(STEPS)]


def _loss(model, rows):
    return mse_loss(model(rows[:, :5]), rows[:, 5:])


# -- the reference: one process that plays all workers -----------------------------------------------


def _simulated(workers, every, inner, outer=None, fragments=1, steps=STEPS):
    """Weights of all workers after the last step, by the texts of the papers, and the values at the last exchange."""
    models = [_net() for _ in range(workers)]
    optimizers = [inner(model.parameters()) for model in models]
    anchors = [nn.Parameter(p.detach().clone()) for p in models[0].parameters()]
    slow = None if outer is None else outer(anchors)
    for step, rows in enumerate(_data()[:steps], 1):
        for model, optimizer, part in zip(models, optimizers, rows.chunk(workers), strict=True):
            _loss(model, part).backward()
            optimizer.step()
            optimizer.zero_grad()
        for fragment in range(fragments):
            if step % every == fragment * every // fragments:
                _exchange(models, anchors, slow, range(fragment, len(anchors), fragments))
    return [[p.detach() for p in model.parameters()] for model in models], [a.detach() for a in anchors]


@torch.no_grad()
def _exchange(models, anchors, slow, chosen):
    for number, anchor in enumerate(anchors):
        anchor.grad = None
        if number in chosen:
            mean = torch.stack([list(model.parameters())[number] for model in models]).mean(0)
            anchor.grad = anchor - mean
            if slow is None:
                anchor.copy_(mean)
    if slow is not None:
        slow.step()
    for model in models:
        for number in chosen:
            list(model.parameters())[number].copy_(anchors[number])


# -- on ranks ----------------------------------------------------------------------------------------


def _build(ctx, inner, *, strategy=None, axis=None, **options):
    model = _net()
    optimizer = inner(model.parameters())
    model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, axis=axis, **options)
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, rebind=optimizer)
    elif strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    elif strategy:
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    return model, optimizer, ctx


def _step(model, optimizer, ctx, rows):
    _loss(model, rows.chunk(ctx.world_size)[ctx.rank]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _weights(model, ctx):
    with weft.full_params(model, ctx):
        return [p.detach().clone() for p in model.parameters()]


def _train(ctx, inner, **options):
    model, optimizer, ctx = _build(ctx, inner, **options)
    for rows in _data():
        _step(model, optimizer, ctx, rows)
    return _weights(model, ctx)


def _assert_simulated(found, expected, ranks_per_worker=1):
    for rank, weights in enumerate(found):
        assert largest_difference(weights, expected[rank // ranks_per_worker]) < 1e-12


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.variant)])
@pytest.mark.parametrize(
    ("every", "inner", "outer", "fragments"),
    [(4, adamw, nesterov, 1), (3, adamw, None, 1), (4, adamw, nesterov, 3)],
    ids=["diloco", "local sgd", "streaming"],
)
def test_equals_one_process_that_plays_all_workers(ranks, every, inner, outer, fragments):
    expected, _ = _simulated(ranks, every, inner, outer, fragments)
    _assert_simulated(run_ranks(_train, ranks, inner, every=every, outer=outer, fragments=fragments), expected)


@pytest.mark.parametrize("strategy", ["fully_shard", "zero1", *variants("replicate", "zero2", "zero3")])
def test_shards_inside_and_local_steps_across(strategy):
    expected, _ = _simulated(2, 4, adamw, nesterov)
    mesh = {"replica": 2, "shard": 2}
    found = run_ranks(_train, 4, adamw, every=4, outer=nesterov, strategy=strategy, mesh=mesh)
    _assert_simulated(found, expected, 2)


def _plain():
    model = _net()
    optimizer = sgd(model.parameters())
    for rows in _data():
        _loss(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.variant)])
def test_every_step_with_sgd_is_one_process(ranks):
    _assert_simulated(run_ranks(_train, ranks, sgd, every=1), [_plain()] * ranks)


def _ragged(ctx):
    """An epoch of 10 rows, in windows of 2 micro-batches of 2 rows per rank."""
    rows = torch.cat(_data())[:11]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
    loader, ctx = weft.shard_data(loader, ctx, uneven="empty")
    model, optimizer, ctx = _build(ctx, sgd, every=1)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    for window in loader:
        for (x,) in window:
            (_loss(model, x).nan_to_num() * window.share).backward()
        optimizer.step()
        optimizer.zero_grad()
    weft.check(ctx, model=model, optimizer=optimizer, loader=loader)
    return [p.detach() for p in model.parameters()]


def test_windows_of_unequal_parts_are_exact():
    model = _net()
    optimizer = sgd(model.parameters())
    rows = torch.cat(_data())[:11]
    for window in (rows[:8], rows[8:]):
        _loss(model, window).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [p.detach() for p in model.parameters()]
    _assert_simulated(run_ranks(_ragged, 2), [expected] * 2)


# -- checkpoints -------------------------------------------------------------------------------------


def _resumed(ctx, directory, strategy, fragments):
    """Weights of a run, and of one that was saved after 6 of 10 steps, in the middle between exchanges."""
    options = {"every": 4, "outer": nesterov, "fragments": fragments, "strategy": strategy}
    model, optimizer, inner = _build(ctx, adamw, **options)
    state, inner = weft.checkpointable({"model": model, "optimizer": optimizer}, inner)
    for number, rows in enumerate(_data()):
        if number == 6:
            weft.save(state, directory, 6, inner)
        _step(model, optimizer, inner, rows)
    expected = _weights(model, inner)

    model, optimizer, inner = _build(ctx, adamw, **options)
    state, inner = weft.checkpointable({"model": model, "optimizer": optimizer}, inner)
    weft.restore(state, directory, inner)
    for rows in _data()[6:]:
        _step(model, optimizer, inner, rows)
    return expected, _weights(model, inner)


@pytest.mark.parametrize(
    ("ranks", "mesh", "strategy", "fragments"),
    [
        (2, None, None, 3),
        (4, {"replica": 2, "shard": 2}, "zero1", 1),
        *variant_cases((2, None, None, 1), (4, {"replica": 2, "shard": 2}, "fully_shard", 2)),
    ],
)
def test_a_run_that_is_resumed_between_exchanges_is_bitwise_the_same(tmp_path, ranks, mesh, strategy, fragments):
    for expected, found in run_ranks(_resumed, ranks, tmp_path, strategy, fragments, mesh=mesh):
        assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def _saved(ctx, directory):
    model, optimizer, ctx = _build(ctx, adamw, every=4, outer=nesterov)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    for rows in _data()[:6]:
        _step(model, optimizer, ctx, rows)
    weft.save(state, directory, 6, ctx)
    return [optimizer.state[p]["exp_avg"] for p in model.parameters()]


def _continued(ctx, directory, local):
    model = _net()
    optimizer = adamw(model.parameters())
    if local:
        model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every=4, outer=nesterov)
    else:
        model, ctx = weft.fully_shard(model, ctx, rebind=optimizer)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    weft.restore(state, directory, ctx, strict=local)
    with weft.full_params(model, ctx):
        weights = [p.detach().clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    moments = [m.full_tensor() if hasattr(m, "full_tensor") else m.clone() for m in moments]
    _step(model, optimizer, ctx, _data()[6])
    return weights, moments


@pytest.mark.parametrize(("ranks", "local"), [(1, True), (4, True), (2, False)])
def test_another_number_of_replicas_resumes_from_the_anchor_and_the_mean_state(tmp_path, ranks, local):
    moments = run_ranks(_saved, 2, tmp_path)
    mean = [torch.stack(both).mean(0) for both in zip(*moments, strict=True)]
    _, anchors = _simulated(2, 4, adamw, nesterov, steps=4)
    for weights, found in run_ranks(_continued, ranks, tmp_path, local):
        assert largest_difference(weights, anchors) < 1e-12
        assert largest_difference(found, mean) < 1e-12


# -- evaluation, bytes, what is refused --------------------------------------------------------------


def _evaluated(ctx):
    model, optimizer, ctx = _build(ctx, adamw, every=4, outer=nesterov)
    for rows in _data()[:6]:
        _step(model, optimizer, ctx, rows)
    before = [p.detach().clone() for p in model.parameters()]
    with averaged(model, ctx):
        inside = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ContractError, match="a step while the module holds the mean"):
            optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    return inside


def test_the_mean_of_the_replicas_is_there_for_evaluation():
    workers, _ = _simulated(2, 4, adamw, nesterov, steps=6)
    mean = [torch.stack(both).mean(0) for both in zip(*workers, strict=True)]
    for inside in run_ranks(_evaluated, 2):
        assert largest_difference(inside, mean) < 1e-12


def _bytes_sent(ctx, every, fragments):
    """Bytes of the all-reduces of each step."""
    sent, per_step = [], []
    all_reduce = torch.distributed.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    model, optimizer, ctx = _build(ctx, adamw, every=every, fragments=fragments)
    torch.distributed.all_reduce = counted
    try:
        for rows in _data()[:8]:
            _step(model, optimizer, ctx, rows)
            per_step.append(sum(sent))
            sent.clear()
    finally:
        torch.distributed.all_reduce = all_reduce
    return per_step, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (4, 1), (4, 4)])
def test_bytes_are_one_in_every(every, fragments):
    for per_step, gradients in run_ranks(_bytes_sent, 2, every, fragments):
        assert sum(per_step) == 8 // every * gradients  # replicate sends 8 times the gradients
        assert sum(sent > 0 for sent in per_step) == 8 // every * fragments


def _late(ctx):
    model, optimizer, ctx = _build(ctx, adamw, every=2)
    for rows in _data()[: 2 if ctx.rank else 3]:
        _step(model, optimizer, ctx, rows)
    if ctx.rank:
        ctx.agree("the end")  # one step less than the other, which goes to its next exchange alone
    else:
        _step(model, optimizer, ctx, _data()[3])


def test_ranks_with_different_numbers_of_steps_raise_and_do_not_hang():
    with pytest.raises(weft.testing.RanksFailed, match="(?s)local_steps: exchange.*the end|the end.*local_steps"):
        run_ranks(_late, 2)


def _order(ctx):
    model = _net()
    optimizer = adamw(model.parameters())
    model, inner = weft.replicate(model, ctx)
    with pytest.raises(OrderError, match="local_steps: comes too late, after replicate"):
        weft.local_steps(model, optimizer, inner, every=4)
    model = _net()
    optimizer = adamw(model.parameters())
    model, optimizer, inner = weft.local_steps(model, optimizer, ctx, every=4)
    for strategy in (weft.replicate, partial(weft.fully_shard, rebind=optimizer), partial(weft.replicate, axis="data")):
        with pytest.raises(OrderError, match="local_steps averages parameters along 'data'"):
            strategy(model, inner)
    weft.check(inner, model=model, optimizer=optimizer)


def test_a_strategy_over_the_same_axis_is_refused():
    run_ranks(_order, 2)


def _incomplete(ctx):
    model, optimizer, ctx = _build(ctx, adamw, every=4)
    with pytest.raises(ContractError, match="each of 2 ranks trains"):
        weft.check(ctx, model=model, optimizer=optimizer)


def test_check_misses_a_strategy_along_the_other_axis():
    run_ranks(_incomplete, 4, mesh={"replica": 2, "shard": 2})


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"every": 0}, ValueError, "every"),
        ({"every": 4, "fragments": 5}, ValueError, "fragments"),
        ({"every": 4, "outer": "nesterov"}, TypeError, "outer = str"),
        ({"every": 4, "axis": "model"}, ContextError, "axis = 'model'"),
    ],
)
def test_bad_options(options, kind, text):
    model = _net()
    with pytest.raises(kind, match=text):
        weft.local_steps(model, adamw(model.parameters()), weft.local(), **options)


def test_an_optimizer_over_other_parameters_is_refused():
    model = _net()
    for optimizer in (adamw(model[0].parameters()), adamw([*model.parameters(), nn.Parameter(torch.ones(1))])):
        with pytest.raises(ContractError, match="does not hold exactly the parameters"):
            weft.local_steps(model, optimizer, weft.local(), every=4)
    model[2].requires_grad_(False)
    weft.local_steps(model, adamw(model[0].parameters()), weft.local(), every=4)


def _frozen_later(ctx):
    model, optimizer, ctx = _build(ctx, adamw, every=2)
    _step(model, optimizer, ctx, _data()[0])
    model[2].requires_grad_(False)
    with pytest.raises(ContractError, match="the trained parameters differ from those of the first step"):
        _step(model, optimizer, ctx, _data()[1])


def test_parameters_that_are_frozen_later_are_noticed():
    run_ranks(_frozen_later, 2)


def test_undo_takes_the_hooks_off():
    model = _net()
    optimizer = adamw(model.parameters())
    model, optimizer, ctx = weft.local_steps(model, optimizer, weft.local(), every=1, outer=nesterov)
    model, ctx = weft.undo(model, ctx)
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks and not ctx.applied
