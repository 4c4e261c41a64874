"""place: units on the CPU and on a disk, streamed; the same bits as in memory, or one clear error before any change."""

import copy
import io
import json
import pickle
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weft
from tests.variants import variants
from weft.testing import fake, run_ranks
from weft.weights import PlacementPlan, module_sizes, on_meta, plan_placement

BUDGETS = {"cpu": "6KB", "disk": None}
FORM = r"[\s\S]*found: [\s\S]*expected: [\s\S]*fix: "


class Block(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.register_buffer("table", torch.ones(dim), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, *, fail=False):
        if fail:
            raise KeyError("mine")
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.table + self.seen


class Net(nn.Module):
    """Tied embedding and head, a parameter of its own, blocks of which one is used twice, and one has two names."""

    def __init__(self, layers=5, dim=16):
        super().__init__()
        self.embed = nn.Embedding(20, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 20, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((), 1.5))
        self.again = self.blocks[2]

    def forward(self, x, **kwargs):
        x = self.embed(x) * self.scale
        for block in (*self.blocks, self.blocks[1]):
            x = block(x, **kwargs)
        return self.head(x)


X = torch.arange(6).view(2, 3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A plain model, and its weights in a file, in files with an index, and in a checkpoint."""
    torch.manual_seed(0)
    plain, folder = Net(), tmp_path_factory.mktemp("weights")
    with torch.no_grad():
        for block in plain.blocks:
            block.seen.fill_(0.25)
    state, ctx = weft.checkpointable({"model": plain}, weft.local())
    saved = weft.save(state, folder / "saved", 1, ctx)
    weft.export(saved, folder / "one")
    weft.export(saved, folder / "many", max_shard_size="4KB")
    return plain, {"file": folder / "one" / "model.safetensors", "index": folder / "many", "checkpoint": saved}


def _meta(build=Net):
    with on_meta():
        return build()


def _placed(path, budgets=BUDGETS, **options):
    return weft.place(_meta(), weft.local(), budgets, weights=path, **options)


# -- the same bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", ["file", "index", "checkpoint"])
def test_it_computes_the_bits_of_the_model_in_memory(files, kind, ahead):
    plain, paths = files
    model = _meta()
    names = list(model.state_dict())
    model, ctx = weft.place(model, weft.local(), BUDGETS, weights=paths[kind], ahead=ahead)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(X), plain(X))
    assert list(model.state_dict()) == names and isinstance(model, Net)
    assert model.head.weight is model.embed.weight
    assert [record.name for record in ctx.applied] == ["place"]
    assert model.blocks[0].up.weight.is_meta and model.scale.item() == 1.5


@pytest.mark.parametrize(
    "budget", [7000, *(pytest.param(b, marks=pytest.mark.variant) for b in (5000, 9000, 12000, 16000, 20000, 30000))]
)
def test_every_budget_gives_the_same_bits(files, budget):
    plain, paths = files
    model, ctx = _placed(paths["index"], {"cpu": budget, "disk": None})
    with torch.inference_mode():
        assert torch.equal(model(X), plain(X)) and torch.equal(model(X), plain(X))
    weft.undo(model, ctx)


def test_what_streams_is_held_in_the_room_of_the_plan(files):
    _, paths = files
    plan = plan_placement(_meta(), BUDGETS)
    model, _ = _placed(paths["file"], plan)
    pointers = set()
    for block in model.blocks:
        block.register_forward_hook(lambda m, a, o: pointers.add(m.up.weight.untyped_storage().data_ptr()))
    with torch.no_grad():
        model(X)
    real = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters() if not p.is_meta}
    assert len(plan.streamed) >= 3 and len(pointers - set(real)) == 1
    assert sum(real.values()) + dict(plan.room)["cpu"] <= plan.used()["cpu"] <= 6000


def test_other_orders_of_calls_are_learned(files):
    plain, paths = files
    model, _ = _placed(paths["file"])
    with torch.no_grad():
        for order in ([4, 2, 0], [0, 0, 3], [1, 4, 2, 3], [4, 2, 0]):
            here = there = torch.ones(2, 16)
            for i in order:
                here, there = model.blocks[i](here), plain.blocks[i](there)
            assert torch.equal(here, there)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.float64])
def test_every_dtype_is_read_as_it_lies(tmp_path, dtype):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter((torch.arange(700) % 7).to(dtype), requires_grad=False)
            self.single = nn.Parameter(torch.tensor(3.0).to(dtype), requires_grad=False)
            self.none = nn.Parameter(torch.empty(0, 3).to(dtype), requires_grad=False)

        def forward(self):
            return self.first.double() * self.single.double() + self.none.double().sum()

    plain = nn.Sequential(Odd(), Odd(), Odd())
    save_file({name: p.detach() for name, p in plain.named_parameters()}, tmp_path / "w.safetensors")
    slot = -(-700 * dtype.itemsize // 64) * 64 + 64
    plan = plan_placement(plain, {"cpu": slot, "disk": None}, units=Odd)
    assert len(plan.streamed) == 3
    model = _meta(lambda: nn.Sequential(Odd(), Odd(), Odd()))
    model, _ = weft.place(model, weft.local(), plan, weights=tmp_path / "w.safetensors")
    with torch.no_grad():
        for part, whole in zip(model, plain, strict=True):
            assert torch.equal(part(), whole())


def test_products_with_weights_that_require_gradients_have_the_same_bits(tmp_path):
    plain = nn.Sequential(*(nn.Linear(64, 10, bias=False) for _ in range(3)))
    save_file(plain.state_dict(), tmp_path / "w.safetensors")
    model = _meta(lambda: nn.Sequential(*(nn.Linear(64, 10, bias=False) for _ in range(3))))
    model, _ = weft.place(model, weft.local(), {"cpu": "5KB", "disk": None}, weights=tmp_path / "w.safetensors")
    x = torch.randn(2, 64, 6, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert all(torch.equal(part(x), whole(x)) for part, whole in zip(model, plain, strict=True))


def test_files_of_another_dtype_are_converted(files):
    plain, paths = files
    model = _meta().bfloat16()
    model, _ = weft.place(model, weft.local(), {"cpu": "4KB", "disk": None}, weights=paths["file"])
    with torch.no_grad():
        assert torch.equal(model(X), copy.deepcopy(plain).bfloat16()(X))


def test_modules_that_keep_their_parameters_elsewhere_stream_too(tmp_path):
    def build():
        torch.manual_seed(1)
        return nn.ModuleDict({"first": nn.LSTM(8, 8), "second": nn.LSTM(8, 8), "wide": nn.MultiheadAttention(8, 2)})

    plain, x = build().eval(), torch.ones(3, 1, 8)
    save_file(plain.state_dict(), tmp_path / "w.safetensors")
    model, _ = weft.place(
        _meta(build).eval(), weft.local(), {"cpu": "3KB", "disk": None}, weights=tmp_path / "w.safetensors"
    )
    with torch.no_grad():
        for name in ("first", "second"):
            assert torch.equal(model[name](x)[0], plain[name](x)[0])
        assert torch.equal(model["wide"](x, x, x)[0], plain["wide"](x, x, x)[0])


def test_a_model_that_fits_is_trained_as_ever(files):
    plain, paths = files
    model, _ = _placed(paths["file"], {"cpu": None})
    model(X).sum().backward()
    other = copy.deepcopy(plain)
    other(X).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_module_with_values_needs_no_files(files):
    plain, _ = files
    model = copy.deepcopy(plain)
    parameters = list(model.parameters())
    model, _ = weft.place(model, weft.local(), {"cpu": None})
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(X), plain(X))


# -- together with others ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", ["bf16", weft.Precision(param=torch.bfloat16, compute=torch.bfloat16, buffer=torch.bfloat16)]
)
def test_with_precision_comes_first(files, policy):
    plain, paths = files
    outputs = []
    for given, budgets in ((copy.deepcopy(plain), {"cpu": None}), (_meta(), BUDGETS)):
        model, ctx = weft.with_precision(given, weft.local(), policy)
        model, ctx = weft.place(model, ctx, budgets, weights=paths["file"])
        with torch.no_grad():
            outputs.append(model(X))
    assert torch.equal(*outputs) and outputs[0].dtype in (torch.bfloat16, torch.float32)


def test_functions_at_blocks_see_parameters(files):
    plain, paths = files
    model, ctx = _placed(paths["file"])
    seen = []

    def look(block, args, kwargs, output=None):
        seen.append(block.up.weight.sum().item())

    model, ctx = weft.hooked(model, ctx, blocks=Block, before=look, after=look)
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
    sums = [block.up.weight.sum().item() for block in (*plain.blocks, plain.blocks[1])]
    assert seen == [one for one in sums for _ in (0, 1)]


def test_undo_gives_back_what_was_on_meta(files):
    plain, paths = files
    model = _meta()
    before, buffers = dict(model.named_parameters()), [b.clone() for b in model.buffers()]
    model, ctx = weft.place(model, weft.local(), BUDGETS, weights=paths["file"])
    with torch.no_grad():
        model(X)
    model, ctx = weft.undo(model, ctx)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is p for name, p in before.items())
    assert all(torch.equal(b, c) for b, c in zip(model.buffers(), buffers, strict=True)) and ctx.applied == ()
    assert not any(part._forward_hooks or part._forward_pre_hooks or "_apply" in vars(part) for part in model.modules())
    weft.load_weights(model, paths["file"], ctx)
    assert torch.equal(model(X), plain(X))


def test_undo_gives_back_what_had_values(files):
    plain, paths = files
    model = copy.deepcopy(plain)
    before = dict(model.named_parameters())
    model, ctx = weft.place(model, weft.local(), BUDGETS, weights=paths["index"])
    assert before["blocks.0.up.weight"].numel() == 0, "its memory is free"
    model, ctx = weft.undo(model, ctx)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert torch.equal(model(X), plain(X))


def _on_ranks(ctx, path, budget):
    """Does it give what a plain model gives in this process? In another one, torch may choose other kernels."""
    plain, model = Net(), _meta()
    weft.load_weights(plain, path, ctx)
    model, ctx = weft.place(model, ctx, {"cpu": budget if ctx.rank == 0 else 6000, "disk": None}, weights=path)
    with torch.no_grad():
        return torch.equal(model(X), plain(X)), model(X)


def test_each_rank_places_its_own_copy_and_one_error_is_one_on_all(files):
    plain, paths = files
    for is_equal, found in run_ranks(_on_ranks, 2, str(paths["file"]), 9000):
        assert is_equal
        torch.testing.assert_close(found, plain(X))
    with pytest.raises(weft.testing.RanksFailed, match="(?s)does not fit.*PeerError"):
        run_ranks(_on_ranks, 2, str(paths["file"]), 10)


# -- refused -----------------------------------------------------------------------------------------


def test_an_error_in_forward_leaves_it_usable(files):
    plain, paths = files
    model, _ = _placed(paths["file"])
    with torch.no_grad():
        with pytest.raises(KeyError, match="mine"):
            model(X, fail=True)
        assert all(p.is_meta for p in model.blocks[0].parameters())
        assert torch.equal(model(X), plain(X))


def test_gradients_are_refused(files):
    _, paths = files
    model, _ = _placed(paths["file"])
    with pytest.raises(weft.errors.ContractError, match="streamed" + FORM + ".*no_grad"):
        model(X)
    model.requires_grad_(requires_grad=False)
    with pytest.raises(weft.errors.ContractError, match=FORM):
        model.blocks[0](torch.ones(2, 16, requires_grad=True))


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.float16), lambda m: m.half(), lambda m: m.cpu(), lambda m: m.blocks.double(),
        lambda m: m.blocks[0].to("cpu"), lambda m: m.load_state_dict({}),
    ],
)  # fmt: skip
def test_it_cannot_be_moved(files, move):
    plain, paths = files
    model, _ = _placed(paths["file"])
    with pytest.raises(weft.errors.ContractError, match="cannot be moved" + FORM):
        move(model)
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize(
    "copied", [copy.copy, pickle.dumps, *variants(copy.deepcopy, lambda part: torch.save(part, io.BytesIO()))]
)
def test_what_is_streamed_cannot_be_copied(files, copied):
    plain, paths = files
    model, ctx = _placed(paths["file"])
    for part in (model.blocks, model.blocks[0]):
        if copied is not copy.copy or part is model.blocks[0]:
            with pytest.raises(weft.errors.ContractError, match="nor copied" + FORM):
                copied(part)
    model, ctx = weft.undo(model, ctx)
    copied(model)
    whole, _ = weft.place(copy.deepcopy(plain), weft.local(), {"cpu": None})
    assert torch.equal(copy.deepcopy(whole)(X), plain(X))


@pytest.mark.parametrize(
    "read",
    [
        lambda model, x: nn.functional.linear(x, model.embed.weight), lambda model, x: x @ model.embed.weight.T,
        lambda model, x: x @ model.embed.weight.data.t(), lambda model, x: model.embed.weight[0].item(),
        lambda model, x: x @ model.state_dict()["embed.weight"].t(), lambda model, x: model.blocks[1].up(x),
        lambda model, x: torch.save(model.state_dict(), io.BytesIO()),
    ],
)  # fmt: skip
def test_what_is_streamed_cannot_be_read_between_calls(files, read):
    _, paths = files
    model, _ = _placed(paths["file"])
    with torch.no_grad(), pytest.raises(weft.errors.ContractError, match="is read while" + FORM + ".*keep="):
        read(model, torch.ones(2, 16))
    weight = model.embed.weight
    assert (weight.shape, weight.dtype, weight.is_meta, weight.numel()) == ((20, 16), torch.float32, True, 320)


def test_it_cannot_be_exported(files):
    _, paths = files
    model, _ = _placed(paths["file"])
    with torch.no_grad(), pytest.raises(weft.errors.ContractError, match="cannot be exported" + FORM):
        torch.export.export(model, (X,))


def test_threads_take_turns(files):
    plain, paths = files
    model, _ = _placed(paths["file"])

    def call(i):
        with torch.no_grad():
            if i % 4 == 3:
                with pytest.raises(KeyError, match="mine"):
                    model(X, fail=True)
            return torch.equal(model(X + i), plain(X + i))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(12)))


def test_what_needs_all_values_is_refused(files):
    _, paths = files
    model, ctx = _placed(paths["file"])
    for call in (
        lambda: weft.load_weights(model, paths["file"], ctx),
        lambda: weft.checkpointable({"model": model}, ctx),
        lambda: weft.full_params(model, ctx).__enter__(),
    ):
        with pytest.raises(weft.errors.ContractError, match="are streamed" + FORM):
            call()
    with pytest.raises(weft.errors.OrderError, match=FORM):
        weft.replicate(model, ctx)
    with pytest.raises(weft.errors.OrderError, match="comes too late"):
        weft.with_precision(model, ctx, "bf16")


def test_parts_within_each_other_are_refused(tmp_path):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.other = nn.Linear(4, 4), [None]

        def forward(self, x):
            return self.own(self.other[0](x))

    def build():
        model = nn.Sequential(Outer(), nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].other[0] = model[1]
        return model

    save_file(build().state_dict(), tmp_path / "w.safetensors")
    plan = plan_placement(build(), {"cpu": 200, "disk": None}, units=[Outer, "1", "2"])
    model, _ = weft.place(_meta(build), weft.local(), plan, weights=tmp_path / "w.safetensors")
    with torch.no_grad(), pytest.raises(weft.errors.ContractError, match="1 is called while 0 computes" + FORM):
        model(torch.ones(1, 4))


def _damage(path, how):
    data = bytearray(path.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    if how == "truncated":
        data = data[:-5]
    elif how == "shape":
        header["blocks.3.up.weight"]["shape"].reverse()
    elif how == "kind":
        header["blocks.3.up.weight"]["dtype"] = "I32"
    elif how == "name":
        header["blocks.3.up.other"] = header.pop("blocks.3.up.weight")
    if how != "truncated":
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text)) + text + data[8 + size :]
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("truncated", "cannot be read"),
        ("shape", r"blocks.3.up.weight: float32 \(16, 32\) for float32 \(32, 16\)"),
        ("kind", "blocks.3.up.weight: int32"),
        ("name", "not in the file: blocks.3.up.weight"),
    ],
)
def test_files_that_do_not_fit_change_nothing(files, tmp_path, how, said):
    _, paths = files
    path = tmp_path / "model.safetensors"
    path.write_bytes(paths["file"].read_bytes())
    _damage(path, how)
    model = _meta()
    before = list(model.parameters())
    with pytest.raises(weft.errors.CheckpointError, match=said) as error:
        weft.place(model, weft.local(), BUDGETS, weights=path)
    assert re.search(FORM, str(error.value)) and all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(weft.errors.CheckpointError, match=FORM):
        _placed(tmp_path / "none.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"scale": "gone.safetensors"}}')
    with pytest.raises(weft.errors.CheckpointError, match="gone.safetensors" + FORM):
        _placed(tmp_path)
    for model, budgets in ((_meta(), {"cpu": None}), (Net(), BUDGETS)):
        with pytest.raises(ValueError, match="values are missing" + FORM):
            weft.place(model, weft.local(), budgets)


def test_names_may_be_changed_and_left_over(files, tmp_path):
    plain, _ = files
    named = {f"model.{name}": value for name, value in plain.state_dict().items() if name[:5] not in ("head.", "again")}
    save_file(named | {"model.more": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(weft.errors.CheckpointError, match="only in the file: more"):
        _placed(tmp_path / "w.safetensors", rename=lambda name: name.removeprefix("model."))
    model, _ = _placed(tmp_path / "w.safetensors", rename=lambda name: name.removeprefix("model."), strict=False)
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))


def test_plans_that_cannot_be_followed(files):
    _, paths = files
    with pytest.raises(ValueError, match="cuda:7 is not available" + FORM):
        _placed(paths["file"], {"cuda:7": None})
    with pytest.raises(ValueError, match="does not fit this Net" + FORM):
        _placed(paths["file"], plan_placement(_meta(lambda: Net(layers=6)), {"cpu": None}))
    with pytest.raises(ValueError, match="needs|does not fit" + FORM):
        _placed(paths["file"], {"cpu": 100, "disk": None})
    with pytest.raises(ValueError, match="ahead" + FORM):
        _placed(paths["file"], ahead=2)
    plan = PlacementPlan.from_json(plan_placement(_meta(), BUDGETS).to_json())
    model, _ = _placed(paths["file"], plan)
    assert module_sizes(model)[""] == module_sizes(Net())[""]


def test_fake_worlds_place_too(files):
    plain, paths = files
    with fake(3, 8) as ctx:
        model, _ = weft.place(_meta(), ctx, BUDGETS, weights=paths["file"])
        with torch.no_grad():
            assert torch.equal(model(X), plain(X))


@pytest.mark.slow
def test_a_program_may_end_while_the_next_part_is_read(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(
        "import torch, weft\n"
        "build = lambda: torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(4)))\n"
        f"weft.export(weft.save(weft.checkpointable({{'model': build()}}, weft.local())[0], {str(tmp_path)!r}, 1, "
        f"weft.local()), {str(tmp_path / 'out')!r})\n"
        "model = weft.weights.on_meta()(build)()\n"
        f"weft.place(model, weft.local(), {{'cpu': '3MB', 'disk': None}}, weights={str(tmp_path / 'out')!r})\n"
        "with torch.no_grad(): model(torch.ones(1, 600))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "terminate" not in done.stderr, done.stderr


def test_budgets_that_are_no_mapping_are_refused():
    with pytest.raises(TypeError, match=r"(?s)found: +'auto'.*fix: +weft.weights.plan_placement\(model, \{"):
        weft.place(nn.Linear(2, 2), weft.local(), "auto")
