"""PEFT: adapters trained under every strategy, exported as PEFT reads them, loaded alone."""

import copy
import json

import pytest
import torch

import weft
from tests.fix_lines.told import told
from tests.variants import variant_cases
from weft.errors import CheckpointError
from weft.testing import largest_difference, run_ranks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True),
    "lora and a head": lambda: peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["lm_head"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}
STRATEGIES = ["replicate", "zero1", "zero2", "zero3", "fully_shard", "tensor"]


def _base():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def _adapted(kind="lora", name="default"):
    model = peft.get_peft_model(_base(), CONFIGS[kind](), adapter_name=name, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # an adapter begins as nothing
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.05)
    return model


def _tokens(step):
    return torch.randint(32, (4, 7), generator=torch.Generator().manual_seed(100 + step))


def _loss(model, tokens):
    # transformers computes the loss of a model in fp32.
    logits = model(input_ids=tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _trained(model, steps, share=slice(None)):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for step in range(steps):
        _loss(model, _tokens(step)[share]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _with_strategy(model, ctx, strategy):
    if strategy == "fully_shard":
        return weft.fully_shard(model, ctx, units="LlamaDecoderLayer")
    if strategy == "replicate":
        return weft.replicate(model, ctx)
    if strategy == "tensor":
        return weft.tensor_parallel(model, ctx)
    return model, ctx


def _train_and_save(ctx, kind, strategy, folder):
    model, ctx = _with_strategy(_adapted(kind), ctx, strategy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    if strategy.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    share = slice(None) if strategy == "tensor" else slice(ctx.rank, None, ctx.world_size)
    for step in range(3):
        _loss(model, _tokens(step)[share]).backward()
        optimizer.step()
        optimizer.zero_grad()
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    weft.save(state, folder, 3, ctx)


def _logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=_tokens(50)).logits


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        *((strategy, "lora") for strategy in STRATEGIES),
        *(("fully_shard", kind) for kind in CONFIGS if kind != "lora"),
        ("tensor", "lora and a head"),
    ],
)
def test_trained_on_2_ranks_exported_and_read_by_peft(strategy, kind, tmp_path):
    mesh = {"tensor": 2} if strategy == "tensor" else None
    run_ranks(_train_and_save, 2, kind, strategy, str(tmp_path / "run"), mesh=mesh)
    files = weft.export(tmp_path / "run", tmp_path / "adapter", peft=True)
    assert [file.name for file in files] == ["adapter_model.safetensors", "adapter_config.json"]

    plain, _ = _trained(_adapted(kind), 3)
    plain.save_pretrained(tmp_path / "peft")
    ours, theirs = (json.loads((tmp_path / part / "adapter_config.json").read_text()) for part in ("adapter", "peft"))
    unordered = {"target_modules", "modules_to_save", "feedforward_modules", "auto_mapping"}
    assert {k: v for k, v in ours.items() if k not in unordered} == {
        k: v for k, v in theirs.items() if k not in unordered
    }
    read = peft.PeftModel.from_pretrained(_base(), tmp_path / "adapter", autocast_adapter_dtype=False)
    assert largest_difference(_logits(read), _logits(plain)) < 1e-12
    own = weft.export(tmp_path / "run", tmp_path / "adapter", peft="default")  # an earlier one is replaced
    assert own == files


def _loads(ctx, kind, strategy, folder):
    model, ctx = _with_strategy(_adapted(kind), ctx, strategy)
    loaded = weft.load_weights(model, folder, ctx)
    full = weft.full_params(model, ctx) if strategy == "fully_shard" else None
    if full is not None:
        with full:
            return loaded.missing, loaded.unexpected, _logits(model)
    return loaded.missing, loaded.unexpected, _logits(model)


@pytest.mark.parametrize("kind", ["lora", "lora and a head"])
@pytest.mark.parametrize("strategy", ["replicate", "fully_shard"])
def test_an_adapter_alone_is_loaded(kind, strategy, tmp_path):
    plain, _ = _trained(_adapted(kind), 2)
    plain.save_pretrained(tmp_path / "adapter")
    for missing, unexpected, logits in run_ranks(_loads, 2, kind, strategy, str(tmp_path / "adapter")):
        assert (missing, unexpected) == ((), ())
        assert largest_difference(logits, _logits(plain)) < 1e-12


def _streamed(ctx, kind, strategy):
    model, ctx = _with_strategy(_adapted(kind), ctx, strategy)
    apart = dict(weft.weights.stream(model, ctx, peft=True))
    merged = dict(weft.weights.stream(model, ctx, merge=True, bucket_bytes="4KB"))
    again = dict(weft.weights.stream(model, ctx, merge=True, dtype="bf16", filter="model.layers.0.**"))
    whole = dict(weft.weights.stream(model, ctx))
    expected = _adapted(kind).state_dict()
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in whole)
    return apart, merged, again


@pytest.mark.parametrize(("strategy", "kind"), [("fully_shard", "lora and a head"), ("tensor", "lora"),
    *variant_cases(("fully_shard", "dora"), ("replicate", "ia3"), ("tensor", "lora and a head"))])  # fmt: skip
def test_adapters_are_streamed_merged_or_apart(strategy, kind, tmp_path):
    from safetensors.torch import load_file

    mesh = {"tensor": 2} if strategy == "tensor" else None
    plain = _adapted(kind)
    plain.save_pretrained(tmp_path)
    expected = plain.merge_and_unload().state_dict()
    for apart, merged, low in run_ranks(_streamed, 2, kind, strategy, mesh=mesh):
        for found, wanted in ((apart, load_file(tmp_path / "adapter_model.safetensors")), (merged, expected)):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in found)
        assert all(name.startswith("model.layers.0.") for name in low)
        assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in low.items())


def test_adapters_that_cannot_be_streamed_so():
    model, ctx = _adapted("lora", "first"), weft.local()
    model.add_adapter("second", CONFIGS["dora"]())
    with told("weights/adapter_files.py", "the adapter is ambiguous") as it:
        weft.weights.stream(model, ctx, peft=True)
    assert it.run(model=model, ctx=ctx)
    with told("weights/stream.py", "check_adapter_options(") as it:
        weft.weights.stream(_adapted(), ctx, peft=True, merge=True)
    it.run(model=_adapted(), ctx=ctx)
    with told("weights/adapter_files.py", "merge=True, where") as it:
        weft.weights.stream(_base(), ctx, merge=True)
    it.run(model=_base(), ctx=ctx)


def _saved(model, folder):
    state, ctx = weft.checkpointable({"model": model}, weft.local())
    return weft.save(state, folder, 1, ctx)


def test_one_of_two_adapters_is_named(tmp_path):
    model, out = _adapted("lora", "first"), tmp_path / "adapter"
    model.add_adapter("second", CONFIGS["dora"]())
    path = _saved(model, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"the adapter is ambiguous(?s:.*)'first'(?s:.*)'second'"):
        weft.export(path, out, peft=True)
    with told("weights/adapter_files.py", "the adapter is ambiguous") as it:
        weft.export(path, out, peft="third")
    assert "no adapter 'third'" in str(it.error)
    it.run(path=path, out=out)
    assert json.loads((out / "adapter_config.json").read_text())["use_dora"] is False
    weft.export(tmp_path / "run", tmp_path / "adapter", peft="second")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["use_dora"] is True


def test_adapters_that_transformers_added_are_read_by_peft(tmp_path):
    model = _base()
    model.add_adapter(CONFIGS["lora"]())
    weft.export(_saved(model, tmp_path / "run"), tmp_path / "adapter", peft=True)
    read = peft.PeftModel.from_pretrained(_base(), tmp_path / "adapter")
    assert largest_difference(_logits(read), _logits(model)) < 1e-6  # transformers made the adapter in fp32


def test_without_an_adapter_both_ways_say_so(tmp_path):
    path, out = _saved(_base(), tmp_path / "run"), tmp_path / "out"
    with told("weights/adapter_files.py", "the adapter is ambiguous") as it:
        weft.export(path, out, peft=True)
    assert [file.name for file in weft.export(path, out)] == ["model.safetensors"]
    assert it.fix == "weft.export(path, out)"
    _adapted().save_pretrained(tmp_path / "peft")
    with told("weights/adapter_files.py", "and the module has none that is active") as it:
        weft.load_weights(_base(), tmp_path / "peft", weft.local())
    model = it.run(model=_base(), folder=tmp_path / "peft", peft=peft)["model"]
    weft.load_weights(model, tmp_path / "peft", weft.local())
    assert largest_difference(_logits(model), _logits(_adapted())) < 1e-6  # PEFT made the adapter in fp32
    path, out = _saved(_adapted(), tmp_path / "adapted"), tmp_path / "adapter"
    with told("weights/export.py", "check_adapter_options(") as it:
        weft.export(path, out, peft=True, filter="**")
    it.run(path=path, out=out)
    with told("weights/export.py", "check_adapter_options(") as it:
        weft.export(path, out, peft=1)
    it.run(path=path, out=out)
    assert (out / "adapter_config.json").exists()


def test_an_adapter_with_a_tensor_missing_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    model = _adapted()
    model.save_pretrained(tmp_path / "peft")
    file = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.popitem()
    save_file(tensors, file)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match="not in the file: base_model"):
        weft.load_weights(model, tmp_path / "peft", weft.local())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _refused(ctx, kind):
    with pytest.raises(ValueError, match=r"an adapter in .* cannot be cut"):
        weft.tensor_parallel(_adapted(kind), ctx)


@pytest.mark.parametrize("kind", ["dora", "ia3"])
def test_adapters_that_tensor_parallelism_cannot_cut_are_refused(kind):
    run_ranks(_refused, 2, kind, mesh={"tensor": 2})
