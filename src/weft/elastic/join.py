"""The state of one replica, sent to another one in pieces, without a disk.

The sender reads the live tensors. The receiver keeps what arrives in memory of the CPU until it has everything and has
found it to fit: a replica whose source dies halfway still has the state that it had.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import increment_version

from weft.checkpoint.format.manifest import Manifest, TensorEntry
from weft.checkpoint.state.apply import check_values, load_objects, put_weights, request
from weft.checkpoint.state.collect import Checkpoint, collect
from weft.checkpoint.state.random_states import random_state
from weft.context import DistContext
from weft.errors import CheckpointError
from weft.peers.replica_groups import ReplicaGroup
from weft.tensors.blocks import Held, sharded_as


def send_state(
    state: Checkpoint, step: int, to: Sequence[int], replicas: ReplicaGroup, ctx: DistContext, *, began: int
) -> bool:
    """Send the state to some members of the quorum; False if one was lost. `began`: see `receive_state`."""
    content = collect(state, to_save=False)
    header = {
        "step": step,
        "began": began,
        "ranks": ctx.world_size,
        "tensors": {n: [held.dtype, held.shape, tuple(held.local.shape)] for n, held in content.tensors.items()},
        "same_as": content.same_as,
        "values": content.values,
        "rank": {"rng": random_state(ctx) if state.rng else None, "generators": content.generators},
    }
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    tensors = [torch.tensor([text.numel()]), text]
    local = (held.local.detach().resolve_conj().resolve_neg() for held in content.tensors.values())
    for tensor in (*tensors, *local):
        here = tensor.contiguous().cpu()
        if here.numel() and not all(replicas.send(here, each) for each in to):
            return False
    return True


def receive_state(source: int, replicas: ReplicaGroup, *, began: int) -> Received | None:
    """Receive a state, and change nothing yet; None if a replica was lost.

    `began` stands for torch's random state with which a replica has begun. If all began with the same, they continue
    with the same; otherwise each one draws numbers of its own.
    """
    length = torch.zeros(1, dtype=torch.int64)
    if not replicas.receive(length, source):
        return None
    text = torch.empty(int(length), dtype=torch.uint8)
    if not replicas.receive(text, source):
        return None
    header = json.loads(bytes(text.tolist()))
    if header["began"] != began:
        header["rank"]["rng"] = None
    values: dict[str, torch.Tensor] = {}
    for name, (dtype, _, part) in header["tensors"].items():
        values[name] = torch.empty(part, dtype=getattr(torch, dtype))
        if values[name].numel() and not replicas.receive(values[name], source):
            return None
    return Received(header, values)


def load_received(received: Received, state: Checkpoint, ctx: DistContext) -> int:
    """Give the objects the state that was received; returns its step.

    Raises:
        CheckpointError: It does not fit the objects here.
    """
    plan = request(state, received, ctx, strict=True)
    check_values(plan)
    with contextlib.ExitStack() as undo:
        load_objects(plan, ctx, undo)
        undo.pop_all()
    put_weights(plan, ctx)
    return received.manifest.step


class Received:
    """What has arrived, in the form in which a checkpoint is read.

    Attributes:
        folder: What it is called in errors.
        manifest: Its names, dtypes and shapes, and its plain values.
    """

    def __init__(self, header: dict[str, Any], values: dict[str, torch.Tensor]) -> None:
        self.folder = Path("the state of another replica")
        entries = {name: TensorEntry(dtype=d, shape=tuple(shape)) for name, (d, shape, _) in header["tensors"].items()}
        for name, origin in header["same_as"].items():
            entries[name] = replace(entries[origin], same_as=origin)
        ranks = [header["rank"]] * header["ranks"]  # each rank has received its own
        self.manifest = Manifest(
            step=header["step"], world_size=len(ranks), tensors=entries, values=header["values"], ranks=ranks
        )
        self._values = values
        self._live: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _found(self, name: str, like: Held | None) -> torch.Tensor:
        entry = self.manifest.tensors.get(name)
        value = None if entry is None else self._values[entry.same_as or name]
        here = None if like is None else tuple(like.local.shape)
        if entry is None or value is None or tuple(value.shape) != (entry.shape if here is None else here):
            raise CheckpointError(
                f"resilient: {name} is not in {self.folder}",
                found="no such tensor" if value is None else f"shape {tuple(value.shape)}",
                expected="the objects of this replica, with their shapes",
                fix="start the same program on every replica",
            )
        return value

    def request(self, name: str, like: Held | None) -> torch.Tensor:
        """A tensor that has arrived, sharded as `like`."""
        value = self._found(name, like)
        return sharded_as(value.to(like.local.device), like.tensor) if like is not None and like.is_sharded else value

    def request_into(self, name: str, held: Held) -> None:
        """Let `read_live` replace the values of a tensor."""
        self._live.append((self._found(name, held), held.local))

    def lost_values(self, held: Held, name: str, *others: str) -> Iterator[str]:
        """What would be lost if a tensor took its values."""
        value = self._found(name, held)
        if value.dtype != held.tensor.dtype:
            yield f"{held.name} is of {held.dtype} here, and of {value.dtype} there"
        yield from (f"{held.name} and {each} differ" for each in others if not torch.equal(value, self._values[each]))

    def read_new(self) -> None:
        """All of them are here."""

    def read_live(self) -> None:
        """Give the tensors their values."""
        with torch.no_grad():
            for value, out in self._live:
                out.copy_(value)
                if not out.is_inference():
                    increment_version(out)
        self._live.clear()
