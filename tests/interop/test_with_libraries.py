"""The programs of docs/with_libraries.md, on one rank and two, where their libraries are installed."""

import importlib.util
import pathlib
import re

import pytest

from weft.testing import run_ranks

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "with_libraries.md").read_text()
PROGRAMS: dict[str, str] = dict(re.findall(r"^```text\n# ([\w ]+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))


def _names(ctx, libraries, folder):
    import os
    import warnings

    before = pathlib.Path.cwd()
    os.chdir(folder)
    names = {"__name__": "page", "started": ctx}
    # `start` on ranks of the pool: the context they have
    program = PROGRAMS[libraries].replace("with weft.start() as ctx:", "if ctx := started:")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(compile(program, libraries, "exec"), names)
        finally:
            os.chdir(before)
    kept = ("losses", "seen", "streamed", "everyone", "before", "after", "accuracy")
    return {name: names[name] for name in kept if name in names}


def _run(libraries, ranks, folder):
    for library in libraries.split():
        if importlib.util.find_spec(library) is None:  # it is imported on the ranks
            pytest.skip(f"needs {library}")
    return run_ranks(_names, ranks, libraries, str(folder))


def test_the_page_has_a_program_for_each_library():
    assert list(PROGRAMS) == ["transformers", "datasets", "transformers peft", "diffusers", "torchmetrics"]


@pytest.mark.slow
def test_transformers(tmp_path):
    one, two = _run("transformers", 2, tmp_path)
    assert one == two and len(one["losses"]) == 4 and one["losses"][-1] < one["losses"][0]
    transformers = pytest.importorskip("transformers")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert again.config.vocab_size == 64 and not any(p.is_meta for p in again.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_datasets(ranks, tmp_path):
    found = _run("datasets", ranks, tmp_path)
    for name in ("seen", "streamed"):
        assert sorted(number for each in found for number in each[name]) == list(range(16))
    assert [number for part in found[0]["everyone"] for number in part] == list(range(16))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_peft(ranks, tmp_path):
    found = _run("transformers peft", ranks, tmp_path)
    assert all(each["after"] < each["before"] for each in found)


@pytest.mark.slow
def test_diffusers(tmp_path):
    (alone,), two = _run("diffusers", 1, tmp_path), _run("diffusers", 2, tmp_path)
    assert two[0] == two[1] and len(alone["losses"]) == 4
    assert two[0]["losses"] == pytest.approx(alone["losses"], rel=0.02)  # in bf16


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_torchmetrics(ranks, tmp_path):
    found = _run("torchmetrics", ranks, tmp_path)
    right = sum(i % 3 == i % 2 for i in range(15))
    assert [each["accuracy"] for each in found] == [pytest.approx(right / 15)] * ranks


def _train(ctx, strategy, steps):
    import warnings

    import torch
    import transformers
    from torch.utils.data import DataLoader

    import weft

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rows = [{"input_ids": [1 + (i * j) % 60 for j in range(1, 4 + i % 5)]} for i in range(16)]

    def collate(batch):
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch])
        return transformers.BatchEncoding({"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)})

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).double()
        model.gradient_checkpointing_enable()
    model.train()
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units="LlamaDecoderLayer")
    elif strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if strategy == "zero_partition":
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)
    loader, ctx = weft.shard_data(DataLoader(rows, batch_size=2, collate_fn=collate, shuffle=True), ctx)
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    losses, kinds = [], set()
    for window in windows:
        tokens = window.denominator(lambda batch: (batch["labels"][:, 1:] != -100).sum())
        total = torch.zeros((), dtype=torch.float64)
        for batch in window:
            output = model(**batch, num_items_in_batch=tokens)
            output.loss.backward()
            kinds.add(type(output).__name__)
            total += output.loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(weft.reduce(total, ctx, "mean").item())
    return losses, kinds


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "fully_shard", "zero_partition"])
def test_losses_of_transformers_are_means_over_the_tokens_of_all_ranks(strategy):
    pytest.importorskip("transformers")
    one, kinds = run_ranks(_train, 1, strategy, 4)[0]
    two, _ = run_ranks(_train, 2, strategy, 2)[0]
    assert len(one) == 2 and kinds == {"CausalLMOutputWithPast"}
    assert one == pytest.approx(two, rel=1e-12)
