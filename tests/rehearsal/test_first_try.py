"""Scripts that read numbers, as most do, are rehearsed as they are; what a number decides has to be assumed."""

import pytest

from tests.variants import diagonal, variant_cases
from weft.errors import ContextError
from weft.rehearsal.script import rehearse_script

SCRIPT = """
import math, sys, torch, weft
from torch import nn

with weft.start(device="cpu", mesh={"pipeline": 2, "data": -1} if "pipeline" in sys.argv else None) as ctx:
    strategy = sys.argv[1]
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    data = torch.utils.data.TensorDataset(torch.randn(4096, 16), torch.arange(4096) % 4)
    loader, ctx = weft.shard_data(torch.utils.data.DataLoader(data, 4, shuffle=True), ctx)
    cross_entropy, best, bad, losses = nn.functional.cross_entropy, math.inf, 0, []
    if strategy == "pipeline":
        model, ctx = weft.pipeline(model, ctx, loss=cross_entropy, micro_batches=2)
        model, ctx = weft.replicate(model, ctx)
    elif strategy in ("replicate", "fully_shard"):
        model, ctx = getattr(weft, strategy)(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    if strategy == "zero_partition":
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)
    elif strategy == "local_steps":
        model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every=8)
    call = model if strategy == "pipeline" else lambda x, y: cross_entropy(model(x), y)
    BEFORE
    for step, (x, y) in enumerate(loader, 1):
        loss = call(x, y)
        loss.backward()
        BODY
        optimizer.step()
        optimizer.zero_grad()
"""
STRATEGIES = ("replicate", "fully_shard", "zero_partition", "local_steps", "pipeline")
# What stands before the loop, and what reads numbers in it.
BODIES = {
    "printed": ("", "print(f'{step} {loss.item():.3f} {loss:.3f}', float(loss.detach()))"),
    "running mean": ("mean = 0.0", "mean = 0.9 * mean + 0.1 * loss.item(); print('%.3f' % mean)"),
    "best by torch.save": (
        "",
        "if loss.item() < best: best = loss.item(); torch.save([model.state_dict(), optimizer], 'best.pt')",
    ),
    "best by weft.save": (
        "state, ctx = weft.checkpointable({'model': model, 'optimizer': optimizer}, ctx)",
        "if loss.item() < best: best = loss.item(); weft.save(state, 'best', step, ctx)",
    ),
    "best of tensors": (
        "best = torch.tensor(math.inf)",
        "if loss < best: best = loss.detach(); torch.save(model.state_dict(), 'best.pt')",
    ),
    "early stopping": (
        "",
        "bad = 0 if loss.item() < best else bad + 1; best = min(best, loss.item())",
        "if bad: break",
    ),
    "evaluation": (
        "evaluate = torch.no_grad()(lambda: sum(call(x, y).item() for _ in range(3)))",
        "best = min(best, evaluate()); print(f'held out {best:.3f}')",
    ),
    "tensorboard": (
        "from torch.utils.tensorboard import SummaryWriter; log = SummaryWriter('runs')",
        "log.add_scalar('loss', loss, step); log.add_scalar('again', loss.item(), step); log.flush()",
    ),
    "weft.log": (
        "trackers = [weft.monitoring.jsonl('log.jsonl')]",
        "best = min(best, weft.log({'loss': loss}, step, ctx, trackers)['loss'])",
    ),
    "rich": (
        "from rich.progress import Progress; bar = Progress(); task = bar.add_task('', total=9)",
        "bar.update(task, advance=1, description=f'loss {loss.item():.2f}')",
    ),
    "NaN check": ("", "if torch.isnan(loss) or math.isnan(loss.item()): raise RuntimeError('NaN')"),
    "not finite": ("", "if not torch.isfinite(loss).all(): raise RuntimeError('inf')"),
    "diverged anywhere": ("", "if weft.collectives.any_rank(loss > 50, ctx): raise RuntimeError('diverged')"),
    "diverged": ("", "if not loss.item() < 50: raise RuntimeError('diverged')"),
    "plateau": (
        "plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
        "plan.step(loss.item()); plan.step(loss.detach())",
    ),
    "scaler": (
        "scale = 1.0",
        "norm = weft.clip_grads(model, ctx, max_norm=1.0)",
        "if not math.isfinite(norm) or not torch.isfinite(norm): scale /= 2; optimizer.zero_grad(); continue",
    ),
    "large norm": (
        "",
        "norm = weft.clip_grads(model, ctx, max_norm=1.0)",
        "if norm > 50: optimizer.zero_grad(); continue",
    ),
    "accuracy": (
        "right = 0",
        "right += (loss[None].argmax(0) == loss.long()).sum().item(); print(right / step / len(y))",
    ),
    "perplexity": ("", "best = min(math.exp(loss.item()), best); print(round(best, 2))"),
    "every n": ("", "losses.append(loss.detach())", "if step % 2 == 0: print(torch.stack(losses).mean().item())"),
    "numpy": ("import numpy as np", "print(np.mean(loss.detach().numpy()), np.isnan(loss.detach().cpu().numpy()))"),
    "appended": ("", "losses.append(loss.item()); print(sum(losses[-100:]) / len(losses[-100:]), max(losses))"),
    "tolist": ("", "losses += loss.detach()[None].tolist(); print(min(losses))"),
    "torch's gradient norm": (
        "",
        "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "norm = norm if strategy != 'zero_partition' else weft.clip_grads(model, ctx, max_norm=1.0)",
        "print(math.log10(norm.item()))",
    ),
    "gradient norm": ("", "norm = weft.clip_grads(model, ctx, max_norm=1.0); print(float(norm), norm.item())"),
}


def rehearse(folder, before, lines, strategy="replicate", **options):
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("BEFORE", before or "pass").replace("BODY", "\n        ".join(lines)))
    return rehearse_script(script, [strategy], ranks=8, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("body", "strategy"), diagonal(tuple(BODIES), STRATEGIES, every=4))
def test_a_number_that_is_read_needs_no_answer(tmp_path, monkeypatch, body, strategy):
    monkeypatch.chdir(tmp_path)
    before, *lines = BODIES[body]
    found = rehearse(tmp_path, before, lines, strategy)
    assert found.steps == 2
    assert bool(found.exchange) == (strategy == "local_steps")
    assert any(line.startswith("train.py:") for line in found.assumed)
    assert (found.saved > 0) == ("save" in " ".join(lines))


LINE = 1 + SCRIPT[: SCRIPT.index("BODY")].count("\n")
READ = f"train.py:{LINE}: a number that is read is "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "read"),
    [
        (["print(loss.item())"], "0.01 or 100, with the same result"),
        (["print((loss > 0).sum().item())"], "1 or 2, with the same result"),
        (["if not loss.item() < 50: raise RuntimeError('diverged')"], "0.01; with 100, RuntimeError: diverged"),
        (["print('ab'[(loss > 0).sum().item()])"], "1; with 2, IndexError: string index out of range"),
        (["if loss > best: torch.save(model.state_dict(), 'b')"], "0 or 1, with 0 B or 2.64 KiB saved: the larger is"),
        *variant_cases(
            (["if loss.item() < 50: raise RuntimeError('overfits')"], "100; with 0.01, RuntimeError: overfits"),
            (["if loss < best: sys.exit(3)"], "0; with 1, SystemExit: 3"),
            (
                ["if loss.item() > 50 and step > 2: break", "if step > 2: model(x.repeat(99, 1))"],
                "0.01; with 100, training",
            ),
            (
                ["if loss > 1: model(x.repeat(99, 1))"],
                "0 or 1, with 303 KiB or 423 KiB in a step: the larger is in the",
            ),
        ),
    ],
)
def test_what_is_assumed_is_told_with_its_line(tmp_path, lines, read):
    found = rehearse(tmp_path, "", lines, steps=3)
    assert next(line for line in found.assumed if line.startswith("train.py")).startswith(READ + read)
    if "larger" in read:
        other = rehearse(tmp_path, "", lines, steps=3, assume={"values": 1})
        assert (found.step_peak.total, found.saved) == (other.step_peak.total, other.saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            ["if loss.item() < 50: weft.reduce(loss.detach(), ctx)"],
            "with 0.01, .* 4.63 KiB sent.*with 100, .* 4.62 KiB",
        ),
        *variant_cases(
            (["model(x.repeat(99 * (loss > 0).sum().item(), 1))"], "with 1, .* in a step.*with 2, .* in a step"),
            (["while loss.item() > 50: loss * 2"], "with 0.01, .*with 100, no end after [0-9,]+ operations"),
            (["while not loss < 1: loss * 2"], "with 0, no end after 10,000 reads.*with 1, .* sent"),
        ),
    ],
)
def test_a_number_that_decides_has_to_be_assumed(tmp_path, lines, told):
    with pytest.raises(ContextError, match=rf"(?s)decides what it does.*train.py:{LINE} reads a number: {told}") as it:
        rehearse(tmp_path, "", lines)
    assert f"--assume train.py:{LINE}=" in str(it.value)
    found = rehearse(tmp_path, "", lines, assume={f"train.py:{LINE}": 1})
    assert f"{READ}1" in found.assumed


def test_an_error_of_the_program_is_raised_whatever_it_reads(tmp_path):
    with pytest.raises(ZeroDivisionError) as it:
        rehearse(tmp_path, "", ["print(loss.item())", "1 / 0"])
    assert it.value.__notes__[-1] == f"weft: after reads of numbers that are not known, at train.py:{LINE}"


@pytest.mark.slow
def test_of_several_lines_those_that_decide_are_named(tmp_path):
    lines = ["print(loss.item())", "if loss.item() < 50: weft.reduce(loss.detach(), ctx)", "losses.append(loss.item())"]
    with pytest.raises(ContextError, match=rf"train.py:{LINE + 1} reads") as it:
        rehearse(tmp_path, "", lines)
    assert f"train.py:{LINE}" not in str(it.value) and f"train.py:{LINE + 2}" not in str(it.value)
