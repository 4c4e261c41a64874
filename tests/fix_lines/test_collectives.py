"""Collectives: values that cannot be sent, combined or split, and cross-entropy over a divided vocabulary."""

import dataclasses
import datetime as dt
import importlib
import pathlib
import sys
import tempfile
import threading
import time
import warnings
import zoneinfo

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from tests.fix_lines.told import told
from weft.collectives import (
    all_to_all,
    broadcast,
    gather,
    gather_objects,
    pad_across,
    reduce,
    reduce_scatter,
    scatter,
    vocab_cross_entropy,
)
from weft.testing import run_ranks


class Plain:
    """No dataclass."""

    def __init__(self):
        self.a = 1


@dataclasses.dataclass
class Inner:
    """At the top of a module."""

    a: int = 1


def _local_class():
    @dataclasses.dataclass
    class Inner:
        a: int = 1

    return Inner()


def _sends_what_the_line_says(it, value, ctx):
    sent = eval(it.fix, {"weft": weft, "value": value, "ctx": ctx})
    assert broadcast(sent, ctx) is sent
    return sent


@pytest.mark.filterwarnings("ignore:.*(prototype stage|quantize_per_tensor|TypedStorage)")
def test_values_that_cannot_be_sent():
    with weft.start(device="cpu") as ctx:
        value = {"a": [1]}
        value["a"].append(value)
        with told("collectives/encoding.py", "more than 100 others") as it:
            broadcast(value, ctx)
        assert it.fix == "leave out references of a value to itself"
        broadcast({"a": value["a"][:1]}, ctx)

        with told("collectives/encoding.py", "kind.__name__, 'send its fields") as it:
            broadcast(Plain(), ctx)
        assert it.fix == "send its fields as a dict"
        broadcast(vars(Plain()), ctx)

        with told("collectives/encoding.py", "requires grad; the others") as it:
            broadcast(value := torch.ones(2, requires_grad=True), ctx)
        _sends_what_the_line_says(it, value, ctx)
        assert "or weft.gather(value, ctx, grad=True)" in it.fix and weft.gather(value, ctx, grad=True).requires_grad

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strange = [
                torch.eye(2).to_sparse(),
                torch.eye(2).to_sparse_csr(),
                torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
                torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            ]
        for value in strange:
            with told("collectives/encoding.py", "with layout") as it:
                broadcast(value, ctx)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _sends_what_the_line_says(it, value, ctx)

        value = np.array([dt.timedelta(1), "x"], dtype=object)
        with told("collectives/encoding.py", "of dtype {item.dtype}") as it:
            broadcast(value, ctx)
        assert it.fix == "an array of numbers, strings or times"
        broadcast(value.astype(str), ctx)

        value = dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
        with told("collectives/encoding.py", "a time zone") as it:
            broadcast(value, ctx)
        moment, zone = _sends_what_the_line_says(it, value, ctx)
        assert moment.replace(tzinfo=zoneinfo.ZoneInfo(zone)) == value

        with told("collectives/encoding.py", "not found by its name") as it:
            broadcast(_local_class(), ctx)
        assert it.fix == "define the class at the top of a module"
        broadcast(Inner(), ctx)

        value = torch.empty(2, device="meta")
        with told("collectives/encoding.py", "'send its parts'") as it:
            broadcast(value, ctx)
        broadcast((list(value.shape), value.dtype), ctx)


def test_arguments():
    with weft.start(device="cpu") as ctx:
        rows = torch.ones(2)
        with told("collectives/objects.py", "there is not one value for each rank") as it:
            scatter(rows, ctx)
        it.run(rows=rows, ctx=ctx)
        for call, value in ((broadcast, "x"), (scatter, ["x"])):
            with told("collectives/objects.py", "'source', source") as it:
                call(value, ctx, source=1)
            it.run(value=value, ctx=ctx)

        for call in (reduce, gather, all_to_all, reduce_scatter):
            with told("collectives/primitives.py", "is not a tensor") as it:
                call([1], ctx)
            it.run(value=[1], ctx=ctx)
            with told("collectives/primitives.py", "no gradient would flow back") as it:
                call(value := torch.ones(2, requires_grad=True), ctx)
            it.run(value=value, ctx=ctx)
            call(value.detach(), ctx)

        for call in (all_to_all, reduce_scatter):
            with told("collectives/rows.py", "cannot be used") as it:
                call(rows, ctx, splits=[1, 1])
            it.run(value=rows, ctx=ctx)
            for value, splits in ((torch.tensor(1.0), None), (rows, [3])):
                with told("collectives/rows.py", "cannot be split into rows") as it:
                    call(value, ctx, splits=splits)
                it.run(value=value, ctx=ctx)

        with told("collectives/tensors.py", "sends no gradients back") as it:
            reduce(value := torch.ones(2, requires_grad=True), ctx, "max", grad=True)
        assert eval(it.fix, {"weft": weft, "value": value, "ctx": ctx}).requires_grad
        for call in (reduce, reduce_scatter):
            with told("collectives/tensors.py", "'op', op") as it:
                call(rows, ctx, "median")
            it.run(value=rows, ctx=ctx)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        with told("collectives/tensors.py", "nested tensors have no common length") as it:
            pad_across(value, ctx)
        assert eval(it.fix, {"torch": torch, "value": value}).shape == (2, 3)

        logits, target = torch.zeros(4, 3, 5), torch.zeros(4, 3, dtype=torch.int64)
        for given in ((logits, target.int()), (logits.long(), target)):
            with told("collectives/vocab_loss.py", "are not logits and class indices") as it:
                vocab_cross_entropy(*given, ctx)
            it.run(logits=given[0], target=given[1], ctx=ctx)
        for given in ((logits, target.flatten()), (logits[0, 0], target[0, 0])):
            with told("collectives/vocab_loss.py", "logits and classes do not fit") as it:
                vocab_cross_entropy(*given, ctx)
            it.run(logits=given[0], target=given[1], ctx=ctx)
        with told("collectives/vocab_loss.py", "logits and classes do not fit") as it:
            vocab_cross_entropy(logits[:, :-1], target, ctx)
        it.run(logits=logits, target=target, ctx=ctx)


# -- on two ranks --------------------------------------------------------------------------------------


def _on_ranks(ctx, folder):
    for shape, dims in (((2, 2 + ctx.rank), 1), ((2, 2 + ctx.rank, 3 - ctx.rank), 2)):
        value = torch.ones(shape)
        with told("collectives/tensors.py", "rows have different shapes on the ranks") as it:
            gather(value, ctx)
        assert it.fix.count("pad_across") == dims
        assert gather(it.run(value=value, ctx=ctx)["value"], ctx).shape == (4, 3, 3)[: value.dim()]

    value = DTensor.from_local(torch.ones(4, 3), ctx.mesh["tensor"], [Shard(1)])
    with told("collectives/encoding.py", "with layout") as it:
        gather_objects(value, ctx)
    assert gather_objects(eval(it.fix, {"value": value}), ctx)[0].shape == (4, 6)
    with told("collectives/primitives.py", "do not belong together") as it:
        weft.reduce(value, ctx)
    assert torch.equal(eval(it.fix, {"weft": weft, "value": value, "ctx": ctx}), torch.full((4, 6), 2.0))

    module = "only_on_one_rank"
    pathlib.Path(folder, f"{module}.py").write_text("import enum\nKind = enum.Enum('Kind', ['A', 'B'])\n")
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    kind = importlib.import_module(module).Kind.A if ctx.is_main else None
    weft.barrier(ctx)
    if ctx.is_main:
        broadcast(kind, ctx)
    else:
        with told("collectives/encoding.py", "unknown on this rank") as it:
            broadcast(kind, ctx)
        it.run()
    assert broadcast(kind, ctx).name == "A"

    logits, target = torch.zeros(4, 3), torch.tensor([0, 5, -1, -1])
    with told("collectives/vocab_loss.py", "outside the vocabulary") as it:
        vocab_cross_entropy(logits, target, ctx)
    it.fix = it.fix.replace("...", "-1")
    it.run(logits=logits, target=target, ctx=ctx)
    with told("collectives/vocab_loss.py", "are not logits and class indices") as it:
        vocab_cross_entropy(value.redistribute(placements=[Replicate()]), target.abs(), ctx)
    it.run(logits=value.redistribute(placements=[Replicate()]), target=target.abs(), ctx=ctx, Shard=Shard)


@pytest.mark.slow
def test_on_ranks():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_on_ranks, 2, folder, mesh={"tensor": 2})


def _from_two_threads(ctx):
    def reduces(own):
        reduce(torch.ones(1), own)

    reduces(ctx)  # which asks for its shape once
    if ctx.is_main:
        with told("collectives/primitives.py", "two threads of this rank") as it:
            thread = threading.Thread(target=reduces, args=(ctx,))
            thread.start()
            while not ctx.world.inside:
                time.sleep(0.001)
            gather(torch.ones(1), ctx)
        thread.join()
    else:
        time.sleep(0.3)  # so long the first rank is in its first collective
        reduces(ctx)
    fix = broadcast(it.fix if ctx.is_main else None, ctx)
    names = {"ctx": ctx}
    exec(fix, names)
    thread = threading.Thread(target=reduces, args=(names["other"],))
    thread.start()
    gather(torch.ones(1), ctx)
    thread.join()


@pytest.mark.slow
def test_from_two_threads():
    run_ranks(_from_two_threads, 2)
