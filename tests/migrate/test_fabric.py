"""`weft migrate` for programs of Lightning Fabric: text, and what the translated program computes on 1 and 2 ranks."""

import pathlib
import re

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.testing import run_ranks
from weft_migrate import translate

HEAD = "from lightning.fabric import Fabric\nimport torch\nfabric = Fabric({})\n"
SETUP = "model, optimizer = fabric.setup(model, optimizer)\nloader = fabric.setup_dataloaders(loader)\n"


def _lines(text, settings=""):
    found = translate(HEAD.replace("{}", settings) + SETUP + text)
    return found.text, found


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("fabric.backward(loss, model=model)", "loss.backward()"),
        ("fabric.backward(a / 2)", "(a / 2).backward()"),
        ("fabric.clip_gradients(model, optimizer, max_norm=1.0)", "clip_grad_norm_(model.parameters(), 1.0)"),
        ("fabric.clip_gradients(model, optimizer, clip_val=0.5)", "clip_grad_value_(model.parameters(), 0.5)"),
        ("x = fabric.all_reduce(x)", 'x = weft.reduce(x, ctx, "mean")'),
        ("x = fabric.all_reduce(x, reduce_op='sum')", "x = weft.reduce(x, ctx, 'sum')"),
        ("x = fabric.all_gather(x)", "x = weft.gather(x[None], ctx)"),
        ("x = fabric.all_gather((a, b + 1))", "x = weft.gather((a[None], (b + 1)[None]), ctx)"),
        ("x = fabric.all_gather({'a': [b, c]})", "x = weft.gather({'a': [b[None], c[None]]}, ctx)"),
        ("a = {}\nx = fabric.all_gather(a)", "x = weft.gather({name: value[None] for name, value in a.items()}, ctx)"),
        ("x = fabric.broadcast(x)", "x = weft.broadcast(x, ctx)"),
        ("x = fabric.broadcast(x, src=1)", "x = weft.broadcast(x, ctx, source=1)"),
        ("with fabric.init_module(empty_init=False): pass", "with torch.device(ctx.device): pass"),
        ("if fabric.world_size > 1:\n    loader.sampler.set_epoch(1)\nx = 1", "x = 1"),
        ("torch.save(model.module.state_dict(), 'f')", "torch.save(model.state_dict(), 'f')"),
        ("model.mark_forward_method('score')\nx = 1", "x = 1"),
        ("fabric.barrier()", "weft.barrier(ctx)"),
        ("fabric.seed_everything(1)", "weft.rng.set_seed(1, ctx)"),
        ("with fabric.rank_zero_first(): pass", "with weft.main_first(ctx, local=False): pass"),
        ("x = fabric.to_device(x)", "x = weft.to_device(x, ctx)"),
        ("fabric.print('x')", "ctx.print('x')"),
        (
            "r = fabric.global_rank, fabric.world_size, fabric.is_global_zero",
            "r = ctx.rank, ctx.world_size, ctx.is_main",
        ),
        ("fabric.launch()\nx = 1", "\nx = 1"),
        ("fabric.launch(main, 3)", "main(ctx, 3)"),
        ("fabric.save('f', model.state_dict())", "if ctx.is_main:\n    torch.save(model.state_dict(), 'f')"),
        ("with fabric.autocast(): pass", "with contextlib.nullcontext(): pass"),
        ("with fabric.init_module(): pass", "with torch.device(ctx.device): pass"),
    ],
)
def test_a_line(line, new):
    text, found = _lines(line + "\n")
    assert text.endswith(new + "\n") and found.left == 0 and "fabric" not in text and found.library == "Fabric"


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ("", ["model, ctx = weft.replicate(model, ctx)", "loader, ctx = weft.shard_data(loader, ctx)"]),
        ("strategy='ddp_find_unused_parameters_true'", ['model, ctx = weft.replicate(model, ctx, unused="zero")']),
        (
            "strategy='fsdp', precision='bf16-mixed'",
            [
                'model, ctx = weft.with_precision(model, ctx, "bf16")',
                "model, ctx = weft.fully_shard(model, ctx, rebind=optimizer)",
            ],
        ),
        (
            "strategy=FSDPStrategy(auto_wrap_policy={torch.nn.Linear}, cpu_offload=False)",
            ["model, ctx = weft.fully_shard(model, ctx, units=torch.nn.Linear, rebind=optimizer)"],
        ),
        (
            "strategy=FSDPStrategy(activation_checkpointing_policy={torch.nn.Linear})",
            ["model, ctx = weft.recompute(model, ctx, blocks=torch.nn.Linear)"],
        ),
        (
            "strategy='deepspeed_stage_2'",
            ["model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)"],
        ),
        ("strategy='deepspeed'", ["model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)"]),
        (
            "accelerator='cpu', precision='16-mixed'",
            ['ctx = weft.start(device="cpu")', "optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)"],
        ),
    ],
)
def test_settings_become_transforms_and_run(settings, lines):
    head = HEAD.replace("import Fabric", "import Fabric, FSDPStrategy").replace("{}", settings)
    found = translate(head + SETUP)
    assert found.left == 0 and [line for line in lines if line not in found.text.splitlines()] == []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    names["loader"] = DataLoader(torch.randn(8, 4), batch_size=2)
    exec(found.text, names)
    for batch in names["loader"]:
        names["model"](batch).sum().backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    names["ctx"].close()


@pytest.mark.parametrize(
    "line",
    [
        "fabric.call('on_train_end')",
        "fabric.save('f', {'model': model})",
        "state = fabric.load('f')",
        "fabric.log('x', 1)",
        "fabric.clip_gradients(model, optimizer)",
        "with fabric.init_module(empty_init=True): pass",
        "fabric.something_new(1)",
        "loader = fabric.setup_dataloaders(loader, move_to_device=False)",
    ],
)
def test_what_is_not_known_stays_and_is_listed(line):
    text, found = _lines(line + "\n")
    assert text.endswith(line + "\n") and found.left == 1 and next(each.hint for each in found.findings if each.left)


def test_what_a_strategy_says_that_is_not_taken_over_is_listed():
    found = translate(
        "from lightning.fabric import Fabric\nfrom lightning.fabric.strategies import FSDPStrategy\n"
        "fabric = Fabric(strategy=FSDPStrategy(auto_wrap_policy=policy(), mixed_precision=p, cpu_offload=True))\n"
        "model = fabric.setup(model)\n"
    )
    assert "model, ctx = weft.fully_shard(model, ctx, offload=True)" in found.text
    [hint] = [each.hint for each in found.findings]
    assert hint == "FSDPStrategy: auto_wrap_policy=policy(), mixed_precision=p is not taken over"


def test_a_logger_becomes_a_tracker():
    found = translate("""\
from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger
logger = TensorBoardLogger("runs")
fabric = Fabric(loggers=logger)
fabric.log("loss", 1.0, 2)
fabric.log_dict({"a": 1}, step=3)
""")
    assert (
        found.left == 0
        and found.text
        == """\
import weft
ctx = weft.start()
trackers = [weft.monitoring.tensorboard("runs")]
weft.log({"loss": 1.0}, 2, ctx, trackers)
weft.log({"a": 1}, 3, ctx, trackers)
"""
    )


_CHOICE = """\
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
import torch
{}
fabric = Fabric(strategy={})
model, optimizer = fabric.setup(model, optimizer)
"""
_LINEAR = "FSDPStrategy(auto_wrap_policy={torch.nn.Linear})"


def _chosen(before, strategy):
    return translate(_CHOICE.replace("{}", before, 1).replace("={}", f"={strategy}"))


@pytest.mark.parametrize(
    ("before", "strategy", "head"),
    [
        ("", f"{_LINEAR} if sharded else 'ddp'", "if sharded:"),
        (f"s = {_LINEAR} if sharded else 'ddp'", "s", 'if s == "FSDPStrategy":'),
        (f"s = 'auto'\nif sharded:\n    s = {_LINEAR}", "s", 'if s == "FSDPStrategy":'),
    ],
)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_strategy_under_a_condition_keeps_the_condition(before, strategy, head, sharded):
    found = _chosen(before, strategy)
    assert found.left == 0 and "FSDPStrategy(" not in found.text and "lightning" not in found.text
    assert found.text.endswith(f"""
{head}
    model, ctx = weft.fully_shard(model, ctx, units=torch.nn.Linear, rebind=optimizer)
else:
    model, ctx = weft.replicate(model, ctx)
""")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "sharded": sharded}
    exec(found.text, names)
    assert ("fully_shard" in str(weft.explain(names["ctx"]))) == sharded
    names["ctx"].close()


@pytest.mark.parametrize(
    ("before", "strategy", "makers"),
    [
        ("", "args.strategy", 0),
        (f"def pick(name):\n    if name == 'fsdp':\n        return {_LINEAR}\n    return name", "pick(name)", 1),
        (f"if a:\n    s = {_LINEAR}\nelse:\n    s = FSDPStrategy()", "s", 2),
        (f"s = {_LINEAR}\ns.cpu_offload = offload", "s", 1),
        ("", "'xla'", 0),
    ],
)
def test_a_strategy_that_is_not_known_is_not_guessed(before, strategy, makers):
    found = _chosen(before, strategy)
    assert found.text.endswith("\nctx = weft.start()\nmodel, optimizer = fabric.setup(model, optimizer)\n")
    assert found.left == 1 + makers
    [hint] = [each.hint for each in found.findings if each.what == "fabric.setup(model, optimizer)"]
    assert "rebind=optimizer)\nelse:\n    model, ctx = weft.replicate(model, ctx)" in hint
    assert ("units=torch.nn.Linear" in hint) == bool(makers)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_precision_that_is_an_argument_is_a_policy_of_the_run(precision):
    found = translate("""\
from lightning.fabric import Fabric
fabric = Fabric(precision=precision, accelerator=kind)
model, optimizer = fabric.setup(model, optimizer)
with fabric.autocast():
    product = model.weight @ model.weight
""")
    assert found.left == 0 and 'ctx = weft.start(device="cpu" if kind == "cpu" else None)' in found.text
    model = torch.nn.Linear(4, 4)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(found.text, names | {"precision": precision, "kind": "cpu"}, names)
    assert names["product"].dtype == (torch.bfloat16 if precision == "bf16-mixed" else torch.float32)
    names["ctx"].close()


def test_full_precision_that_is_an_argument_converts_nothing():
    found = translate(
        "from lightning.fabric import Fabric\nfabric = Fabric(precision=precision)\n"
        "model, optimizer = fabric.setup(model, optimizer)\n"
    )
    for precision, dtype in (("32-true", torch.float64), ("16-mixed", torch.float32)):
        model = torch.nn.Linear(2, 2).double()
        names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "precision": precision}
        exec(found.text, names)
        assert names["model"].weight.dtype == dtype
        assert ("skip_nonfinite" in str(weft.explain(names["ctx"]))) == (precision == "16-mixed")
        names["ctx"].close()


def test_names_of_loggers_are_kept_and_more_is_listed():
    found = translate("""\
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
logger = TensorBoardLogger(root_dir=out, name="image", version=3)
fabric = Fabric(loggers=[logger, CSVLogger(out, name="logs")])
""")
    assert 'trackers = [weft.monitoring.tensorboard(os.path.join(out, "image")), ' in found.text
    assert 'weft.monitoring.csv(os.path.join(out, "logs", "metrics.csv"))]\n' in found.text and found.left == 0
    assert "TensorBoardLogger: version=3 is not taken over" in [each.hint for each in found.findings]


def test_a_logger_that_is_gone_is_used_no_more():
    found = translate("""\
from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from lightning.fabric.utilities import rank_zero_only
logger = TensorBoardLogger("runs")
fabric = Fabric(loggers=logger)
logger.log_hyperparams(values)
logger.finalize("success")

@rank_zero_only
def write(path):
    path.touch()
""")
    assert [(each.line, each.what) for each in found.findings if each.left] == [
        (6, "logger.log_hyperparams(values)"),
        (9, "rank_zero_only"),
    ]
    assert "finalize" not in found.text and (found.uses, found.left) == (5, 2)


_SAVED = """\
from lightning.fabric import Fabric
import torch
step = 0
fabric = Fabric(accelerator="cpu")
model, optimizer = fabric.setup(model, optimizer)
# transforms
rest = fabric.load(folder, {"model": model, "optimizer": optimizer})
step = rest["step"]
# end of loading
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
step += 1
fabric.save(folder, {"model": model, "optimizer": optimizer, "step": step})
"""


def test_the_lines_for_a_state_continue_a_run(tmp_path):
    found = translate(_SAVED)
    load, save = [each.hint.splitlines() for each in found.findings if each.left]
    text = re.sub("rest = .*\nstep = .*\n", "\n".join(each.strip() for each in load[4:6]) + "\n", found.text)
    text = text.replace("# transforms", "\n".join(each.strip() for each in load[1:3]))
    text = re.sub("fabric.save.*", "\n".join(each.strip() for each in save[1:]), text)
    assert "fabric" not in text and load[-1] == "fabric.load returned what its dict has not; here, that is in progress"
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {"model": model, "optimizer": optimizer, "folder": tmp_path}
        exec(text, names)
        names["ctx"].close()
        found.append((names["step"], model.bias.item()))
    assert [step for step, _ in found] == [1, 2]
    assert found[1][1] == pytest.approx(found[0][1] - 0.1)


def test_the_lines_for_a_dict_of_the_script_keep_its_name():
    _, found = _lines("""\
state = {"model": model, "optimizer": optimizer, "epoch": 0, "hparams": vars(args)}
fabric.load("f", state)
state["epoch"] += 1
fabric.save("f", state)
""")
    load, save = [each.hint for each in found.findings if each.left]
    assert 'state = {"epoch": 0, "hparams": dict(vars(args))}' in load and "in place of state" in load
    assert '"optimizer": optimizer, "loader": loader, "progress": state}, ctx)' in load
    assert 'weft.save(weft_state, "f", state["epoch"], ctx)' in save


# -- the page ----------------------------------------------------------------------------------------

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "from_fabric.md").read_text()
[(OLD, NEW)] = re.findall(
    r"^With Fabric:\n\n```text\n(.*?)```\n\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
)


def test_the_program_of_the_page_is_what_migrate_writes():
    found = translate(OLD)
    assert found.left == 0 and found.text == NEW


def _trained(ctx, text):
    names = {"given": ctx}
    exec(text.replace('weft.start(device="cpu")', "given"), names)
    return [each.detach().clone() for each in names["model"].parameters()]


def test_the_program_of_the_page_trains_as_one_process_does():
    x = torch.arange(24.0).reshape(12, 2) / 24
    data = TensorDataset(x, x.sum(1, keepdim=True))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=4):
            mse_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for found in run_ranks(_trained, 2, NEW):
        for mine, expected in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-5, atol=1e-6)
