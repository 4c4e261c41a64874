"""Optimizers, collectives, checkpoints and placement on the simulated device: what they give is what a CPU gives."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.fix_lines.told import told
from tests.simulated_device.device import load
from tests.simulated_device.ranks import needs_compiler, on_cpu, on_ranks
from tests.variants import variant_cases, variants
from weft.engines.torch.streaming.slots import Slots, Wanted
from weft.testing import RanksFailed, run_ranks

pytestmark = [needs_compiler, pytest.mark.timeout(400)]


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), _Block(), _Block(), nn.Linear(8, 3))


STRATEGIES = {
    "replicate": lambda model, optimizer, ctx: (*weft.replicate(model, ctx)[:1], None),
    "fully_shard": lambda model, optimizer, ctx: (*weft.fully_shard(model, ctx, units=_Block)[:1], None),
    **{
        f"zero {stage}": lambda model, optimizer, ctx, stage=stage: weft.zero_partition(
            model, optimizer(model), ctx, stage=stage
        )[:2]
        for stage in (1, 2, 3)
    },
}


def _whole(ctx, module):
    with weft.full_params(module, ctx, write=False):
        return [p.detach().cpu().clone() for p in module.parameters()]


def _train(model, optimizer, batches):
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- optimizers --------------------------------------------------------------------------------------------------------


def _stepped(ctx, strategy, kind, options):
    def optimizer(model):
        return getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **options)

    model, made = STRATEGIES[strategy](_model().to(ctx.device), optimizer, ctx)
    draw = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 6, generator=draw).to(ctx.device), torch.randint(3, (8,), generator=draw).to(ctx.device))
        for _ in range(4)
    ]
    mine = [(x.chunk(2)[ctx.rank], y.chunk(2)[ctx.rank]) for x, y in batches]
    _train(model, made or optimizer(model), mine)
    return _whole(ctx, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"foreach": True}),
        # SGD and Adagrad: torch's fused kernels are for plain tensors, and weft refuses shards.
        *variant_cases(("AdamW", {"fused": True}), ("SGD", {"foreach": True}), ("Adagrad", {"foreach": True})),
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_optimizers_step_as_on_the_cpu(strategy, kind, options):
    expected = run_ranks(_stepped, 2, strategy, kind, {"foreach": False})
    for one, two in zip(on_ranks(_stepped, 2, strategy, kind, options), expected, strict=True):
        for x, y in zip(one, two, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def _drifting(ctx, strategy):
    if strategy == "hybrid":
        model, ctx = weft.fully_shard(_model(), ctx, axis=("replica", "shard"))
    else:
        model, ctx = weft.replicate(_model(), ctx, flat=strategy == "flat")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        model(torch.ones(2, 6, device=ctx.device)).sum().backward()
        if step == 3 and ctx.rank == 1:
            next(model.parameters()).grad.mul_(2.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["replicate", *variants("flat", "hybrid")])
def test_replicas_that_drift_are_seen_one_step_later(strategy):
    mesh = {"replica": 2, "shard": 2} if strategy == "hybrid" else {"data": 2}
    with pytest.raises(RanksFailed, match=r"(?s)weights before step 5 of SGD: .* a sum of their bits: "):
        on_ranks(_drifting, 4 if strategy == "hybrid" else 2, strategy, mesh=mesh)


# -- collectives -------------------------------------------------------------------------------------------------------


def _exchanged(ctx):
    value = torch.arange(4.0, device=ctx.device) + ctx.rank
    ragged = torch.ones(1 + ctx.rank, 2, device=ctx.device)
    collectives = weft.collectives
    found = {op: weft.reduce({"a": value, "b": [value.int()]}, ctx, op) for op in ("sum", "mean", "max")}
    found["gather"] = weft.gather(value, ctx)
    found["ragged"] = weft.gather(ragged, ctx)
    found["broadcast"] = weft.broadcast({"a": value, "n": ctx.rank}, ctx, source=1)
    found["objects"] = collectives.gather_objects({"rank": ctx.rank, "value": value}, ctx)
    found["scatter"] = collectives.scatter([value, value + 1], ctx)
    found["pad"] = collectives.pad_across(ragged, ctx)
    found["all_to_all"] = collectives.all_to_all([value, value * 2], ctx)
    found["any"] = [collectives.any_rank(ctx.rank == 1, ctx), collectives.any_rank(False, ctx)]
    found["mean of parts"] = weft.metrics.weighted_mean(value.sum(), ctx, weight=1 + ctx.rank)
    weft.barrier(ctx)
    tracked = value.clone().requires_grad_()
    (weft.reduce(tracked, ctx, grad=True) * (1 + ctx.rank)).sum().backward()
    return on_cpu({**found, "gradient": tracked.grad})


@pytest.mark.slow
def test_collectives_bring_the_same_as_on_cpus():
    for one, two in zip(on_ranks(_exchanged, 2), run_ranks(_exchanged, 2), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


# -- data, checkpoints -------------------------------------------------------------------------------------------------


def _job(ctx, strategy):
    def optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, made = STRATEGIES[strategy](_model().to(ctx.device), optimizer, ctx)
    made = made or optimizer(model)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 6, generator=draw), torch.randint(3, (32,), generator=draw))
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=4, shuffle=True), ctx)
    state, ctx = weft.checkpointable({"model": model, "optimizer": made, "loader": loader}, ctx)
    return model, made, loader, state, ctx


def _saved(ctx, folder, strategy):
    model, optimizer, loader, state, ctx = _job(ctx, strategy)
    batches = iter(loader)
    _train(model, optimizer, [next(batches) for _ in range(2)])
    weft.save(state, folder, 2, ctx)
    weft.save_async(state, folder, 3, ctx).wait()
    _train(model, optimizer, batches)
    return _whole(ctx, model)


def _restored(ctx, folder, strategy):
    model, optimizer, loader, state, ctx = _job(ctx, strategy)
    torch.manual_seed(5)
    weft.restore(state, folder, ctx)
    _train(model, optimizer, loader)
    return _whole(ctx, model)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fully_shard", *variants("replicate", "zero 1", "zero 2", "zero 3")])
def test_checkpoints_go_on_bitwise_and_also_on_cpus(tmp_path, strategy):
    expected = on_ranks(_saved, 2, str(tmp_path), strategy)
    for found in on_ranks(_restored, 2, str(tmp_path), strategy):
        assert all(map(torch.equal, found, expected[0]))
    for found in run_ranks(_restored, 2, str(tmp_path), strategy):
        torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-6)


# -- placement ---------------------------------------------------------------------------------------------------------


def _placed(ctx):
    model, x = _model(), torch.randn(4, 6)
    with torch.no_grad():
        expected = model(x)
    plan = weft.weights.plan_placement(model, {"sim:0": 1400, "cpu": "1GB"}, units=_Block)
    model, _ = weft.place(model, weft.local(device="sim:0"), plan)
    with torch.no_grad():
        found = [model(x.to("sim:0")).cpu() for _ in range(3)]
    return [unit.name for unit in plan.streamed], expected, found


@pytest.mark.xfail(raises=RanksFailed, reason="`parameter.data = ...` across devices: torch allows it to built-in ones")
def test_streamed_blocks_compute_as_on_the_cpu():
    ((streamed, expected, found),) = on_ranks(_placed, 1)
    assert streamed
    for one in found:
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)


def _closed_while_reading(ctx):
    """The next part is read ahead on a stream of its own when the memory is let go, and its owner takes it again."""

    def fill(pairs):
        for source, target in pairs:
            target.copy_(source)

    parts = [[Wanted(torch.full((256,), float(part), device=ctx.device), (256,), torch.float32)] for part in (0, 1)]
    slots = Slots(parts, ctx.device, 2048, fill, ahead=True)
    slots.enter(0)
    slots.close()
    torch.zeros(512, device=ctx.device)
    return load().take_hazards()


def test_memory_that_is_still_written_is_not_given_to_others():
    assert on_ranks(_closed_while_reading, 1) == [[]]


# -- state off and on --------------------------------------------------------------------------------------------------


def _off_and_on(ctx, strategy, times):
    model = _model().to(ctx.device)
    if strategy in ("fully_shard", "replicate"):
        model, ctx = getattr(weft, strategy)(model, ctx)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if strategy.startswith("zero"):
        model, made, ctx = weft.zero_partition(model, made, ctx, stage=int(strategy[-1]))
    model, ctx = weft.average_weights(model, ctx, decay=0.9)
    averages = weft.averages(model)
    draw, left = torch.Generator().manual_seed(1), []
    for step in range(6):
        x = torch.randn(8, 6, generator=draw).to(ctx.device)
        model(x.chunk(2)[ctx.rank]).square().mean().backward()
        for _ in range(times):
            held = [*model.parameters(), *(p.grad for p in model.parameters())]
            held += [value for state in made.state.values() for value in state.values() if value.dim()]
            held += averages.state_dict()["weights"].values() if step else ()
            with weft.offloaded(model, made, ctx):
                left += [weft.tensors.dtensor.local(one).untyped_storage().nbytes() for one in held]
                with pytest.raises(weft.errors.ContractError, match="called inside"):
                    model(x)
        made.step()
        averages.update()
        made.zero_grad()
    return on_cpu(_whole(ctx, model)), max(left, default=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fully_shard", "replicate", *variants("zero 1", "zero 2", "zero 3")])
def test_state_leaves_the_device_and_comes_back(strategy):
    expected = [found for found, _ in on_ranks(_off_and_on, 2, strategy, 0)]
    for (found, left), wanted in zip(on_ranks(_off_and_on, 2, strategy, 2), expected, strict=True):
        assert left == 0
        assert all(map(torch.equal, found, wanted))


def _with_state_on_cpu(ctx, strategy, offload, folder=None, *, narrow=False):
    """Four steps, the last two from a checkpoint if there is a folder; and where the state lies after each."""

    def made():
        nonlocal ctx
        model = _model().to(ctx.device)
        if strategy == "fully_shard":
            model, ctx = weft.fully_shard(model, ctx, units=_Block, offload=offload or False)
        elif strategy == "replicate":
            model, ctx = weft.replicate(model, ctx, offload=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if strategy.startswith("zero"):
            stage = int(strategy[-1])
            model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=stage, offload=offload)
        if narrow:
            optimizer, ctx = weft.state_in_bf16(optimizer, ctx)
        state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
        return model, optimizer, state

    model, optimizer, state = made()
    draw, places = torch.Generator().manual_seed(1), set()
    for step in range(4):
        if step == 2 and folder is not None:
            weft.save(state, folder, 2, ctx)
            model, optimizer, state = made()
            weft.restore(state, folder, ctx)
        x = torch.randn(8, 6, generator=draw).to(ctx.device)
        model(x.chunk(2)[ctx.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        places |= {weft.tensors.dtensor.local(one).device.type for one in moments}
    return on_cpu(_whole(ctx, model)), on_cpu([weft.tensors.dtensor.local(one) for one in moments]), places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "offload", "narrow"),
    [
        ("fully_shard", True, False),
        ("replicate", "optimizer", False),
        *variant_cases(("fully_shard", "optimizer", True)),
        *variant_cases(
            ("fully_shard", "optimizer", False), ("zero 1", "optimizer", True), ("zero 1", "optimizer", False)
        ),
        *variant_cases(("zero 2", "optimizer", False), ("zero 3", "optimizer", False), ("zero 3", "cpu", True)),
    ],
)
def test_state_on_the_cpu_gives_the_same_bits_also_in_checkpoints(strategy, offload, narrow, tmp_path):
    expected = on_ranks(_with_state_on_cpu, 2, strategy, None, narrow=narrow)
    for folder in (None, tmp_path):
        of_ranks = on_ranks(_with_state_on_cpu, 2, strategy, offload, folder, narrow=narrow)
        for found, wanted in zip(of_ranks, expected, strict=True):
            assert found[2] == {"cpu"} and wanted[2] == {"sim"}
            assert all(map(torch.equal, found[0], wanted[0]))
            assert all(map(torch.equal, found[1], wanted[1]))


def _taken_back(ctx):
    model, ctx = weft.replicate(_model().to(ctx.device), ctx, offload="optimizer")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6, device=ctx.device)).sum().backward()
    optimizer.step()
    there = {value.device.type for state in optimizer.state.values() for value in state.values() if value.dim()}
    model, ctx = weft.undo(model, ctx, rebind=optimizer)
    back = {value.device.type for state in optimizer.state.values() for value in state.values() if value.dim()}
    flat, ctx = weft.replicate(_model().to(ctx.device), ctx, offload="optimizer", flat=True)
    fused, ctx = weft.fuse_step(torch.optim.AdamW(flat.parameters()), ctx)
    flat(torch.ones(2, 6, device=ctx.device)).sum().backward()
    with told("engines/torch/device/state_offload.py", "steps on a few parameters") as it:
        fused.step()
    return there, back, it.fix


@pytest.mark.slow
def test_undo_brings_the_state_back_and_fused_steps_are_refused():
    for there, back, fix in on_ranks(_taken_back, 2):
        assert (there, back) == ({"cpu"}, {"sim"})
        assert fix == 'leave offload="optimizer" out of the call of replicate'


def _streamed(ctx):
    model, ctx = weft.fully_shard(_model().to(ctx.device), ctx, units=_Block)
    found = dict(weft.weights.stream(model, ctx, bucket_bytes=500, dtype="bf16"))
    with weft.full_params(model, ctx):
        return [
            (tensor.device.type, torch.equal(tensor, model.get_parameter(n).bfloat16())) for n, tensor in found.items()
        ]


def test_whole_weights_are_streamed_on_the_device():
    for found in on_ranks(_streamed, 2):
        assert found == [("sim", True)] * len(list(_model().parameters()))
