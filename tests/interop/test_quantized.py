"""quantized weights: as the libraries make them, under the strategies, in checkpoints."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.told import told
from weft.errors import CheckpointError
from weft.testing import largest_difference, run_ranks

bitsandbytes = pytest.importorskip("bitsandbytes")
torchao = pytest.importorskip("torchao")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def _config():
    return transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip


def _model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(_config())


def _on_meta():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(_config())
    rotary = model.model.rotary_emb  # its buffers are computed, and not saved
    model.model.rotary_emb = type(rotary)(_config())
    return model


def _tokens(step=0):
    return torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))


def _logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=_tokens(), use_cache=False).logits


@pytest.fixture
def folder(tmp_path):
    _model().save_pretrained(tmp_path / "model", max_shard_size="100KB")
    return tmp_path / "model"


@pytest.mark.parametrize("from_files", [False, True])
@pytest.mark.parametrize(("scheme", "double"), [("nf4", False), ("nf4", True), ("fp4", False)])
def test_four_bits_are_those_of_transformers(scheme, double, from_files, folder):
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=scheme, bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=options, dtype=torch.float32)
    if from_files:
        ours, ctx = weft.quantized(_on_meta(), weft.local(), scheme, weights=folder, double=double)
    else:
        ours, ctx = weft.quantized(_model(), weft.local(), scheme, double=double)
    assert torch.equal(_logits(ours), _logits(theirs))
    assert "quantized" in weft.explain(ctx)
    own = {name: type(part).__name__ for name, part in ours.named_modules()}
    assert own == {name: type(part).__name__ for name, part in theirs.named_modules()}


@pytest.mark.parametrize("from_files", [False, True])
def test_eight_bits_are_those_of_their_libraries(from_files, folder):
    def made(engine, scheme="int8"):
        if from_files:
            return weft.quantized(_on_meta(), weft.local(), scheme, weights=folder, engine=engine)[0]
        return weft.quantized(_model(), weft.local(), scheme, engine=engine)[0]

    options = transformers.BitsAndBytesConfig(load_in_8bit=True)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=options, dtype=torch.float32)
    assert torch.equal(_logits(made("bitsandbytes")), _logits(theirs))

    quantization = torchao.quantization
    for scheme, config in (("int8", "Int8WeightOnlyConfig"), ("float8", "Float8WeightOnlyConfig")):
        plain = _model()
        quantization.quantize_(
            plain,
            getattr(quantization, config)(),
            filter_fn=lambda part, name: type(part) is nn.Linear and name != "lm_head",
        )
        assert torch.equal(_logits(made("torchao", scheme)), _logits(plain))


@pytest.mark.parametrize("from_files", [False, True])
def test_a_table_gives_layers_different_schemes(from_files, folder):
    def made(scheme):
        if from_files:
            return weft.quantized(_on_meta(), weft.local(), scheme, weights=folder)
        return weft.quantized(_model(), weft.local(), scheme)

    table = {"*.0.mlp": None, "*.mlp": "nf4", "*.q_proj": "int8"}
    found, ctx = made(table)
    four, eight = made("nf4")[0], made("int8")[0]
    for name, part in found.named_modules():
        if type(_model().get_submodule(name)) is nn.Linear:
            like = four if "1.mlp" in name else eight if "q_proj" in name else _model()
            assert type(part) is type(like.get_submodule(name)), name
            x = torch.randn(2, part.in_features, generator=torch.Generator().manual_seed(0))
            assert torch.equal(part(x), like.get_submodule(name)(x)), name
    assert dict(ctx.applied[-1].options) == {"scheme": "nf4, int8", "engine": "bitsandbytes, torchao", "layers": "5"}
    with pytest.raises(ValueError, match="'decoder' decides about nothing"):
        made({"decoder": "nf4"})


def test_layers_that_transformers_keeps_in_full_precision_stay(tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    plain = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    plain.save_pretrained(tmp_path)
    options = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = type(plain).from_pretrained(tmp_path, quantization_config=options, dtype=torch.float32)
    ours, _ = weft.quantized(plain, weft.local(), "nf4")
    assert {name: type(part) for name, part in ours.named_modules()} == {
        name: type(part) for name, part in theirs.named_modules()
    }
    assert type(ours.encoder.block[0].layer[1].DenseReluDense.wo) is nn.Linear


def _adapted(ctx):
    model, ctx = weft.quantized(_model(), ctx, "nf4")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, config), ctx


def _train(ctx, strategy, folder=None, resume=False, steps=(0, 1, 2)):
    model, ctx = _adapted(ctx)
    if strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units="LlamaDecoderLayer")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if strategy.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    if resume:
        weft.restore(state, folder, ctx)
    losses = []
    for step in steps:
        tokens = _tokens(step)[ctx.rank :: ctx.world_size]
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(weft.reduce(loss.detach(), ctx, "mean")))
        if strategy != "none":
            _logits(model)  # an evaluation changes nothing
            model.train()
    if folder is not None and not resume:
        weft.save(state, folder, 1, ctx)
    return losses


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero2", "zero3", "fully_shard"])
def test_adapters_on_four_bits_train_as_on_one_rank_and_resume(strategy, tmp_path):
    expected = _train(weft.local(), "none", steps=range(5))
    first = run_ranks(_train, 2, strategy, str(tmp_path / "run"))[0]
    more = run_ranks(_train, 2, strategy, str(tmp_path / "run"), resume=True, steps=(3, 4))[0]
    assert largest_difference(torch.tensor(first + more), torch.tensor(expected)) < 2e-6  # of fp32 losses
    files = weft.export(tmp_path / "run", tmp_path / "adapter", peft=True)
    base, _ = weft.quantized(_model(), weft.local(), "nf4")
    read = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert files and sum(p.numel() for name, p in read.named_parameters() if "lora_" in name)


def test_scales_are_restored(tmp_path):
    def saved(model, ctx):
        return weft.checkpointable({"model": model}, ctx)[0]

    one, ctx = weft.quantized(_model(), weft.local(), "nf4", double=True)
    weft.save(saved(one, ctx), tmp_path / "run", 1, ctx)
    torch.manual_seed(5)
    other, ctx = weft.quantized(transformers.LlamaForCausalLM(_config()), weft.local(), "nf4", double=True)
    assert not torch.equal(_logits(other), _logits(one))
    weft.restore(saved(other, ctx), tmp_path / "run", ctx)
    assert torch.equal(_logits(other), _logits(one))


def test_a_quantized_model_is_exported_as_transformers_reads_it(tmp_path):
    model, ctx = weft.quantized(_model(), weft.local(), "nf4", double=True)
    state, ctx = weft.checkpointable({"model": model}, ctx)
    weft.save(state, tmp_path / "run", 1, ctx)
    weft.export(tmp_path / "run", tmp_path / "weights")
    config = _config()
    config.quantization_config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "weights")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    assert torch.equal(_logits(theirs), _logits(model))
    torch.manual_seed(5)
    other, _ = weft.quantized(transformers.LlamaForCausalLM(_config()), weft.local(), "nf4", double=True)
    weft.load_weights(other, tmp_path / "run", weft.local())
    assert torch.equal(_logits(other), _logits(model))


def _refused(ctx):
    texts = []
    for scheme, engine, strategy in (
        ("int8", "bitsandbytes", lambda model: weft.fully_shard(model, ctx)),
        ("int8", "torchao", lambda model: weft.replicate(model, ctx)),
    ):
        model, _ = weft.quantized(nn.Sequential(nn.Linear(64, 64)), ctx, scheme, engine=engine)
        with pytest.raises(ValueError, match="quantized weights of Sequential cannot be taken") as error:
            strategy(model)
        texts.append(str(error.value))
    return texts


def test_what_a_strategy_cannot_take_is_refused():
    assert all(run_ranks(_refused, 2))
    with pytest.raises(ValueError, match="quantized weights of Sequential cannot be taken"):
        _refused_by_tensor()
    with pytest.raises(TypeError, match=r"0\.weight cannot be saved"):
        ctx = weft.local()
        model, ctx = weft.quantized(nn.Sequential(nn.Linear(64, 64)), ctx, "int8")
        state, ctx = weft.checkpointable({"model": model}, ctx)
        weft.save(state, "nowhere", 1, ctx)


def _refused_by_tensor():
    model, ctx = weft.quantized(nn.Sequential(nn.Linear(64, 64)), weft.local(), "nf4")
    weft.tensor_parallel(model, ctx, plan={"0": "column"})


def test_bad_requests_change_nothing(folder):
    ctx = weft.local()
    for call, text in (
        (lambda m: weft.quantized(m, ctx, "int3"), "scheme"),
        (lambda m: weft.quantized(m, ctx, "nf4", engine="torchao"), "engine"),
        (lambda m: weft.quantized(m, ctx, "int8", double=True), "double=True has no effect"),
        (lambda m: weft.quantized(m, ctx, "nf4", skip=("nothing",)), "names nothing"),
        (lambda m: weft.quantized(m, ctx, "nf4", skip=("**",)), "no layer is left"),
    ):
        model = _model()
        with pytest.raises(ValueError, match=text):
            call(model)
        assert not any("4bit" in type(part).__name__ for part in model.modules())
    with pytest.raises(ValueError, match="is on meta"):
        weft.quantized(_on_meta(), ctx, "nf4")
    model, ctx = weft.quantized(_model(), ctx, "nf4", skip=("lm_head", "self_attn"))
    assert sum("4bit" in type(part).__name__ for part in model.modules()) == 6


def _bits(model):
    return sum("4bit" in type(part).__name__ for part in model.modules())


def test_the_lines_that_are_told_work(folder, monkeypatch, tmp_path):
    ctx = weft.local()
    with told("weights/quantization/quantize.py", "check_module") as it:
        weft.quantized(_model().state_dict(), ctx, "nf4")
    found = it.run(model=_model(), ctx=ctx)
    assert _bits(found["model"]) == 14
    with told("weights/quantization/quantize.py", "is already quantized") as it:
        weft.quantized(found["model"], found["ctx"], "nf4")
    assert _bits(it.run(model=_model(), ctx=ctx)["model"]) == 14
    with told("weights/quantization/quantize.py", "is under") as it:
        weft.quantized(*weft.replicate(_model(), ctx), "nf4")
    found = it.run(model=_model(), ctx=ctx)
    weft.replicate(found["model"], found["ctx"])
    with told("weights/quantization/quantize.py", "is on meta") as it:
        weft.quantized(_on_meta(), ctx, "nf4")
    _model().save_pretrained(tmp_path / "one")
    monkeypatch.chdir(tmp_path / "one")
    assert _bits(it.run(model=_on_meta(), ctx=ctx)["model"]) == 14
    for skip in (("head",), ("**",)):
        with told("weights/quantization/quantize.py", "names nothing") as it:
            weft.quantized(_model(), ctx, "nf4", skip=skip)
        assert _bits(weft.quantized(_model(), ctx, "nf4", skip=it.run()["skip"])[0]) == 15
    with told("weights/quantization/quantize.py", "names nothing") as it:
        weft.quantized(nn.Sequential(nn.Conv1d(2, 2, 1)), ctx, "nf4")
    assert it.fix == "leave weft.quantized out"  # of the program
    tied = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    tied[2].weight = tied[0].weight
    with told("weights/quantization/quantize.py", "weights shared with other parts") as it:
        weft.quantized(tied, ctx, "nf4")
    assert _bits(weft.quantized(tied, ctx, "nf4", skip=it.run()["skip"])[0]) == 1


def test_names_of_files_that_do_not_fit(tmp_path):
    from safetensors.torch import save_file

    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    save_file({f"model.{name}": tensor for name, tensor in net.state_dict().items()}, tmp_path / "x.safetensors")
    with told("weights/assign.py", "does not fit the module") as it:
        weft.quantized(net, weft.local(), "nf4", weights=tmp_path / "x.safetensors")
    it.run(model=net, path=tmp_path / "x.safetensors", ctx=weft.local())
    plain = net.state_dict()
    assert _bits(weft.quantized(net, weft.local(), "nf4")[0]) == 2  # as the line says, without weights=
    with told("weights/sources.py", "{path} cannot be used") as it:
        weft.quantized(_model(), weft.local(), "nf4", weights=tmp_path / "y.safetensors")
    save_file(plain, tmp_path / "x.safetensors")
    it.run(model=nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), ctx=weft.local(), scheme="nf4")


def test_a_library_that_cannot_do_it_here(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no kernel")

    with monkeypatch.context() as patched:
        patched.setattr(torchao.quantization, "Float8WeightOnlyConfig", fails)
        with told("weights/quantization/quantized_layers.py", "another of") as it:
            weft.quantized(_model(), weft.local(), "float8")
        schemes = it.fix.removeprefix("another of: ").split(", ")
        for scheme in schemes:
            weft.quantized(_model(), weft.local(), scheme)
    assert len(schemes) == 3


def test_a_damaged_file_leaves_the_module_on_meta(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])
    model = _on_meta()
    with pytest.raises(CheckpointError):
        weft.quantized(model, weft.local(), "nf4", weights=folder)
    assert all(p.is_meta for p in model.parameters())
