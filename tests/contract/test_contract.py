"""The contract: once, in order, with the right context, names stay, on all ranks; for anybody's transform."""

import copy
import gc
import importlib.util
import pathlib
import pickle
import re
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import weft
from weft.contract import agree_on_parameters, check_methods
from weft.errors import AlreadyApplied, NameChanged, OrderError, PeerError, StaleContext
from weft.testing import RanksFailed, laws, run_ranks

# -- transforms of a user ----------------------------------------------------------------------------


@weft.transform()
def plain(module, ctx, *, size=1):
    return module, ctx


@weft.transform(before={"later"})
def early(module, ctx):
    return module, ctx


@weft.transform(after={"middle"})
def later(module, ctx):
    return module, ctx


@weft.transform()
def middle(module, ctx):
    return module, ctx


@weft.transform(excludes={"plain"})
def rival(module, ctx):
    return module, ctx


class Offer:
    """Reduces gradients, and can be taken back."""

    mean_over = 2

    def __init__(self):
        self.undone = False

    def begin_window(self):
        pass

    def last_backward(self):
        pass

    def end_window(self, *, left=False):
        pass

    def undo(self):
        self.undone = True


@weft.transform()
def offers(module, ctx):
    return module, ctx.offering(Offer())


def _net():
    return nn.Linear(2, 2)


# -- once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [False, True])
def test_twice_raises_with_any_context(stale):
    first = weft.local()
    model, ctx = plain(_net(), first)
    with pytest.raises(
        AlreadyApplied, match=r"plain: this Linear already has this transform\n  found:    plain\(Linear; size=1\)"
    ) as caught:
        plain(model, first if stale else ctx)
    assert "fix:      leave one of the two calls of plain out" in str(caught.value)


def test_once_per_object_and_not_per_context():
    one, ctx = plain(_net(), weft.local())
    two, ctx = plain(_net(), ctx, size=2)
    assert [record.options for record in ctx.applied] == [(("size", "1"),), (("size", "2"),)]
    assert [str(r) for r in ctx.records(one)] == ["plain(Linear; size=1)"]
    assert [str(r) for r in ctx.records(two)] == ["plain(Linear; size=2)"]


def test_a_refused_call_leaves_no_mark():
    @weft.transform()
    def fails(module, ctx):
        raise RuntimeError("broken inside")

    model = _net()
    with pytest.raises(RuntimeError, match="broken inside"):
        fails(model, weft.local())
    assert vars(model).keys() == vars(_net()).keys()
    assert plain(model, weft.local())[1].applied[0].name == "plain"


# -- order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (later, early, r"early: comes too late, after later\n.*applied so far: later\n.*early, then later\n.*move the"),
        (later, middle, r"middle: comes too late, after later\n.*applied so far: later\n.*middle, then later\n.*move"),
        (
            plain,
            rival,
            r"rival: cannot be combined with plain on one Linear\n.*either rival or plain\n.*leave plain or",
        ),
        (
            rival,
            plain,
            r"plain: cannot be combined with rival on one Linear\n.*either plain or rival\n.*leave rival or",
        ),
    ],
    ids=["before", "after", "excludes", "excluded"],
)
def test_wrong_order_names_the_right_one(first, second, text, stale):
    before = weft.local()
    model, ctx = first(_net(), before)
    with pytest.raises(OrderError, match=r"(?s)" + text):
        second(model, before if stale else ctx)


def test_right_order_and_other_objects_are_accepted():
    model, ctx = weft.compose(early, middle, later)(_net(), weft.local())
    assert [record.name for record in ctx.records(model)] == ["early", "middle", "later"]
    other, ctx = early(_net(), ctx)  # the order is per object
    assert [record.name for record in ctx.records(other)] == ["early"]


def test_a_stale_context_names_what_it_misses():
    first = weft.local()
    model, ctx = plain(_net(), first)
    text = r"middle: the context does not know.*not in ctx.applied: plain\n.*module, ctx = plain\(module, ctx\)  # pass"
    with pytest.raises(StaleContext, match=r"(?s)" + text):
        middle(model, first)
    with pytest.raises(StaleContext, match=r"not in ctx.applied: plain"):
        middle(model, plain(_net(), first)[1])  # an equal record, but of another object
    assert middle(model, ctx)[1].applied[-1].name == "middle"


def test_contexts_of_models_prepared_separately_can_be_merged():
    one, first = plain(_net(), weft.local())
    two, second = plain(_net(), weft.local())

    @weft.transform()
    def joint(modules, ctx):
        return modules, ctx

    with pytest.raises(StaleContext, match=r"not in ctx.applied: plain"):
        joint([one, two], first)
    both = first.merge(second)
    assert both.merge(second) == both and len(both.applied) == 2
    (one, two), ctx = joint([one, two], both)
    assert ctx.records(one)[-1] is ctx.records(two)[-1] and ctx.applied[-1].targets == ("Linear", "Linear")


# -- names stay --------------------------------------------------------------------------------------


def _renamed(module):
    module.renamed = module._modules.pop("0")
    return module


def _reordered(module):
    module._modules["0"] = module._modules.pop("0")
    return module


def _with_buffer(module):
    module.register_buffer("extra", torch.zeros(1))
    return module


def _without_key(module):
    module._non_persistent_buffers_set.add("count")
    return module


def _wrapped(module):
    return nn.Identity()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_renamed, r"changed the parameters of the module\n  found:    gone: 0.weight, 0.bias; new: renamed.weight"),
        (_reordered, r"changed the parameters of the module\n  found:    another order"),
        (_with_buffer, r"changed the buffers of the module\n  found:    gone: none; new: extra"),
        (_without_key, r"changed the state_dict keys of the module\n  found:    gone: count; new: none"),
        (_wrapped, r"changed the class of the module\n  found:    gone: Sequential; new: Identity"),
    ],
)
def test_a_changed_name_raises(change, text):
    @weft.transform()
    def changes(module, ctx):
        return change(module), ctx

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("count", torch.zeros(1))
    with pytest.raises(NameChanged, match=text) as caught:
        changes(model, weft.local())
    assert "fix:      return the same module from changes, with hooks instead of wrappers" in str(caught.value)


def test_a_subclass_of_the_class_is_allowed():
    class Special(nn.Linear):
        pass

    @weft.transform()
    def specialised(module, ctx):
        module.__class__ = Special
        return module, ctx

    assert isinstance(specialised(_net(), weft.local())[0], nn.Linear)


def test_a_module_that_is_left_out_of_the_result_raises():
    @weft.transform()
    def loses(module, optimizer, ctx):
        return module, ctx

    model = _net()
    text = r"(?s)loses: .*found:    Linear, DistContext\n.*a tuple of 2 and a .*fix:      return module, optimizer, ctx"
    with pytest.raises(TypeError, match=text):
        loses(model, torch.optim.SGD(model.parameters()), weft.local())


# -- form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [None, 3, (3,), ("module", "ctx")], ids=lambda value: type(value).__name__)
def test_a_result_of_another_form_raises(result):
    @weft.transform()
    def returns(module, ctx):
        return result

    model = _net()
    text = (
        r"(?s)returns: a transform returns its objects and the next context\n  found:    .*fix:      return module, ctx"
    )
    with pytest.raises(TypeError, match=text):
        returns(model, weft.local())
    plain(model, weft.local())  # and left no mark


@pytest.mark.parametrize("wrong", [None, 3, "ctx"], ids=lambda value: type(value).__name__)
def test_something_else_than_a_context_raises(wrong):
    text = rf"plain: ctx = {wrong!r} is not a context\n  found:    {type(wrong).__name__}\n"
    with pytest.raises(TypeError, match=text) as caught:
        plain(_net(), wrong)
    assert "fix:      module, ctx = plain(module, ctx)  # with the ctx of weft.start()" in str(caught.value)


def test_swapped_arguments_raise():
    with pytest.raises(TypeError, match=r"plain: ctx = Linear\(.*is not a context"):
        plain(weft.local(), _net())


@pytest.mark.parametrize(
    ("arguments", "text"), [((), "missing a required argument"), ((1, 2, 3), "too many positional")]
)
def test_a_call_with_wrong_arguments_raises_as_any_function(arguments, text):
    with pytest.raises(TypeError, match=text):
        plain(*arguments)


def test_a_function_without_ctx_is_refused_when_decorated():
    text = r"(?s)transform: .*found:    strange\(module, context\)\n.*fix:      def strange\(module, ctx"
    with pytest.raises(TypeError, match=text):

        @weft.transform()
        def strange(module, context):
            return module, context


def test_a_transform_keeps_name_signature_and_doc():
    import inspect

    @weft.transform(before={"x"})
    def named(module: nn.Module, ctx: weft.DistContext, *, size: int = 3) -> tuple[nn.Module, weft.DistContext]:
        """Do nothing."""
        return module, ctx

    assert named.__name__ == "named" and named.__doc__ == "Do nothing."
    assert list(inspect.signature(named).parameters) == ["module", "ctx", "size"]


# -- compose -----------------------------------------------------------------------------------------


@weft.transform()
def paired(module, optimizer, ctx, *, size=1):
    return module, optimizer, ctx


def test_compose_applies_in_order_with_options_fixed():
    prepare = weft.compose(early, partial(plain, size=7), later)
    model, ctx = prepare(_net(), weft.local())
    assert [str(record) for record in ctx.applied] == ["early(Linear)", "plain(Linear; size=7)", "later(Linear)"]
    assert isinstance(model, nn.Linear)


def test_compose_of_nothing_and_of_compositions():
    model, ctx = _net(), weft.local()
    assert weft.compose()(model, ctx) == (model, ctx)
    nested = weft.compose(weft.compose(early), weft.compose(middle, later))
    assert [r.name for r in nested(model, ctx)[1].applied] == ["early", "middle", "later"]


def test_compose_hands_several_objects_on():
    @weft.transform()
    def again(module, optimizer, ctx):
        return module, optimizer, ctx

    model = _net()
    optimizer = torch.optim.SGD(model.parameters())
    found, same, ctx = weft.compose(partial(paired, size=2), again)(model, optimizer, weft.local())
    assert (found is model, same is optimizer) == (True, True)
    assert [record.targets for record in ctx.applied] == [("Linear", "SGD")] * 2


def test_compose_passes_errors_on():
    with pytest.raises(OrderError, match=r"(?s)early: comes too late, after later.*fix:"):
        weft.compose(later, early)(_net(), weft.local())
    with pytest.raises(AlreadyApplied, match=r"(?s)found:.*fix:"):
        weft.compose(plain, plain)(_net(), weft.local())
    with pytest.raises(TypeError, match="missing"):
        weft.compose(paired)(_net(), weft.local())


# -- offers ------------------------------------------------------------------------------------------


def test_offers_are_found_by_protocol_and_stay_with_the_object():
    model, ctx = offers(_net(), weft.local())
    (sync,) = weft.contract.offered(model, weft.contract.GradSync)
    assert isinstance(sync, Offer) and weft.contract.offered(model, weft.contract.Undoable) == [sync]
    assert (
        weft.contract.offered(model, weft.contract.ReducesIn)
        == []
        == weft.contract.offered(_net(), weft.contract.GradSync)
    )
    assert weft.contract.offered(3, weft.contract.GradSync) == []
    assert ctx.handed_over == ()  # the decorator took it off
    other, ctx = plain(_net(), ctx)
    assert weft.contract.offered(other, weft.contract.GradSync) == []


def test_offers_come_in_order_of_application_and_die_with_the_object():
    @weft.transform()
    def offers_more(module, ctx):
        return module, ctx.offering(Offer(), Offer()).offering(Offer())

    model, ctx = weft.compose(offers, offers_more)(_net(), weft.local())
    found = weft.contract.offered(model, Offer)
    assert len(found) == 4
    refs = [weakref.ref(offer) for offer in found]
    del model, found
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4 and len(ctx.applied) == 2


def test_what_is_offered_can_be_taken_back():
    x, model = torch.randn(3, 2), _net()
    expected = model(x)
    model, _ = weft.with_precision(model, weft.local(), "bf16")
    assert not torch.equal(model(x), expected)
    for undoable in weft.contract.offered(model, weft.contract.Undoable):
        undoable.undo()
    assert torch.equal(model(x), expected) and not model._forward_hooks and not model._forward_pre_hooks


# -- marks and records -------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_starts_without_marks(copied):
    model, ctx = offers(_net(), weft.local())
    twin = copied(model)
    assert weft.contract.offered(twin, weft.contract.GradSync) == [] and ctx.records(twin) == ()
    twin, later_ctx = offers(twin, weft.local())  # neither AlreadyApplied nor StaleContext
    assert len(later_ctx.applied) == 1 and len(weft.contract.offered(model, weft.contract.GradSync)) == 1


def test_a_shallow_copy_shares_hooks_and_so_the_marks():
    model, ctx = offers(_net(), weft.local())
    with pytest.raises(AlreadyApplied, match=r"(?s)found:.*fix:"):
        offers(copy.copy(model), ctx)


def test_records_refer_weakly():
    model, ctx = plain(_net(), weft.local())
    ref = weakref.ref(model)
    (record,) = ctx.records(model)
    assert record.concerns(model) and not record.concerns(_net())
    del model
    gc.collect()
    assert ref() is None and ctx.applied == (record,)


def test_contexts_built_alike_are_equal_and_others_differ():
    def build(**options):
        return plain(_net(), weft.local(), **options)[1]

    assert build() == build() and hash(build()) == hash(build())
    assert build() != build(size=2) and build() != weft.local()
    assert pickle.loads(pickle.dumps(build())) == build()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (nn.Linear, "Linear"),
        (_net, "_net"),
        ((nn.Linear, 1), "(Linear, 1)"),
        ({"x"}, "('x')"),
        (torch.bfloat16, "torch.bfloat16"),
        (Offer(), "Offer"),
        (partial(_net), "partial"),
        (None, "None"),
        ({"b": nn.Linear, "a": Offer()}, "{'b': Linear, 'a': Offer}"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_options_are_recorded_as_text_without_addresses(value, text):
    (record,) = plain(_net(), weft.local(), size=value)[1].applied
    assert record.options == (("size", text),)


def test_a_set_is_recorded_in_the_same_order_in_every_process():
    names = {f"name{i}" for i in range(20)}
    (record,) = plain(_net(), weft.local(), size=names)[1].applied
    assert record.options[0][1] == "(" + ", ".join(sorted(map(repr, names))) + ")"


def test_explain_shows_the_pipeline():
    ctx = weft.local()
    assert "pipeline: nothing applied yet" in weft.explain(ctx)
    model, ctx = plain(_net(), ctx, size=5)
    model, ctx = middle(model, ctx)
    lines = weft.explain(ctx).splitlines()
    start = lines.index("pipeline:")
    assert [line.strip() for line in lines[start + 1 :]] == ["1. plain(Linear; size=5)", "2. middle(Linear)"]


# -- on all ranks ------------------------------------------------------------------------------------


@weft.transform(collective=True)
def together(module, ctx, *, size=1):
    if size < 0:
        raise ValueError("size must not be negative")
    ctx.agree("together", {"size": size})
    return module, ctx


def _refused_on_one_rank(ctx, how):
    model = _net()
    if how == "argument":
        arguments = {"size": -1 if ctx.rank == 1 else 1}
    elif how == "different":
        arguments = {"size": ctx.rank}
    else:
        arguments = {}
        if ctx.rank == 1:
            model, _ = together(model, weft.local())
    try:
        together(model, ctx, **arguments)
    except (ValueError, weft.errors.WeftError) as error:
        ctx.agree("after")  # the ranks are still in step
        return type(error).__name__, getattr(error, "rank", None), str(error)
    return None


@pytest.mark.parametrize(("how", "kind"), [("argument", "ValueError"), ("mark", "AlreadyApplied")])
def test_a_refusal_on_one_rank_reaches_all(how, kind):
    zero, one, two = run_ranks(_refused_on_one_rank, 3, how)
    assert one[0] == kind
    for name, rank, text in (zero, two):
        assert (name, rank) == ("PeerError", 1) and f"rank 1 failed: {kind}" in text


def test_different_options_raise_on_all_ranks():
    for name, _, text in run_ranks(_refused_on_one_rank, 2, "different"):
        assert name == "ContextError" and "size: 0 on rank 0, 1 on rank 1" in text and "fix:" in text


def _fails_after_agreement(ctx):
    @weft.transform(collective=True)
    def late(module, ctx):
        ctx.agree("late")
        raise RuntimeError("rank 1 fails late")

    @weft.transform(collective=True)
    def early_or_late(module, ctx):
        ctx.agree("late")
        return module, ctx

    (late if ctx.rank == 1 else early_or_late)(_net(), ctx)
    weft.barrier(ctx)


def test_a_failure_after_the_agreement_is_not_told_twice():
    with pytest.raises(RanksFailed, match="rank 1 fails late") as caught:
        run_ranks(_fails_after_agreement, 2, timeout_s=55)
    assert isinstance(caught.value.errors[1], RuntimeError) and caught.value.first == 1


def _agrees_on_parameters(ctx, model_of):
    try:
        agree_on_parameters("mine", model_of(ctx.rank), ctx, {})
    except weft.errors.ContextError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize(
    ("model_of", "text"),
    [
        (lambda rank: nn.Linear(2, 2), "fine"),
        (lambda rank: nn.Linear(2, 2 + rank), r"weight: '\(2, 2\) torch.float32 trained' on rank 0, '\(3, 2\)"),
        (lambda rank: nn.Linear(2, 2).requires_grad_(rank == 0), "weight: .*trained' on rank 0, .*frozen' on rank 1"),
        (lambda rank: nn.Linear(2, 2, bias=rank == 0), "bias: .*on rank 0, None on rank 1"),
        (
            lambda rank: nn.BatchNorm1d(2).to(torch.float64 if rank else None),
            "running_mean: .*float32 buffer' on rank 0",
        ),
    ],
    ids=["same", "shape", "frozen", "bias", "dtype"],
)
def test_ranks_agree_on_parameters_or_hear_which_differ(model_of, text):
    import re

    for found in run_ranks(_agrees_on_parameters, 2, model_of):
        assert re.search(text, found), found


@pytest.mark.parametrize(
    ("methods", "found"),
    [(["nope"], "'nope'"), (["forward"], "'forward'"), (["half", "half"], "'half'"), (["weight"], "'weight'")],
)
def test_methods_that_cannot_be_used_raise(methods, found):
    with pytest.raises(ValueError, match=rf"(?s)mine: methods = .*found:    {found}\n.*fix:"):
        check_methods("mine", _net(), methods)
    check_methods("mine", _net(), ["half"])


# -- a user's own transform is a first-class citizen ---------------------------------------------------


def _documented():
    path = pathlib.Path(__file__).parents[2] / "docs" / "custom_transform.py"
    spec = importlib.util.spec_from_file_location("custom_transform", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return path, module


def test_the_documented_transform_uses_public_names_only_and_keeps_every_law():
    path, module = _documented()
    source = path.read_text()
    assert "weft._" not in source and "from weft" not in source and "import weft." not in source
    assert {name for name in dir(weft) if re.search(rf"weft\.{name}\b(?!\.)", source)} <= {*weft.__all__}

    def apply(parts, ctx):
        parts.module, ctx = module.sum_gradients(parts.module, ctx)
        return ctx

    def broken(parts, ctx):
        _, ctx = module.sum_gradients(nn.Linear(1, 1), ctx)
        return ctx

    laws.check_laws(laws.Row(name="sum_gradients", apply=apply, synchronizes=True, break_input=broken))


def _accumulates(ctx):
    """A strategy of the user and accumulate_grads of the library meet through the protocol."""
    _, module = _documented()
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    model, ctx = module.sum_gradients(model, ctx)
    model, windows, ctx = weft.accumulate_grads(model, [torch.ones(1, 1)] * 4, ctx, steps=2)
    seen = []
    for window in windows:
        for x in window:
            (model(x * (ctx.rank + 1)).sum() / len(window)).backward()
            seen.append(float(model.weight.grad))
        model.zero_grad()
    return seen


def test_the_documented_transform_works_with_accumulate_grads():
    assert run_ranks(_accumulates, 2) == [[0.0, 3.0, 0.0, 3.0]] * 2


def test_a_peer_error_survives_pickling():
    error = pickle.loads(pickle.dumps(PeerError("it failed", rank=3, text="why")))
    assert (str(error), error.rank, error.text) == ("it failed", 3, "why")


# -- results that were not unpacked, arguments that are missing --------------------------------------


def test_a_result_that_was_not_unpacked_says_so():
    ctx = weft.local()
    model = weft.replicate(nn.Linear(2, 2), ctx)
    for use in (lambda: plain(model, ctx), lambda: plain(nn.Linear(1, 1), model)):
        with pytest.raises(TypeError, match=r"(?s)plain: the result of replicate .*fix: +module, ctx = weft.repl"):
            use()


def test_a_result_is_a_tuple():
    assert type(plain(nn.Linear(2, 2), weft.local())) is tuple


def test_missing_arguments_name_the_function():
    model = nn.Linear(2, 2)
    with pytest.raises(
        TypeError, match=r"(?s)weft.replicate: missing a required argument: 'ctx'.*weft.replicate\(module, ctx"
    ):
        weft.replicate(model)
    with pytest.raises(TypeError, match=r"(?s)'steps'.*fix: +weft.accumulate_grads\(modules, loader, ctx, steps=...\)"):
        weft.accumulate_grads(model, [1], weft.local())
    with pytest.raises(TypeError, match="(?s)weft.with_precision: .*unexpected keyword argument 'polcy'"):
        weft.with_precision(model, weft.local(), polcy="bf16")
    with pytest.raises(TypeError, match=r"(?s)plain: missing.*fix: +plain\(module, ctx\)"):
        plain()
