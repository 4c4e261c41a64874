"""One training loop, as five libraries want it written; measured by bench_step.py.

Every builder gets a fresh model with the same parameters and returns a function that trains on a
list of batches. Batches are on the device already; a step is forward, loss, backward, step, zero_grad.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

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

    ranks: int = 2
    bf16: bool = False
    micro: int = 1


CASES = {
    "plain": Case(ranks=1),
    "replicate": Case(),
    "bf16": Case(bf16=True),
    "accumulate4": Case(micro=4),
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


def torch_expert(model: nn.Module, case: Case) -> Run:
    wrapped: Any = model
    if case.ranks > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model)
    if case.micro == 1 and not case.bf16:
        return simple_loop(wrapped, optimizer)
    assert case.micro == 1 or not case.bf16

    def run_accumulating(batches: list[Batch]) -> None:
        for index, (x, y) in enumerate(batches, 1):
            last = index % case.micro == 0
            with nullcontext() if last else wrapped.no_sync():
                loss = cross_entropy(wrapped(x), y) / case.micro
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    def run_bf16(batches: list[Batch]) -> None:
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(wrapped(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run_bf16 if case.bf16 else run_accumulating


def accelerate(model: nn.Module, case: Case) -> Run:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # one Accelerator per process: forget that of the case before
    GradientState._reset_state()
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if case.bf16 else "no",
        gradient_accumulation_steps=case.micro,
        kwargs_handlers=[options],
    )
    assert accelerator.num_processes == case.ranks
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model))

    def run(batches: list[Batch]) -> None:
        for x, y in batches:
            loss = cross_entropy(wrapped(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def run_accumulating(batches: list[Batch]) -> None:
        for x, y in batches:
            with accelerator.accumulate(wrapped):
                loss = cross_entropy(wrapped(x), y)
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

    def run(batches: list[Batch]) -> None:
        for x, y in batches:
            loss = cross_entropy(wrapped(x), y)
            lightning.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def run_accumulating(batches: list[Batch]) -> None:
        for index, (x, y) in enumerate(batches, 1):
            last = index % case.micro == 0
            with lightning.no_backward_sync(wrapped, enabled=not last):
                loss = cross_entropy(wrapped(x), y) / case.micro
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
NEEDS = {"accelerate": "accelerate", "fabric": "lightning"}


def available(case: Case) -> list[str]:
    """The contestants that are installed and mean something in this case."""
    names = [n for n in BUILDERS if n not in NEEDS or importlib.util.find_spec(NEEDS[n]) is not None]
    return [n for n in names if case.ranks > 1 or n != "weft flat"]
