"""A program on one rank of many: what it holds and sends is what it holds and sends in a real run."""

import copy
import gc
import importlib
import itertools
import json
import os
import random
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data._utils import worker

import weft
from tests.variants import variants
from weft import monitoring
from weft.errors import ContextError
from weft.testing import assert_rehearsed, run_ranks


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class LM(nn.Module):
    def __init__(self, width=32, depth=2, words=64):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(words, width), nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


MODELS = {
    "fp16": lambda model, ctx: weft.with_precision(model, ctx, "fp16"),
    "bf16": lambda model, ctx: weft.with_precision(model, ctx, "bf16"),
    "recompute": lambda model, ctx: weft.recompute(model, ctx, blocks=Block),
    "replicate": weft.replicate,
    "flat": lambda model, ctx: weft.replicate(model, ctx, flat=True),
    "fully_shard": lambda model, ctx: weft.fully_shard(model, ctx, units=[Block]),
}


def averaging(model, ctx):
    model, ctx = weft.average_weights(model, ctx)
    return weft.averages(model).update


def program(ctx, *parts, length=16):
    model = LM()
    for part, apply in MODELS.items():
        if part in parts:
            model, ctx = apply(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if "fp16" in parts:
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    for stage in (1, 2, 3):
        if f"zero{stage}" in parts:
            model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=stage)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(64 * length).view(64, -1) % 64), 2)
    loader, ctx = weft.shard_data(loader, ctx)
    if "accumulate" in parts:
        model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    batches = iter(loader)
    update = averaging(model, ctx) if "average" in parts else list

    def step():
        window = next(batches)
        for (x,) in window if "accumulate" in parts else [window]:
            share = window.share if "accumulate" in parts else 1
            (cross_entropy(model(x).flatten(0, 1), x.flatten()) * share).backward()
        if "clip" in parts:
            weft.clip_grads(model, ctx, max_norm=1.0)
        if "torch_clip" in parts:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update()

    return step


@pytest.mark.slow
def test_bytes_and_messages_are_those_of_a_real_run():
    assert_rehearsed(program, 2, "fully_shard", "bf16", "recompute", only=[1])


ALL = ("bf16", "recompute", "accumulate", "clip")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "flat", "fully_shard", "zero1", "zero2", "zero3"])
def test_every_strategy_is_as_in_a_real_run(strategy):
    assert_rehearsed(program, 2, strategy, *ALL, only=[0])
    assert_rehearsed(program, 2, strategy, "fp16", "average", "torch_clip", only=[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [("replicate", None), ("zero1", None), ("fully_shard", {"replica": 2, "shard": 2})],
    ids=["replicate", "zero1", "hybrid"],
)
def test_four_ranks_are_as_in_a_real_run(strategy, mesh):
    found = assert_rehearsed(program, 4, strategy, *ALL, mesh=mesh, only=[0, 3])
    assert {message.axis for message in found.messages} >= (mesh or {"data": 4}).keys()


def sharded(ctx):
    model, ctx = weft.fully_shard(nn.Linear(1024, 1024, bias=False), ctx)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(4, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_rank_of_1024_holds_what_the_closed_forms_say():
    found = weft.rehearse(sharded, 1024)
    one = 1024 * 4  # a row of 1,024 for each rank
    assert (found.at_rest.parameters, found.at_rest.optimizer - 4, found.at_rest.gradients) == (one, 2 * one, 0)
    assert {m.kind: (m.count, m.bytes) for m in found.messages} == {
        "all_gather": (1, 1024 * one),
        "reduce_scatter": (1, 1024 * one),
    }
    assert [moment.label for moment in found.timeline] == ["build", "step 1", "step 2"]
    assert found.step_peak.where.startswith("tests/rehearsal/test_rehearse.py:")


def test_messages_have_the_axes_of_the_mesh():
    found = weft.rehearse(sharded, 64, mesh={"replica": 4, "shard": 16}, rank=63)
    assert {(m.kind, m.axis, m.ranks, m.nodes) for m in found.messages} == {
        ("all_gather", "shard", 16, 2),
        ("reduce_scatter", "shard", 16, 2),
        ("all_reduce", "replica", 4, 4),
    }
    assert found.mesh == (("replica", 4), ("shard", 16))


def copies(ctx):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2, enable_nested_tensor=False)
    model, ctx = weft.fully_shard(model, ctx, units=[nn.TransformerEncoderLayer])
    return model.parameters  # keeps it


@pytest.mark.slow
def test_copies_of_a_layer_have_memory_of_their_own():
    at_rest = weft.rehearse(copies, 2).at_rest
    weights = sum(p.numel() for p in nn.TransformerEncoderLayer(64, 4, 128).parameters())
    assert at_rest.total == at_rest.parameters == 2 * weights * 4 // 2


@pytest.mark.slow
def test_gradients_that_wait_for_the_end_of_a_window_are_gradients():
    peak = weft.rehearse(lambda ctx: program(ctx, "fully_shard", "accumulate"), 8).step_peak
    assert peak.gradients > 2 * (12 * 32**2 + 11 * 32) * 4  # those of all blocks, in whole


def saves(ctx, folder, background):
    model, ctx = weft.fully_shard(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)

    def step():
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        path = weft.save_async(state, folder, 1, ctx).wait() if background else weft.save(state, folder, 1, ctx)
        assert path.name == "step-00000001"

    return step


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, *variants(True)])
def test_of_a_checkpoint_each_rank_writes_what_it_would(tmp_path, background):
    run_ranks(lambda ctx: saves(ctx, tmp_path / "real", background)(), 2)
    for rank in range(2):
        (file,) = tmp_path.glob(f"real/*/rank-0000{rank}*.safetensors")
        text = file.read_bytes()
        head = 8 + int.from_bytes(text[:8], "little")
        found = weft.rehearse(lambda ctx: saves(ctx, tmp_path / "pretended", background), 2, rank=rank, steps=1)
        assert found.saved == len(text) - head
    assert "of a checkpoint, this rank writes" in str(found)
    assert not (tmp_path / "pretended").exists()


def scaled(ctx):
    model, ctx = weft.replicate(nn.Linear(8, 8), ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.ones(2, 8)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.slow
def test_trackers_and_other_files_of_a_run_are_left_as_they_are(tmp_path):
    def trackers():
        names = [monitoring.jsonl(tmp_path / "run.jsonl", purge_step=2), monitoring.csv(tmp_path / "run.csv")]
        return [*names, monitoring.tensorboard(tmp_path), monitoring.in_background(monitoring.csv(tmp_path / "b.csv"))]

    def log(step, ctx, loss):
        with monitoring.closing(trackers()) as all_of_them:
            monitoring.log_start(step, ctx, all_of_them, settings={"lr": 0.1})
            weft.log({"loss": loss}, step, ctx, all_of_them)

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    own = []

    def program(ctx):
        model, ctx = weft.fully_shard(nn.Linear(4, 4), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        numbers = itertools.count(2)
        objects = {"model": model, "optimizer": optimizer}
        record = monitoring.ledger(objects, tmp_path, ctx)
        profile = monitoring.profile(ctx, tmp_path / "profiles").__enter__()  # of the second step

        def step():
            loss, number = model(torch.ones(4, 4)).square().mean(), next(numbers)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(number, ctx, loss)
            monitoring.jsonl(tmp_path / "apart" / "run.jsonl")({"loss": 1.0}, step=number)
            weft.log({"loss": loss}, number, ctx, lambda values, step: own.append(step))
            record(number, loss=loss)
            profile.step()
            monitoring.save_memory_snapshot(tmp_path / "memory", ctx)
            assert monitoring.report.write_report(tmp_path / "apart")[0].folder == tmp_path / "apart"

        return step

    for step in (1, 2):
        log(step, weft.local(), 1.0)
    before, shown = files(), len(list(tmp_path.iterdir()))
    weft.rehearse(program, 4)
    assert files() == before
    assert len(list(tmp_path.iterdir())) == shown
    assert set(own) == {2, 3}  # a tracker of the program's own is called
    log(2, weft.local(), 3.0)
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1]) == {"step": 2, "loss": 3.0}


def test_a_scaler_of_torch_finds_finite_gradients():
    found = weft.rehearse(scaled, 4)
    assert found.at_rest.optimizer == 2 * 72 * 4 + 2 * 4  # it has made steps
    assert "gradients are finite" in found.assumed[0]


def works(ctx):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 8)), 2, num_workers=1)
    loader, ctx = weft.shard_data(loader, ctx)
    model, batches = nn.Linear(8, 8), iter(loader)
    return lambda: model(next(batches)[0]).sum().backward()


@pytest.mark.slow
def test_workers_of_a_loader_work():
    assert weft.rehearse(works, 4).at_rest.gradients == 72 * 4


def process_state():
    owners = (sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"])
    hooks = [list(value or ()) for owner in owners for name, value in vars(owner).items() if name.startswith("_global")]
    return (
        dict(os.environ), random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(),
        torch.get_default_dtype(), torch.get_default_device(), torch.empty(1).device, torch.get_num_threads(),
        dist.group.WORLD, dist.is_initialized() and dist.get_world_size(), dict(dist.Backend._plugins),
        list(dist.Backend.backend_list), list(dist.distributed_c10d._world.pg_names.values()), hooks,
        list(warnings.filters), sys.argv, sys.path, Path.cwd(), gc.isenabled(), gc.get_freeze_count() > 0,
        torch.is_grad_enabled(), _get_current_dispatch_mode_stack(),
        torch.overrides._get_current_function_mode_stack(), vars(torch.UntypedStorage).get("resize_"),
        torch.autocast.__init__, torch.amp.GradScaler.__init__, torch.utils.swap_tensors, FakeTensor.tolist,
        len(FakeTensorMode.cache), worker._worker_loop, torch.empty(1).untyped_storage().nbytes(),
    )  # fmt: skip


def fails(ctx):
    random.random()
    np.random.rand()
    torch.randperm(8)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    weft.fully_shard(nn.Linear(8, 8), ctx)
    raise OSError("disk full")


@pytest.mark.parametrize("body", [sharded, fails])
def test_the_process_is_as_before(body):
    before, threads = process_state(), set(threading.enumerate())
    if body is sharded:
        weft.rehearse(body, 16, mesh={"replica": 2, "shard": 8})
    else:
        with pytest.raises(OSError, match="disk full") as caught:
            weft.rehearse(body, 16)
        assert "rank 0 of 16, at tests/rehearsal/test_rehearse.py:" in caught.value.__notes__[0]
    assert process_state() == before
    assert set(threading.enumerate()) <= threads  # one of an earlier test may end meanwhile


def inside(ctx):
    model, ctx = weft.replicate(nn.Linear(4, 4), ctx)
    before = process_state()
    found = weft.rehearse(sharded, 64)
    assert process_state() == before
    model(torch.ones(2, 4) * (ctx.rank + 1)).sum().backward()
    gathered = weft.gather(model.weight.grad[None], ctx)
    return found.at_rest.parameters, torch.equal(gathered[0], gathered[1]), float(weft.reduce(torch.ones(()), ctx))


def test_it_runs_inside_of_a_job():
    assert run_ranks(inside, 2) == [(1024 * 16 * 4, True, 2.0)] * 2


def on(ctx, first, second):
    torch.set_default_device(first)
    layers = [nn.Linear(8, 8)]
    torch.set_default_device("cpu")
    with torch.device(second):
        layers.append(nn.Linear(8, 8))
    model = nn.Sequential(*layers, nn.Linear(8, 8, device=first))
    kept = list(model.parameters())
    model.to(first).to(device=second, dtype=torch.float32)
    if first != "cpu":
        model.cuda().to(0)
    assert all(one is other for one, other in zip(kept, model.parameters(), strict=True))
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        x = torch.tensor([[1.0] * 8] * 4, device=first).to(torch.device(second), non_blocking=True)
        y = torch.randint(0, 8, (4,), device=first)
        with torch.autocast(torch.device(first).type, dtype=torch.bfloat16):
            loss = cross_entropy(model(x if first == "cpu" else x.cuda()), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.slow
def test_devices_that_are_not_there_are_like_the_one_that_is():
    there, absent = (
        weft.rehearse(lambda ctx, names=names: on(ctx, *names), 4) for names in (("cpu", "cpu"), ("cuda", "cuda:3"))
    )
    assert str(absent.compare(there)) == "no difference"
    assert there.step_peak.activations


def converted(ctx):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[0].weight.grad = torch.zeros(8, 8)
    weight = model[0].weight
    model.to(torch.bfloat16)
    assert model[0].weight is weight
    assert {weight.dtype, weight.grad.dtype} == {torch.bfloat16}
    return model.parameters


def test_a_model_may_change_its_dtype():
    found = weft.rehearse(converted, 2)
    assert (found.at_rest.parameters, found.at_rest.gradients, found.at_rest.buffers) == (88 * 2, 64 * 2, 2 * 8 * 2 + 8)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def answers(ctx):
    """What a program asks about parameters, made of tensors with values and of others."""
    found = []
    for make in (
        lambda: torch.zeros(()),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.randn(2),
        lambda: torch.from_numpy(np.ones(2)),
        lambda: torch.zeros(2, device="meta"),
    ):
        p, module, other = nn.Parameter(make()), nn.Module(), nn.Module()
        p.mark = "kept"
        before = torch.optim.Adam([p])
        module.list, module.dict = nn.ParameterList([p]), nn.ParameterDict({"p": p})
        module.list.append(make())
        module.dict["other"] = make()
        module.set = p
        module.register_parameter("registered", p)
        other.register_parameter("registered", None)
        other.registered = p
        kept = [module.list[0], module.dict["p"], module.set, module.registered, other.registered]
        module.kept, again = kept, nn.Parameter(p)
        copied = copy.deepcopy(module)
        found.append([each is p for each in kept])
        found.append([isinstance(each, nn.Parameter) for each in (*module.list, *module.dict.values(), again, make())])
        found.append((again is p, again.data_ptr() == p.data_ptr(), len({*module.parameters(), *other.parameters()})))
        found.append((copied.set is copied.kept[0], copied.set is p, isinstance(copied.set, nn.Parameter)))
        module.requires_grad_(False)
        found.append((p.requires_grad, p.mark, before.param_groups[0]["params"][0] is module.set))
        buffer = nn.Buffer(make())
        module.buffer, module.plain = buffer, make()
        found.append((module.buffer is buffer, isinstance(buffer, nn.Buffer), list(dict(module.named_buffers()))))
        nn.utils.parametrize.register_parametrization(other, "registered", Doubled())
        found.append((other.parametrizations.registered.original is p, isinstance(other.registered, nn.Parameter)))
    for lazy, other in (nn.LazyLinear(3, device="cpu"), nn.Linear(4, 3)), (nn.LazyBatchNorm1d(), nn.BatchNorm1d(4)):
        weight = lazy.weight
        found.append((isinstance(weight, nn.Parameter), nn.parameter.is_lazy(weight)))
        lazy(torch.ones(2, 4))
        found.append((lazy.weight is weight, type(lazy) is type(other), nn.parameter.is_lazy(weight)))
        found.append([p.shape == same.shape for p, same in zip(lazy.parameters(), other.parameters(), strict=True)])
        found.append(list(lazy.state_dict()) == list(other.state_dict()))
    return found


def test_parameters_are_what_they_are_in_a_real_run():
    found = []

    def asking(ctx):
        found.append(answers(ctx))
        scale, model = nn.Parameter(torch.zeros(())), nn.Linear(2, 2)
        scales, optimizer = nn.ParameterList([scale]), torch.optim.Adam([scale])
        _, ctx = weft.checkpointable({"model": model, "scales": scales, "optimizer": optimizer}, ctx)
        return lambda: model(torch.ones(1, 2)).sum().backward()

    weft.rehearse(asking, 2)
    assert found == [answers(None)]


def test_parameters_of_a_module_that_is_imported_meanwhile_have_values(tmp_path, monkeypatch):
    text = "import torch\nlayer = torch.nn.Linear(2, 2)\nscale = torch.nn.Parameter(torch.ones(2))\n"
    (tmp_path / "imported_in_a_rehearsal.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def importing(ctx):
        module = importlib.import_module("imported_in_a_rehearsal")
        model, holder = nn.Linear(2, 2), nn.ParameterList([module.scale])
        return lambda: (model(torch.ones(1, 2)).sum() + holder[0].sum()).backward()

    weft.rehearse(importing, 2)
    module = sys.modules.pop("imported_in_a_rehearsal")
    assert not isinstance(module.layer.weight, FakeTensor)
    assert module.scale.tolist() == [1.0, 1.0]


def reads(ctx):
    model = nn.Linear(4, 4)

    def step():
        loss = model(torch.ones(1, 4)).sum()
        if loss.item() > 0.5:
            loss.backward()

    return step


@pytest.mark.slow
def test_a_number_may_be_assumed():
    found = weft.rehearse(reads, 2)
    assert found.at_rest.gradients == 80
    assert "is 0.01 or 100, with 80 B or 160 B at rest, " in found.assumed[0]
    assert weft.rehearse(reads, 2, assume={"values": 0.0}).at_rest.gradients == 0
    found = weft.rehearse(reads, 2, assume={"values": 1.0})
    assert found.at_rest.gradients == 80
    assert "is 1.0" in found.assumed[0]


def masked(ctx):
    weight = nn.Linear(4, 4).weight
    return lambda: weight[weight > 0].sum()


def test_sizes_that_depend_on_values_are_refused():
    with pytest.raises(ContextError, match=r"(?s)size of what aten.* depends on the values.*test_rehearse"):
        weft.rehearse(masked, 2)


def speech(ctx):
    frames, words = torch.tensor([9, 6]), torch.tensor([3, 2])
    recurrent, head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 12)
    nn.init.trunc_normal_(head.weight)
    rates = torch.linspace(0, 0.5, len(words)).tolist()
    recurrent, ctx = weft.replicate(recurrent, ctx)
    head, ctx = weft.replicate(head, ctx)

    def step():
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 9, 4), frames, batch_first=True)
        found, lengths = nn.utils.rnn.pad_packed_sequence(recurrent(packed)[0])
        scores = head(nn.functional.dropout(found, rates[-1])).log_softmax(-1)
        nn.functional.ctc_loss(scores, torch.tensor([[1, 2, 3], [4, 5, 0]]), lengths, words).backward()

    return step


def with_sparse_gradients(ctx):
    table, head = nn.Embedding(64, 4, sparse=True), nn.Linear(4, 1)
    table, ctx = weft.replicate(table, ctx)
    head, ctx = weft.replicate(head, ctx)
    optimizers = torch.optim.SparseAdam(table.parameters()), torch.optim.Adam(head.parameters())

    def step():
        chosen = table(torch.arange(6)).argmax(-1)
        (head(table(chosen)).sum() + torch.bincount(chosen, minlength=4).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def test_sparse_gradients_are_rehearsed_and_sent_as_whole_tables_at_most():
    found = weft.rehearse(with_sparse_gradients, 4)
    assert found.at_rest.optimizer == 2 * 4 * (64 * 4 + 5) + 2 * 4  # moments, and steps of Adam
    assert [(each.kind, each.bytes) for each in found.messages] == [("all_reduce", 4 * (64 * 4 + 5))]


@pytest.mark.slow
def test_known_lengths_decide_sizes_as_in_a_real_run():
    assert_rehearsed(speech, 2, only=[1])


@pytest.mark.parametrize("arguments", [{"ranks": 0}, {"ranks": 4, "rank": 4}, {"ranks": 4, "steps": 0}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match=r"(?s)found:.*ranks=.*fix: +weft.rehearse"):
        weft.rehearse(sharded, **arguments)


@pytest.mark.slow
def test_a_second_rehearsal_at_the_same_time_is_refused():
    def refused():
        with pytest.raises(ContextError, match="another rehearsal is running in this process") as error:
            weft.rehearse(lambda ctx: lambda: None, 2)
        told.append(str(error.value))

    def program(ctx):
        refused()  # by the program itself
        thread = threading.Thread(target=refused)
        thread.start()
        thread.join()
        layer = nn.Linear(4, 4)
        return lambda: layer(torch.ones(2, 4)).sum().backward()

    told = []
    assert len(weft.rehearse(program, 2, rank="all distinct")) == 1
    assert len(told) == 4 and len(set(told)) == 1
    assert all(part in told[0] for part in ("found:", "expected:", "fix:"))

    def fails(ctx):
        raise RuntimeError("of the program")

    for _ in range(2):  # the first one does not stand in the way of the next
        with pytest.raises(RuntimeError, match="of the program"):
            weft.rehearse(fails, 2)
    assert weft.rehearse(lambda ctx: lambda: None, 2).world_size == 2


def test_a_mesh_that_does_not_fit_is_refused_as_in_a_real_run():
    with pytest.raises(ContextError, match="16"):
        weft.rehearse(sharded, 16, mesh={"data": 3, "shard": 5})
    with pytest.raises(ValueError, match=r"(?s)does not return a step.*fix:"):
        weft.rehearse(lambda ctx: None, 2)


def test_deepspeed_cannot_be_rehearsed():
    def body(ctx):
        model = nn.Linear(2, 2)
        weft.zero_partition(model, torch.optim.AdamW(model.parameters()), ctx, stage=1, engine="deepspeed")

    with pytest.raises(weft.errors.ContextError, match=r"(?s)deepspeed.* cannot be rehearsed.*fix: +engine=\"torch\""):
        weft.rehearse(body, 4)


def nesterov(parameters):
    return torch.optim.SGD(parameters, 0.7, momentum=0.9, nesterov=True)


@pytest.mark.slow
def test_the_exchange_of_local_steps_is_shown_whatever_the_number_of_steps():
    def body(ctx, **options):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every=4, **options)

        def step():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    reached = weft.rehearse(body, 4, steps=4)
    assert [(each.kind, each.bytes) for each in reached.messages] == [("all_reduce", 80)]
    for steps in (1, 2, 5):
        found = weft.rehearse(body, 4, steps=steps)
        assert (found.steps, found.messages, found.exchange) == (steps, (), reached.messages)
        assert "messages of an exchange of local_steps" in str(found)
        assert found.step_peak.where.startswith("tests/rehearsal")
    parts = weft.rehearse(lambda ctx: body(ctx, fragments=2, outer=nesterov), 4, steps=1)
    assert [(each.count, each.bytes) for each in parts.exchange] == [(2, 80)]
    assert parts.at_rest.optimizer == 80  # of the outer one, from the first exchange on
    assert weft.rehearsal.Rehearsal.from_json(parts.to_json()) == parts
    assert_rehearsed(body, 2, only=[1])


def test_what_goes_without_messages_says_so():
    assert "no messages in step 2, the last one; more: weft.rehearse(..., steps=...)" in str(weft.rehearse(on_one, 4))


def on_one(ctx):
    layer = nn.Linear(4, 4)
    return lambda: layer(torch.ones(2, 4)).sum().backward()


@pytest.mark.slow
def test_a_sharded_model_may_be_called_without_a_backward_pass():
    def body(ctx):
        torch.manual_seed(0)
        model, _ = weft.fully_shard(nn.Linear(4, 4), ctx)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step():
            model(torch.ones(2, 4)).detach()  # as a generator is for its critic
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    assert [each.kind for each in weft.rehearse(body, 2).messages] == ["all_gather", "reduce_scatter"]
    assert_rehearsed(body, 2)
