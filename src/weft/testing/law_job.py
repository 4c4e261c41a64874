"""The small training job of the laws: the model, the data, rows of transforms applied to them, and the reference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from weft.collectives import gather_objects, reduce
from weft.context import DistContext, local
from weft.context.placement import to_device
from weft.contract import GradSync, KeepsParameters, applied_to, gradient_axes, offered, part_axes
from weft.data.split_sequence import split_sequence
from weft.grads import Element, NamedGrads
from weft.tensors import dtensor
from weft.tensors.blocks import block_of
from weft.tensors.remote_parameter import is_elsewhere
from weft.tensors.sequence_order import part_of
from weft.transforms.clip_grads import clip_grads
from weft.transforms.undo import undo

Apply: TypeAlias = Callable[["Parts", DistContext], DistContext]


@dataclass
class Parts:
    """What transforms are applied to.

    Attributes:
        module: The model.
        loader: Batches, later perhaps windows.
        optimizer: None until it is made.
        applied: What of `Row.then` was applied to it.
    """

    module: nn.Module
    loader: Any
    optimizer: torch.optim.Optimizer | None = None
    applied: list[Apply] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One transform, as the laws see it.

    Attributes:
        name: For people.
        apply: Applies the transform to the right part, in place in `Parts`; returns the context.
        on_optimizer: It takes the optimizer, and so comes after all others.
        on_both: It takes module and optimizer: the optimizer is made just before.
        needs: Rows that have to be applied before this one has any meaning.
        then: For a row on the module: what the optimizer needs as well, applied once it is there.
        synchronizes: It makes gradients equal on all ranks.
        tolerance: Allowed difference to the reference in float64 parameters.
        one_rank_tolerance: The same on one rank; 0 means bit for bit.
        dtype: Of the model and data.
        break_input: Applies the transform with an argument it must refuse.
        mesh: Of several ranks; as for `weft.start`.
        job: Makes the training job, of which the transform needs more than `Job` has.
        device: Where the ranks and the reference compute, such as "cuda"; ranks may share it.
        backend: Of the group of the ranks, as for `run_ranks`.
    """

    name: str
    apply: Apply
    on_optimizer: bool = False
    on_both: bool = False
    needs: tuple[Row, ...] = ()
    then: Apply | None = None
    synchronizes: bool = False
    tolerance: float = 1e-12
    one_rank_tolerance: float = 0.0
    dtype: torch.dtype = torch.float64
    break_input: Apply | None = None
    mesh: Mapping[str, int] | None = None
    job: Callable[..., Job] | None = None
    device: str = "cpu"
    backend: str = "gloo"


@dataclass(frozen=True, kw_only=True)
class Job:
    """The small training job of the laws: a classifier on ragged data.

    A row may bring another one: the classes of samples may have more dimensions than one.

    Attributes:
        samples: Size of the dataset.
        global_batch: Samples per micro-batch of all ranks together.
        epochs: Passes over the data.
        clip: Largest norm of the gradient; infinite: it is not clipped.
        dtype: Of the model and data.
        seed: Of model and data.
        elements: Of a `grad_chain`, which the reference calls one after the other on whole gradients.
    """

    samples: int = 38
    global_batch: int = 8
    epochs: int = 2
    clip: float = 0.5
    dtype: torch.dtype = torch.float64
    seed: int = 0
    elements: tuple[Element, ...] = ()

    def dataset(self) -> TensorDataset:
        """Features [samples, 6] and classes [samples]."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(self.samples, 6, generator=draw, dtype=torch.float64).to(self.dtype)
        return TensorDataset(x, torch.randint(0, 3, (self.samples,), generator=draw))

    def model(self) -> Model:
        """The same model wherever it is called; the global random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Model().to(self.dtype)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """AdamW with large steps, so that a wrong gradient shows."""
        return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


class Model(nn.Module):
    """A small classifier with a tied weight, a buffer, an attribute and a method besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.full((8,), 0.1))
        self.note = "mine"

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 6] to [batch, 8]."""
        hidden = torch.tanh(self.first(x)) + self.shift
        return torch.relu(self.third(torch.tanh(self.second(hidden))) * self.scale)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 6] to logits [batch, 3]."""
        logits: torch.Tensor = self.head(self.features(x))
        return logits


def reference(job: Job, steps: int = 1, device: str = "cpu") -> list[torch.Tensor]:
    """Parameters after training with plain torch, one process, no transform: the one truth."""
    module = job.model().to(device)
    optimizer = job.optimizer(module)
    x, y = (tensor.to(device) for tensor in job.dataset().tensors)
    number = 0
    for _ in range(job.epochs):
        batches = list(zip(x.split(job.global_batch), y.split(job.global_batch), strict=True))
        for start in range(0, len(batches), steps):
            window = batches[start : start + steps]
            total = sum(classes.numel() for _, classes in window)
            for features, classes in window:
                loss_of(module, features, classes, total).backward()
            finish_step(module, optimizer, job, number=number)
            number += 1
    return [p.detach().cpu() for p in module.parameters()]


def train(ctx: DistContext, rows: Sequence[Row], job: Job) -> list[torch.Tensor]:
    """Parameters after the same training with `rows` applied in order, on the ranks of `ctx`."""
    torch.manual_seed(ctx.rank)  # whatever the ranks draw, training must not depend on it
    parts, ctx = prepare(ctx, job, rows)
    assert parts.optimizer is not None
    ranks = ([sync.mean_over for sync in offered(parts.module, GradSync)] or [1])[-1]
    for _ in range(job.epochs):
        for window in parts.loader:
            batches: Any
            if hasattr(window, "denominator"):
                total = window.denominator(lambda batch: batch[1].numel())
                batches = window
            else:
                batches = [_part(window, ctx)]
                everyone = float(reduce(torch.tensor(float(batches[0][1].numel()), device=ctx.device), ctx))
                copies = ctx.world_size / math.prod(map(ctx.axis_size, gradient_axes(parts.module, ctx)))
                total = everyone / copies / ranks  # each batch is on several model ranks
            for batch in batches:
                features, classes = to_device(_part(batch, ctx), ctx)
                loss_of(parts.module, features, classes, total).backward()
            finish_step(parts.module, parts.optimizer, job, ctx)
    if any(map(is_elsewhere, parts.module.parameters())):
        parts.module, ctx = undo(parts.module, ctx, rebind=parts.optimizer)
    with contextlib.ExitStack() as stack:
        for offer in offered(parts.module, KeepsParameters):
            stack.enter_context(offer.gathered(write=False))
        return [_whole(p, ctx) for p in parts.module.parameters()]


def _part(batch: Any, ctx: DistContext) -> Any:
    """This rank's part of a batch, where ranks have parts of sequences and this is whole."""
    axes = () if any(part_of(x) for x in batch) else part_axes(ctx)
    return split_sequence(batch, ctx, axis=axes[0]) if axes else batch


def _whole(tensor: torch.Tensor, ctx: DistContext) -> torch.Tensor:
    """A copy of all of a tensor on the CPU, also if it is sharded over the ranks; then all of them have to ask."""
    if not dtensor.is_sharded(tensor):
        return tensor.detach().to("cpu", copy=True)
    cut: Any = tensor.detach()
    # Not by full_tensor: its all-gather over gloo reads memory of a device as if it were the host's, and crashes.
    mine = block_of(cut.shape, cut.device_mesh, cut.placements)
    whole = torch.empty(cut.shape, dtype=cut.dtype)
    for block, values in gather_objects((mine, dtensor.local(cut)), ctx):
        whole[block.slices] = values
    return whole


def loss_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor, total: float) -> torch.Tensor:
    """This batch's part of the mean loss over `total` samples."""
    if any(record.name == "pipeline" for record in applied_to(module)):  # whose row has the same loss
        found: torch.Tensor = module(x, y)
        return found / total
    return nn.functional.cross_entropy(module(x).flatten(0, -2), y.flatten(), reduction="sum") / total


def finish_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, job: Job, ctx: DistContext | None = None, number: int = 0
) -> None:
    """Clip, step, and drop the gradients; some transforms allow no clipping. Without a context, call the elements."""
    cut = set(map(dtensor.is_sharded, module.parameters()))
    rounds = torch.__version__ < "2.10" and True in cut
    # Of some modules torch sees no gradients; where only some parameters are cut it refuses; torch 2.9 takes the
    # norm of shards in float32.
    elsewhere = any(map(is_elsewhere, module.parameters()))
    if math.isinf(job.clip):
        pass
    elif ctx is not None and (offered(module, KeepsParameters) or rounds or len(cut) > 1 or elsewhere):
        clip_grads(module, ctx, max_norm=job.clip)
    else:
        torch.nn.utils.clip_grad_norm_(module.parameters(), job.clip)
    for place, element in enumerate(job.elements if ctx is None else ()):
        with torch.no_grad():
            changed = element(NamedGrads(dict(module.named_parameters()), number, place), local())
        for name, p in module.named_parameters():
            p.grad = changed.get(name)
    optimizer.step()
    optimizer.zero_grad()


def build(ctx: DistContext, job: Job, rows: Sequence[Row]) -> tuple[Parts, DistContext]:
    """The parts of a job, with `rows` applied to them, but for those that take the optimizer alone."""
    rows = [row for row in rows if not row.on_optimizer]
    parts = Parts(job.model().to(ctx.device), plain_loader(ctx, job, rows))
    for number, row in enumerate(rows):
        if row.on_both and parts.optimizer is None:
            parts.optimizer = job.optimizer(parts.module)
            ctx = _apply_to_optimizer(parts, ctx, rows[:number])
        ctx = row.apply(parts, ctx)
    return parts, ctx


def prepare(ctx: DistContext, job: Job, rows: Sequence[Row]) -> tuple[Parts, DistContext]:
    """The parts of a job and its optimizer, with all of `rows` applied to them."""
    parts, ctx = build(ctx, job, rows)
    parts.optimizer = parts.optimizer or job.optimizer(parts.module)
    return parts, _apply_to_optimizer(parts, ctx, rows)


def plain_loader(ctx: DistContext, job: Job, rows: Sequence[Row]) -> DataLoader[Any]:
    """The plain loader: of the whole data if a row will share it out, else of this rank's part."""
    dataset, per_rank = job.dataset(), job.global_batch // ctx.data_size
    if any(row.name.startswith("shard_data") for row in rows):
        return DataLoader(dataset, batch_size=per_rank)
    order = torch.arange(job.samples).split(job.global_batch)
    mine = [list(step.tensor_split(ctx.data_size)[ctx.data_rank]) for step in order]
    return DataLoader(dataset, batch_sampler=mine)


def _apply_to_optimizer(parts: Parts, ctx: DistContext, rows: Sequence[Row]) -> DistContext:
    """Apply what `rows` do to the optimizer, or need there, once."""
    chosen = [row.apply for row in rows if row.on_optimizer]
    needed = [row.then for row in rows if row.then is not None and row.then not in chosen]
    for apply in dict.fromkeys((*needed, *chosen)):
        if apply not in parts.applied:
            parts.applied.append(apply)
            ctx = apply(parts, ctx)
    return ctx
