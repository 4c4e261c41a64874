"""Train a small language model, byte by byte, on the source files of Python's standard library.

    python examples/train_lm.py                                 # one process
    weft launch -n 2 examples/train_lm.py                       # two ranks: the same loss curve
    weft launch -n 4 examples/train_lm.py --resume --steps 500  # trains a run further, on any number of ranks
    weft report runs/train_lm                                   # the run so far as one page of HTML
    weft report runs/a runs/b                                   # two runs, side by side

The model is plain torch and does not use weft, and neither does the loop from `for step, window` on. Results go to
`--out`: `model.safetensors`, checkpoints, a TensorBoard log, `log.jsonl` and `report.html`. On SIGTERM the run saves a
checkpoint and exits with code 75; with `--max-restarts 3` it restarts automatically if a rank is killed.
"""

import argparse
import itertools
import math
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft import monitoring

BYTES, WARMUP_STEPS = 256, 20
STAGES: dict[str, Literal[1, 2, 3]] = {"zero1": 1, "zero2": 2, "zero3": 3}
T = TypeVar("T")


class Block(nn.Module):
    """Causal self-attention, then a feed-forward net; both added to what came in, [batch, seq, width]."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, head, seq, width / head]
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        mixed: Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class ByteLM(nn.Module):
    """A decoder-only transformer over bytes: [batch, seq] to logits [batch, seq, 256]."""

    def __init__(self, width: int = 128, depth: int = 4, num_heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.context = context
        self.embed, self.place = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        for weight in (self.embed.weight, self.place.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        here = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(x) + self.place(here))))
        return logits

    @torch.no_grad()
    def write(self, start: str, length: int, seed: int) -> str:
        """Go on with `start` for `length` bytes."""
        device, draw = self.head.weight.device, torch.Generator().manual_seed(seed)
        text = torch.tensor([list(start.encode())], device=device)
        for _ in range(length):
            chances = (self(text[:, -self.context :])[0, -1].float().cpu() / 0.7).softmax(-1)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=draw).to(device)[None]], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


def texts(context: int) -> tuple[TensorDataset, TensorDataset]:
    """Pieces of the standard library, [context + 1] bytes each: for training, and held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    both = []
    for chosen in ([f for i, f in enumerate(files) if i % 16], files[::16]):
        text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in chosen)), dtype=torch.uint8)
        both.append(TensorDataset(text[: len(text) // (context + 1) * (context + 1)].view(-1, context + 1)))
    return both[0], both[1]


def main(options: argparse.Namespace, ctx: weft.DistContext) -> None:
    torch.manual_seed(options.seed)
    train_set, held_out_set = texts(options.context)
    model = ByteLM(options.width, options.depth, context=options.context)
    # Batch sizes are those of all ranks together, so that the curve does not depend on their number.
    loader = DataLoader(train_set, batch_size=options.batch, shuffle=True, drop_last=True)
    held_out = DataLoader(held_out_set, batch_size=math.lcm(64, ctx.world_size))

    loader, ctx = weft.shard_data(loader, ctx, mode="split", seed=options.seed)
    held_out, ctx = weft.shard_data(held_out, ctx, mode="split", uneven="empty")
    model, ctx = weft.with_precision(model, ctx, options.precision)
    if options.strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    elif options.strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    if options.strategy in STAGES:
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=STAGES[options.strategy])
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=options.accumulate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": windows}
    state, ctx = weft.checkpointable(objects, ctx)

    done, checkpoints = resume(state, options, ctx), options.out / "checkpoints"
    preempted = weft.on_preemption(ctx)
    events = monitoring.tensorboard(options.out, purge_step=done + 1, flush_s=0)  # no checkpoint is ahead of the log
    resumed = options.resume or ctx.attempt > 0  # else the lines of an earlier run stay
    trackers = [events, monitoring.jsonl(options.out / "log.jsonl", purge_step=done + 1 if resumed else None)]
    monitoring.log_start(done, ctx, trackers, steps=options.steps, settings=vars(options))  # for the report
    first = evaluate(model, held_out, ctx)
    speed = weft.monitoring.throughput(ctx)
    left = itertools.islice(speed.timed(endless(windows)), options.steps - done)
    training = weft.progress(left, ctx, total=options.steps, done=done, title="training")
    for step, window in enumerate(training, start=done + 1):
        loss = torch.zeros((), device=ctx.device)
        for (text,) in speed.timed(window):
            part = cross_entropy(model(text[:, :-1].long()).flatten(0, 1), text[:, 1:].long().flatten())
            (part * window.share).backward()
            loss += part.detach() * window.share
            speed.count(tokens=text[:, 1:].numel())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        speed.step()

        if step % options.log_every == 0 or step in (1, options.steps):
            found = weft.log({"loss": loss, **speed.read()}, step, ctx, trackers)
            words = f"step {step:4d}  loss {found['loss']:.4f}  {found['tokens_per_s']:,.0f} tokens/s"
            ctx.print(words)
        if preempted(step) or step % options.save_every == 0 or step == options.steps:
            with speed.part("save"):
                weft.save(state, checkpoints, step, ctx, keep=2)
        if preempted(step):
            weft.log({"preempted": preempted.reason}, step, ctx, trackers)
            ctx.print(f"{preempted.reason}: saved after step {step}; --resume continues from there")
            raise SystemExit(preempted.exit_code)

    last = evaluate(model, held_out, ctx)
    model, ctx = weft.undo(model, ctx, rebind=optimizer)  # whole parameters on every rank, whatever the strategy was
    model = model.cpu()
    weft.log({"held_out_loss": last}, options.steps, ctx, trackers)
    if ctx.is_main:
        save_file(model.state_dict(), options.out / "model.safetensors")
        monitoring.write_report(options.out)
        if options.export is not None and (newest := weft.checkpoint.latest(checkpoints)):
            weft.export(newest, options.export)
        print(f"\n{model.write('def ', 300, options.seed)}\n")
        print(f"held-out loss {first:.4f} -> {last:.4f} nats per byte; results in {options.out}")


def share_of_lr(step: int) -> float:
    """Warmup, then an inverse square root: without `--steps` in it, so that a finished run can be trained further."""
    return min((step + 1) / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / (step + 1)))


def resume(state: weft.checkpoint.Checkpoint, options: argparse.Namespace, ctx: weft.DistContext) -> int:
    """Go on from the newest checkpoint if asked to, or started again by the launcher; the steps that are done."""
    checkpoints = options.out / "checkpoints"
    if options.resume or ctx.attempt > 0:
        restored = weft.restore(state, checkpoints, ctx)
        return restored.step if restored else 0
    with weft.main_first(ctx):
        if ctx.is_main and checkpoints.exists():  # of an earlier run: they stay, under another name
            names = (checkpoints.with_name(f"checkpoints.{n}") for n in itertools.count(1))
            checkpoints.rename(next(name for name in names if not name.exists()))
    return 0


def evaluate(model: nn.Module, loader: Iterable[tuple[Tensor, ...]], ctx: weft.DistContext) -> float:
    """Mean loss per byte over the whole held-out text, the same on every rank."""
    sums = torch.zeros(2, dtype=torch.float64, device=ctx.device)
    with torch.no_grad():
        for (text,) in loader:
            loss = cross_entropy(
                model(text[:, :-1].long()).flatten(0, 1), text[:, 1:].long().flatten(), reduction="sum"
            )
            sums += torch.tensor([loss, text[:, 1:].numel()], dtype=torch.float64, device=ctx.device)
    total, count = weft.reduce(sums, ctx).tolist()
    return total / count if count else math.nan


def endless(loader: Iterable[T]) -> Iterator[T]:
    """Epoch after epoch; each has its own order."""
    while True:
        batches = iter(loader)
        first = next(batches, None)
        if first is None:
            raise ValueError("an epoch has no batch: --batch or --context is too large for the text")
        yield first
        yield from batches


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps in all, with those before --resume")
    parser.add_argument("--batch", type=int, default=8, help="sequences per micro-batch, of all ranks together")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--strategy", default="replicate", choices=("replicate", "fully_shard", *STAGES))
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16")
    parser.add_argument("--device", help="cpu, cuda, xla, ...; default: what torch finds")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes the model sees")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=50, help="steps between two lines")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --out, if any")
    parser.add_argument("--export", type=Path, help="folder for the weights in the Hugging Face layout")
    parser.add_argument("--out", type=Path, default=Path("runs/train_lm"), help="folder for the results")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    with weft.start(device=options.device) as ctx:
        main(options, ctx)
