"""`weft migrate`: programs of Accelerate, translated, print the same losses on one rank and on two."""

import ast
import contextlib
import inspect
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import unittest.mock

import libcst
import pytest
import torch

import weft.cli
from weft.testing import run_ranks
from weft_migrate import translate
from weft_migrate.translate import LIBRARIES

SCRIPTS = pathlib.Path(__file__).with_name("accelerate_scripts")
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
WEFT = str(pathlib.Path(sys.executable).with_name("weft"))
_NUMBER = re.compile(r"\d+\.\d+")
# Put before a program of Accelerate: where the reducer of DDP is the last owner of a group, it ends the group while it
# holds the lock of the interpreter, which a thread of that group may wait for: one run in six never ended.
_KEEP_GROUP = "import torch.distributed\ntorch.distributed.destroy_process_group = lambda *_: None\n"


def _output(script, ranks, *arguments):
    command = [WEFT, "launch", "-n", str(ranks), str(script), *arguments]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}  # otherwise Accelerate makes no group without an accelerator
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=script.parent, timeout=300, env=env)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    # DeepSpeed, where it is installed and Accelerate imports it, logs to stdout.
    return "".join(line for line in done.stdout.splitlines(keepends=True) if "[real_accelerator.py" not in line)


def _pair(name, folder):
    original = folder / "accelerate_program" / f"{name}.py"
    new = folder / "weft_program" / f"{name}.py"
    for path in (original, new):
        path.parent.mkdir(exist_ok=True)
    source = (SCRIPTS / f"{name}.py").read_text()
    original.write_text(_KEEP_GROUP + source)
    new.write_text(translate(source).text)
    return original, new


def _assert_same(new, old, tolerance=2e-6):
    assert _NUMBER.sub("#", new) == _NUMBER.sub("#", old) and "loss" in old
    numbers = [[float(x) for x in _NUMBER.findall(text)] for text in (new, old)]
    assert numbers[0] == pytest.approx(numbers[1], rel=tolerance, abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_translated_program_prints_what_the_original_does(name, ranks, tmp_path):
    pytest.importorskip("accelerate")
    original, new = _pair(name, tmp_path)
    # DDP rounds gradients to 16 bits, also with one rank, and adds in another order
    tolerance = 2e-3 if name == "ddp_comm_hook" else 2e-6
    _assert_same(_output(new, ranks), _output(original, ranks), tolerance)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_translated_program_resumes_as_the_original_does(tmp_path):
    pytest.importorskip("accelerate")
    found = []
    for script in _pair("complete_example", tmp_path):
        whole = _output(script, 2, "--checkpointing_steps", "4", "--with_tracking")
        resumed = _output(script, 2, "--resume_from_checkpoint", str(script.parent / "step_4"))
        assert list((script.parent / "logs").rglob("events*"))
        found.append(resumed)
        losses = [[line for line in text.splitlines() if "loss" in line] for text in (whole, resumed)]
        assert losses[0][4:] == losses[1]
    _assert_same(found[1], found[0])


# -- text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_use_in_the_programs_is_translated(name):
    found = translate((SCRIPTS / f"{name}.py").read_text())
    ast.parse(found.text)
    assert found.left == 0 and found.uses > 10
    assert "accelerator." not in found.text and "import accelerate" not in found.text


def _body(text):
    """A program around some lines that use `accelerator`, translated; without its first lines."""
    head = """from accelerate import Accelerator
import torch
accelerator = Accelerator(gradient_accumulation_steps=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
    found = translate(head + text)
    lines = found.text.splitlines(keepends=True)
    return "".join(lines[6 if "accumulate" in text else 5 :]), found


def test_a_loop_with_accumulate_becomes_two():
    text, found = _body("""\
for step, (x, y) in enumerate(loader):   # of an epoch
    with accelerator.accumulate(model):  # all of it
        loss = loss_of(model(x), y)      # two  spaces

        accelerator.backward(loss + 1)
        seen.append(loss)
        # now the step
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += 1
""")
    assert (
        text
        == """\
for window in windows:   # of an epoch
    for (x, y) in window:
        loss = loss_of(model(x), y)      # two  spaces

        ((loss + 1) * window.share).backward()
        seen.append(loss)
    # now the step
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total += 1
"""
    )
    assert [(each.line, each.left) for each in found.findings] == [(6, False), (16, False)]
    assert "once per optimizer step" in found.findings[1].hint


def test_gradients_that_are_cleared_first_are_cleared_once_per_window():
    text, _ = _body("""\
for x in loader:
    with accelerator.accumulate(model):
        optimizer.zero_grad()
        accelerator.backward(model(x))
        optimizer.step()
print("end")
""")
    assert (
        text
        == """\
for window in windows:
    for x in window:
        (model(x) * window.share).backward()
    optimizer.step()
    optimizer.zero_grad()
print("end")
"""
    )


@pytest.mark.parametrize(
    "text",
    [
        "for x in loader:\n  with accelerator.accumulate(model):\n    accelerator.backward(x)\n    if x: break\n",
        "for x in other():\n  with accelerator.accumulate(m):\n    m(x)\n    if accelerator.sync_gradients: n += 1\n",
        "for x in other():\n    with accelerator.accumulate(model):\n        accelerator.backward(model(x))\n",
        "with accelerator.accumulate(model):\n    accelerator.backward(model(1))\n",
    ],
)
def test_a_loop_that_is_not_understood_stays_and_is_listed(text):
    _, found = _body(text)
    assert "with accelerator.accumulate(m" in found.text and "windows" not in found.text
    assert "weft.accumulate_grads(model, loader, ctx, steps=4)" in found.findings[0].hint
    assert found.left == 1 + text.count("sync_gradients") == 1 + found.text.count("accelerator.sync_gradients")


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("accelerator.backward(loss, retain_graph=True)", "(loss / 4).backward(retain_graph=True)"),
        ("ok = accelerator.is_main_process and not accelerator.use_distributed", None),
        ("x = accelerator.reduce(x, 'mean')", "x = weft.reduce(x, ctx, 'mean')"),
        ("x = accelerator.pad_across_processes(x, 1)", "x = weft.collectives.pad_across(x, ctx, dim=1, fill=0)"),
        ("accelerator.clip_grad_norm_(ps, 1, norm_type=1)", "torch.nn.utils.clip_grad_norm_(ps, 1, 1)"),
        ("accelerator.save(x, 'f')", "if ctx.is_main:\n    torch.save(x, 'f')"),
        ("m = accelerator.unwrap_model(model, keep_fp32_wrapper=False)", "m = model"),
        ("f(save_function=accelerator.save)", "f(save_function=torch.save)"),
        ("with accelerator.no_sync(model): pass", "with weft.contract.no_sync(model, ctx): pass"),
        ("n = accelerator.gradient_accumulation_steps", "n = 4"),
        ("n = accelerator.state.num_processes", "n = ctx.world_size"),
        ("accelerator.state.wait_for_everyone()", "weft.barrier(ctx)"),
        ("accelerator.save(obj=x, f='f')", "if ctx.is_main:\n    torch.save(x, 'f')"),
        ("plain = accelerator.state.deepspeed_plugin is None", "plain = True"),
        ("p = accelerator.state.fsdp_plugin is not None and accelerator.state.fsdp_plugin.size", "p = False"),
    ],
)
def test_a_line(line, new):
    text, found = _body(line + "\n")
    new = new or "ok = ctx.is_main and not (ctx.world_size > 1)"
    assert text.removeprefix("import contextlib\n").endswith(new + "\n") and found.left == 0


@pytest.mark.parametrize(
    "line",
    [
        "x = accelerator.reduce(x, 'mean', scale=0.5)",
        "accelerator.save(x, 'f', safe_serialization=True)",
        "accelerator.set_trigger()",
        "with accelerator.join_uneven_inputs([model]): pass",
        "accelerator.log({'a': 1})",
        "batches = accelerator.skip_first_batches(loader, 3)",
        "accelerator.something_new(1)",
        "gradients = accelerator.state.something",
        "size = accelerator.state.deepspeed_plugin.batch_size",
        "accelerator.even_batches = False",
        "thing, other = accelerator.prepare(a, b)",
        "f(accelerator.prepare(model))",
    ],
)
def test_what_is_not_known_stays_as_it_is(line):
    text, found = _body(line + "\n")
    assert text == line + "\n" and found.left == 1 and found.findings[0].left and found.findings[0].hint


def test_a_collective_for_the_main_rank_only_is_left():
    _, found = _body(
        "accelerator.register_for_checkpointing(scheduler)\n"
        "if accelerator.is_main_process:\n    accelerator.save_state('run')\n"
    )
    assert "accelerator.save_state('run')" in found.text
    assert [each.hint.startswith("every rank has to call it") for each in found.findings if each.left] == [True]


def test_an_accelerator_that_is_passed_on_and_kept_in_an_object():
    found = translate("""\
from accelerate import Accelerator

class Trainer:
    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.model = self.accelerator.prepare(build_model())

    def step(self, loss):
        self.accelerator.backward(loss)

def main():
    accelerator = Accelerator(mixed_precision="fp16")
    Trainer(accelerator=accelerator)
""")
    assert "def __init__(self, ctx: weft.DistContext):" in found.text
    assert "    Trainer(ctx=ctx)\n" in found.text and "        loss.backward()\n" in found.text
    assert 'weft.with_precision(build_model(), self.ctx, "fp16")' in found.text


def test_a_setting_that_a_function_reads_becomes_its_parameter():
    source = """\
from accelerate import Accelerator

def loaders(accelerator: Accelerator, size: int = 16):
    def collate(batch):
        return 8 if accelerator.mixed_precision == "fp16" else None

def main(args):
    accelerator = Accelerator(mixed_precision=args.precision)
    steps = accelerator.gradient_accumulation_steps, accelerator.state.mixed_precision
    if args.mocked:
        loaders = mocked_dataloaders
    loaders(accelerator, 4)
"""
    found = translate("from accelerate.test_utils.training import mocked_dataloaders\n" + source)
    assert found.left == 0 and "mocked_dataloaders" not in found.text
    assert [each.what for each in found.findings] == ["loaders = mocked_dataloaders"]
    assert "def loaders(ctx: weft.DistContext, size: int = 16, *, mixed_precision):" in found.text
    assert 'return 8 if mixed_precision == "fp16" else None' in found.text
    assert '    steps = 1, args.precision or "no"\n' in found.text  # Accelerate reads None as "no"
    assert '    loaders(ctx, 4, mixed_precision=args.precision or "no")\n' in found.text
    # where the function goes by another name, nobody knows who calls it
    kept = translate(source + "other = loaders\n")
    assert kept.left == 1 and 'accelerator.mixed_precision == "fp16"' in kept.text
    assert "pass it to this function" in next(each.hint for each in kept.findings if each.left)


def test_a_loop_in_a_nested_function_shares_the_context_and_its_late_settings():
    source = """\
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

def main():
    seen = 0
    accelerator = Accelerator()

    @find_executable_batch_size(starting_batch_size=64)
    def train(size):
        nonlocal seen, accelerator
        steps = 64 // size
        accelerator.gradient_accumulation_steps = steps
        model, loader = accelerator.prepare(Net(), make_loader(size))
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x))

    train()
"""
    found = translate(source)
    compile(found.text, "train.py", "exec")
    assert found.left == 0 and "weft.data.find_batch_size, ctx=ctx, start=64" in found.text
    assert "        nonlocal seen, ctx\n        steps = 64 // size\n        model, ctx = " in found.text
    assert "weft.accumulate_grads(model, loader, ctx, steps=steps)" in found.text


def test_a_training_that_is_tried_again_with_smaller_batches():
    found = translate("""\
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
accelerator = Accelerator()

@find_executable_batch_size(starting_batch_size=first)
def train(size):
    sizes.append(accelerator.num_processes * size)
    if size > 16:
        raise MemoryError

train()
""")
    assert found.left == 0 and _run(found.text, first=20, sizes=[])["sizes"] == [20, 18, 16]


_LOCAL = """\
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

def main(steps):
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=every, enabled=True) as local_sgd:
        for n in range(2):
            accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index + n)).sum())
            optimizer.step()
            local_sgd.step()
    return [each.item() for each in model.parameters()]
"""


@pytest.mark.slow
def test_local_sgd_becomes_a_transform():
    found = translate(_LOCAL.replace("every", "steps"))
    assert found.left == 0 and "weft.local_steps(model, optimizer, ctx, every=steps)" in found.text

    def trained(ctx, steps):
        return _run(found.text.replace("weft.start()", "given"), given=ctx)["main"](steps)

    apart, together = run_ranks(trained, 2, 3), run_ranks(trained, 2, 2)
    assert apart[0] != apart[1] and together[0] == together[1]


def test_local_sgd_with_steps_that_are_not_known_where_the_model_is_prepared_is_left():
    source = _LOCAL.replace(
        "    with",
        "    loop(accelerator, model, optimizer, steps)\n\ndef loop(accelerator, model, optimizer, every):\n    with",
    )
    found = translate(source)
    assert [each.what for each in found.findings if each.left] == [
        "model, optimizer = accelerator.prepare(model, optimizer)"
    ]
    assert "weft.local_steps(model, optimizer, ctx, every=8)" in str(found.findings)


def test_lines_for_a_trigger_can_be_pasted():
    text, found = _body("""\
for n in range(5):
    if n == 2:
        accelerator.set_trigger()
    if accelerator.check_trigger():
        break
""")
    hints = {each.what: each.hint for each in found.findings if each.left}
    line, _, first = hints["accelerator.set_trigger()"].partition("; and before the loop: ")
    text = f"{first}\n{text}".replace("accelerator.set_trigger()", line)
    text = text.replace("accelerator.check_trigger()", hints["accelerator.check_trigger()"])
    assert _run(f"import weft\n{text}", ctx=weft.local())["n"] == 2


def test_hints_have_the_context_of_the_script():
    found = translate("from accelerate import Accelerator\nctx = 1\na = Accelerator()\na.check_trigger()\n")
    assert [each.hint for each in found.findings] == ["weft.collectives.any_rank(triggered, weft_ctx)"]


def test_what_is_translated_in_a_line_of_which_a_part_is_left_is_not_listed():
    text, found = _body("accelerator.print(accelerator.something_new, accelerator.device)\n")
    assert text == "ctx.print(accelerator.something_new, ctx.device)\n"
    assert [each.what for each in found.findings] == ["accelerator.something_new"]


def test_an_accelerator_without_a_name_is_left():
    found = translate("from accelerate import PartialState\nlast = PartialState().is_last_process\n")
    assert found.left == found.uses == 1 and "last = PartialState().is_last_process\n" in found.text


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("options['fsdp_plugin'] = None", 1),
        ("options['cpu'] = True", 0),
        ("options.update(found())", 1),
        ("f(options)", 1),
    ],
)
def test_settings_in_a_dict_are_known_if_every_key_is(change, left):
    source = "from accelerate import Accelerator\noptions = {}\n{}\naccelerator = Accelerator(**options)\n"
    found = translate(source.replace("{}\nacc", change + "\nacc") + "plain = accelerator.state.fsdp_plugin is None\n")
    assert found.left == left and ("plain = True" in found.text) == (not left)


@pytest.mark.parametrize(
    ("precision", "hook", "line"),
    [
        ('"bf16"', "DDPCommunicationHookType.FP16", 'named_policy("bf16"), reduce=torch.float16'),
        (
            "p",
            "h",
            'named_policy(p), reduce={"fp16": torch.float16, "bf16": torch.bfloat16}.get(k)))\nelse:\n    model, ',
        ),
        ("None", "h", 'weft.Precision(reduce={"fp16": torch.float16, "bf16": torch.bfloat16}.get(k))'),
        (
            "None",
            "DDPCommunicationHookType.POWER_SGD",
            "weft.replicate(model, ctx, compress=weft.precision.PowerSGD())",
        ),
    ],
)
def test_a_hook_of_ddp_is_kept(precision, hook, line):
    found = translate(f"""\
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
h = DDPCommunicationHookType(k)
handler = DistributedDataParallelKwargs(comm_hook={hook})
accelerator = Accelerator(mixed_precision={precision}, kwargs_handlers=[handler])
model = accelerator.prepare(model)
""")
    assert found.left == 0 and line in found.text and "accelerate" not in found.text


_PLUGINS = """\
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate import FullyShardedDataParallelPlugin as Plugin
from accelerate.utils import GradScalerKwargs
accelerator = Accelerator({})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            "deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)",
            ["model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)"],
        ),
        (
            "deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), mixed_precision='fp16'",
            [
                "model, ctx = weft.with_precision(model, ctx, 'fp16')",
                "optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)",
                "model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)",
            ],
        ),
        (
            "fsdp_plugin=FullyShardedDataParallelPlugin(min_num_params=10, reshard_after_forward=False)",
            ["model, ctx = weft.fully_shard(model, ctx, units=10, reshard_after_forward=False, rebind=optimizer)"],
        ),
        (
            "fsdp_plugin=Plugin(transformer_cls_names_to_wrap=['Linear'], activation_checkpointing=True)",
            [
                'model, ctx = weft.recompute(model, ctx, blocks="Linear")',
                'model, ctx = weft.fully_shard(model, ctx, units="Linear", rebind=optimizer)',
            ],
        ),
        (
            "mixed_precision='fp16', kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]",
            ["scaling=weft.precision.LossScaling(init=1024.0)))"],
        ),
    ],
)
def test_a_plugin_with_literals_becomes_its_strategy_and_runs(settings, lines):
    found = translate(_PLUGINS.replace("{}", settings))
    assert found.left == 0 and "\n".join(lines) in found.text and "accelerate" not in found.text
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    names = {"torch": torch, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    names["loader"] = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    exec(found.text, names)
    for batch in names["loader"]:
        names["model"](batch).sum().backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    names["ctx"].close()


def test_what_a_plugin_says_that_is_not_taken_over_is_listed():
    found = translate(_PLUGINS.replace("{}", "fsdp_plugin=Plugin(min_num_params=size(), ignored_modules='head.*')"))
    assert "weft.fully_shard(model, ctx, rebind=optimizer)" in found.text
    hints = [each.hint for each in found.findings if "not taken over" in each.hint]
    text = "FullyShardedDataParallelPlugin: ignored_modules='head.*', min_num_params=size() is not taken over"
    assert hints == [text]


_FLAGS = """\
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
fsdp_plugin = None
if fsdp:
    fsdp_plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Linear"])
deepspeed_plugin = DeepSpeedPlugin(zero_stage=2) if zero else None
accelerator = Accelerator(fsdp_plugin=fsdp_plugin, deepspeed_plugin=deepspeed_plugin)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""


@pytest.mark.parametrize(("fsdp", "zero"), [(True, False), (False, True), (False, False)])
def test_plugins_under_conditions_keep_the_conditions(fsdp, zero):
    found = translate(_FLAGS)
    assert found.left == 0 and found.text.endswith("""\
fsdp_plugin = None
if fsdp:
    fsdp_plugin = True
deepspeed_plugin = True if zero else None
ctx = weft.start()
if fsdp_plugin:
    model, ctx = weft.fully_shard(model, ctx, units="Linear", rebind=optimizer)
elif deepspeed_plugin:
    model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)
else:
    model, ctx = weft.replicate(model, ctx)
loader, ctx = weft.shard_data(loader, ctx)
""")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "fsdp": fsdp, "zero": zero}
    exec(found.text, names | {"loader": torch.utils.data.DataLoader(torch.randn(8, 4))}, names)
    text = str(weft.explain(names["ctx"]))
    assert [each in text for each in ("fully_shard", "zero_partition")] == [fsdp, zero]
    names["ctx"].close()


@pytest.mark.parametrize(
    "before",
    [
        "plugin = FullyShardedDataParallelPlugin() if a else make()\nA(fsdp_plugin=plugin)",
        "plugin = FullyShardedDataParallelPlugin()\nplugin.auto_wrap_policy = policy\nA(fsdp_plugin=plugin)",
        "if a:\n    A(fsdp_plugin=FullyShardedDataParallelPlugin())\nelse:\n    A()",
        "options = {}\nif a:\n    options['fsdp_plugin'] = FullyShardedDataParallelPlugin()\nA(**options)",
    ],
)
def test_a_plugin_that_is_not_known_is_not_guessed(before):
    found = translate(
        "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n"
        + before.replace("A(", "accelerator = Accelerator(")
        + "\nmodel, loader = accelerator.prepare(model, loader)\n"
    )
    assert "model = accelerator.prepare(model)\nloader, ctx = weft.shard_data(loader, ctx)\n" in found.text
    assert any("if ...:" in each.hint and each.left for each in found.findings)


def test_arguments_that_are_not_taken_over_are_listed():
    found = translate("""\
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
config = ProjectConfiguration(project_dir=out, logging_dir=logs, total_limit=3)
loading = DataLoaderConfiguration(split_batches=True, data_seed=1)
accelerator = Accelerator(log_with="tensorboard", project_config=config, dataloader_config=loading)
accelerator.init_trackers("run")
""")
    assert 'trackers = [weft.monitoring.tensorboard(os.path.join(logs, "run"))]' in found.text
    assert [each.hint for each in found.findings] == [
        "DataLoaderConfiguration: data_seed=1 is not taken over",
        "ProjectConfiguration: total_limit=3 is not taken over",
    ]


def test_a_setting_of_ddp_that_is_no_literal_is_listed():
    found = translate("""\
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
handler = DistributedDataParallelKwargs(find_unused_parameters=args.unused, broadcast_buffers=True)
accelerator = Accelerator(kwargs_handlers=[handler])
model = accelerator.prepare(model)
""")
    assert "model, ctx = weft.replicate(model, ctx)\n" in found.text
    assert [each.hint for each in found.findings] == ["find_unused_parameters: not taken over"]


def test_settings_that_differ_between_constructors_are_listed():
    found = translate("""\
from accelerate import Accelerator
if a:
    accelerator = Accelerator(mixed_precision="bf16", log_with="all")
else:
    accelerator = Accelerator()
""")
    assert {each.hint for each in found.findings} == {
        "mixed_precision: not the same in every Accelerator(...); the last one was taken"
    }


def test_what_only_wrapped_objects_have_is_translated():
    text, found = _body("""\
if hasattr(loader.sampler, "set_epoch"):
    loader.sampler.set_epoch(1)
skipped = optimizer.step_was_skipped
torch.save(model.module.state_dict(), "f")
""")
    assert text == 'skipped = weft.was_skipped(optimizer)\ntorch.save(model.state_dict(), "f")\n'
    assert found.left == 0


def test_a_decorator_for_one_rank_runs_there_only():
    found = translate("""\
from accelerate import Accelerator
accelerator = Accelerator()
@accelerator.on_main_process
def first(x):
    return x
@accelerator.on_last_process
def last(x):
    return x
""")
    assert found.left == 0

    def results(ctx, text):
        names = {"given": ctx}
        exec(text.replace("weft.start()", "given"), names)
        return names["first"](1), names["last"](2)

    assert run_ranks(results, 2, found.text) == [(1, None), (None, 2)]


def test_names_of_the_library_that_stay_are_listed():
    found = translate("""\
from accelerate import Accelerator
from accelerate.utils import LoggerType, PrecisionType
import accelerate
args = parse()
accelerator = Accelerator(log_with=args.tracker)
kinds = [LoggerType.WANDB, accelerate.utils.operations]
def f(kind: PrecisionType):
    return kind
""")
    assert [(each.line, each.what) for each in found.findings if each.left] == [
        (6, "LoggerType.WANDB"),
        (6, "accelerate.utils.operations"),
        (7, "PrecisionType"),
    ]
    assert (found.uses, found.left) == (4, 3)
    assert [each.what for each in found.findings if each.hint == "nothing reads it any more"] == ["args.tracker"]


def test_a_loader_whose_batches_are_gathered_counts_every_row_once():
    found = translate(
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
        "loader = accelerator.prepare(loader)\nfor x in loader:\n"
        "    seen += accelerator.gather_for_metrics(x).tolist()\n"
    )
    assert 'loader, ctx = weft.shard_data(loader, ctx, uneven="empty")' in found.text

    def rows(ctx, text):
        names = {"seen": [], "loader": torch.utils.data.DataLoader(range(5), batch_size=1)}
        exec(text.replace("weft.start()", "given"), names | {"given": ctx}, names)
        return names["seen"]

    for seen in run_ranks(rows, 2, found.text):
        assert sorted(seen) == [0, 1, 2, 3, 4]


def test_a_profile_is_that_of_torch():
    found = translate("""\
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
handler = ProfileKwargs(activities=["cpu"], record_shapes=True)
accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
with accelerator.profile() as profile:
    torch.ones(8) * 2
table = profile.key_averages().table()
accelerator.end_training()
""")
    names = {"torch": torch}
    exec(found.text, names)
    assert found.left == 0 and "aten::mul" in names["table"]
    text = found.text.replace("\n", " ")
    assert "torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)" in text


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("schedule_option={'wait': 1, 'warmup': 1, 'active': 2}", "schedule=torch.profiler.schedule(**{'wait': 1,"),
        ("output_trace_dir='runs'", "tensorboard_trace_handler('runs', f\"rank{ctx.rank}\")) as"),
        ("output_trace_dir=args.out", 'tensorboard_trace_handler(args.out, f"rank{ctx.rank}") if args.out else None'),
    ],
)
def test_an_option_of_a_profile(option, text):
    found = translate(
        "from accelerate import Accelerator\nfrom accelerate.utils import ProfileKwargs\n"
        f"accelerator = Accelerator(kwargs_handlers=[ProfileKwargs({option})])\n"
        "with accelerator.profile() as profile:\n    pass\n"
    )
    assert found.left == 0 and text in found.text
    compile(found.text, "train.py", "exec")


def test_comments_stay_where_a_statement_is_gone():
    text, _ = _body("# one\naccelerator.unscale_gradients()\n# two\nx = 1\n")
    assert text == "# one\n# two\nx = 1\n"


def test_settings_of_a_configuration_file_are_those_of_the_script(tmp_path, capsys):
    script, config = tmp_path / "train.py", tmp_path / "config.yaml"
    script.write_text(
        "from accelerate import Accelerator\naccelerator = Accelerator()\n"
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        "for x in loader:\n    accelerator.backward(model(x))\n"
    )
    config.write_text(
        "mixed_precision: bf16\ngradient_accumulation_steps: 2\ndistributed_type: FSDP\n"
        "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
    )
    assert weft.cli.main(["migrate", "--config", str(config), str(script)]) == 0
    out = capsys.readouterr().out
    assert '+model, ctx = weft.with_precision(model, ctx, "bf16")' in out
    assert '+model, ctx = weft.fully_shard(model, ctx, units="Block", rebind=optimizer)' in out
    assert "+    (model(x) / 2).backward()" in out


def test_a_file_with_deepspeed_and_one_with_megatron():
    source = (
        "from accelerate import Accelerator\naccelerator = Accelerator()\n"
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        "for x in loader:\n    with accelerator.accumulate(model):\n        accelerator.backward(model(x))\n"
    )
    deepspeed = {"zero_stage": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    found = translate(source, {"deepspeed_config": deepspeed, "dynamo_config": {"dynamo_backend": "EAGER"}})
    assert [line for line in found.text.splitlines() if "weft." in line][1:] == [
        "model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)",
        "model, ctx = weft.compile(model, ctx, backend='eager')",
        "loader, ctx = weft.shard_data(loader, ctx)",
        "model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=4)",
    ]
    hints = [each.hint for each in found.findings]
    assert hints.count("to add: weft.clip_grads(model, ctx, max_norm=1.0)") == 1
    megatron = {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2, "megatron_lm_recompute_activations": True}
    found = translate(source, {"megatron_lm_config": megatron})
    assert [line for line in found.text.splitlines() if "weft." in line][:4] == [
        "ctx = weft.start(mesh={'pipeline': 2, 'data': -1, 'tensor': 2})",
        "model, ctx = weft.recompute(model, ctx)",
        "model, ctx = weft.tensor_parallel(model, ctx)",
        "model, ctx = weft.replicate(model, ctx)",
    ]
    assert any(each.hint.startswith("to add: weft.pipeline(") for each in found.findings)


def test_a_test_for_a_plugin_knows_the_configuration_file():
    source = (
        "from accelerate import Accelerator\nfrom accelerate.utils import DistributedType\n"
        "accelerator = Accelerator()\nplain = accelerator.state.fsdp_plugin is None\n"
        "sharded = accelerator.distributed_type == DistributedType.FSDP\n"
    )
    assert "plain = True\nsharded = False\n" in translate(source).text
    found = translate(source, {"fsdp_config": {"fsdp_version": 2}})
    assert found.left == 1 and "sharded = True\n" in found.text


def test_no_sync_of_a_model_that_is_chosen_at_run_time():
    text, found = _body("hold = model.no_sync if last else contextlib.nullcontext\nwith hold():\n    pass\n")
    assert "hold = functools.partial(weft.contract.no_sync, model, ctx) if last else" in text and found.left == 0


def test_tuples_that_are_split_otherwise_are_named():
    text, found = _body("with accelerator.split_between_processes((x, y)) as mine:\n    pass\n")
    assert "weft.data.split_between((x, y), ctx, pad=False)" in text and found.left == 0
    assert any("list(inputs) is cut entry by entry" in each.hint for each in found.findings)


def test_hints_name_what_is_there():
    for library in LIBRARIES:
        rows = (*library.methods.values(), *library.functions.values())
        templates = [each.text for alternatives in rows for each in alternatives]
        hints = (*library.hints.values(), *library.remarks.values(), *library.settings.values(), *templates)
        names = {name for hint in hints for name in re.findall(r"\b(weft(?:\.\w+)+)", hint)}
        assert len(names) > 15
        for name in names:
            pkgutil.resolve_name(name)


def _calls_in(hint):
    """The calls of weft in a text."""
    for found in re.finditer(r"weft(?:\.\w+)+\(", hint):
        for end in (n + 1 for n, character in enumerate(hint) if character == ")" and n >= found.end() - 1):
            with contextlib.suppress(SyntaxError):
                yield ast.parse(hint[found.start() : end], mode="eval").body
                break


def test_calls_in_hints_have_arguments_that_exist():
    calls = 0
    for library in LIBRARIES:
        for hint in (*library.hints.values(), *library.remarks.values(), *library.settings.values()):
            for call in _calls_in(hint):
                function = eval(ast.unparse(call.func), {"weft": weft})
                arguments = [each for each in call.args if not isinstance(each, ast.Constant) or each.value is not ...]
                if len(arguments) == len(call.args):
                    inspect.signature(function).bind(*call.args, **{each.arg: each.value for each in call.keywords})
                    calls += 1
    assert calls > 30


def test_the_command_without_libcst_says_what_to_install(tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("weft_migrate", "libcst")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert weft.cli.main(["migrate", str(tmp_path / "train.py")]) == 2
    assert "pip install 'torchweft[migrate]'" in capsys.readouterr().err


def test_options_of_wandb_are_passed_on():
    _, found = _body("accelerator.init_trackers('run', config, init_kwargs={'wandb': {'name': name}})\n")
    assert found.left == 1  # TensorBoard takes none
    found = translate(
        "from accelerate import Accelerator\naccelerator = Accelerator(log_with='wandb')\n"
        "accelerator.init_trackers('run', config, init_kwargs={'wandb': {'name': name}})\n"
    )
    assert found.left == 0 and "wandb.init(project='run', config=config, **{'name': name})" in found.text


# -- settings where the script reads them --------------------------------------------------------------


def _run(text, **names):
    names |= {"torch": torch}
    exec(text, names)
    return names


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    "precision",
    [
        '"bf16" if flag else "no"',
        '"no" if not flag else "bf16"',
        'None if not flag else "bf16"',
        '"bf16" if flag and\n    flag else "no"',
        '{True: "bf16", False: "no"}[flag]',
        '"bf16" if flag else "bf16" if other else "no"',
        "pick(flag or False)",
    ],
)
def test_a_setting_may_be_any_expression_and_no_precision_converts_nothing(precision, flag):
    found = translate(f"""\
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision={precision}, cpu=flag or True, gradient_accumulation_steps=1 if flag else 4)
model, optimizer = accelerator.prepare(model, optimizer)
with accelerator.autocast():
    product = model.weight @ model.weight
text = f"{{accelerator.mixed_precision}} {{accelerator.use_distributed!r}}"
same = accelerator.unwrap_model(model if flag else None or model).state_dict()
accelerator.backward(model(torch.ones(1, 2, dtype=model.weight.dtype)).sum())
""")
    assert found.left == 0 and ("skip_nonfinite" in found.text) == precision.startswith(("pick", "{"))
    model = torch.nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = _run(
        found.text, model=model, optimizer=optimizer, flag=flag, other=False, pick=lambda on: "bf16" if on else None
    )
    assert names["model"].weight.dtype == (torch.float32 if flag else torch.float64)
    assert names["product"].dtype == (torch.bfloat16 if flag else torch.float64)
    assert names["text"] == ("bf16 False" if flag else "no False") and set(names["same"]) == {"weight", "bias"}
    assert names["model"].bias.grad.tolist() == ([1, 1] if flag else [0.25, 0.25])
    assert "skip_nonfinite" not in str(weft.explain(names["ctx"]))
    names["ctx"].close()


def test_a_model_that_is_made_in_prepare_is_made_once():
    found = translate(
        "from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision=p)\n"
        "model, optimizer = accelerator.prepare(build_model(), optimizer)\n"
    )
    for policy in ("no", "bf16", "fp16"):
        models = [torch.nn.Linear(2, 2)]
        optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
        names = _run(found.text, p=policy, optimizer=optimizer, build_model=models.pop)
        told = str(weft.explain(names["ctx"]))
        assert ("with_precision" in told, "skip_nonfinite" in told) == (policy != "no", policy == "fp16")
        names["ctx"].close()


def test_a_function_gets_the_settings_that_it_does_not_see():
    found = translate("""\
from accelerate import Accelerator

def product(model, accelerator):
    with accelerator.autocast():
        return model.weight @ model.weight

def train(model, accelerator):
    accelerator.backward(model(torch.ones(1, 2, dtype=model.weight.dtype)).sum())
    return product(model, accelerator)

def main(precision, steps):
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=steps)
    model = torch.nn.Linear(2, 2).double()
    model = accelerator.prepare(model)
    result = train(model, accelerator)
    accelerator.end_training()
    return result.dtype, model.bias.grad.tolist()
""")
    main = _run(found.text)["main"]
    assert found.left == 0
    assert main(None, 4) == (torch.float64, [0.25, 0.25]) and main("bf16", 1) == (torch.bfloat16, [1, 1])


@pytest.mark.parametrize(
    ("before", "what"),
    [
        (
            "def f(accelerator, precision=1):\n    with accelerator.autocast(): pass\nother = f\n",
            "accelerator.autocast()",
        ),
        ("def f(accelerator, x):\n    accelerator.backward(x)\nother = f\n", "accelerator.backward(x)"),
        ("def f(accelerator, m):\n    m = accelerator.prepare(model)\nother = f\n", "m = accelerator.prepare(model)"),
    ],
)
def test_a_setting_that_a_function_cannot_see_is_not_written_into_it(before, what):
    found = translate(f"""\
from accelerate import Accelerator
{before}
def main(precision, steps):
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=steps)
    f(accelerator, 1)
""")
    assert [each.what for each in found.findings if each.left] == [what] and what in found.text
    assert "precision not in" not in found.text and "steps" not in found.text.partition("def main")[0]


def test_new_text_that_is_no_python_is_left(monkeypatch):
    monkeypatch.setattr("weft_migrate.walk.from_template", lambda *_: "a b")
    text, found = _body("x = accelerator.reduce(x)\n")
    assert text == "x = accelerator.reduce(x)\n"
    assert [(each.line, each.left) for each in found.findings] == [(5, True)]


# -- loaders and loops, by the scope of their names ----------------------------------------------------

_EVALUATION = """\
from accelerate import Accelerator

def evaluate(accelerator, loader):
    return [row for x in loader for row in rows(accelerator, x)]

def rows(accelerator, x):
    return x.tolist()

def score({}, accelerator):
    seen = []
    for x in {}:
        seen += accelerator.gather_for_metrics(x).tolist()
    return seen

def main(loader, val_loader):
    accelerator = Accelerator()
    loader, val_loader = accelerator.prepare(loader, val_loader)
    chosen = val_loader
    seen = score({}, accelerator=accelerator)
    return seen, [x.tolist() for x in loader]
"""


_MEANS = """\
from accelerate import Accelerator
accelerator = Accelerator()
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
losses = []
for {} in loader:
    {}
    losses.append(accelerator.gather_for_metrics(x.float().mean().requires_grad_().repeat(2)))
mean = torch.cat(losses).mean().item()
"""


@pytest.mark.parametrize(
    ("batch", "line"), [("x, y", "pass"), ("batch", "x = batch['x']"), ("batch", "x = (lambda x: x)(**batch)")]
)
def test_a_mean_that_stands_for_each_row_counts_as_often_as_there_are_rows(batch, line):
    found = translate(_MEANS.format(batch, line))
    data = [(float(n), n) if batch == "x, y" else {"x": float(n)} for n in range(7)]

    def mean(ctx):
        return _run(found.text.replace("weft.start()", "given"), given=ctx, data=data)["mean"]

    assert found.left == 0 and [*run_ranks(mean, 1), *run_ranks(mean, 2)] == [3, 3, 3]


def test_a_mean_over_rows_that_cannot_be_counted_is_left():
    found = translate(_MEANS.format("batch", "x = batch[0]"))
    assert found.left == 1 and "loss.repeat(rows)" in next(each.hint for each in found.findings if each.left)


@pytest.mark.parametrize("loop", ["x in tests", "n, x in enumerate(tests)"])
def test_the_lines_for_models_that_cannot_compute_without_rows(loop):
    source = _MEANS.replace("x.float().mean().requires_grad_().repeat(2)", "model(x).detach()")
    found = translate(source.format("x", "pass").replace("loader", "tests").replace("x in tests", loop))
    [hint] = [each.hint.splitlines() for each in found.findings if "without rows" in each.hint]
    shard, head, gather = map(str.strip, hint[-3:])
    text = found.text.replace('tests, ctx = weft.shard_data(tests, ctx, uneven="empty")', shard)
    text = text.replace(f"for {loop}:", head).replace("weft.gather(model(x).detach(), ctx)", gather)

    def rows(ctx):
        names = _run(text.replace("weft.start()", "given"), given=ctx, data=torch.arange(5.0)[:, None])
        return sum(map(len, names["losses"]))

    assert all(line in text for line in (shard, head, gather))
    assert [*run_ranks(rows, 1), *run_ranks(rows, 2)] == [5, 5, 5]


@pytest.mark.parametrize("call", ["chosen", "loader=chosen"])
def test_a_loader_is_followed_into_the_function_that_gathers_its_batches(call):
    found = translate(_EVALUATION.replace("{}", "loader", 2).replace("{}", call))
    assert "    loader, ctx = weft.shard_data(loader, ctx)\n" in found.text
    assert 'val_loader, ctx = weft.shard_data(val_loader, ctx, uneven="empty")' in found.text
    assert not any("for its loader" in each.hint for each in found.findings)

    def rows(ctx, text):
        loaders = [torch.utils.data.DataLoader(range(n), batch_size=1) for n in (4, 5)]
        return _run(text.replace("weft.start()", "given"), given=ctx)["main"](*loaders)[0]

    for seen in run_ranks(rows, 2, found.text):
        assert sorted(seen) == [0, 1, 2, 3, 4]


def test_a_loader_that_cannot_be_followed_is_listed():
    found = translate(_EVALUATION.replace("{}", "loader", 2).replace("{}", "**options"))
    assert "uneven" not in found.text
    [hint] = [each.hint for each in found.findings if each.hint.startswith("for its loader")]
    assert hint == 'for its loader: loader, ctx = weft.shard_data(loader, ctx, uneven="empty")'


_ALIASED = """\
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=steps)
model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
step = ends = 0
accelerator.save_state(folder)
accelerator.load_state(folder)
for epoch in range(2):
    if epoch:
        batches = train_loader
    else:
        batches = accelerator.skip_first_batches(train_loader, 1)
    for x in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        if step == limit:
            break
        accelerator.save_state(folder)
    else:
        ends += 1
accelerator.end_training()
"""


@pytest.mark.parametrize(("limit", "ends"), [(None, 2), (3, 1)])
def test_a_loop_over_an_alias_of_its_loader_becomes_one_over_windows(limit, ends, tmp_path):
    found = translate(_ALIASED)
    assert found.left == 0 and "weft.save(state, folder, step, ctx)" in found.text
    model = torch.nn.Linear(2, 1)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "folder": tmp_path / "run"}
    loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=1)
    names = _run(found.text, train_loader=loader, steps=4, limit=limit, **names)
    assert (names["step"], names["ends"]) == (limit or 4, ends)


def test_a_hint_has_the_steps_of_the_script():
    found = translate(_ALIASED.replace("optimizer.zero_grad()", "break"))
    hints = [each.hint for each in found.findings if each.what == "accelerator.accumulate(model)"]
    assert "weft.accumulate_grads(model, loader, ctx, steps=steps)" in hints[0]


@pytest.mark.parametrize(
    ("loop", "folder", "number"),
    [
        ("for x in loader:\n    n += 1\n    {}", "out", "n"),
        ("for x in loader:\n    with lock:\n        run.n += 1\n    {}", "out", "run.n"),
        ("while n < 3:\n    for x in loader:\n        n += 1\n        if n % 2:\n            {}", "out", "n"),
        ("for epoch in tqdm(range(3)):\n    {}", "out", "epoch"),
        ("for n, x in enumerate(loader):\n    {}", "out", "n"),
        ("for epoch in range(3):\n    for x in loader:\n        {}", "f'{args.out}/step_{n_step}'", "n_step"),
        ("{}", "f'{args.out}/last'", "0"),
        ("for x in loader:\n    {}", "out", None),
        ("for epoch in range(3):\n    for n, x in enumerate(loader):\n        {}", "out", None),
        ("for x in loader:\n    n = 0\n    n += 1\n    {}", "out", None),
        ("for x in loader:\n    if bad:\n        n += 1\n    {}", "out", None),
        ("for x in loader:\n    total += x\n    {}", "f'{args.out}/last'", None),
    ],
)
def test_the_number_of_a_checkpoint_is_one_that_grows(loop, folder, number):
    _, found = _body(f"accelerator.load_state('run')\n{loop.replace('{}', f'accelerator.save_state({folder})')}\n")
    if number:
        assert found.left == 0 and f"weft.save(state, {folder}, {number}, ctx)" in found.text
    else:
        assert f"accelerator.save_state({folder})" in found.text
        assert next(each.hint for each in found.findings if each.left).startswith("step has to grow from save to save")


_STREAM = """\
from accelerate import Accelerator

class Lines(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0))

class Packed(Lines):
    pass

dataset = Packed()
loader = torch.utils.data.DataLoader(dataset, batch_size=2, drop_last={})
accelerator = Accelerator()
loader = accelerator.prepare(loader)
seen = [x.tolist() for x in loader]
"""


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_stream_of_the_script_runs_on_several_ranks(drop_last):
    found = translate(_STREAM.replace("{}", str(drop_last)))

    def lines(ctx, text):
        return _run(text.replace("weft.start()", "given"), given=ctx)["seen"]

    rows = sorted(x for seen in run_ranks(lines, 2, found.text) for batch in seen for x in batch)
    assert rows == [float(n) for n in range(8 if drop_last else 10)]


def test_a_mean_over_labels_that_count_is_listed():
    _, found = _body("loss = F.cross_entropy(x, y, ignore_index=-100)\n")
    assert ["weft.metrics.denominator(" in each.hint for each in found.findings] == [True]
    _, found = _body("loss = F.cross_entropy(x, y, ignore_index=-100, reduction='sum')\n")
    assert not found.findings


# The others ask for the settings of other launchers, which are listed.
@pytest.mark.parametrize(
    ("name", "share"), [("test_checkpointing", 0.85), ("test_performance", 0.85), ("test_metrics", 0.8)]
)
def test_programs_of_accelerate_itself(name, share):
    accelerate = pytest.importorskip("accelerate")
    folder = pathlib.Path(accelerate.__file__).parent / "test_utils" / "scripts" / "external_deps"
    found = translate((folder / f"{name}.py").read_text())
    ast.parse(found.text)
    assert found.uses - found.left >= share * found.uses, found.findings


# -- the command -------------------------------------------------------------------------------------


def test_the_command_shows_a_diff_and_changes_nothing(tmp_path, capsys):
    script = tmp_path / "train.py"
    source = "from accelerate import Accelerator\r\naccelerator = Accelerator()\r\naccelerator.unknown()\r\n"
    script.write_bytes(source.encode())
    assert weft.cli.main(["migrate", str(script)]) == 1
    out, err = capsys.readouterr()
    assert "-accelerator = Accelerator()" in out and "+ctx = weft.start()" in out
    assert "1 of 2 uses of Accelerate translated\nNot translated:\n  line 3: accelerator.unknown()\n" in err
    assert script.read_bytes() == source.encode()
    assert weft.cli.main(["migrate", "--write", str(script)]) == 1
    assert script.read_bytes().splitlines(keepends=True)[1:] == [
        b"ctx = weft.start()\r\n",
        b"accelerator.unknown()\r\n",
    ]


def test_the_command_says_which_line_libcst_cannot_read(tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("from accelerate import Accelerator\n")
    error = libcst.ParserSyntaxError("no such thing", lines=["x"], raw_line=7, raw_column=0)
    monkeypatch.setattr("libcst.parse_module", unittest.mock.Mock(side_effect=error))
    assert weft.cli.main(["migrate", str(script)]) == 2
    assert "LibCST cannot read line 7: no such thing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "why"), [("x = (", "SyntaxError"), ("x = 1\n", "no use of Accelerate"), (None, "FileNotFoundError")]
)
def test_the_command_says_what_it_cannot_translate(source, why, tmp_path, capsys):
    script = tmp_path / "train.py"
    if source is not None:
        script.write_text(source)
    assert weft.cli.main(["migrate", str(script)]) == 2
    assert re.search(rf"cannot be translated\n  found:    .*{why}(.|\n)*fix:", capsys.readouterr().err)


# -- the page ----------------------------------------------------------------------------------------

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "from_accelerate.md").read_text()
ROWS = re.findall(r"^\| `(.+?)` \| (?:`(.+?)`|-) \| .*\|$", PAGE.partition("## Not translated")[0], re.MULTILINE)
_HEAD = """from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, init_empty_weights, notebook_launcher
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.logging import get_logger
from accelerate.utils import broadcast, DDPCommunicationHookType, DistributedDataParallelKwargs, gather_object, set_seed
from accelerate.utils import find_executable_batch_size
"""
_ALL = "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)\n"


@pytest.mark.parametrize(("old", "new"), ROWS, ids=[old for old, _ in ROWS])
def test_a_row_of_the_page_is_what_migrate_writes(old, new):
    made = old if old.startswith("accelerator = ") else "accelerator = Accelerator()"
    made = f"accelerator = {old}" if old.startswith("Accelerator(") else made
    line = "" if "Accelerator(" in old else f"for epoch in range(2):\n    {old}\n"
    start = 'accelerator.init_trackers("run")\n' if "accelerator.log" in old else ""
    found = translate(f"{_HEAD}{made}\n{start}{_ALL}{line}")
    assert found.left == 0
    if new:
        assert " ".join(new.split()) in " ".join(found.text.split())
    else:
        assert old not in found.text


def test_the_page_has_forty_rows_and_whole_programs():
    assert len(ROWS) >= 40
    programs = re.findall(
        r"^With Accelerate:\n\n```text\n(.*?)```\n\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
    )
    assert len(programs) == 2 and [translate(old).text for old, _ in programs] == [new for _, new in programs]
    assert [translate(old).left for old, _ in programs] == [0, 0]
