"""Models of transformers on meshes: each trains as in one process, or an error says why not.

The table in docs/parallelism.md is made here: `python -m tests.interop.model_matrix` trains them all and rewrites it.
"""

import argparse
import importlib
import math
import pathlib
import re
import textwrap
import time
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

import weft
from weft.testing import run_ranks

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->\n"
WORDS, LENGTH, SAMPLES, BATCH = 33, 8, 20, 8  # windows of 16 and of 4 samples
TOLERANCE = 1e-10

SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "attn_implementation": "sdpa",
    "use_cache": False,
    "pad_token_id": None,
}
FEW = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "attn_implementation": "sdpa"}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}  # the other implementations have no float64


class Model(NamedTuple):
    """A model by its class and config, its blocks for `recompute`, and what is frozen in it."""

    kind: str
    config: str
    options: dict
    blocks: str
    frozen: str
    inputs: str = "words"


MODELS = {
    "GPT-2": Model(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "use_cache": False}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
        | {"attn_implementation": "sdpa", "bos_token_id": 0, "eos_token_id": 0},
        "transformer.h.*",
        "transformer.h.0.mlp.",
    ),
    "Llama 3": Model("LlamaForCausalLM", "LlamaConfig", SIZES, "model.layers.*", "model.layers.0.mlp."),
    "Qwen3": Model(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**SIZES, "head_dim": 8, "tie_word_embeddings": True},
        "model.layers.*",
        "model.layers.0.mlp.",
    ),
    "Qwen3-MoE": Model(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**SIZES, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
        "model.layers.*",
        "model.layers.0.self_attn.",
    ),
    "Mixtral": Model(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**SIZES, **EXPERTS, "num_local_experts": 4},
        "model.layers.*",
        "model.layers.0.self_attn.",
    ),
    "Gemma 3": Model(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**SIZES, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "model.layers.*",
        "model.layers.0.mlp.",
    ),
    "Phi-3": Model(
        "Phi3ForCausalLM",
        "Phi3Config",
        {**SIZES, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
        "model.layers.*",
        "model.layers.0.mlp.",
    ),
    "DeepSeek-V3": Model(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**SIZES, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2}
        | {"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16}
        | {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
        "model.layers.*",
        "model.layers.0.mlp.",
    ),
    "BERT": Model(
        "BertForMaskedLM",
        "BertConfig",
        {**FEW, **DROPS, "vocab_size": WORDS, "max_position_embeddings": LENGTH},
        "bert.encoder.layer.*",
        "bert.encoder.layer.0.intermediate.",
    ),
    "ViT": Model(
        "ViTForImageClassification",
        "ViTConfig",
        {**FEW, **DROPS, "image_size": 12, "patch_size": 4, "num_channels": 1, "num_labels": 5},
        "vit.layers.*",
        "vit.layers.0.mlp.",
        "image",
    ),
    "T5": Model(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": WORDS, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "use_cache": False}
        | {"dropout_rate": 0.1, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8},
        r"*.block.*",
        "encoder.block.0.layer.1.",
        "both",
    ),
}

WITH_EXPERTS = {"Qwen3-MoE", "Mixtral", "DeepSeek-V3"}

MESHES = {
    "tensor 2": {"tensor": 2},
    "tensor 4": {"tensor": 4},
    "context 2": {"context": 2},
    "pipeline 2": {"pipeline": 2},
    "expert 2": {"expert": 2},
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "pipeline 2, shard 2": {"pipeline": 2, "shard": 2},
    "pipeline 2, tensor 2, sequence": {"pipeline": 2, "tensor": 2},
    "tensor 2, sequence": {"tensor": 2},
}


class _InFloat64(TorchFunctionMode):
    """What a part would compute in float32 is computed in float64, so that nothing is rounded on the way."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if one is torch.float32 else one for one in args]
        return function(*args, **{n: torch.float64 if one is torch.float32 else one for n, one in kwargs.items()})


def _in_float64(part):
    kind = type(part)

    def forward(self, *args, **kwargs):
        with _InFloat64():
            return kind.forward(self, *args, **kwargs)

    forward.__wrapped__ = kind.forward
    part.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def build(name):
    """The model in float64, always with the same weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    model = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, model.config)(**model.options)
        module = getattr(transformers, model.kind)(config).double()
        for each in module.parameters():  # no biases of 0 and norms of 1
            each.data += 0.02 * torch.randn_like(each)
    for part in module.modules():
        if type(part).__name__.endswith(("RMSNorm", "Router", "T5LayerNorm")):
            _in_float64(part)
    for own, p in module.named_parameters():
        p.requires_grad_(not own.startswith(model.frozen))
    return module.train()


def samples(name):
    """A list of samples: the inputs of the model by name, and the targets of the loss as "y"."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (SAMPLES, 2, LENGTH + 1), generator=draw)
    if MODELS[name].inputs == "image":
        images = torch.randn(SAMPLES, 1, 12, 12, generator=draw, dtype=torch.float64)
        return [{"pixel_values": x, "y": y % 5} for x, y in zip(images, words[:, 0, 0], strict=True)]
    if MODELS[name].inputs == "both":
        return [{"input_ids": x[:-1], "decoder_input_ids": y[:-1], "y": y[1:]} for x, y in words]
    return [{"input_ids": x[:-1], "y": x[1:], "position_ids": torch.arange(LENGTH)} for x, _ in words]


def loss_of(output, target):
    """The mean over rows and places: the losses of transformers are computed in float32."""
    logits = output.logits
    return cross_entropy(logits.flatten(0, -2), target.flatten())


def call(model, batch, ctx):
    """The loss of a batch: in a pipeline, the call returns it."""
    axes = dict(ctx.axes)
    if "context" in axes:
        batch = weft.data.split_sequence(batch, ctx)
    inputs = {key: value for key, value in batch.items() if key != "y"}
    if "pipeline" in axes:
        return model(**inputs, target=batch["y"])
    return loss_of(model(**inputs), batch["y"])


def whole(p):
    p = p.detach()
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).clone()


def reference(name, steps=4):
    """Parameters of one process, by the functions of torch alone, but for the dropout."""
    model, ctx = build(name), weft.local()
    loader, ctx = weft.shard_data(DataLoader(samples(name), batch_size=BATCH), ctx)
    model, loader, ctx = weft.keyed_dropout(model, loader, ctx)
    optimizer, done = adamw(model), 0
    while True:
        batches = list(loader)
        for window in (batches[:2], batches[2:]):
            total = sum(len(batch["y"]) for batch in window)
            for batch in window:
                (call(model, batch, ctx) * (len(batch["y"]) / total)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                return {own: p.detach() for own, p in model.named_parameters()}


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def compose(name, ctx, *, sequence):
    """Model, optimizer and windows on the mesh of `ctx`, by the transforms that the docs name, in their order."""
    model, axes = build(name), [axis for axis, size in ctx.axes if size > 1]
    loader, ctx = weft.shard_data(DataLoader(samples(name), batch_size=BATCH // ctx.data_size), ctx)
    model, loader, ctx = weft.keyed_dropout(model, loader, ctx)
    model, ctx = weft.recompute(model, ctx, blocks=MODELS[name].blocks)
    if "tensor" in axes:
        model, ctx = weft.tensor_parallel(model, ctx, sequence=sequence)
    if "context" in axes:
        model, ctx = weft.context_parallel(model, ctx)
    if "expert" in axes and name in WITH_EXPERTS:  # of the others, it is one more data axis
        model, ctx = weft.expert_parallel(model, ctx)
    if "pipeline" in axes:
        model, ctx = weft.pipeline(model, ctx, loss=loss_of, micro_batches=2)
    if "shard" in axes:
        model, ctx = weft.fully_shard(model, ctx, units=MODELS[name].blocks)
    if "context" in axes or "expert" in axes:
        model, ctx = weft.replicate(model, ctx)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=2)
    return model, adamw(model), loader, ctx


def fit(model, optimizer, loader, ctx, steps):
    """Train for so many steps, in as many epochs as it takes."""
    done = 0
    while done < steps:
        for window in loader:
            for batch in window:
                (call(model, batch, ctx) * window.share).backward()
            weft.clip_grads(model, ctx, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break


def held(model, ctx):
    """The parameters of this rank, whole."""
    with weft.full_params(model, ctx):
        return {own: whole(p) for own, p in model.named_parameters() if not p.is_meta}


def train(ctx, name, sequence):
    """Parameters of this rank after four steps, or the error that was raised: its kind and text."""
    try:
        model, optimizer, loader, ctx = compose(name, ctx, sequence=sequence)
        fit(model, optimizer, loader, ctx, 4)
        return held(model, ctx)
    except (weft.errors.WeftError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def on_ranks(function, mesh, *args):
    """A function of (ctx, ..., whether sequences are sharded between layers) on the ranks of a mesh."""
    axes = MESHES[mesh]
    options = {"mesh": axes, "timeout_s": 120.0, "probes": "auto"}
    return run_ranks(function, math.prod(axes.values()), *args, mesh.endswith("sequence"), **options)


def measure(name, mesh, expected):
    """Whether all ranks have the parameters of one process: "exact", or why not."""
    try:
        found = on_ranks(train, mesh, name)
    except weft.testing.RanksFailed as error:  # one rank found it out, and the others were told
        return re.findall(r"rank \d+: (\w+: .*)", str(error))[0]
    if any(isinstance(one, str) for one in found):
        texts = {one for one in found if not str(one).startswith("PeerError")}
        assert all(isinstance(one, str) for one in found), f"{name}, {mesh}: some ranks trained: {texts}"
        return min(texts)
    together = {own: p for one in found for own, p in one.items()}
    assert set(together) == set(expected), f"{name}, {mesh}: {sorted(set(expected) ^ set(together))}"
    apart = {own: max(float((one[own] - p).abs().max()) for one in found if own in one) for own, p in expected.items()}
    worst = max(apart, key=apart.get)
    assert apart[worst] < TOLERANCE, f"{name}, {mesh}: {worst} differs by {apart[worst]:.1e}"
    return "exact"


def reason(text):
    """What a cell is about: the kind of the error and its first line, without the names of classes and parts."""
    return re.sub(r"of module '\S+'|'\S+' ", "", text.partition("\n")[0])


def table(found):
    """The table of what was measured, by model and mesh, with notes below it."""
    notes = list(dict.fromkeys(why for row in found.values() for why in row.values() if why != "exact"))
    marks = {"exact": "exact"} | {why: f"({chr(ord('a') + number)})" for number, why in enumerate(notes)}
    lines = ["| | " + " | ".join(MESHES) + " |", "|---" * (len(MESHES) + 1) + "|"]
    lines += ["| " + " | ".join([name, *(marks[why] for why in row.values())]) + " |" for name, row in found.items()]
    lines += ["", *(textwrap.fill(f"- {marks[why]} {why}", 120, subsequent_indent="  ") for why in notes)]
    return "\n".join(lines) + "\n"


def documented():
    """The table in the docs, as `table` takes it."""
    text = DOCS.read_text().partition(BEGIN)[2].partition(END)[0]
    rows, _, notes = text.partition("\n\n")
    marks = {"exact": "exact"}
    for note in notes.replace("\n  ", " ").splitlines():
        mark, why = re.fullmatch(r"- (\(\w\)) (.*)", note).groups()
        marks[mark] = why
    split = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
    return {name: dict(zip(split[0][1:], map(marks.get, cells), strict=True)) for name, *cells in split[2:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", help="these alone, with ; between them; the table is not rewritten then")
    parser.add_argument("--meshes", help="these alone, as above")
    given = parser.parse_args()
    names, meshes = (
        chosen.split(";") if chosen else all_of for chosen, all_of in ((given.models, MODELS), (given.meshes, MESHES))
    )
    found = {}
    for name in names:
        expected, found[name] = reference(name), {}
        for mesh in meshes:
            begin = time.monotonic()
            try:
                text = measure(name, mesh, expected)
            except AssertionError as error:
                if not (given.models or given.meshes):
                    raise
                text = f"differs: {error}"
            found[name][mesh] = reason(text)
            print(f"{name:12} {mesh:32} {time.monotonic() - begin:5.1f} s  {text}", flush=True)
    cells = [why for row in found.values() for why in row.values()]
    print(f"{cells.count('exact')} of {len(cells)} are exact")
    if not (given.models or given.meshes):
        before, _, rest = DOCS.read_text().partition(BEGIN)
        DOCS.write_text(before + BEGIN + table(found) + END + rest.partition(END)[2])


if __name__ == "__main__":
    torch.set_num_threads(1)
    importlib.import_module("tests.interop.model_matrix").main()  # under the name by which the ranks find it
