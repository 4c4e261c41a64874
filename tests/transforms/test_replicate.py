"""replicate: gradients averaged as DDP does, without its wrapper, and everything that is refused."""

import copy
import pickle
import weakref
from collections import OrderedDict
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import weft
from weft import torch_internals
from weft.contract import GradSync, offered
from weft.engines.torch.hooks.bypassed_forward import methods_that_call
from weft.engines.torch.reducing.buckets import Buckets
from weft.testing import largest_difference, run_ranks


class Net(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size)
        self.third = nn.Linear(size, 2)

    def encode(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def decode(self, z):
        return self.third(z)

    def forward(self, x):
        return self.decode(self.encode(x))

    def loss(self, x):
        return self(x).square().mean()


def _net(size=4, seed=0):
    torch.manual_seed(seed)
    return Net(size).double()


def _x(rank, rows=3, size=4):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rank + 10), dtype=torch.float64)


def _train(model, optimizer, x, steps=3):
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _against_ddp(ctx, options, bucket_cap_mb):
    x = _x(ctx.rank)
    ddp = nn.parallel.DistributedDataParallel(
        _net(),
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,
        find_unused_parameters=options.get("unused") == "zero",
    )
    theirs = _train(ddp, torch.optim.AdamW(ddp.parameters(), 0.1), x)
    model, _ = weft.replicate(_net(seed=ctx.rank), ctx, **options)
    ours = _train(model, torch.optim.AdamW(model.parameters(), 0.1), x)
    return theirs, ours


@pytest.mark.filterwarnings("ignore:.*find_unused")
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 1}, {"flat": True}, {"unused": "zero"}, {"flat": True, "unused": "zero"}], ids=str
)
def test_same_numbers_as_ddp(n, options):
    found = run_ranks(_against_ddp, n, options, 25)
    for theirs, ours in found:
        assert largest_difference(theirs, ours) < 1e-15
        assert largest_difference(ours, found[0][1]) == 0


def _count(ctx, options, phase):
    from torch.distributed.tensor.debug import CommDebugMode

    model, ctx = weft.replicate(_net(), ctx, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _train(model, optimizer, _x(0))  # buckets are made anew after the first step
    counts = {}
    for name in ("forward", "backward", "step"):
        with CommDebugMode() as counter:
            if name == "forward":
                loss = model(_x(0)).sum()
            elif name == "backward":
                loss.backward()
            else:
                optimizer.step()
        counts[name] = counter.get_total_counts()
    weft.contract.offered(model, weft.contract.GradSync)[0].begin_window()
    with CommDebugMode() as counter:
        model(_x(0)).sum().backward()
    counts["silent"] = counter.get_total_counts()
    return counts[phase] if phase else counts


# first: 4x4 + 4 doubles = 160 bytes, second the same, third 80 bytes; buckets fill from the last.
@pytest.mark.parametrize(
    ("options", "messages"),
    [({}, 1), ({"bucket_bytes": 1}, 6), ({"bucket_bytes": 200}, 2), ({"bucket_bytes": 240}, 2), ({"flat": True}, 1)],
    ids=str,
)
def test_messages_are_sent_in_a_reduced_backward_only(options, messages):
    # flat: a small buffer is exchanged between pairs of ranks, by messages that are no collectives
    expected = {"forward": 0, "backward": messages, "step": 0, "silent": 0}
    assert run_ranks(_count, 2, options, None) == [expected] * 2


def _starts_equal(ctx):
    class WithBuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x):
            self.count += x.mean(0).detach()
            return self.layer(x) + 0 * self.count

    torch.manual_seed(ctx.rank)
    results = []
    for buffers in ("broadcast", "local"):
        model = WithBuffer()
        model.count += ctx.rank
        model, _ = weft.replicate(model, ctx, buffers=buffers)
        before = model.count.tolist()
        model(torch.full((1, 2), float(ctx.rank))).sum().backward()
        results.append((model.layer.weight.tolist(), before, model.count.tolist()))
    return results


def test_ranks_start_equal_and_buffers_follow_the_policy():
    zero, one = run_ranks(_starts_equal, 2)
    assert zero[0] == one[0] and zero[1][:2] == one[1][:2]
    assert zero[1][2] == [0, 0] and one[1][2] == [1, 1]


# -- what may go through the module ------------------------------------------------------------------


def _methods(ctx, how):
    x = _x(ctx.rank)
    model, ctx = weft.replicate(_net(), ctx, methods=("encode",) if how == "listed" else (), unused="zero")
    try:
        if how == "submodule":
            model.second(x).sum().backward()
        elif how == "loss":
            model.loss(x).backward()
        else:
            model.encode(x).sum().backward()
    except weft.errors.NotSynchronized as error:
        return str(error)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return gradients


def test_a_listed_method_is_reduced_and_unused_parameters_have_no_gradient():
    plain = [_net(), _net()]
    for rank, net in enumerate(plain):
        net.encode(_x(rank)).sum().backward()
    zero, one = run_ranks(_methods, 2, "listed")
    for name, expected in plain[0].named_parameters():
        if expected.grad is None:
            assert zero[name] is None and one[name] is None
        else:
            mean = (expected.grad + dict(plain[1].named_parameters())[name].grad) / 2
            assert torch.allclose(zero[name], mean, atol=1e-15, rtol=0) and torch.equal(zero[name], one[name])


def test_a_method_that_calls_forward_needs_no_listing():
    zero, one = run_ranks(_methods, 2, "loss")
    assert all(torch.equal(zero[name], one[name]) for name in zero)


@pytest.mark.parametrize("how", ["method", "submodule"])
def test_a_gradient_past_forward_raises(how):
    for text in run_ranks(_methods, 2, how):
        assert "of Net past forward" in text and "a call of encode, not in methods=()" in text
        assert "fix:      weft.replicate(model, ctx, methods=('encode',))" in text


class Inner(Net):
    """As models of transformers: a part that does the work, getters, classes and functions among the attributes."""

    config_class = dict

    def __init__(self):
        super().__init__()
        self.model = Net()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def get_model(self):
        return self.model

    def through_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def embed(self, x):
        return self._inner(x)

    def _inner(self, x):
        return self.model.encode(x)

    def beside(self, x):
        return x + self.first_of_all(x)  # since Python 3.13, one instruction loads both x and self

    def forward(self, x):
        return self.decode(self.through_blocks(x) + self.embed(x))


def test_methods_are_found_that_compute_with_a_part():
    assert methods_that_call(Inner, "model") == ["embed"]
    assert methods_that_call(Inner, "blocks") == ["through_blocks"]
    assert methods_that_call(Inner, "first_of_all") == ["beside"]
    assert methods_that_call(Inner, "third") == ["decode"] and methods_that_call(nn.Sequential, "0") == []


def _inner_part(ctx):
    model, ctx = weft.replicate(nn.Sequential(Net(), nn.Linear(2, 2)).double(), ctx)
    try:
        model[0](_x(ctx.rank)).sum().backward()
    except weft.errors.NotSynchronized as error:
        return str(error)
    return "nothing raised"


def test_a_call_of_a_part_is_named_where_no_method_helps():
    for text in run_ranks(_inner_part, 2):
        assert "a call of '0' itself" in text and "model(...)  # in place of model[0](...)" in text


@pytest.mark.parametrize("methods", [("forward",), ("nothing",), ("encode", "encode")])
def test_bad_methods(methods):
    with pytest.raises(ValueError, match="(?s)found:.*methods of Net other than forward.*fix:"):
        weft.replicate(_net(), weft.local(), methods=methods)


def _copies(ctx):
    model, ctx = weft.replicate(_net(), ctx, methods=("encode",))
    assert type(model) is Net and list(model.state_dict()) == list(_net().state_dict())
    twin, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    x = _x(0)
    for other in (twin, again):
        assert torch.equal(other.encode(x), model.encode(x)) and other.encode.__self__ is other
        other(x).sum().backward()  # plain: nothing is reduced, nothing raises
    return twin.first.weight.grad is not None and model.first.weight.grad is None


def test_a_copy_is_plain():
    assert run_ranks(_copies, 2) == [True, True]


# -- many small gradients ----------------------------------------------------------------------------


def _deep(layers=10):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(layers)]
    for layer in layers[:2]:
        layer.weight.data = layer.weight.data.t().contiguous().t()  # another order of its elements in memory
    return nn.Sequential(*layers).double()


def _deep_steps(model, optimizer, batches, ranks):
    """Frozen and unfrozen parameters, two backward passes, and a step that only momentum must not make."""
    for step, batch in enumerate(batches):
        model[3].requires_grad_(step != 1)
        if step == 2:
            model(batch[0])  # without a backward pass there are no gradients
            optimizer.step()
            assert all(p.grad is None for p in model.parameters())
        for x in batch:
            (model(x).square().sum() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 3)
    return [p.detach().clone() for p in model.parameters()]


def _deep_on_ranks(ctx):
    model, ctx = weft.replicate(_deep(), ctx)
    before = [p.data_ptr() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    batches = [[_x(10 * step + ctx.rank), _x(100 + 10 * step + ctx.rank)] for step in range(5)]
    found = _deep_steps(model, optimizer, batches, 1)
    assert [p.data_ptr() for p in model.parameters()] == before
    with pytest.raises(weft.errors.OrderError, match="are not in a flat buffer"):
        weft.fuse_step(optimizer, ctx)
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_many_small_gradients_travel_at_once_with_the_same_numbers(n):
    model = _deep()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    batches = [[_x(k + 10 * step + rank) for k in (0, 100) for rank in range(n)] for step in range(5)]
    expected = _deep_steps(model, optimizer, batches, n)
    for found in run_ranks(_deep_on_ranks, n):
        assert largest_difference(found, expected) < 1e-12


def _messages(ctx, options, layers):
    model, ctx = weft.replicate(_deep(layers), ctx, **options)
    (reducer,) = weft.contract.offered(model, weft.contract.GradSync)
    return type(reducer.transport.channel).__name__, "chosen: small gradients travel as one" in weft.explain(ctx)


@pytest.mark.parametrize(
    ("options", "layers", "kind"),
    [
        ({}, 10, "FlatBuffer"),
        ({"flat": True}, 10, "FlatBuffer"),
        ({}, 7, "Buckets"),
        ({"bucket_bytes": 1000}, 10, "Buckets"),
        ({"unused": "zero"}, 10, "Buckets"),
        ({"compress": weft.precision.PowerSGD()}, 10, "Buckets"),
    ],
    ids=str,
)
def test_gradients_travel_at_once_where_they_are_many_and_small(options, layers, kind):
    assert run_ranks(_messages, 2, options, layers) == [(kind, kind == "FlatBuffer" and "flat" not in options)] * 2


# -- unused parameters -------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, side):
        hidden = self.trunk(x)
        return {"left": self.left(hidden), "right": self.right(hidden), "both": self.left(hidden) + self.right(hidden)}[
            side
        ]


def _branches(ctx, sides, options):
    torch.manual_seed(0)
    model, ctx = weft.replicate(Branches(), ctx, **options)
    try:
        model(torch.ones(1, 2) * (ctx.rank + 1), sides[ctx.rank]).sum().backward()
    except (weft.errors.UnusedParameters, weft.errors.PeerError) as error:
        return type(error).__name__, str(error)
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def _spare(ctx, flat):
    model, ctx = weft.replicate(Skips(), ctx, flat=flat)
    for _ in range(2):
        try:
            model(torch.ones(1, 2)).sum().backward()
        except weft.errors.UnusedParameters as error:
            text = str(error)
    return text


@pytest.mark.parametrize("flat", [False, True])
def test_an_unused_parameter_is_named_in_the_same_backward(flat):
    for text in run_ranks(_spare, 2, flat):
        assert "2 parameter(s) of Skips" in text and "found:    spare.weight, spare.bias" in text
        assert 'unused="zero"' in text


@pytest.mark.parametrize("flat", [False, True])
def test_unused_on_one_rank_counts_as_zero(flat):
    zero, one = run_ranks(_branches, 2, ("left", "right"), {"unused": "zero", "flat": flat})
    torch.manual_seed(0)
    plain = [Branches(), None]
    plain[1] = copy.deepcopy(plain[0])
    for rank, side in enumerate(("left", "right")):
        plain[rank](torch.ones(1, 2) * (rank + 1), side).sum().backward()
    for name in zero:
        parts = [dict(p.named_parameters())[name].grad for p in plain]
        expected = sum(torch.zeros_like(zero[name]) if part is None else part for part in parts) / 2
        assert torch.allclose(zero[name], expected, atol=1e-7) and torch.equal(zero[name], one[name])


@pytest.mark.parametrize("flat", [False, True])
def test_unused_on_all_ranks_has_no_gradient(flat):
    for found in run_ranks(_branches, 2, ("left", "left"), {"unused": "zero", "flat": flat}):
        assert found["right.weight"] is None and found["left.weight"] is not None


def _ignored_output(ctx):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            return {"a": self.a(x), "aux": [self.b(x)]}

    model, ctx = weft.replicate(Two(), ctx, unused="zero")
    for _ in range(3):
        model(torch.ones(1, 2))["a"].sum().backward()
    return model.a.weight.grad is not None


def test_an_output_that_the_loss_ignores():
    assert run_ranks(_ignored_output, 2) == [True, True]


# -- several calls, several backwards ----------------------------------------------------------------


def _calls(ctx, pattern, options):
    model, ctx = weft.replicate(_net(), ctx, **options)
    one, two = _x(ctx.rank), _x(ctx.rank + 2)
    if pattern == "f f b":
        (model(one).sum() + model(two).square().sum()).backward()
    elif pattern == "f f b b":
        first, second = model(one).sum(), model(two).square().sum()
        first.backward()
        second.backward()
    elif pattern == "f b f b":
        model(one).sum().backward()
        model(two).square().sum().backward()
    elif pattern == "retain":
        loss = model(one).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    elif pattern == "penalty":
        x = one.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (model(x).sum() + slope.square().sum()).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"flat": True}], ids=str)
@pytest.mark.parametrize("pattern", ["f f b", "f f b b", "f b f b", "retain", "penalty"])
def test_any_pattern_of_calls_and_backwards(pattern, options):
    expected = None
    for rank in range(2):
        parts = _plain_calls(rank, pattern)
        expected = parts if expected is None else [(a + b) / 2 for a, b in zip(expected, parts, strict=True)]
    for found in run_ranks(_calls, 2, pattern, options):
        assert largest_difference(found, expected) < 1e-14


def _plain_calls(rank, pattern):
    alone = weft.testing.fake(0, 1)
    return _calls(_Ranked(alone, rank), pattern, {})


class _Ranked:
    """A context of one rank that gives another rank's data."""

    def __new__(cls, ctx, rank):
        from dataclasses import replace

        return replace(ctx, rank=rank, axes=(("data", 1),))


def _norms(ctx):
    """Two forwards before a backward, with batch norm: torch's DDP raises here with its defaults."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model, ctx = weft.replicate(model, ctx)
    for _ in range(2):
        (model(_x(ctx.rank)).sum() + model(_x(ctx.rank + 2)).sum()).backward()
    return model[1].running_mean.tolist(), model[0].weight.grad.tolist()


def test_two_forwards_with_batch_norm():
    zero, one = run_ranks(_norms, 2)
    assert zero == one


def _steps_inside(ctx, how):
    model, ctx = weft.replicate(_net(), ctx)
    model, windows, ctx = weft.accumulate_grads(model, [_x(i) for i in range(4)], ctx, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for window in windows:
            for x in window:
                model(x).sum().backward()
                if how == "each":
                    optimizer.step()
                    optimizer.zero_grad()
                if how == "break":
                    break
            if how == "break":
                optimizer.zero_grad()
                continue
            optimizer.step()
    except weft.errors.NotSynchronized as error:
        return str(error)
    return "fine"


def test_a_step_in_the_middle_of_a_window_is_noticed():
    for text in run_ranks(_steps_inside, 2, "each"):
        assert "an optimizer step in the middle of a window" in text and "fix:" in text
    assert run_ranks(_steps_inside, 2, "break") == ["fine", "fine"]


def _torn(ctx):
    model, ctx = weft.replicate(_net(), ctx)
    for fail in (False, True, False):
        loss = model(_x(ctx.rank)).sum()
        if fail:
            loss.register_hook(_raise)
        try:
            (loss * 1).backward()
        except KeyError:
            model.zero_grad()
    return [p.grad.clone() for p in model.parameters()]


def _raise(gradient):
    raise KeyError("in backward")


def test_a_backward_that_raises_does_not_spoil_the_next():
    zero, one = run_ranks(_torn, 2)
    assert largest_difference(zero, one) == 0


# -- a torch that does not call what it was given ----------------------------------------------------


class _NeverCalled:
    """In place of torch's reducer: no gradient reaches it."""

    def __init__(self, *args):
        pass

    def prepare_for_backward(self, outputs):
        pass

    def _check_reducer_finalized(self):
        pass

    def _rebuild_buckets(self):
        return False


def _nothing(*args, **kwargs):
    return RemovableHandle(OrderedDict())


_NOT_CALLED = {
    "reducer": ("torch.distributed.Reducer", _NeverCalled),
    "hooks on gradients": ("torch.Tensor.register_post_accumulate_grad_hook", _nothing),
    "function for buckets": ("weft.torch_internals.register_comm_hook", _nothing),
}


def _not_called(ctx, which):
    with mock.patch(*_NOT_CALLED[which]):
        model = _net().float()
        if which == "function for buckets":
            model, ctx = weft.with_precision(model, ctx, weft.Precision(reduce=torch.bfloat16))
        model, ctx = weft.replicate(model, ctx)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(weft.errors.NotSynchronized) as caught:
            _train(model, optimizer, _x(ctx.rank).float(), steps=1)
        return str(caught.value), largest_difference(before, list(model.parameters()))


@pytest.mark.parametrize("which", _NOT_CALLED)
def test_what_torch_does_not_call_is_noticed_in_the_first_step(which):
    for text, change in run_ranks(_not_called, 2, which):
        assert "averaged" in text and "fix:" in text and not change


def _released(ctx):
    made = []

    def reducer(*args):
        made.append(weakref.ref(one := real(*args)))
        return one

    real = torch.distributed.Reducer
    with (
        mock.patch("torch.distributed.Reducer", reducer),
        mock.patch.object(torch_internals.REBUILD_BUCKETS, "spelling", "gone"),
    ):
        model, ctx = weft.replicate(_net().float(), ctx)
        with pytest.raises(weft.errors.ContextError, match="gone") as caught:
            model(_x(ctx.rank).float()).sum().backward()
    frames = [entry.frame.f_locals.get("self") for entry in caught.traceback]
    held = any(isinstance(each, Buckets) for each in frames)
    before = [ref() is not None for ref in made]
    for sync in offered(model, GradSync):
        sync.release()  # as the end of the context does
    return held, before, [ref() is not None for ref in made]


def test_an_error_does_not_keep_the_reducer_of_torch():
    """As the last owner of the process group, it would deadlock with a thread of gloo when the traceback is freed."""
    assert run_ranks(_released, 2) == [(True, [True], [False])] * 2


# -- frozen, tied, sparse, cast ----------------------------------------------------------------------


def _frozen(ctx):
    model = _net().requires_grad_(False)
    model, ctx = weft.replicate(model, ctx)
    x = _x(0).requires_grad_()
    model(x).sum().backward()
    return x.grad is not None


def test_a_frozen_model_is_usable():
    assert run_ranks(_frozen, 2) == [True, True]


class _Phases(nn.Module):
    def __init__(self):
        super().__init__()
        self.real = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.phase = nn.Parameter(torch.full((3,), 1 + 2j, dtype=torch.complex128))

    def forward(self, x):
        return ((self.real * x) * self.phase).abs().square().sum() + (self.phase * 1j).real.sum()


def _complex(ctx, flat, reduce):
    model = _Phases()
    if ctx.world_size > 1 and reduce is not None:
        model, ctx = weft.with_precision(model, ctx, weft.Precision(reduce=reduce))
    model, ctx = weft.replicate(model, ctx, flat=flat)
    rows = [ctx.rank + 1.0] if ctx.world_size > 1 else [1.0, 2.0]
    for row in rows:
        (model(torch.full((3,), row, dtype=torch.float64)) / len(rows)).backward()
    return [model.real.grad, torch.view_as_real(model.phase.grad)]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("reduce", [None, torch.float32, torch.bfloat16])
def test_complex_gradients_keep_their_imaginary_part(flat, reduce):
    expected = _complex(weft.local(), flat, reduce)
    for found in run_ranks(_complex, 2, flat, reduce):
        torch.testing.assert_close(found, expected, rtol=1e-2 if reduce is torch.bfloat16 else 1e-12, atol=0)


def _sparse(ctx):
    torch.manual_seed(0)
    model, ctx = weft.replicate(nn.Sequential(nn.Embedding(6, 2, sparse=True), nn.Linear(2, 1)), ctx)
    model(torch.tensor([ctx.rank, 3])).sum().backward()
    return model[0].weight.grad.to_dense()[:, 0].ne(0).tolist()


def test_sparse_gradients():
    assert run_ranks(_sparse, 2) == [[True, True, False, True, False, False]] * 2


def _reduced_in(ctx, flat):
    model, ctx = weft.with_precision(_net().float(), ctx, weft.Precision(reduce=torch.bfloat16))
    model, ctx = weft.replicate(model, ctx, flat=flat)
    model(_x(ctx.rank).float()).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("flat", [False, True])
def test_gradients_travel_in_the_dtype_of_the_policy(flat):
    found = run_ranks(_reduced_in, 2, flat)
    exact = [p / 2 for p in _sum_plain()]
    for ours, expected in zip(found[0], exact, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, ours.bfloat16().float())
        assert torch.allclose(ours, expected.float(), rtol=1e-2, atol=1e-3)
    assert not all(torch.equal(ours, expected.float()) for ours, expected in zip(found[0], exact, strict=True))
    assert largest_difference(*found) == 0


def _sum_plain():
    nets = [_net().float(), _net().float()]
    for rank, net in enumerate(nets):
        net(_x(rank).float()).sum().backward()
    return [a.grad + b.grad for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True)]


# -- batch norm over ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["1d", "2d", "cumulative", "plain"])
def test_sync_batch_norm_equals_one_process_with_all_data(kind):
    found = run_ranks(_sync_norm, 2, kind)
    expected = _sync_norm(weft.local(), kind)
    for result in found:
        assert largest_difference(result["state"], expected["state"]) < 1e-12
        assert largest_difference(result["gradients"], [g / 1 for g in expected["gradients"]]) < 1e-12
        assert result["classes"] == [True] * 3
    assert torch.allclose(torch.cat([r["output"] for r in found]), expected["output"], atol=1e-12)


def _sync_norm(ctx, kind):
    torch.manual_seed(0)
    shape = (8, 3, 4, 4) if kind == "2d" else (8, 3)
    everything = torch.randn(shape, dtype=torch.float64)
    norm = {
        "1d": lambda: nn.BatchNorm1d(3),
        "2d": lambda: nn.BatchNorm2d(3),
        "cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
        "plain": lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False),
    }[kind]()
    mix = nn.Conv2d(3, 3, 1) if kind == "2d" else nn.Linear(3, 3)
    model = nn.Sequential(mix, norm, nn.Tanh()).double()
    own = type(model[1])
    model, ctx = weft.sync_batch_norm(model, ctx)
    model, ctx = weft.replicate(model, ctx)
    x = everything.chunk(ctx.world_size)[ctx.rank]
    for _ in range(2):
        model.zero_grad()
        output = model(x)  # in training: with the statistics of all ranks
        (output.square().sum() * ctx.world_size / len(everything)).backward()
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "gradients": [p.grad.clone() for p in model.parameters()],
        "output": output.detach(),
        "classes": [isinstance(model[1], own), type(model) is nn.Sequential, isinstance(copy.deepcopy(model)[1], own)],
    }


# -- refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bucket_bytes": 0}, "found:    0"),
        ({"bucket_bytes": True}, "found:    True"),
        ({"unused": "never"}, "found:    'never'"),
        ({"buffers": "mean"}, "found:    'mean'"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ValueError, match=f"(?s){text}.*fix:"):
        weft.replicate(_net(), weft.local(), **options)


def test_unknown_axis_and_no_module():
    with pytest.raises(weft.errors.ContextError, match="(?s)axis = 'model' is not an axis.*fix:"):
        weft.replicate(_net(), weft.local(), axis="model")
    with pytest.raises(TypeError, match="(?s)found:    list.*fix:"):
        weft.replicate([1], weft.local())
    with pytest.raises(TypeError, match="(?s)found:    NoneType.*fix:"):
        weft.replicate(_net(), None)


def test_meta_and_lazy_modules():
    with pytest.raises(ValueError, match="(?s)first.weight on meta.*fix:    .*real device"), torch.device("meta"):
        weft.replicate(Net(), weft.local())
    with pytest.raises(ValueError, match="(?s)no shape yet.*weight, bias.*fix:"):
        weft.replicate(nn.LazyLinear(3), weft.local())


def _nested(ctx):
    model, ctx = weft.replicate(_net(), ctx)
    texts = []
    for part in (model.first, nn.Sequential(model)):
        try:
            weft.replicate(part, ctx)
        except weft.errors.AlreadyApplied as error:
            texts.append(str(error))
    return texts


def test_a_part_or_a_parent_of_a_replicated_module():
    for inside, outside in run_ranks(_nested, 2):
        assert "of Linear are replicated already" in inside and "0.first.weight" in outside


def _different_models(ctx):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 if ctx.rank else 2))
    before = [p.clone() for p in model.parameters()]
    try:
        weft.replicate(model, ctx)
    except weft.errors.ContextError as error:
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        return str(error)
    return "nothing raised"


def test_different_models_are_told_apart_by_name():
    for text in run_ranks(_different_models, 2):
        assert "1.weight: '(2, 2) torch.float32 trained' on rank 0, '(3, 2) torch.float32 trained' on rank 1" in text


def _different_options(ctx):
    try:
        weft.replicate(_net(), ctx, bucket_bytes=100 + ctx.rank)
    except weft.errors.ContextError as error:
        return str(error)
    return "nothing raised"


def test_different_options_are_named():
    for text in run_ranks(_different_options, 2):
        assert "bucket_bytes: 100 on rank 0, 101 on rank 1" in text


def _moved(ctx):
    model, ctx = weft.replicate(_net(), ctx, flat=True)
    model.float()
    try:
        model(_x(0).float())
    except weft.errors.ContractError as error:
        return str(error)
    return "nothing raised"


def test_a_flat_model_must_not_be_moved():
    for text in run_ranks(_moved, 2):
        assert "moved out of the flat buffer" in text and "fix:" in text


# -- the step on the flat buffer ---------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


def _fused(ctx, name):
    results = []
    for fuse in (False, True):
        model, c = weft.replicate(_net(), ctx, flat=True)
        groups = [
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.02},
            {"params": [p for p in model.parameters() if p.dim() > 1]},
        ]
        optimizer = OPTIMIZERS[name](groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if fuse:
            optimizer, c = weft.fuse_step(optimizer, c)
        for step in range(4):
            model(_x(ctx.rank)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step == 1:  # through a state_dict and back
                state = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(state)
        results.append(
            (
                [p.detach().clone() for p in model.parameters()],
                optimizer.state_dict(),
                len(optimizer.param_groups[0]["params"]),
            )
        )
    return results


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_step_has_the_numbers_and_the_state_of_the_plain_one(name):
    for plain, fused in run_ranks(_fused, 2, name):
        assert largest_difference(plain[0], fused[0]) < 1e-15 and plain[2] == fused[2] == 3
        assert plain[1]["param_groups"] == fused[1]["param_groups"]
        assert plain[1]["state"].keys() == fused[1]["state"].keys()
        for key, state in plain[1]["state"].items():
            assert largest_difference(state, fused[1]["state"][key]) < 1e-15


def test_optimizers_that_cannot_step_on_a_buffer():
    model = _net()
    with pytest.raises(ValueError, match="(?s)found:    LBFGS.*fix:"):
        weft.fuse_step(torch.optim.LBFGS(model.parameters()), weft.local())


def _fuse_wrong(ctx, kind):
    model, ctx = weft.replicate(_net(), ctx, flat=kind != "buckets", unused="zero" if kind == "unused" else "error")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        optimizer, ctx = weft.fuse_step(optimizer, ctx)
        model(_x(0)).sum().backward()
        if kind == "some":
            model.first.weight.grad = None
        optimizer.step((lambda: 0.0) if kind == "closure" else None) if kind == "closure" else optimizer.step()
    except weft.errors.ContractError as error:
        return type(error).__name__, str(error)
    return "fine", ""


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("buckets", "OrderError", "replicate(..., flat=True), then the optimizer, then fuse_step"),
        ("unused", "ContractError", 'unused="zero"'),
        ("closure", "ContractError", "optimizer.step(closure)"),
        ("some", "ContractError", "1 of 6 parameters have no gradient"),
    ],
)
def test_refused_fused_steps(kind, error, text):
    for found in run_ranks(_fuse_wrong, 2, kind):
        assert found[0] == error and text in found[1] and "fix:" in found[1]


# -- compile -----------------------------------------------------------------------------------------


def _compiled(ctx, flat, policy):
    results = []
    for compiled in (False, True):
        model, c = _net().float(), ctx
        if policy:
            model, c = weft.with_precision(model, c, policy)
        model, c = weft.replicate(model, c, flat=flat)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if policy:
            optimizer, c = weft.skip_nonfinite(optimizer, c)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        for _ in range(3):
            call(_x(ctx.rank).float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    return results


@pytest.mark.parametrize(
    ("flat", "policy"),
    [
        pytest.param(False, None, marks=pytest.mark.variant),
        pytest.param(True, None, marks=pytest.mark.variant),
        pytest.param(False, "bf16", marks=pytest.mark.variant),
        pytest.param(False, "fp16", marks=pytest.mark.variant),
    ],
)
def test_compile_works_after_the_transforms(flat, policy):
    found = run_ranks(_compiled, 2, flat, policy)
    for plain, compiled in found:
        assert largest_difference(plain, compiled) < (2e-3 if policy else 1e-6)
    assert largest_difference(found[0][1], found[1][1]) == 0


class _Exchanging(nn.Module):
    """Puts another frozen parameter in the place of its own in each call, as PEFT does with weights of few bits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.trained = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)

    def forward(self, x):
        self.frozen.weight = nn.Parameter(self.frozen.weight.clone(), requires_grad=False)
        return self.trained(self.frozen(x))


def _exchanged(ctx):
    model = _Exchanging().double()
    if ctx is not None:
        model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    for _ in range(3):
        model(x if ctx is None else x.chunk(2)[ctx.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [p.detach() for p in model.trained.parameters()]
    if ctx is not None:
        model.trained.weight = nn.Parameter(model.trained.weight.clone())
        with pytest.raises(weft.errors.ContractError, match=r"did not have when(.|\n)*trained.weight(.|\n)*fix: "):
            model(x)
    return found


def test_a_frozen_parameter_may_be_put_in_the_place_of_another():
    for found in run_ranks(_exchanged, 2):
        assert largest_difference(found, _exchanged(None)) < 1e-12


def _zeros_of_both_signs(ctx):
    model, ctx = weft.replicate(nn.Linear(3, 1, bias=False), ctx)
    model.weight.grad = torch.zeros(1, 3) * (-1 if ctx.rank else 1)
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.weight.grad = torch.full((1, 3), float(ctx.rank))
    with pytest.raises(weft.errors.NotSynchronized, match="were not averaged"):
        torch.optim.SGD(model.parameters(), 0.1).step()


def test_gradients_set_by_hand_are_equal_whatever_the_sign_of_a_zero():
    run_ranks(_zeros_of_both_signs, 2)
