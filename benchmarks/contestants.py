"""One training loop, as five libraries want it written; measured by bench_step.py.

Every builder gets a fresh model with the same parameters and returns a function that trains on a
list of batches. Batches are on the device already; a step is forward, loss, backward, step, zero_grad.
Here is a full copy per rank; sharded_contestants.py has models and optimizers cut into shards.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import weft

Batch = tuple[torch.Tensor, torch.Tensor]
Run = Callable[[list[Batch]], None]


@dataclass(frozen=True)
class Case:
    """What is trained how: so many ranks, in fp32 or bf16, so many micro-batches per step."""

    strategy: Literal["replicate", "shard", "zero1"] = "replicate"
    ranks: int = 2
    bf16: bool = False
    micro: int = 1


CASES = {
    "plain": Case(ranks=1),
    "replicate": Case(),
    "bf16": Case(bf16=True),
    "accumulate4": Case(micro=4),
    "shard": Case("shard"),
    "shard-bf16": Case("shard", bf16=True),
    "shard-accumulate": Case("shard", micro=4),
    "zero1": Case("zero1"),
}


def mlp() -> nn.Module:
    """20 tensors, 5,060 parameters: a step costs calls and not arithmetic.

    Tanh and not ReLU, whose kinks turn a rounding difference into another run.
    """
    return nn.Sequential(*[layer for _ in range(10) for layer in (nn.Linear(22, 22), nn.Tanh())][:-1])


def mlp_batch() -> Batch:
    return torch.randn(8, 22), torch.randint(22, (8,))


class Transformer(nn.Module):
    """A causal language model of 13.8 million parameters."""

    def __init__(self, vocabulary: int = 4096, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token, [batch, vocabulary, seq]."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits.transpose(1, 2)

    def get_input_embeddings(self) -> nn.Module:
        """What Hugging Face calls it; Accelerate makes it a unit of its own."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """As above."""
        return self.head


def transformer_batch() -> Batch:
    tokens = torch.randint(4096, (2, 33))
    return tokens[:, :-1], tokens[:, 1:]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "mlp": (mlp, mlp_batch),
    "transformer": (Transformer, transformer_batch),
}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def simple_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    """The plain PyTorch loop; of torch and weft alike."""

    def run(batches: list[Batch]) -> None:
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def autocast_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    def run(batches: list[Batch]) -> None:
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def torch_expert(model: nn.Module, case: Case) -> Run:
    wrapped: Any = model
    if case.ranks > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model)
    if case.bf16:
        return autocast_loop(wrapped, optimizer)
    if case.micro == 1:
        return simple_loop(wrapped, optimizer)

    def run(batches: list[Batch]) -> None:
        for index, (x, y) in enumerate(batches, 1):
            last = index % case.micro == 0
            with nullcontext() if last else wrapped.no_sync():
                loss = cross_entropy(wrapped(x), y) / case.micro
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    return run


def accelerate(model: nn.Module, case: Case) -> Run:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    forget_accelerate()
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if case.bf16 else "no",
        gradient_accumulation_steps=case.micro,
        kwargs_handlers=[options],
    )
    assert accelerator.num_processes == case.ranks
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model))
    return accelerate_loop(accelerator, wrapped, optimizer, case)


def forget_accelerate() -> None:
    """There is one Accelerator per process: forget that of the case before."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def accelerate_loop(accelerator: Any, model: Any, optimizer: Any, case: Case) -> Run:
    def run(batches: list[Batch]) -> None:
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def run_accumulating(batches: list[Batch]) -> None:
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return run if case.micro == 1 else run_accumulating


def fabric(model: nn.Module, case: Case) -> Run:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy: Any = "auto"
    if case.ranks > 1:
        strategy = DDPStrategy(gradient_as_bucket_view=True)
    lightning = Fabric(
        accelerator="cpu",
        devices=case.ranks,
        strategy=strategy,
        precision="bf16-mixed" if case.bf16 else "32-true",
    )
    lightning.launch()
    assert lightning.world_size == case.ranks
    wrapped, optimizer = lightning.setup(model, make_optimizer(model))
    return fabric_loop(lightning, wrapped, optimizer, case)


def fabric_loop(lightning: Any, model: Any, optimizer: Any, case: Case) -> Run:
    def run(batches: list[Batch]) -> None:
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            lightning.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def run_accumulating(batches: list[Batch]) -> None:
        for index, (x, y) in enumerate(batches, 1):
            last = index % case.micro == 0
            with lightning.no_backward_sync(model, enabled=not last):
                loss = cross_entropy(model(x), y) / case.micro
                lightning.backward(loss)
            if last:
                optimizer.step()
                optimizer.zero_grad()

    return run if case.micro == 1 else run_accumulating


def weft_plain(model: nn.Module, case: Case, *, flat: bool = False) -> Run:
    ctx = weft.adopt() if case.ranks > 1 else weft.local()
    if case.bf16:
        model, ctx = weft.with_precision(model, ctx, "bf16")
    model, ctx = weft.replicate(model, ctx, flat=flat)
    optimizer = make_optimizer(model)
    if flat:
        optimizer, ctx = weft.fuse_step(optimizer, ctx)
    return weft_loop(model, optimizer, ctx, case)


def weft_loop(model: nn.Module, optimizer: torch.optim.Optimizer, ctx: weft.DistContext, case: Case) -> Run:
    if case.micro == 1:
        return simple_loop(model, optimizer)
    stream: list[Batch] = []
    model, windows, ctx = weft.accumulate_grads(model, stream, ctx, steps=case.micro)

    def run(batches: list[Batch]) -> None:
        stream[:] = batches
        for window in windows:
            for x, y in window:
                loss = cross_entropy(model(x), y) / len(window)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


BUILDERS: dict[str, Callable[[nn.Module, Case], Run]] = {
    "torch": torch_expert,
    "control": torch_expert,
    "accelerate": accelerate,
    "fabric": fabric,
    "weft": weft_plain,
    "weft flat": partial(weft_plain, flat=True),
}
NEEDS = {
    "accelerate": "accelerate",
    "fabric": "lightning",
    **{f"deepspeed {stage}": "deepspeed" for stage in (1, 2, 3)},
    **{f"zero{stage} deepspeed": "deepspeed" for stage in (1, 2, 3)},
    "zero3 ds offload": "deepspeed",
}


def installed(name: str) -> bool:
    """Whether the library of a contestant is there."""
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def available(case: Case) -> list[str]:
    """The contestants that are installed and mean something in this case."""
    return [n for n in BUILDERS if installed(n) and (case.ranks > 1 or n != "weft flat")]
