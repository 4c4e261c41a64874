"""with_precision: which dtype where; fp16 gradients in true units; steps that are skipped on all ranks."""

import copy
import gc
import math
import os
import pickle
import threading
import weakref
from collections import UserDict
from dataclasses import FrozenInstanceError, dataclass, replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import weft
from tests.variants import variants
from weft import Precision
from weft.engines.torch.hooks.graph_walk import running_backward
from weft.precision import LossScaling
from weft.tensors.blocks import full_tensor
from weft.testing import largest_difference, run_ranks

f16, f32, f64, bf16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
INF = float("inf")
# As "fp16", with a first scale that no gradient of these tests overflows.
FP16 = Precision(param=f32, compute=f16, buffer=f32, output=f32, scaling=LossScaling(init=1024.0))


class Net(nn.Module):
    def __init__(self, size=4, hidden=8, out=2):
        super().__init__()
        self.first = nn.Linear(size, hidden)
        self.last = nn.Linear(hidden, out)

    def encode(self, x):
        return torch.tanh(self.first(x))

    def loss(self, x):
        return self(x).square().mean()

    def forward(self, x):
        return self.last(self.encode(x))


def _net(kind=Net, seed=0, **options):
    torch.manual_seed(seed)
    return kind(**options)


def _x(seed=1, rows=5, size=4):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def _loss(model, x=None):
    return model(_x() if x is None else x).square().mean()


def _precise(policy=FP16, model=None, **options):
    return weft.with_precision(_net() if model is None else model, weft.local(), policy, **options)


SGD = partial(torch.optim.SGD, lr=0.1)


def _trained(policy=FP16, model=None, optimizer=SGD):
    """A model and an optimizer with a precision."""
    model, ctx = _precise(policy, model)
    optimizer, _ = weft.skip_nonfinite(optimizer(model.parameters()), ctx)
    return model, optimizer


def _grads(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def _values(model):
    return [p.detach().clone() for p in model.parameters()]


def _error(found, wanted):
    """The largest relative difference, tensor by tensor."""
    assert found.keys() == wanted.keys()
    return max(float((found[k].float() - wanted[k].float()).norm() / wanted[k].float().norm()) for k in wanted)


def _check_gradients(backward, policy=FP16, tolerance=1e-2, make=_net, **options):
    """`backward(model)` leaves the same gradients as in plain float32."""
    plain, model = make(), make()
    model, _ = _precise(policy, model, **options)
    expected, found = backward(plain), backward(model)
    assert _error(_grads(model), _grads(plain)) < tolerance
    return expected, found


# -- which dtype where -------------------------------------------------------------------------------


class Everything(nn.Module):
    """One layer of every kind, and what it saw."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("index", torch.arange(4))
        self.seen = {}

    def forward(self, x):
        self.seen["input"] = x.dtype
        self.seen["inside"] = torch.mm(x, x.t()).dtype
        self.seen["layer"] = self.trained(x).dtype
        self.seen["loss"] = mse_loss(self.trained(x), self.trained(x)).dtype
        return {"y": self.trained(x), "index": self.index}


# policy: stored parameters, stored buffers, seen inside, output
MAP = {
    "fp32": (f32, f32, f32, f32),
    "fp64": (f64, f64, f64, f64),
    "bf16": (f32, f32, bf16, f32),
    "fp16": (f32, f32, f16, f32),
    "bf16-true": (bf16, bf16, bf16, bf16),
    "fp16-true": (f16, f16, f16, f16),
    Precision(param=f64): (f64, f32, f32, None),
    Precision(buffer=bf16): (f32, bf16, f32, f32),
    Precision(output=f64): (f32, f32, f32, f64),
    Precision(compute=bf16): (f32, f32, bf16, bf16),
    Precision(param=bf16, compute=bf16, output=f32): (bf16, f32, bf16, f32),
    Precision(param=bf16, compute=f32): (bf16, f32, f32, None),
}


@pytest.mark.parametrize("policy", MAP, ids=str)
def test_the_dtypes_are_those_of_the_policy(policy):
    param, buffer, inside, output = MAP[policy]
    model, _ = _precise(policy, Everything())
    assert {p.dtype for layer in (model.trained, model.norm) for p in layer.parameters()} == {param}
    assert {p.dtype for p in model.frozen.parameters()} == {f64 if policy == "fp64" else f32}
    assert {model.table.dtype, model.norm.running_mean.dtype, model.norm.running_var.dtype} == {buffer}
    assert model.index.dtype == model.norm.num_batches_tracked.dtype == torch.int64
    if output is not None:
        found = model(_x())
        assert (model.seen["inside"], found["y"].dtype, found["index"].dtype) == (inside, output, torch.int64)


@pytest.mark.parametrize(("policy", "frozen"), [("fp64", f32), ("fp32", bf16), ("fp32", f64), ("bf16", bf16)])
def test_frozen_layers_of_another_dtype_compute_with_the_rest(policy, frozen):
    model = nn.Sequential(nn.Linear(4, 8).to(frozen).requires_grad_(False), nn.Linear(8, 2))
    plain = [p.detach().clone() for p in model.parameters()]
    model, _ = _precise(policy, model)
    model(torch.ones(3, 4)).sum().backward()
    assert all(torch.equal(p.to(f64), old.to(f64)) for p, old in zip(model.parameters(), plain, strict=True))
    assert (
        model[0].weight.dtype == (frozen if policy == "bf16" else MAP[policy][0]) and model[1].weight.grad is not None
    )


def test_operations_that_are_unsafe_in_16_bits_stay_in_32_under_a_mixed_policy():
    for policy, dtype in (("bf16", f32), ("fp16", f32), ("bf16-true", bf16)):
        model, _ = _precise(policy, Everything().requires_grad_(True))
        model(_x())
        assert model.seen["loss"] == dtype


def test_a_block_may_switch_autocast_off():
    class Careful(Net):
        def forward(self, x):
            y = self.encode(x)
            with torch.autocast("cpu", enabled=False):
                inner = y.float() @ y.float().t()
            return y, inner, self.last(y)

    model, _ = _precise(Precision(compute=bf16), _net(Careful))
    assert [t.dtype for t in model(_x())] == [bf16, f32, bf16]


@pytest.mark.parametrize("part_first", [False, True])
def test_a_part_may_have_its_own_precision(part_first):
    model, ctx = _net(), weft.local()
    for part in (True, False) if part_first else (False, True):
        _, ctx = weft.with_precision(*((model.last, ctx, "fp32") if part else (model, ctx, "bf16-true")))
    seen = []
    model.last.register_forward_hook(lambda _, args, y: seen.append((args[0].dtype, y.dtype)))
    assert (model.first.weight.dtype, model.last.weight.dtype) == (bf16, f32)
    assert model(_x()).dtype == f32 and seen == [(f32, f32)]
    mixed, ctx = _net(), weft.local()
    for part in (True, False) if part_first else (False, True):
        _, ctx = weft.with_precision(*((mixed.last, ctx, "fp32") if part else (mixed, ctx, Precision(compute=bf16))))
    assert mixed.encode(_x()).dtype == f32 and mixed(_x()).dtype == f32  # not bf16, which only the part forbids


def test_an_fp32_module_computes_in_fp32_under_autocast():
    model, _ = _precise("fp32")
    with torch.autocast("cpu", bf16):
        assert model(_x()).dtype == f32
        assert torch.is_autocast_enabled("cpu")


@dataclass
class Out:
    logits: torch.Tensor
    count: int
    more: dict


class Pair(NamedTuple):
    left: torch.Tensor
    right: list


def test_nested_outputs_keep_their_types_and_other_leaves():
    class Nested(Net):
        def forward(self, x):
            y = super().forward(x)
            return Out(y, 3, {"pair": Pair(y, [y, "text", None]), "index": torch.arange(2)}), UserDict(y=y)

    for policy in ("bf16", "fp16"):
        out, user = _precise(policy, _net(Nested))[0](_x())
        assert (type(out), out.count, out.logits.dtype) == (Out, 3, f32)
        assert type(out.more["pair"]) is Pair and out.more["pair"].right[0].dtype == f32
        assert out.more["pair"].right[1:] == ["text", None] and out.more["index"].dtype == torch.int64
        assert type(user) is UserDict and user["y"].dtype == f32 and user["y"].requires_grad


def test_inputs_are_cast_in_keywords_and_nested_values():
    class Reads(Net):
        def forward(self, x, *, more):
            assert more["y"].dtype == bf16 and more["index"].dtype == torch.int64 and more["c"].is_complex()
            return super().forward(x) + more["y"][:, :2]

    model, _ = _precise("bf16-true", _net(Reads))
    more = {"y": _x(), "index": torch.arange(2), "c": torch.ones(1, dtype=torch.complex64)}
    assert model(_x(), more=more).dtype == bf16 and more["y"].dtype == f32


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16", "fp16", "bf16-true", "fp16-true"])
def test_the_module_stays_itself(policy):
    model = _net()
    before, parameters = dict(vars(model)), list(model.parameters())
    keys = list(model.state_dict())
    again, _ = _precise(policy, model)
    assert again is model and type(model) is Net and isinstance(model, Net)
    assert list(model.state_dict()) == keys and [name for name, _ in model.named_parameters()] == [*keys]
    assert set(vars(model)) - set(before) == {"_weft_marks"} and model.encode.__func__ is Net.encode
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))


def test_fp32_changes_no_number():
    plain, model = _net(), _precise("fp32")[0]
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (plain, model)]
    for _ in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            _loss(m).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert largest_difference(_values(plain), _values(model)) == 0


def test_tied_parameters_and_shared_buffers_stay_shared():
    model = _net()
    model.tied = nn.Linear(4, 8)
    model.tied.weight = model.first.weight
    shared = torch.ones(3)
    for layer in (model.first, model.last):
        layer.register_buffer("shared", shared)
    _precise("bf16-true", model)
    assert model.tied.weight is model.first.weight and model.first.shared is model.last.shared is shared
    assert shared.dtype == model.tied.weight.dtype == bf16


def test_a_model_loaded_in_bf16_gets_float32_master_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    model, _ = _precise("bf16", model)
    with torch.no_grad():
        for _ in range(1000):
            model[0].weight += 1e-4
    assert torch.allclose(model[0].weight, torch.tensor(1.1), atol=1e-3)
    assert model(_x()).dtype == f32
    _loss(model).backward()


@pytest.mark.parametrize(
    ("policy", "stored"), [("bf16", f32), ("bf16", bf16), ("bf16-true", f32), ("bf16-true", bf16), ("fp16", f32)]
)
def test_a_frozen_backbone_is_left_alone_with_its_statistics_and_runs(policy, stored):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(stored)
    model[:2].requires_grad_(False)
    before = {name: t.dtype for name, t in model[:2].state_dict().items()}
    model, _ = _precise(policy, model)
    assert {name: t.dtype for name, t in model[:2].state_dict().items()} == before
    model(_x().to(stored)).float().sum().backward()
    assert model[2].weight.grad.dtype == (bf16 if policy == "bf16-true" else f32)


def test_existing_gradients_are_cast_along():
    model = _net()
    _loss(model).backward()
    _precise("bf16-true", model)
    assert {p.grad.dtype for p in model.parameters()} == {bf16}
    model(_x()).sum().backward()


def test_packed_sequences_pass():
    from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

    packed = pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    for policy, dtype in (("bf16", f32), ("bf16-true", bf16)):
        output, hidden = _precise(policy, nn.GRU(4, 3, batch_first=True))[0](packed)
        assert type(output) is PackedSequence and output.data.dtype == hidden.dtype == dtype


# -- policies as values ------------------------------------------------------------------------------


def test_policies_are_frozen_hashable_values():
    one, two = Precision(compute=f16, scaling=LossScaling()), Precision(compute=f16, scaling=LossScaling())
    assert one == two and hash(one) == hash(two) and one != replace(one, scaling=None)
    assert pickle.loads(pickle.dumps(one)) == one
    for value, name in ((one, "param"), (LossScaling(), "init")):
        with pytest.raises(FrozenInstanceError, match="cannot assign"):
            setattr(value, name, None)
    with pytest.raises(TypeError, match="positional"):
        Precision(f32)


@pytest.mark.parametrize(
    "options",
    [
        {"param": torch.int32}, {"compute": torch.bool}, {"reduce": torch.complex64}, {"buffer": "bf16"},
        {"output": 16}, {"compute": torch.float8_e4m3fn},
    ],
    ids=str,
)  # fmt: skip
def test_a_policy_of_other_dtypes_raises(options):
    with pytest.raises(ValueError, match=f"(?s)found:    {next(iter(options))}=.*16 bits or more.*fix:"):
        Precision(**options)


def test_a_scale_without_fp16_or_of_another_type_raises():
    with pytest.raises(ValueError, match=r"(?s)found:    compute=torch\.bfloat16.*fix:"):
        Precision(compute=bf16, scaling=LossScaling())
    for scaling in (True, {"init": 2.0}):
        with pytest.raises(TypeError, match=r"(?s)found:.*fix: .*LossScaling\(\)"):
            Precision(compute=f16, scaling=scaling)


@pytest.mark.parametrize(
    "options",
    [
        {"init": 3.0}, {"init": 0.0}, {"init": -2.0}, {"init": INF}, {"init": float("nan")}, {"init": "2"},
        {"init": None}, {"init": True}, {"growth": 0.5}, {"growth": 1.5}, {"backoff": 1.0}, {"backoff": 0.3},
        {"backoff": 2.0}, {"growth_every": 0}, {"growth_every": -1}, {"growth_every": 2.5}, {"growth_every": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_scaling_outside_its_limits_raises(options):
    with pytest.raises(
        ValueError, match=f"(?s)found:    {next(iter(options))}=.*powers of two.*fix:      weft.precision.LossScaling"
    ):
        LossScaling(**options)


def test_a_scaling_at_its_limits_is_accepted():
    LossScaling(init=1, growth=1, backoff=0.5, growth_every=1)
    LossScaling(init=2.0**-10, growth=8.0, backoff=0.125, growth_every=10**6)


@pytest.mark.parametrize("policy", ["int8", "FP16", "", None, 16, bf16, (), ["bf16"]], ids=str)
def test_an_unknown_policy_raises(policy):
    with pytest.raises(ValueError, match=r"(?s)is unknown.*found:.*'bf16-true'.*fix:"):
        _precise(policy)
    with pytest.raises(ValueError, match=r"(?s)is unknown.*found:.*fix:"), weft.precision.creation_dtype(policy):
        pass


# -- what is refused ---------------------------------------------------------------------------------


def test_neither_module_nor_optimizer_raises():
    with pytest.raises(TypeError, match=r"(?s)found:    function.*fix:"):
        weft.with_precision(_net, weft.local(), "bf16")


def test_an_optimizer_before_its_module_raises():
    model = _net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(weft.errors.OrderError, match=r"(?s)found:    transforms so far: none.*fix:"):
        weft.skip_nonfinite(optimizer, weft.local())
    _, ctx = _precise(model=_net())  # another module
    with pytest.raises(weft.errors.OrderError, match=r"(?s)found:    transforms so far: with_precision.*fix:"):
        weft.skip_nonfinite(optimizer, ctx)


def test_twice_raises():
    model, ctx = _precise()
    with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)found:    with_precision.*fix:"):
        weft.with_precision(model, ctx, "bf16")
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.parameters()), ctx)
    with pytest.raises(weft.errors.AlreadyApplied, match=r"(?s)found:    skip_nonfinite.*fix:"):
        weft.skip_nonfinite(optimizer, ctx)


def test_after_replicate_raises():
    model, ctx = weft.replicate(_net(), weft.local())
    with pytest.raises(
        weft.errors.OrderError, match=r"(?s)found:.*replicate.*fix:      move the call of with_precision before"
    ):
        weft.with_precision(model, ctx, "bf16")


def test_trained_float16_parameters_with_a_scale_are_refused_by_name():
    with pytest.raises(ValueError, match=r'(?s)found:    last\.weight, last\.bias.*fix: .*"fp16"'):
        model = _net()
        model.last.half()
        _precise(Precision(compute=f16, scaling=LossScaling()), model)
    with pytest.raises(ValueError, match=r"(?s)found:    first.weight.*fix:"):
        _precise(Precision(param=f16, compute=f16, scaling=LossScaling()))
    frozen = _net().half().requires_grad_(False)
    frozen.last.float().requires_grad_(True)
    frozen, _ = _precise("fp16", frozen)
    _loss(frozen, _x().half()).backward()
    assert frozen.first.weight.dtype == f16 and frozen.last.weight.grad is not None


def test_two_scales_on_one_parameter_are_refused():
    ctx, shared = weft.local(), nn.Linear(4, 4)
    one, two = nn.Sequential(shared, nn.Linear(4, 2)), nn.Sequential(shared, nn.Linear(4, 3))
    _, ctx = weft.with_precision(one, ctx, "fp16")
    text = r"(?s)found:    0\.weight \(of Sequential\), 0\.bias.*outermost.*fix:"
    with pytest.raises(ValueError, match=text):
        weft.with_precision(two, ctx, "fp16")
    with pytest.raises(ValueError, match=r"(?s)found:    weight \(of Sequential\)"):
        weft.with_precision(shared, ctx, "fp16")
    outer = nn.Sequential(one)
    with pytest.raises(ValueError, match=r"(?s)found:    0\.0\.weight \(of Sequential\)"):
        weft.with_precision(outer, weft.local(), "fp16")


def test_modules_without_forward_are_refused_unless_only_stored():
    for policy in ("bf16", "fp16", Precision(output=f32)):
        with pytest.raises(ValueError, match=r"(?s)found:    ModuleList.*fix:      for part in modules"):
            _precise(policy, nn.ModuleList([_net()]))
    modules, _ = _precise(Precision(param=bf16), nn.ModuleDict({"net": _net()}))
    assert modules["net"].first.weight.dtype == bf16


def test_lazy_parameters_are_refused_if_they_had_to_be_cast():
    with pytest.raises(ValueError, match=r"(?s)found:    0.weight, 0.bias, 1.weight.*fix:"):
        _precise("bf16-true", nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()))
    model, _ = _precise("bf16", nn.Sequential(nn.LazyLinear(4)))
    assert model(_x()).dtype == f32 and model[0].weight.dtype == f32


@pytest.mark.parametrize("methods", [("forward",), ("nothing",), ("encode", "encode")])
def test_bad_methods_raise(methods):
    with pytest.raises(ValueError, match=r"(?s)found:.*methods of Net other than forward.*fix:"):
        _precise(methods=methods)


def test_policies_the_device_cannot_do_are_refused():
    mps = replace(weft.local(), device=torch.device("mps"))
    with pytest.raises(ValueError, match=r"(?s)found:    float64 on mps.*fix:"):
        weft.with_precision(_net(), mps, "fp64")
    meta = replace(weft.local(), device=torch.device("meta"))
    with pytest.raises(ValueError, match=r"(?s)found:    torch has no autocast on meta.*fix:"):
        weft.with_precision(_net(), meta, "fp16")


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-true"])
def test_a_module_on_meta_is_cast_there(policy):
    model = _net()
    model.last.to("meta")
    _precise(policy, model)
    assert model.last.weight.is_meta and not model.first.weight.is_meta
    assert model.first.weight.dtype == model.last.weight.dtype == (bf16 if policy == "bf16-true" else f32)


def test_lbfgs_with_fp16_is_refused():
    model, ctx = _precise()
    with pytest.raises(ValueError, match=r'(?s)found:    LBFGS.*fix: .*"bf16"'):
        weft.skip_nonfinite(torch.optim.LBFGS(model.parameters()), ctx)
    model, ctx = _precise("bf16")
    weft.skip_nonfinite(torch.optim.LBFGS(model.parameters()), ctx)


def test_skipped_asks_for_an_optimizer_that_knows():
    model, ctx = _precise("bf16")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(weft.errors.ContractError, match=r"(?s)found:    SGD.*fix: .*skip_nonfinite\(optimizer, ctx\)"):
        weft.was_skipped(optimizer)
    optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    assert not weft.was_skipped(optimizer)
    assert weft.loss_scale(model) == weft.loss_scale(nn.Linear(1, 1)) == 1


# -- nothing else changes ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32", "bf16-true"])
def test_autocast_is_as_before_when_forward_raises(policy):
    class Breaks(Net):
        def forward(self, x):
            super().forward(x)
            raise RuntimeError("broken")

        encode_more = forward

    model, _ = _precise(policy, _net(Breaks), methods=("encode_more",))
    for outer in (False, True):
        with torch.autocast("cpu", bf16, enabled=outer):
            before = (
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.is_autocast_cache_enabled(),
            )
            for call in (model, model.encode_more):
                with pytest.raises(RuntimeError, match="broken"):
                    call(_x())
                after = (
                    torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
                    torch.is_autocast_cache_enabled(),
                )  # fmt: skip
                assert before == after


def test_a_call_that_was_interrupted_is_forgotten_at_the_next():
    # torch runs no hooks after a KeyboardInterrupt, so until then autocast stays on.
    class Slow(Net):
        interrupted = True

        def forward(self, x):
            if self.interrupted:
                raise KeyboardInterrupt("ctrl-c")
            return super().forward(x)

    def backward(model):
        if hasattr(model, "_weft_marks"):
            with pytest.raises(KeyboardInterrupt, match="ctrl-c"):
                model(_x())
        model.interrupted = False
        _loss(model).backward()

    _check_gradients(backward, make=partial(_net, Slow))
    assert not torch.is_autocast_enabled("cpu")


def test_random_state_environment_and_defaults_are_as_before():
    def state():
        return dict(os.environ), torch.get_default_dtype(), torch.get_rng_state().tolist()

    model, before = _net(), state()
    model, optimizer = _trained("fp16", model)
    _loss(model).backward()
    optimizer.step()
    assert state() == before


def test_two_contexts_side_by_side_are_as_alone():
    def job(policy, seed):
        model, optimizer = _trained(policy, _net(seed=seed), partial(torch.optim.AdamW, lr=0.05))

        def step(i):
            _loss(model, _x(i)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    policies = ["fp32", "bf16", "fp16", "bf16-true"]
    alone = []
    for seed, policy in enumerate(policies):
        model, step = job(policy, seed)
        for i in range(4):
            step(i)
        alone.append(_values(model))
    together = [job(policy, seed) for seed, policy in enumerate(policies)]
    for i in range(4):
        for _, step in together:
            step(i)
    for (model, _), expected in zip(together, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(_values(model), expected, strict=True))


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-true"])
def test_models_and_optimizers_are_collected(policy):
    model, optimizer = _trained(policy)
    for last in (False, True):
        _loss(model).backward()
        if not last:
            optimizer.step()
    refs = [weakref.ref(thing) for thing in (model, optimizer, model.first.weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp32"])
def test_copies_and_pickles_are_plain(policy):
    model, ctx = _precise(policy, methods=("loss",))
    optimizer, ctx = weft.skip_nonfinite(torch.optim.Adam(model.parameters()), ctx)
    model.loss(_x()).backward()
    optimizer.step()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(_x()), _same_numbers(model)(_x())) and other.loss.__self__ is other
        _loss(other).backward()
        assert weft.with_precision(other, weft.local(), "bf16")[0] is other
    assert copy.deepcopy(optimizer).state_dict().keys() == optimizer.state_dict().keys()
    pickle.dumps(optimizer)
    assert pickle.loads(pickle.dumps(ctx)) == ctx


def _same_numbers(model):
    plain = _net()
    plain.load_state_dict(model.state_dict())
    return plain


def test_threads_may_call_one_module():
    model, failures = _precise()[0], []

    def work():
        failures.extend(i for i in range(5) if model(_x(i)).dtype != f32 or torch.is_autocast_enabled("cpu"))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    plain = _net()
    _loss(plain).backward()
    _loss(model).backward()
    assert _error(_grads(model), _grads(plain)) < 1e-2


def test_to_find_the_backward_pass_from_another_thread_keeps_no_graph():  # hooks run in one on an accelerator
    seen = []

    def look(_):
        thread = threading.Thread(target=lambda: seen.append(running_backward().retains_graph))
        thread.start()
        thread.join()

    output = torch.ones(2, requires_grad=True) * 2
    output.register_hook(look)
    loss = output.sum()
    graph = weakref.ref(loss)
    gc.disable()
    try:
        loss.backward(retain_graph=True)
        del loss
        assert seen == [True] and graph() is None
    finally:
        gc.enable()


# -- optimizers made before --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16", "fp16", "bf16-true", "fp16-true"])
def test_an_optimizer_made_before_is_alive(policy):
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, ctx = _precise(policy, model)
    optimizer, _ = weft.skip_nonfinite(optimizer, ctx)
    before = _values(model)
    model(_x()).float().square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, _values(model), strict=True))
    assert all(any(p is q for q in optimizer.param_groups[0]["params"]) for p in model.parameters())


# -- fp16: gradients in true units -------------------------------------------------------------------


def test_gradients_are_in_true_units_after_backward():
    _check_gradients(lambda model: _loss(model).backward(), policy="fp16")
    assert weft.loss_scale(_precise("fp16")[0]) == 2.0**16


def test_small_gradients_do_not_underflow():
    def backward(model):
        (_loss(model) * 1e-7).backward()

    _check_gradients(backward, policy="fp16")
    model, _ = _precise(replace(FP16, scaling=None))
    backward(model)
    assert model.first.weight.grad.count_nonzero() < model.first.weight.numel()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches_add_up(set_to_none):
    def backward(model):
        _loss(model).backward()
        model.zero_grad(set_to_none=set_to_none)
        for i in range(4):
            (_loss(model, _x(i)) / 4).backward()

    _check_gradients(backward, policy="fp16")


def test_gradients_set_by_hand_are_added_to():
    def backward(model):
        for p in model.parameters():
            p.grad = torch.ones_like(p) * 3
        _loss(model).backward()

    _check_gradients(backward, policy="fp16", tolerance=1e-3)


def test_several_calls_before_one_backward_and_several_backwards():
    def once(model):
        sum(_loss(model, _x(i)) for i in range(3)).backward()

    def later(model):
        losses = [_loss(model, _x(i)) for i in range(3)]
        for loss in losses:
            loss.backward()

    def chained(model):
        y = torch.nn.functional.pad(model(_x()), (0, 2))
        _loss(model, y).backward()

    def retained(model):
        loss = _loss(model)
        loss.backward(retain_graph=True)
        loss.backward()

    for backward in (once, later, chained, retained):
        _check_gradients(backward)


def test_input_gradients_are_in_true_units():
    for dtype in (f32, f16):

        def backward(model, dtype=dtype):
            x = _x().to(dtype if hasattr(model, "_weft_marks") else f32).requires_grad_()
            _loss(model, x).backward()
            return {"x": x.grad}

        expected, found = _check_gradients(backward, policy="fp16")
        assert _error(found, expected) < 1e-2


def test_outputs_in_fp16_and_scales_beyond_its_range():
    policy = Precision(param=f32, compute=f16, scaling=LossScaling(init=2.0**17))
    model, _ = _precise(policy)
    assert model(_x()).dtype == f16
    _check_gradients(lambda model: (model(_x()).float().square().mean() / 4).backward(), policy)


def test_clipping_sees_the_true_norm():
    def backward(model):
        (_loss(model) * 5).backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    expected, found = _check_gradients(backward)
    assert expected > 0.2 and abs(found / expected - 1) < 1e-2


def test_training_is_that_of_fp32():
    results = []
    for policy in (None, "fp16", "bf16"):
        model = _net()
        model, optimizer = _trained(policy, model) if policy else (model, torch.optim.SGD(model.parameters(), 0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        for i in range(10):
            _loss(model, _x(i)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        results.append(dict(enumerate(_values(model))))
        assert scheduler.get_last_lr() == [0.1 * 0.5**2]
    assert _error(results[1], results[0]) < 1e-2 and _error(results[2], results[0]) < 2e-2


def test_outputs_may_be_changed_in_place():
    def backward(model):
        y = model(_x())
        y[:, 0] = 0
        y *= 0.5
        y.square().mean().backward()

    _check_gradients(backward)


def test_no_grad_and_inference_leave_no_graph():
    model, _ = _precise()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not model(_x()).requires_grad
    assert model(_x()).requires_grad


def test_sparse_and_complex_gradients():
    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.net = Net()
            self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, x):
            return (self.net(self.table(x)).float() * self.phase).abs()

    results = []
    for policy in (None, FP16):
        model = _net(Embeds)
        if policy:
            model, optimizer = _trained(policy, model)
        for _ in range(2):
            model(torch.tensor([1, 2, 1])).square().mean().backward()
        results.append({n: torch.view_as_real(g) if g.is_complex() else g.to_dense() for n, g in _grads(model).items()})
    assert _error(results[1], results[0]) < 1e-2
    optimizer.step()
    assert not weft.was_skipped(optimizer)


class Recomputes(Net):
    reentrant = False

    def forward(self, x):
        return self.last(checkpoint(self.encode, x, use_reentrant=self.reentrant))


class RecomputesReentrantly(Recomputes):
    reentrant = True


@pytest.mark.parametrize("kind", [Recomputes, RecomputesReentrantly, Net])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_inside_and_around(kind, reentrant):
    def backward(model):
        x = _x().requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant) if kind is Net else model(x)
        y.square().mean().backward()
        return {"x": x.grad}

    expected, found = _check_gradients(backward, make=partial(_net, kind))
    assert _error(found, expected) < 1e-2


@pytest.mark.parametrize("methods", [("encode",), ("loss",), ("encode", "loss")])
def test_listed_methods_inside_and_around_forward(methods):
    def both(model):
        _loss(model).backward()
        model.loss(_x()).backward()

    _check_gradients(both, methods=methods)
    model, _ = _precise(methods=("encode",))
    seen = []
    model.first.register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    assert model.encode(_x()).dtype == f32 and seen == [f16]
    _check_gradients(lambda m: (m.encode(_x()).mean() + m(_x()).mean()).backward(), methods=("encode",))


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, depth=3):
        return self.layer(x) if depth == 0 else torch.tanh(self.layer(self(x, depth - 1)))


def test_a_module_that_calls_itself():
    _check_gradients(lambda model: _loss(model).backward(), make=partial(_net, Recursive))


def test_a_submodule_called_by_itself_is_plain():
    def backward(model):
        model.first(_x()).square().mean().backward()
        _loss(model).backward()

    _check_gradients(backward)
    model, _ = _precise()
    with pytest.raises(weft.errors.ContractError, match=r"(?s)parameters of Net outside its forward.*found:.*fix:"):
        (model.first(_x()).mean() + _loss(model)).backward()


def test_parameters_that_are_unfrozen_replaced_or_added_later():
    def backward(model):
        model.first.requires_grad_(True)
        torch.manual_seed(5)
        model.last = nn.Linear(8, 3)
        _loss(model).backward()

    def make():
        model = _net()
        model.first.requires_grad_(False)
        return model

    _check_gradients(backward, make=make)


def test_a_float16_parameter_unfrozen_later_raises():
    model = _net()
    model.first.half().requires_grad_(False)
    model, _ = _precise("fp16", model)
    _loss(model, _x().half()).backward()
    model.first.requires_grad_(True)
    loss = _loss(model, _x().half())
    with pytest.raises(
        weft.errors.ContractError, match=r"(?s)found:    a parameter of shape \(8, 4\).*fix: .*float\(\)"
    ):
        loss.backward()


def test_tensors_used_inside_that_are_no_parameters():
    class Uses(Net):
        def __init__(self):
            super().__init__()
            self.hidden = [nn.Linear(2, 2)]  # not registered
            self.gain = [torch.full((2,), 3.0, requires_grad=True)]

        def forward(self, x):
            return self.hidden[0](super().forward(x)) * self.gain[0]

    def backward(model):
        for _ in range(2):
            _loss(model).backward()
        return {"hidden": model.hidden[0].weight.grad, "gain": model.gain[0].grad}

    expected, found = _check_gradients(backward, make=partial(_net, Uses))
    assert _error(found, expected) < 1e-2


def test_functional_call_gives_true_gradients():
    results = []
    for policy in (None, FP16):
        model = _net() if policy is None else _precise(policy)[0]
        other = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, other, (_x(),)).square().mean().backward()
        results.append({name: p.grad for name, p in other.items()})
    assert _error(results[1], results[0]) < 1e-2


def test_forces_computed_inside():
    class Energy(Net):
        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = super().forward(x).float().square().sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return energy / 10, force

    def backward(model):
        energy, force = model(_x())
        (energy + force.square().mean()).backward()

    _check_gradients(backward, make=partial(_net, Energy))


# -- fp16: what cannot be right raises ---------------------------------------------------------------


def _penalty(model):
    return _loss(model) + 0.1 * model.first.weight.square().sum()


def _own_parameter_as_input(model):
    return _loss(model, model.first.weight)


def _next_to_another(model):
    return _loss(model) + _loss(_precise(model=_net(seed=3))[0], model.first.weight)


def _penalty_of_gradients(model):
    x = _x().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (slope.norm() - 1) ** 2


@pytest.mark.parametrize("loss", [_penalty, _own_parameter_as_input, _next_to_another, _penalty_of_gradients])
def test_a_loss_that_uses_parameters_directly_raises_and_leaves_gradients_alone(loss):
    model, _ = _precise()
    _loss(model).backward()
    before = _grads(model)
    with pytest.raises(
        weft.errors.ContractError, match=r'(?s)parameters of Net.*found:    a parameter of shape .*fix: .*"bf16"'
    ):
        loss(model).backward()
    assert all(torch.equal(g, before[name]) for name, g in _grads(model).items() if name.startswith("last"))
    model.zero_grad()
    plain = _net()
    _loss(plain).backward()
    _loss(model).backward()  # all is as if nothing had been
    assert _error(_grads(model), _grads(plain)) < 1e-2
    bf, _ = _precise("bf16")
    loss(bf).backward()


def test_a_penalty_with_its_own_backward_is_right():
    def weights(model):
        _loss(model).backward()
        (0.1 * model.first.weight.square().sum()).backward()

    def gradients(model):
        x = _x().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ((slope.norm() - 1) ** 2).backward()
        _loss(model).backward()
        return {"x": x.grad}

    for backward in (weights, gradients):
        expected, found = _check_gradients(backward)
    assert _error(found, expected) < 1e-2


def test_second_derivatives_by_the_inputs():
    results = []
    for policy in (None, FP16):
        model = _net() if policy is None else _precise(policy)[0]
        x = _x().requires_grad_()
        (one,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (two,) = torch.autograd.grad(one.sum(), x)
        results.append({"first": one.detach(), "second": two})
    assert _error(results[1], results[0]) < 1e-2


def test_autograd_grad_for_parameters_raises_and_for_outputs_is_right():
    model, _ = _precise()
    with pytest.raises(
        weft.errors.ContractError, match=r"(?s)found:    a tensor of shape \(8, 4\).*fix:      loss.backward\(\)"
    ):
        torch.autograd.grad(_loss(model), [model.first.weight])
    hidden = []
    model.first.register_forward_hook(lambda _, __, y: hidden.append(y))
    loss = _loss(model)
    with pytest.raises(weft.errors.ContractError, match=r"(?s)found:    a tensor of shape \(5, 8\)"):
        torch.autograd.grad(loss, hidden[-1])
    y = model(_x())
    (g,) = torch.autograd.grad(y.square().sum(), y)
    assert torch.equal(g, 2 * y)


def test_forgetting_the_optimizer_raises_at_the_second_backward():
    for told in ((), ("first",)):
        model, ctx = _precise("fp16")
        optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in (model.first, model.last)]
        if told:
            weft.skip_nonfinite(optimizers[0], ctx)
        _loss(model).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss = _loss(model)
        with pytest.raises(
            weft.errors.ContractError, match=r"(?s)found:    an optimizer step.*fix: .*\(optimizer, ctx\)"
        ):
            loss.backward()


def test_accumulation_is_no_forgotten_optimizer():
    model, optimizer = _trained()
    for _ in range(2):
        for i in range(3):
            _loss(model, _x(i)).backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-1, 1)
        optimizer.zero_grad()


@pytest.mark.parametrize("then", ["forward", "step"])
def test_a_backward_that_broke_off_leaves_true_gradients(then):
    model, optimizer = _trained()
    _loss(model).backward()
    once, before = _grads(model), dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in before.items()}
    handle = model.first.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        _loss(model).backward()
    handle.remove()
    if then == "forward":
        model(_x())
        found = _grads(model)
    else:
        optimizer.step()
        found = {name: (before[name] - p.detach()) / 0.1 for name, p in model.named_parameters()}
    for name, gradient in found.items():  # the second backward has reached some of them
        ratio = float(gradient.norm() / once[name].norm())
        assert min(abs(ratio - 1), abs(ratio - 2)) < 1e-2


# -- fp16: skipped steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_a_step_with_a_bad_gradient_is_skipped(make, bad):
    model, optimizer = _trained("fp16", optimizer=make)
    _loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not weft.was_skipped(optimizer)
    before, state = _values(model), copy.deepcopy(optimizer.state_dict())
    (_loss(model) * bad).backward()
    optimizer.step()
    assert weft.was_skipped(optimizer) and weft.loss_scale(model) == 2.0**15
    assert all(torch.equal(a, b) for a, b in zip(before, _values(model), strict=True))
    assert str(state) == str(optimizer.state_dict())
    _loss(model).backward()
    optimizer.step()
    assert not weft.was_skipped(optimizer) and weft.loss_scale(model) == 2.0**15
    assert any(not torch.equal(a, b) for a, b in zip(before, _values(model), strict=True))


def test_the_scale_grows_and_backs_off_as_asked():
    scaling = LossScaling(init=64.0, growth=4.0, backoff=0.25, growth_every=3)
    model, optimizer = _trained(replace(FP16, scaling=scaling))
    scales = []
    for i in range(10):
        (_loss(model) * (INF if i == 4 else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(weft.loss_scale(model))
    assert scales == [64, 64, 256, 256, 64, 64, 64, 256, 256, 256]


def test_a_scale_that_is_too_large_finds_its_way_down():
    model, optimizer = _trained(replace(FP16, scaling=LossScaling(init=2.0**24)))
    skips = 0
    for _ in range(12):
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        skips += weft.was_skipped(optimizer)
    assert 0 < skips < 12 and not weft.was_skipped(optimizer) and weft.loss_scale(model) == 2.0 ** (24 - skips)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_gradient_made_bad_by_hand_skips():
    model, optimizer = _trained()
    scales = []
    for forward in (True, False, False):
        if forward:
            _loss(model).backward()
            model.first.weight.grad[0, 0] = INF
        else:
            model.last.bias.grad = torch.full((2,), float("nan"))
        before = _values(model)
        optimizer.step()
        assert weft.was_skipped(optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, _values(model), strict=True))
        scales.append(weft.loss_scale(model))
    assert scales == [512, 256, 128]


def test_clipping_values_cannot_hide_an_overflow():
    model, optimizer = _trained()
    (_loss(model) * INF).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    assert weft.was_skipped(optimizer)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_closure_is_checked_after_it_ran(how):
    model, optimizer = _trained("fp16", optimizer=partial(torch.optim.Adam, lr=0.1))
    plain = _net()
    reference = torch.optim.Adam(plain.parameters(), 0.1)

    def step(module, optimizer, factor):
        def closure():
            optimizer.zero_grad()
            loss = _loss(module) * factor
            loss.backward()
            return loss

        return optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)

    for factor in (1, INF, 1):
        before = _values(model)
        loss = step(model, optimizer, factor)
        assert weft.was_skipped(optimizer) == (factor == INF)
        if factor == 1:
            assert abs(loss / step(plain, reference, 1) - 1) < 1e-2
        else:
            assert all(torch.equal(a, b) for a, b in zip(before, _values(model), strict=True))
    assert largest_difference(_values(plain), _values(model)) < 1e-2


def test_schedulers_follow_the_user():
    model, optimizer = _trained()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for factor in (1, INF, 1):
        (_loss(model) * factor).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if not weft.was_skipped(optimizer):
            scheduler.step()
    assert scheduler.get_last_lr() == [0.1 * 0.25]


def test_several_optimizers_of_one_module_skip_by_themselves_and_count_once():
    for order in ((0, 1), (1, 0)):
        model, ctx = _precise(replace(FP16, scaling=LossScaling(init=1024.0, growth_every=3)))
        optimizers = []
        for layer in (model.first, model.last):
            optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(layer.parameters(), 0.1), ctx)
            optimizers.append(optimizer)
        scales, skips = [], []
        for i in range(8):
            loss = _loss(model)
            if i == 4:
                model.first.weight.register_hook(lambda g: g * INF)  # only the first one's gradients
                loss = _loss(model)
            elif i == 5:
                model.first.weight._backward_hooks.clear()
            loss.backward()
            for index in order:
                optimizers[index].step()
            model.zero_grad()
            scales.append(weft.loss_scale(model))
            skips.append([weft.was_skipped(o) for o in optimizers])
        assert scales == [1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048]
        assert skips == [[False] * 2] * 4 + [[True, False]] + [[False] * 2] * 3


def test_one_optimizer_of_two_modules_blames_the_right_one():
    ctx = weft.local()
    one, ctx = weft.with_precision(_net(), ctx, FP16)
    two, ctx = weft.with_precision(_net(seed=1), ctx, FP16)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1), ctx)
    before = _values(one) + _values(two)
    one.first.weight.register_hook(lambda g: g * INF)
    (_loss(one) + _loss(two)).backward()
    optimizer.step()
    assert weft.was_skipped(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, _values(one) + _values(two), strict=True))
    assert (weft.loss_scale(one), weft.loss_scale(two)) == (512, 1024)


def test_parameter_groups_added_later_are_checked():
    model = _net()
    model.first.requires_grad_(False)
    model, ctx = _precise(FP16, model)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.last.parameters(), 0.1), ctx)
    model.first.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.first.parameters())})
    _loss(model).backward()
    model.first.weight.grad.fill_(INF)
    optimizer.step()
    assert weft.was_skipped(optimizer) and weft.loss_scale(model) == 512


def test_a_module_without_trained_parameters():
    judge = _net(size=2).requires_grad_(False)
    ctx = weft.local()
    model, ctx = weft.with_precision(_net(), ctx, FP16)
    judge, ctx = weft.with_precision(judge, ctx, replace(FP16, scaling=LossScaling(init=256.0)))
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.parameters(), 0.1), ctx)
    plain, plain_judge = _net(), _net(size=2)
    judge(model(_x())).square().mean().backward()
    plain_judge(plain(_x())).square().mean().backward()
    assert _error(_grads(model), _grads(plain)) < 1e-2
    optimizer.step()
    assert not weft.was_skipped(optimizer)
    empty, _ = _precise(FP16, nn.Sequential(nn.Tanh()))
    x = _x().requires_grad_()
    empty(x).sum().backward()
    assert torch.allclose(x.grad, 1 - torch.tanh(_x()) ** 2, atol=1e-2)


# -- fp16: chained models ----------------------------------------------------------------------------


def _gan(ctx, policies, steps=20, replicated=False):
    """Train a generator through a discriminator; None: plain float32 on the joined batch."""
    generator, judge = _net(size=3, out=4), _net(seed=1, out=1)
    if policies:
        generator, ctx = weft.with_precision(generator, ctx, policies[0])
        judge, ctx = weft.with_precision(judge, ctx, policies[1])
    if replicated:
        generator, ctx = weft.replicate(generator, ctx)
        judge, ctx = weft.replicate(judge, ctx)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.5) for m in (generator, judge)]
    if policies:
        for optimizer in optimizers:
            _, ctx = weft.skip_nonfinite(optimizer, ctx)
    rows = slice(ctx.rank * 4, ctx.rank * 4 + 4) if replicated else slice(None)
    skips = 0
    for i in range(steps):
        real, z = _x(i, 8)[rows], _x(100 + i, 8, 3)[rows]
        ones = torch.ones(len(z), 1)
        optimizers[1].zero_grad()
        (mse_loss(judge(real), ones) + mse_loss(judge(generator(z).detach()), -ones)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        mse_loss(judge(generator(z)), ones).backward()  # leaves gradients in the judge, too
        optimizers[0].step()
        skips += policies is not None and any(weft.was_skipped(o) for o in optimizers)
    return dict(enumerate(_values(generator) + _values(judge))), skips


TWO_SCALES = (FP16, replace(FP16, scaling=LossScaling(init=64.0)))


def test_a_gan_with_two_scales_is_that_of_fp32():
    plain, _ = _gan(weft.local(), None)
    for policies in (TWO_SCALES, TWO_SCALES[::-1], (FP16, "fp32"), ("fp32", FP16), (FP16, "bf16")):
        found, skips = _gan(weft.local(), policies)
        assert skips == 0 and _error(found, plain) < 2e-2


def test_a_gan_on_two_ranks_is_that_of_fp32():
    plain, _ = _gan(weft.local(), None)
    ranks = run_ranks(_gan, 2, TWO_SCALES, replicated=True)
    for found, skips in ranks:
        assert skips == 0 and _error(found, plain) < 2e-2
        assert all(torch.equal(found[k], ranks[0][0][k]) for k in found)


def test_the_scale_that_overflowed_is_the_one_that_backs_off():
    ctx = weft.local()
    generator, ctx = weft.with_precision(_net(size=3, out=4), ctx, FP16)
    judge, ctx = weft.with_precision(_net(out=1), ctx, replace(FP16, scaling=LossScaling(init=2.0**60)))
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(generator.parameters(), 0.1), ctx)
    judge(generator(_x(size=3))).mean().backward()
    optimizer.step()
    assert weft.was_skipped(optimizer)
    assert (weft.loss_scale(generator), weft.loss_scale(judge)) == (1024, 2.0**59)


# -- ranks -------------------------------------------------------------------------------------------


def _one_rank_overflows(ctx, bad_rank, how, options):
    model, ctx = weft.with_precision(_net(), ctx, FP16)
    if options is not None:
        model, ctx = weft.replicate(model, ctx, **options)
    optimizer, ctx = weft.skip_nonfinite(torch.optim.Adam(model.parameters(), 0.1), ctx)
    if options == {"flat": True}:
        optimizer, ctx = weft.fuse_step(optimizer, ctx)
    told = []
    for i in range(3):
        before = _values(model)
        bad = i == 1 and ctx.rank == bad_rank
        (_loss(model) * (INF if bad and how == "loss" else 1)).backward()
        if bad and how == "hand":
            model.first.weight.grad[0, 0] = INF
        optimizer.step()
        optimizer.zero_grad()
        moved = any(not torch.equal(a, b) for a, b in zip(before, _values(model), strict=True))
        told.append((weft.was_skipped(optimizer), moved, weft.loss_scale(model)))
    return told, _values(model)


@pytest.mark.parametrize("options", [None, {}, {"flat": True}], ids=["alone", "replicate", "flat"])
@pytest.mark.parametrize(("n", "bad_rank", "how"), [(2, 1, "loss"), (4, 2, "loss"), (2, 0, "hand")])
def test_an_overflow_on_one_rank_skips_on_all(n, bad_rank, how, options):
    found = run_ranks(_one_rank_overflows, n, bad_rank, how, options)
    for told, values in found:
        assert told == [(False, True, 1024), (True, False, 512), (False, True, 512)]
        assert all(torch.equal(a, b) for a, b in zip(values, found[0][1], strict=True))


def _uneven_use(ctx):
    """Only rank 0 runs a backward through the second module."""
    one, ctx = weft.with_precision(_net(), ctx, replace(FP16, scaling=LossScaling(init=64.0, growth_every=2)))
    two, ctx = weft.with_precision(_net(), ctx, replace(FP16, scaling=LossScaling(init=64.0, growth_every=2)))
    optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1), ctx)
    for _ in range(4):
        _loss(one).backward()
        if ctx.rank == 0:
            _loss(two).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weft.loss_scale(one), weft.loss_scale(two)


def test_scales_are_the_same_on_all_ranks_whatever_they_ran():
    assert run_ranks(_uneven_use, 2) == [(256, 256), (256, 256)]


def _told(fn, *args):
    try:
        fn(*args)
    except (weft.errors.WeftError, ValueError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _different(ctx, what):
    model = _net()
    if what == "policy":
        return _told(weft.with_precision, model, ctx, ["bf16", "fp16"][ctx.rank])
    if what == "bad policy":
        return _told(weft.with_precision, model, ctx, ["bf16", "fp31"][ctx.rank])
    model, ctx = weft.with_precision(model, ctx, "fp16")
    strange = _net() if ctx.rank else model
    return _told(weft.skip_nonfinite, torch.optim.SGD(strange.parameters()), ctx)


@pytest.mark.parametrize(
    ("what", "zero", "one", "text"),
    [
        ("policy", "ContextError", "ContextError", "bfloat16"),
        ("bad policy", "PeerError", "ValueError", "fp31"),
        ("optimizer", "PeerError", "OrderError", "knows no module"),
    ],
)
def test_a_difference_between_ranks_raises_on_all(what, zero, one, text):
    found = run_ranks(_different, 2, what)
    assert [name for name, _ in found] == [zero, one] and all(text in told for _, told in found)


def _reduced_in(ctx, dtype):
    model, ctx = weft.with_precision(_net(), ctx, Precision(param=f32, reduce=dtype))
    model, ctx = weft.replicate(model, ctx)
    _loss(model, _x(ctx.rank)).backward()
    return _grads(model)


def test_gradients_travel_in_the_dtype_of_the_policy():
    exact, rounded = run_ranks(_reduced_in, 2, None)[0], run_ranks(_reduced_in, 2, bf16)[0]
    assert 1e-6 < _error(rounded, exact) < 1e-2 and all(g.dtype == f32 for g in rounded.values())


def _accumulates(ctx):
    model, ctx = weft.with_precision(_net(), ctx, FP16)
    model, ctx = weft.replicate(model, ctx)
    batches = [_x(10 * i + ctx.rank) for i in range(4)]
    model, loader, ctx = weft.accumulate_grads(model, batches, ctx, steps=4)
    for window in loader:
        for x in window:
            (_loss(model, x) / len(window)).backward()
    return _grads(model)


def test_windows_over_two_ranks_are_the_mean_of_fp32():
    plain = _net()
    for i in range(4):
        for rank in range(2):
            (_loss(plain, _x(10 * i + rank)) / 8).backward()
    for found in run_ranks(_accumulates, 2):
        assert _error(found, _grads(plain)) < 1e-2


# -- compile -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "policy", ["bf16", FP16, *variants("fp32", "bf16-true")], ids=["bf16", "fp16", "fp32", "bf16-true"]
)
@pytest.mark.parametrize("how", ["compile", *variants("Module.compile", "part")])
def test_compiled_modules_compute_in_the_same_precision(policy, how):
    torch._dynamo.reset()
    plain, (model, _) = _precise(policy)[0], _precise(policy, methods=("encode",))
    seen = []
    for m in (plain, model):
        m.last.register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    if how == "Module.compile":
        model.compile(backend="aot_eager")
    call = {"compile": model, "Module.compile": None, "part": nn.Sequential(model, nn.Identity())}[how]
    call = model if call is None else torch.compile(call, backend="aot_eager")
    for m, f in ((plain, plain), (model, call)):
        y = f(_x())
        y.float().square().mean().backward()
        seen.append((y.dtype, type(m)))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert _error(_grads(model), _grads(plain)) < 1e-2
    torch._dynamo.reset()


# -- creation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16", "fp16", "bf16-true", "fp16-true", Precision()], ids=str)
def test_parameters_are_created_as_the_policy_stores_them(policy):
    with weft.precision.creation_dtype(policy):
        model = _net()
    assert torch.get_default_dtype() == f32
    param = MAP[policy][0] if policy in MAP else f32
    assert {p.dtype for p in model.parameters()} == {param}
    before = [p.data_ptr() for p in model.parameters()]
    model, _ = _precise(policy, model)
    assert [p.data_ptr() for p in model.parameters()] == before  # nothing had to be cast


def test_the_default_dtype_is_as_before_after_an_error():
    with pytest.raises(RuntimeError, match="broken"), weft.precision.creation_dtype("bf16-true"):
        assert torch.get_default_dtype() == bf16
        raise RuntimeError("broken")
    assert torch.get_default_dtype() == f32


def test_16_bit_parameters_take_half_the_bytes():
    def size(model):
        return sum(p.numel() * p.element_size() for p in model.parameters())

    assert size(_precise("bf16-true")[0]) * 2 == size(_precise("bf16")[0])


# -- sharded -----------------------------------------------------------------------------------------


def _keeps_casts(ctx, strategy):
    seen = []

    class Net(torch.nn.Linear):
        def forward(self, x):
            seen.append(torch.is_autocast_cache_enabled())
            return super().forward(x)

    model, ctx = weft.with_precision(Net(2, 2), ctx, "bf16")
    model, ctx = getattr(weft, strategy)(model, ctx)
    model(torch.ones(1, 2))
    return seen


@pytest.mark.parametrize(("strategy", "kept"), [("replicate", True), ("fully_shard", False)])
def test_what_autocast_has_cast_is_not_kept_where_parameters_are_freed(strategy, kept):
    assert run_ranks(_keeps_casts, 2, strategy) == [[kept]] * 2


# -- two optimizers over one module ------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x), self.two(x)


def _two_heads(ctx, strategy, bad, first, clip):
    """Whether each head's optimizer skipped and changed its head, and how the scale moved."""
    torch.manual_seed(0)
    model, after = weft.with_precision(Heads(), ctx, "fp16")
    if strategy is not None:
        model, after = strategy(model, after)
    optimizers = {}
    for name in ("one", "two"):
        optimizer = torch.optim.SGD(getattr(model, name).parameters(), 0.1, weight_decay=0.5)
        optimizers[name], after = weft.skip_nonfinite(optimizer, after)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    heads = dict(zip(("one", "two"), model(torch.full((2, 4), 0.1)), strict=True))
    sum(y.sum() * (1e6 if name == bad and ctx.rank == 0 else 1e-3) for name, y in heads.items()).backward()
    if clip:
        weft.clip_grads(model, after, max_norm=1.0)
    for name in (first, *(other for other in optimizers if other != first)):
        optimizers[name].step()
    moved = {
        name: any(
            bool(full_tensor((p.detach() != before[n]).any()))
            for n, p in model.named_parameters()
            if n.startswith(name)
        )
        for name in optimizers
    }
    return {name: weft.was_skipped(one) for name, one in optimizers.items()}, moved, weft.loss_scale(model) / 2**16


def _two_heads_all(ctx):
    return {
        (strategy and strategy.__name__, bad, first, clip): _two_heads(ctx, strategy, bad, first, clip)
        for strategy in (None, weft.replicate, weft.fully_shard)
        if strategy is not None or ctx.world_size == 1
        for bad in ("none", "one", "two")
        for first in ("one", "two")
        for clip in (False, True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_an_overflow_skips_the_optimizer_that_it_concerns(n):
    for found in run_ranks(_two_heads_all, n):
        for (strategy, bad, first, clip), (skipped, moved, scale) in found.items():
            both = clip and bad != "none"  # clipping by a norm that is not finite has spoilt the other head too
            expected = {name: both or name == bad for name in ("one", "two")}
            assert skipped == expected, (strategy, bad, first, clip)
            assert scale == (1 if bad == "none" else 0.5), (strategy, bad, first, clip)
            if n == 1 or strategy == "replicate":
                assert moved == {name: not skip for name, skip in expected.items()}, (strategy, bad, first, clip)


# -- code outside of a module -----------------------------------------------------------------------


def test_code_outside_of_a_module_computes_by_its_policy():
    ctx, x = weft.local(), torch.ones(2, 2)
    for policy, inside in (("bf16", bf16), (Precision(), f32), ("fp32", f32), ("bf16-true", f32)):
        with weft.precision.autocast(policy, ctx):
            assert (x @ x).dtype is inside
        with torch.autocast("cpu", bf16), weft.precision.autocast(policy, ctx):
            assert (x @ x).dtype is (bf16 if policy == Precision() else inside)
    with pytest.raises(ValueError, match=r"loss scale(.|\n)*methods="), weft.precision.autocast("fp16", ctx):
        pass
    with torch.no_grad(), weft.precision.autocast("fp16", ctx):
        assert (x @ x).dtype is f16
    assert (x @ x).dtype is f32


class _Allocated(TorchDispatchMode):
    """Bytes per element of new tensors of this many elements."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.bytes = elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        held = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.numel() == self.elements:
            self.bytes += made.element_size() * (made.untyped_storage().data_ptr() not in held)
        return made


def test_the_gradient_of_logits_takes_no_more_than_with_grad_scaler():
    rows, classes = 64, 500
    x, y = torch.randn(rows, 16), torch.randint(classes, (rows,))

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, classes))

    plain, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", f16):
        scaled = scaler.scale(nn.functional.cross_entropy(plain(x), y))
    with _Allocated(rows * classes) as theirs:
        scaled.backward()
    model, _ = _precise(FP16, net())
    loss = nn.functional.cross_entropy(model(x), y)
    with _Allocated(rows * classes) as ours:
        loss.backward()
    assert 0 < ours.bytes <= theirs.bytes == 10
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad * 1024, q.grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_what_came_in_is_seen_wherever_it_is(bad):
    for place in (0, 3, 6):
        model, _ = _precise(FP16, nn.Linear(3, 7))
        gradient = torch.full((1, 7), torch.finfo(f32).max if bad is None else 0.0)
        gradient[0, place] = gradient[0, place] if bad is None else bad
        model(torch.ones(1, 3)).backward(gradient)
        (scale,) = [one for one in gc.get_objects() if type(one).__name__ == "LossScale" and one._module() is model]
        assert bool(scale.came_in) == (bad is not None)
