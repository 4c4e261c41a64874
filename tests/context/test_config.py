"""Configuration: argument > environment > file > default; files are read only if somebody names them."""

import itertools
import os
import subprocess
import sys
import tomllib

import pytest
import torch

import weft
import weft.cli
from weft.cli.config import answered, toml
from weft.cli.foreign.accelerate import from_accelerate, program
from weft.context.config import LAUNCH, checked, read_config
from weft.context.settings import SETTINGS, resolve
from weft.errors import ContextError

# Per setting: an argument, the text of a variable and its value, a value of a file.
LAYERS = {
    "mesh": ({"a": 1}, "b=1", {"b": 1}, {"c": 1}),
    "data_axes": (("a",), "b,c", ("b", "c"), ["d"]),
    "device": ("cpu", "cuda", "cuda", "mps"),
    "backend": ("gloo", "nccl", "nccl", "mpi"),
    "timeout_s": (1.0, "2", 2.0, 3),
    "seed": (1, "2", 2, 3),
    "debug": (True, "0", False, True),
    "probes": ("off", "every", "every", "auto"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("argument", "variable", "in_file"), list(itertools.product([True, False], repeat=3)))
def test_the_highest_layer_that_sets_a_value_wins(name, argument, variable, in_file):
    given, text, parsed, filed = LAYERS[name]
    settings = resolve(
        {name: given if argument else None},
        {SETTINGS[name].variable: text} if variable else {},
        file=("run.toml", {name: filed} if in_file else {}),
    )
    layers = [
        (argument, given, "argument"), (variable, parsed, f"environment {SETTINGS[name].variable}"),
        (in_file, filed, "file run.toml"), (True, SETTINGS[name].default, "default"),
    ]  # fmt: skip
    _, value, source = next(layer for layer in layers if layer[0])
    assert getattr(settings, name) == value and dict(settings.sources)[name] == source


def test_start_reads_the_file_that_is_named_and_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text('[start]\nseed = 7\ndevice = "cpu"\nmesh = { replica = 1, shard = 1 }\n[launch]\nnproc = 2\n')
    with weft.start() as ctx:
        assert ctx.seed == 0
    with weft.start(config=path, seed=8) as ctx:
        assert (ctx.seed, dict(ctx.axes)) == (8, {"replica": 1, "shard": 1})
        assert f"device           cpu                  from file {path}" in weft.explain(ctx)
    monkeypatch.setenv("WEFT_CONFIG", str(path))
    with weft.start() as ctx:
        assert ctx.seed == 7
    monkeypatch.setenv("WEFT_CONFIG", str(tmp_path / "gone.toml"))
    with pytest.raises(ContextError, match=r"(?s)gone.toml cannot be read.*FileNotFound.*fix: .*weft config --out"):
        weft.start()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[start]\nsed = 1", "unknown keys(.|\n)*start.sed"), ("[strat]\nseed = 1", r"\[strat\]"),
        ("seed = 1", "seed"), ("start = 3", "start = 3, not a table"), ("[launch]\nseed = 1", "launch.seed"),
        ("[start]\nseed = '1'", "start.seed = '1', not a whole number"), ("[start]\nseed = true", "start.seed = True"),
        ("[start]\nmesh = 'a=1'", "start.mesh"), ("[start]\nmesh = {a = 1.5}", "start.mesh"),
        ("[start]\ndata_axes = 'a'", "start.data_axes"), ("[start]\ntimeout_s = '1'", "start.timeout_s"),
        ("[start]\ndebug = 1", "start.debug = 1, not true or false"), ("[start]\ndevice = ''", "start.device"),
        ("[launch]\nnproc = 0", "launch.nproc = 0, not a whole number >= 1"), ("[launch]\nnnodes = '3:1'", "nnodes"),
        ("[launch]\nrdzv = 'host'", "launch.rdzv"), ("[launch]\naffinity = 1", "launch.affinity"),
        ("[start", "cannot be read"), ("\x00", "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_means_something_else_is_refused(tmp_path, text, found):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ContextError, match=rf"(?s)run.toml.*{found}.*expected: .*fix: "):
        read_config(path)
    with pytest.raises(ContextError, match="run.toml"):
        weft.start(config=path)


def test_a_value_out_of_range_in_a_file_is_refused_by_start(tmp_path):
    (tmp_path / "run.toml").write_text("[start]\ntimeout_s = -1\n")
    with pytest.raises(ContextError, match="timeout_s = -1 cannot be used"):
        weft.start(config=tmp_path / "run.toml")


def test_every_key_has_what_the_commands_need():
    assert sorted(LAYERS) == sorted(SETTINGS)
    for about in (*SETTINGS.values(), *LAUNCH.values()):
        assert about.question and about.expected and (about.default is None or about.fits(about.default))


def test_what_is_written_is_read_again():
    data = {
        "launch": {"nproc": 2, "nnodes": "1:3", "rdzv": "first:29500", "affinity": True},
        "start": {
            "mesh": {"replica": 2, "shard": -1},
            "data_axes": ["replica"],
            "timeout_s": 1.5,
            "device": 'a"\\\n\x7f',
        },
    }
    assert tomllib.loads(toml(checked(data, "x"))) == data


def test_the_command_writes_what_it_is_told_and_asks_nobody_outside_of_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail("it asked"))
    words = ["launch.nproc=2", "launch.nnodes=1:2", "start.mesh=replica=2,shard=-1", "start.data_axes=replica"]
    assert weft.cli.main(["config", *words, "start.debug=yes", "launch.affinity=true"]) == 0
    assert "weft launch --config run.toml train.py" in capsys.readouterr().out
    found = read_config("run.toml")
    assert found.launch == {"nproc": 2, "nnodes": "1:2", "affinity": True}
    assert found.start == {"mesh": {"replica": 2, "shard": -1}, "data_axes": ["replica"], "debug": True}
    before = (tmp_path / "run.toml").read_text()
    for arguments, text in [
        ([], "run.toml already exists"), (["--out", "b", "launch.nprocs=2"], "'launch.nprocs=2' means nothing"),
        (["--out", "b", "nproc"], "means nothing"), (["--out", "b", "start.seed=x"], "start.seed = 'x'"),
        (["--out", "b", "launch.nproc=0"], "launch.nproc = '0'"), (["--out", "b", "import", "no.yaml"], "no.yaml"),
    ]:  # fmt: skip
        assert weft.cli.main(["config", *arguments]) == 2
        assert text in capsys.readouterr().err
    assert (tmp_path / "run.toml").read_text() == before and not (tmp_path / "b").exists()
    assert weft.cli.main(["config", "--force"]) == 0 and read_config("run.toml").launch == {}


def test_a_file_is_updated_in_place(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(
        "# our cluster\n[launch]\nnproc = 2  # per node\nmixed_precision = 'bf16'  # of an older version\n"
        "max_restarts = 3  # at night\n\n[old]\nx = 1\n"
    )
    words = ["config", "update", str(path), "launch.nproc=4", "start.seed=7", "launch.affinity=true"]
    assert weft.cli.main(words) == 0
    assert path.read_text() == (
        "# our cluster\n[launch]\nnproc = 4  # per node\nmax_restarts = 3  # at night\naffinity = true\n"
        "\n[start]\nseed = 7\n"
    )
    assert capsys.readouterr().out.count("taken out") == 2
    assert weft.cli.main(["config", "update", str(path)]) == 0
    assert capsys.readouterr().out == ""
    before = path.read_text()
    assert weft.cli.main(["config", "update", str(path), "start.seed=many"]) == 2
    assert path.read_text() == before and "start.seed" in capsys.readouterr().err
    path.write_text("[start]\ndata_axes = [\n  'replica',\n]\nseed = 1\n")
    assert weft.cli.main(["config", "update", str(path), "start.data_axes=shard"]) == 0
    assert read_config(path).start == {"data_axes": ["shard"], "seed": 1}
    path.write_text("[launch]\nrdzv = 'a#b:1'   # c # 'd'\n")
    assert weft.cli.main(["config", "update", str(path), "launch.rdzv=e:2"]) == 0
    assert path.read_text() == "[launch]\nrdzv = \"e:2\"   # c # 'd'\n"


def test_answers_are_asked_for_until_they_fit(capsys):
    questions = []
    answers = {"processes per node": ["zero", "0", "4"], "seed": ["7"], "mesh axes, as in replica=2,shard=-1": ["a=4"]}

    def ask(text):
        questions.append(text)
        return answers.get(text.partition(" [")[0], [""]).pop(0)

    found = answered({"launch": {"nnodes": 2}}, ask)
    assert found == {"launch": {"nnodes": 2, "nproc": 4}, "start": {"mesh": {"a": 4}, "seed": 7}}
    assert "'zero' is not a whole number >= 1" in capsys.readouterr().out
    assert "nodes [1]: " not in questions and "processes per node [1]: " in questions


ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config: {}
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_version: 2
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
mixed_precision: bf16
num_machines: 2
num_processes: 16
same_network: true
use_cpu: false
"""


def test_a_file_of_accelerate_is_converted(tmp_path, capsys, monkeypatch):
    (tmp_path / "default_config.yaml").write_text(ACCELERATE)
    out = tmp_path / "run.toml"
    assert weft.cli.main(["config", "import", str(tmp_path / "default_config.yaml"), "--out", str(out)]) == 0
    found = read_config(out)
    assert found.launch == {"nproc": 8, "nnodes": 2, "node_rank": 1, "rdzv": "10.0.0.1:29501"} and found.start == {}
    text = capsys.readouterr().out
    assert text.splitlines()[:4] == [
        "in the program:",
        "model, ctx = weft.with_precision(model, ctx, 'bf16')",
        'model, ctx = weft.recompute(model, ctx, blocks="LlamaDecoderLayer")',
        'model, ctx = weft.fully_shard(model, ctx, units="LlamaDecoderLayer")',
    ]
    assert "use_cpu" not in text and "machine_rank" not in text
    assert "[start]" not in out.read_text()
    assert from_accelerate({"use_cpu": True, "debug": True})[0]["start"] == {"device": "cpu", "debug": True}
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert weft.cli.main(["config", "import", str(tmp_path / "default_config.yaml"), "--out", "x"]) == 2
    assert r"pip install 'torchweft[config]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "values", "lines"),
    [
        ("fsdp_config", {"fsdp_version": 2}, "weft.fully_shard(model, ctx)"),
        (
            "fsdp_config",
            {"fsdp_transformer_layer_cls_to_wrap": "A, B", "fsdp_offload_params": True},
            'weft.fully_shard(model, ctx, units=["A", "B"], offload=True)',
        ),
        (
            "fsdp_config",
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "1e6", "fsdp_sharding_strategy": 2},
            "weft.fully_shard(model, ctx, units=1000000, reshard_after_forward=False)",
        ),
        (
            "fsdp_config",
            {"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_min_num_params": 0},
            'weft.start(mesh={"replica": -1, "shard": torch.accelerator.device_count()}); weft.fully_shard(model, ctx)',
        ),
        ("fsdp_config", {"fsdp_sharding_strategy": "NO_SHARD"}, "weft.replicate(model, ctx)"),
        (
            "fsdp_config",
            {"fsdp_reshard_after_forward": False},
            "weft.fully_shard(model, ctx, reshard_after_forward=False)",
        ),
        (
            "deepspeed_config",
            {"zero_stage": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0},
            "weft.zero_partition(model, optimizer, ctx, stage=2); weft.accumulate_grads(model, loader, ctx, steps=4); weft.clip_grads(model, ctx, max_norm=1.0)",  # noqa: E501
        ),
        (
            "deepspeed_config",
            {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none"},
            "weft.zero_partition(model, optimizer, ctx, stage=3, engine=\"deepspeed\", offload='cpu')",
        ),
        (
            "dynamo_config",
            {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_fullgraph": True},
            "weft.compile(model, ctx, backend='inductor', fullgraph=True)",
        ),
    ],
)
def test_tables_of_accelerate_become_the_calls_they_mean(key, values, lines):
    assert from_accelerate({key: values}) == ({"launch": {}, "start": {}}, lines.split("; "), [])


def test_fp16_under_deepspeed_becomes_bf16_and_is_said():
    values = {"mixed_precision": "fp16", "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"}}
    _, calls, left = from_accelerate(values)
    assert "weft.with_precision(model, ctx, 'bf16')" in calls and "skip_nonfinite" not in str(calls)
    assert left == ["mixed_precision = fp16: DeepSpeed cannot scale a loss that is not its own, so it is bf16 here"]


def test_the_stage_is_that_of_the_file_of_deepspeed(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3}}')
    [call] = from_accelerate({"deepspeed_config": {"deepspeed_config_file": str(path)}})[1]
    assert call == f'weft.zero_partition(model, optimizer, ctx, stage=3, engine="deepspeed", config={str(path)!r})'
    assert from_accelerate({"deepspeed_config": {"zero_stage": 0}})[1] == ["weft.replicate(model, ctx)"]


@pytest.mark.parametrize(
    "values",
    [
        {"mixed_precision": "bf16", "fsdp_config": {"fsdp_min_num_params": 10}, "gradient_accumulation_steps": 2},
        {"mixed_precision": "fp16", "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0}},
        {"fsdp_config": {"activation_checkpointing": True, "transformer_layer_cls_to_wrap": "Linear"}},
        {"mixed_precision": "fp16", "distributed_type": "MULTI_GPU", "gradient_accumulation_steps": 2},
        {"parallelism_config": {"dp_replicate_size": 1}, "debug": True},
    ],
)
def test_the_lines_can_be_pasted(values):
    lines = program(from_accelerate(values)[1])
    assert lines
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    names = {"weft": weft, "torch": torch, "model": model, "ctx": weft.local(), "loader": loader}
    for line in lines:
        if "optimizer" in line and "optimizer" not in names:
            names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        if "clip_grads" in line:
            names["model"](torch.randn(2, 4)).sum().backward()
        exec(line, names)
    assert len(names["ctx"].applied) == len([line for line in lines if "start" not in line and "clip" not in line])


def test_explain_tells_every_value_and_its_source(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.toml"
    path.write_text("[start]\nseed = 7\ntimeout_s = 5\n[launch]\nnproc = 3\n")
    monkeypatch.setenv("WEFT_SEED", "9")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert weft.cli.main(["explain", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    for name, value, source in [
        ("seed", "9", "environment WEFT_SEED"), ("timeout_s", "5", f"file {path}"), ("mesh", "not set", "default"),
        ("nproc", "3", str(path)), ("max_restarts", "0", "default"),
    ]:  # fmt: skip
        assert f"  {name:<18}{value:<26}from {source}\n" in text
    assert sum(line.startswith("  ") for line in text.splitlines()) == 1 + len(SETTINGS) + len(LAUNCH)
    monkeypatch.setenv("WEFT_SED", "9")
    assert weft.cli.main(["explain"]) == 2 and "WEFT_SED" in capsys.readouterr().err


@pytest.mark.slow
def test_the_ranks_get_the_file_of_the_launcher(tmp_path):
    (tmp_path / "run.toml").write_text("[start]\nseed = 7\n[launch]\nnproc = 2\nthreads = 1\naffinity = true\n")
    (tmp_path / "train.py").write_text(
        "import os, torch, weft\n"
        "with weft.start() as ctx:\n"
        "    cores = len(os.sched_getaffinity(0))\n"
        "    ctx.print(ctx.seed, ctx.world_size, torch.get_num_threads(), cores)\n"
    )
    command = [sys.executable, "-m", "weft", "launch", "--config", "run.toml", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["7", "2", "1", str(max(len(os.sched_getaffinity(0)) // 2, 1))]
