"""Strategies, precision and steps of optimizers, in one process: the other half of `weft.transforms`."""

import copy
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import mse_loss

import weft
from tests.fix_lines.test_transforms import Net, OneProcess, TwoSets, X, backward, filled, pretend, sgd
from tests.fix_lines.told import told


class Square(Net):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 4)


def squares():
    return nn.Sequential(nn.Sequential(Square(), Square()))


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


# -- pipeline ----------------------------------------------------------------------------------------


def test_pipelines_with_options_that_do_not_exist(tmp_path):
    ctx = weft.local()
    with told("transforms/pipeline.py", "check_count(") as it:
        weft.pipeline(layers(), ctx, micro_batches=0)
    it.run(model=layers(), ctx=ctx)
    with told("transforms/pipeline.py", "is not a function") as it:
        weft.pipeline(layers(), ctx, loss="cross_entropy")
    model, _ = eval(it.fix, {"weft": weft, "torch": torch, "model": layers(), "ctx": ctx})
    model(X, torch.zeros(8, dtype=torch.long)).backward()
    with weft.weights.on_meta():
        model = layers()
    with told("transforms/pipeline.py", "cannot be used', found=\"'later'\"") as it:
        weft.pipeline(model, ctx, weights="later")
    save_file(layers().state_dict(), path := tmp_path / "model.safetensors")
    it.run(model=model, ctx=ctx, load_file=load_file, path=path)
    model(X)


def test_pipelines_of_what_has_another_transform():
    ctx = weft.local()
    model = layers()
    _, with_scale = weft.with_precision(model[0], ctx, "fp16")
    with told("transforms/pipeline.py", "a part of the module has a loss scale") as it:
        weft.pipeline(model, with_scale, loss=mse_loss)
    made = it.run(model=layers(), ctx=ctx)
    weft.pipeline(made["model"], made["ctx"], loss=mse_loss)

    def replicated(ctx):
        model = layers()
        _, after = weft.replicate(model[0], ctx)
        with told("transforms/pipeline.py", "are replicated or sharded already") as it:
            weft.pipeline(model, after)
        it.run(model=layers(), ctx=ctx)

    pretend(replicated, mesh={"data": 2, "pipeline": 1})


# -- place, undo -------------------------------------------------------------------------------------


def test_placing_of_pretended_ranks_and_of_no_module():
    def rehearsed(ctx):
        model, budgets = Net(), {"cpu": None}
        with told("transforms/place.py", "check_not_pretended(") as it:
            weft.place(model, ctx, budgets)
        assert eval(it.fix, {"weft": weft, "model": model, "budgets": budgets}).units

    pretend(rehearsed)
    model, ctx = Net(), weft.local()
    plan = weft.weights.plan_placement(model, {"cpu": None})
    with told("transforms/place.py", "check_module(") as it:
        weft.place(plan, ctx, model)
    it.run(model=model, ctx=ctx, plan=plan)


def test_what_is_placed_is_not_moved(tmp_path):
    def wide():
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    save_file(wide().state_dict(), path := tmp_path / "model.safetensors")
    for budgets, move in (({"cpu": None}, nn.Module.double), ({"cpu": "40KB", "disk": None}, copy.deepcopy)):
        with weft.weights.on_meta():
            model = wide()
        model, ctx = weft.place(model, weft.local(), budgets, weights=path)
        with told("transforms/place.py", "cannot be moved, cast or loaded") as it:
            move(model)
        move(it.run(model=model, ctx=ctx)["model"])


def test_undoing_of_no_module():
    model, ctx = weft.replicate(Net(), weft.local())
    with told("transforms/undo.py", "check_module(") as it:
        weft.undo(sgd(model), ctx)
    assert it.run(model=model, ctx=ctx, optimizer=sgd(model))["ctx"].applied == ()


# -- recompute ---------------------------------------------------------------------------------------


def test_recomputing_with_options_that_do_not_exist():
    ctx = weft.local()
    for mistake, options in (
        (told("transforms/recompute.py", "check_count("), {"every": 0}),
        (told("transforms/recompute.py", "check_choice("), {"determinism_check": "strict"}),
        (told("transforms/recompute.py", "is one name"), {"save": "matmul"}),
    ):
        with mistake as it:
            weft.recompute(Net(), ctx, blocks=nn.Linear, **options)
        filled(it, "blocks=...", "blocks=nn.Linear").run(model=(model := Net()), ctx=ctx, nn=nn)
        backward(model)


def test_recomputing_twice():
    model, ctx = Net(), weft.local()
    _, after = weft.recompute(model.first, ctx, blocks=model.first)
    with told("transforms/recompute.py", "are already checkpointed") as it:
        weft.recompute(model, after, blocks="last")
    filled(it, "[...]", '["first", "last"]').run(model=(model := Net()), ctx=ctx)
    backward(model)


# -- replicate ---------------------------------------------------------------------------------------


def test_replicas_with_options_that_do_not_fit():
    ctx = weft.local()
    with told("transforms/replicate.py", "averages nothing") as it:
        weft.replicate(Net(), ctx, compress="powersgd")
    it.run(model=Net(), ctx=ctx)
    power = weft.precision.PowerSGD(rank=2)
    with told("transforms/replicate.py", "gradients cannot be compressed on their way here") as it:
        weft.replicate(Net(), ctx, compress=power, flat=True)
    assert it.fix.endswith("# without compress, or without the other")
    it.run(model=Net(), ctx=ctx)
    weft.replicate(Net(), ctx, flat=True)
    weft.replicate(Net(), ctx, compress=power)

    def flat(ctx):
        plan = {"first": "column", "last": "row"}
        model, ctx = weft.tensor_parallel(Net(), ctx, plan=plan)
        with told("transforms/replicate.py", "flat=True keeps plain parameters only") as it:
            weft.replicate(model, ctx, flat=True)
        it.run(model=model, ctx=ctx)

    pretend(flat, ranks=4, mesh={"data": 2, "tensor": 2})


def test_replicas_of_an_elastic_job():
    with weft.start(elastic="replica", device="cpu") as ctx:
        with told("transforms/replicate.py", "not supported in an elastic job") as it:
            weft.replicate(Net(), ctx, flat=True)
        it.run(model=Net(), ctx=ctx)
        with told("transforms/replicate.py", "not supported in an elastic job") as it:
            weft.replicate(nn.Linear(2, 2, dtype=torch.complex64), ctx)
    with it.run()["ctx"] as ctx:
        weft.replicate(nn.Linear(2, 2, dtype=torch.complex64), ctx)


def test_sparse_gradients_in_a_flat_buffer():
    model = nn.Embedding(4, 2, sparse=True)
    with told("transforms/replicate.py", "flat=True makes gradients dense") as it:
        weft.replicate(model, weft.local(), flat=True)
    model = it.run(model=model, ctx=weft.local())["model"]
    model(torch.arange(4)).sum().backward()
    torch.optim.SparseAdam(model.parameters()).step()


# -- skip_nonfinite, step_in_backward ----------------------------------------------------------------


def test_skipped_steps_of_something_else():
    model, ctx = weft.with_precision(Net(), weft.local(), "fp16")
    with told("checks.py", "optimizer, ctx = weft.{what}(optimizer, ctx)") as it:
        weft.skip_nonfinite(model, ctx)
    optimizer = it.run(optimizer=sgd(model), ctx=ctx)["optimizer"]
    assert not weft.was_skipped(optimizer)
    with told("transforms/skip_nonfinite.py", "this optimizer never skips a step") as it:
        weft.was_skipped(sgd(model))
    assert not weft.was_skipped(it.run(optimizer=sgd(model), ctx=ctx)["optimizer"])
    with told("transforms/skip_nonfinite.py", "knows no module with a precision") as it:
        weft.skip_nonfinite(sgd(model), weft.local())
    made = it.run(model=Net(), ctx=weft.local())
    weft.skip_nonfinite(sgd(made["model"]), made["ctx"])
    with told("transforms/skip_nonfinite.py", "LBFGS evaluates the loss inside step") as it:
        weft.skip_nonfinite(torch.optim.LBFGS(model.parameters()), ctx)
    made = it.run(model=Net(), ctx=weft.local())
    weft.skip_nonfinite(torch.optim.LBFGS(made["model"].parameters()), made["ctx"])


def test_steps_in_backward_of_gradients_that_are_not_complete():
    def replicated(ctx):
        model, after = weft.replicate(Net(), ctx)
        with told("transforms/step_in_backward.py", "not reduced unit by unit") as it:
            weft.step_in_backward(sgd(model), after)
        made = it.run(model=Net(), ctx=ctx)
        weft.step_in_backward(sgd(made["model"]), made["ctx"])

    pretend(replicated)
    model, _, ctx = weft.accumulate_grads(Net(), [X], weft.local(), steps=2)
    with told("transforms/step_in_backward.py", "complete as soon as they are computed") as it:
        weft.step_in_backward(sgd(model), ctx)
    assert it.fix == "leave step_in_backward or accumulate_grads out"
    sgd(backward(model)).step()
    model = Net()
    weft.step_in_backward(sgd(model), weft.local())
    backward(model)
    with weft.start(elastic="replica", device="cpu") as ctx:
        model, after = weft.replicate(Net(), ctx)
        with told("transforms/step_in_backward.py", "complete as soon as they are computed") as it:
            weft.step_in_backward(sgd(model), after)
    assert it.fix == "leave step_in_backward or elastic= of weft.start out"
    with weft.start(device="cpu") as ctx:
        weft.step_in_backward(sgd(Net()), ctx)


# -- with_precision ----------------------------------------------------------------------------------


def test_a_precision_of_no_module():
    model, ctx = weft.with_precision(Net(), weft.local(), "fp16")
    with told("transforms/with_precision.py", "check_module(") as it:
        weft.with_precision(sgd(model), ctx, "fp16")
    it.run(optimizer=sgd(model), ctx=ctx)
    with told("transforms/with_precision.py", "check_module(") as it:
        weft.with_precision(model.forward, ctx, "bf16")
    it.run(model=Net(), ctx=ctx)
    modules, policy = nn.ModuleList([Net(), Net()]), "bf16"
    with told("transforms/with_precision.py", "has no forward") as it:
        weft.with_precision(modules, weft.local(), policy)
    it.run(modules=modules, policy=policy, ctx=weft.local())
    assert modules[1](X).dtype is torch.float32


def test_a_precision_that_a_device_or_a_module_does_not_have():
    ctx = weft.local()
    with told("transforms/with_precision.py", "does not support this policy") as it:
        weft.with_precision(model := Net(), replace(ctx, device=torch.device("meta")), "fp16")
    it.run(model=model, ctx=ctx)
    with told("transforms/with_precision.py", "can multiply in") as it:
        weft.with_precision(Net(), ctx, "fp8")
    it.run(model=Net(), ctx=ctx)
    with told("transforms/with_precision.py", "can multiply in") as it:
        weft.with_precision(nn.Linear(16, 16), replace(ctx, engine=OneProcess()), "fp8")
    it.run(model=nn.Linear(16, 16), ctx=replace(ctx, engine=OneProcess()))
    model = nn.LazyLinear(2)
    with told("transforms/with_precision.py", "have no shape yet and cannot be cast") as it:
        weft.with_precision(model, ctx, "bf16-true")
    it.run(model=model, example_batch=X)
    model, ctx = weft.with_precision(model, ctx, "bf16-true")
    assert model.weight.dtype is torch.bfloat16


def test_two_scales_and_scales_of_halves():
    ctx = weft.local()
    scaled = weft.precision.Precision(compute=torch.float16, scaling=weft.precision.LossScaling())
    model = Net().half()
    with told("transforms/with_precision.py", "cannot be trained with a loss scale") as it:
        weft.with_precision(model, ctx, scaled)
    it.run(model=model, ctx=ctx)
    assert model.first.weight.dtype is torch.float32
    backward(model)
    model = Net()
    _, after = weft.with_precision(model.first, ctx, "fp16")
    with told("transforms/with_precision.py", "already have a loss scale") as it:
        weft.with_precision(model, after, "fp16")
    it.run(model=(model := Net()), ctx=ctx)
    backward(model)


# -- zero_partition ----------------------------------------------------------------------------------


def test_partitions_of_something_else():
    ctx = weft.local()
    model = Net()
    optimizer, lbfgs = sgd(model), torch.optim.LBFGS(model.parameters())
    for mistake, arguments, options in (
        (told("transforms/zero_partition.py", "check_optimizer("), (model, model.parameters()), {"stage": 1}),
        (told("transforms/zero_partition.py", "check_module("), (optimizer, optimizer), {"stage": 1}),
        (told("transforms/zero_partition.py", "'stage', stage"), (model, optimizer), {"stage": 4}),
        (told("transforms/zero_partition.py", "'stage', stage"), (model, optimizer), {"stage": 0}),
        (told("transforms/zero_partition.py", "units have no"), (model, optimizer), {"stage": 1, "units": nn.Linear}),
        (told("transforms/zero_partition.py", "LBFGS uses all"), (model, lbfgs), {"stage": 1}),
    ):
        with mistake as it:
            weft.zero_partition(*arguments, ctx, **options)
        it.run(model=(fresh := Net()), optimizer=sgd(fresh), ctx=ctx)
    with told("transforms/zero_partition.py", "holds parameters that are not") as it:
        weft.zero_partition(model, sgd(Net()), ctx, stage=1)
    optimizer = it.run(model=model, torch=torch)["optimizer"]
    weft.zero_partition(model, optimizer, ctx, stage=1)


def test_partitions_with_options_of_another_engine():
    deepspeed = {"by": "owner", "engine": "deepspeed"}
    for mistake, make, options in (
        (
            told("interop/deepspeed_partition.py", "steps on all parameters of a group"),
            torch.optim.Adafactor,
            deepspeed,
        ),
        (told("transforms/zero_partition.py", "does not support this in stage"), torch.optim.SGD, {"offload": "/disk"}),
        (
            told("transforms/zero_partition.py", "does not support this in stage"),
            torch.optim.SGD,
            {"config": {"train_batch_size": 8}},
        ),
        (told("transforms/zero_partition.py", "changes parameters outside step"), TwoSets, {"stage": 1}),
    ):
        model, ctx = Net(), weft.local()
        optimizer = make(model.parameters(), 0.1)
        with mistake as it:
            weft.zero_partition(model, optimizer, ctx, **{"stage": 2, **options})
        it.run(model=model, optimizer=optimizer, ctx=ctx)
        backward(model)
        optimizer.step()
    model = Net()
    model, optimizer, ctx = weft.local_steps(model, sgd(model), weft.local(), every=4)
    with told("interop/deepspeed_partition.py", "lets some step apart") as it:
        weft.zero_partition(model, optimizer, ctx, stage=2, engine="deepspeed")
    it.run(model=model, optimizer=optimizer, ctx=ctx)
