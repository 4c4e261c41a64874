"""What probes have measured, as a text to log, and on the page about a run."""

import html
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import weft
from weft import monitoring
from weft.errors import ProbeFailed
from weft.monitoring.report import read, render
from weft.testing import run_ranks


class _Feedforward(nn.Module):
    def __init__(self, *, mixes=False):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.mixes = mixes

    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden.softmax(-1) if self.mixes else hidden.relu())


def _divided(ctx, folder, mixes):
    model, ctx = weft.tensor_parallel(_Feedforward(mixes=mixes).double(), ctx, plan={"up": "column", "down": "row"})
    before, tracker = monitoring.probe_results(ctx), monitoring.jsonl(f"{folder}/log.jsonl")
    x = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        for _ in range(3):
            model(x).sum().backward()
    except ProbeFailed as error:
        after = monitoring.probe_results(ctx)
        if ctx.is_main:
            tracker({"failure": str(error), "probes": after}, step=3)
        return before, after, str(error)
    after = monitoring.probe_results(ctx)
    weft.log({"probes": after}, 3, ctx, tracker)
    return before, after, ""


def test_what_was_measured_is_told_and_shown(tmp_path):
    before, after, _ = run_ranks(_divided, 2, str(tmp_path), False, mesh={"tensor": 2})[0]
    assert before == "tensor_parallel(_Feedforward): nothing measured yet"
    pattern = (
        r"tensor_parallel\(_Feedforward\): 3 calls of 1 part measured, nothing found; largest difference (\S+) of "
    )
    found = re.match(pattern, after)
    assert 0 < float(found[1]) < 0.1 and "gradient of up.weight" in after
    text = render([read(tmp_path)])
    cells = re.findall("<td[^>]*>(.*?)</td>", text)
    assert html.unescape(text).count(after.partition(": ")[2]) == 1 and "<h2>Probes</h2>" in text
    assert cells[:3] == ["tensor_parallel(_Feedforward)", html.escape(after.partition(": ")[2]), "3"]


def test_what_was_found_is_told_and_shown(tmp_path):
    _, after, failure = run_ranks(_divided, 2, str(tmp_path), True, mesh={"tensor": 2})[0]
    assert "1 call of 1 part measured, FAILED; largest difference" in after
    text = html.unescape(render([read(tmp_path)]))
    assert after.partition(": ")[2] in text and f"failure: {failure}" in text


def _staged(ctx):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    model, ctx = weft.pipeline(model, ctx, micro_batches=2, loss=mse_loss)
    model(torch.ones(4, 4).double(), torch.zeros(4, 4).double()).backward()
    return monitoring.probe_results(ctx)


def test_a_pipeline_tells_what_it_measures():
    (text, _) = run_ranks(_staged, 2, mesh={"pipeline": 2})
    assert text.startswith("pipeline(Sequential): 1 call of 1 part measured, nothing found; ")
    assert "the gradients of stage 1, the loss, the loss with all layers on each rank" in text


@pytest.mark.parametrize("mode", ["every", "off"])
def test_only_what_measures_has_a_line(mode):
    ctx = weft.local(probes=mode)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model, ctx = weft.with_precision(model, ctx, "fp32")
    assert monitoring.probe_results(ctx) == ""
    model, ctx = weft.recompute(model, ctx, blocks="*")
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    said = {
        "every": "4 calls of 2 parts measured, nothing found; compared bit for bit: what it returns",
        "off": "probes are off",
    }
    assert monitoring.probe_results(ctx) == f"recompute(Sequential): {said[mode]}"
    del model
    assert monitoring.probe_results(ctx) == ""
