"""What the parts of benchmarks/gpu.py share: the models, and where and for how long they run."""

from __future__ import annotations

import gc
import importlib
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from contestants import Batch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Size:
    """A causal transformer as GPT-2 has them."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50304
    tokens: int = 1024
    batch: int = 16

    @property
    def flops(self) -> float:
        """Of a step on one batch, forward and backward: 6 per weight and token, and attention, not halved.

        Source: Chowdhery et al., "PaLM", 2022, appendix B.
        """
        weights = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        per_token = 6 * weights + 12 * self.layers * self.width * self.tokens
        return float(per_token * self.tokens * self.batch)


SIZES = {
    "124M": Size(12, 768, 12),
    "350M": Size(24, 1024, 16, batch=8),
    "1.3B": Size(24, 2048, 16, batch=4),
}
MINIATURE = Size(2, 32, 2, vocabulary=64, tokens=16, batch=2)


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """The head shares the weight of the embedding. `recompute`: as an expert writes it, in forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.recompute = False
        self.embed, self.place = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] to logits [batch * tokens, vocabulary]."""
        hidden = self.embed(tokens) + self.place.weight
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits.flatten(0, 1)


class Bench:
    """Where it runs and for how long; what was found goes to standard output, a line of JSON each."""

    def __init__(self, *, seconds: float, gigabytes: float, dry: bool) -> None:
        self.dry, self.gigabytes = dry, gigabytes
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device = torch.device("cpu") if kind is None else torch.device(kind.type, 0)
        self.compiler = "aot_eager" if dry else "inductor"
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the limit."""
        return self._end - time.monotonic()

    def row(self, **values: Any) -> None:
        """Say what was measured."""
        print(json.dumps(values), flush=True)

    def note(self, text: str) -> None:
        """Say what a reader has to know."""
        self.row(note=text)

    def refused(self, what: str, error: BaseException) -> None:
        """Say why something could not be measured."""
        first = (str(error.__cause__ or error).splitlines() or [""])[0]
        self.note(f"{what}: {type(error).__name__}: {first[:300]}")

    def wait(self) -> None:
        """For the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def free(self) -> None:
        """Give memory back between rows."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()

    def seconds(self, call: Callable[[], Any]) -> tuple[float, float]:
        """How long a call takes, until the device is done and until the host is."""
        self.wait()
        begin = time.perf_counter()
        call()
        issued = time.perf_counter() - begin
        self.wait()
        return time.perf_counter() - begin, issued

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """The memory of the device that is taken at most while a call runs."""
        if self.device.type != "cuda":
            return None
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return int(torch.cuda.max_memory_allocated())

    def waits(self, call: Callable[[], Any]) -> int | None:
        """How often the host waits for the device in a call: what `cudaMemcpy` or a synchronization did."""
        if self.device.type == "cpu":
            return None
        if self.device.type != "cuda":  # simulated
            device = importlib.import_module("tests.simulated_device.device")
            before = sum(device.waits().values())
            call()
            return int(sum(device.waits().values()) - before)
        self.wait()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(one.message) for one in said)

    def kernels(self, call: Callable[[], Any]) -> tuple[int | None, float | None]:
        """How many kernels and copies run in a call, and the share of the time between the first and the last in which
        none does."""
        if self.device.type != "cuda":
            return None, None
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            call()
            self.wait()
        spans = sorted(
            (e.start_ns(), e.end_ns())
            for e in traced.profiler.kineto_results.events()
            if e.device_type().name != "CPU" and not getattr(e, "is_user_annotation", lambda: False)()
        )
        if not spans:
            return 0, None
        busy, end = 0, spans[0][0]
        for start, stop in spans:
            busy += max(stop - max(start, end), 0)
            end = max(end, stop)
        return len(spans), round(1 - busy / max(end - spans[0][0], 1), 4)


def make_batches(bench: Bench, size: Size, count: int) -> list[Batch]:
    """Random tokens, and the next ones."""
    drawn = torch.randint(size.vocabulary, (count, size.batch, size.tokens + 1), device=bench.device)
    return [(tokens[:, :-1], tokens[:, 1:].flatten()) for tokens in drawn]
