"""Which transforms may be applied to one object, and in which order."""

import itertools

import pytest
from torch import nn

import weft
from tests.known_transforms import TRANSFORMS, objects_of, rules_of
from weft.context import Applied
from weft.contract import Part, Phase
from weft.contract.marks import MARKS, Mark, Marks
from weft.contract.rules import Rules
from weft.contract.transform import _check
from weft.errors import OrderError

# The whole relation between the transforms of version 0.3. One that is added needs no line here: it has a phase.
# Each, and what is too late once it is applied.
TOO_LATE_AFTER = {
    "accumulate_grads": "context_parallel expert_parallel fully_shard local_steps pipeline replicate "
    "shard_data tensor_parallel zero_partition",
    "average_weights": "expert_parallel fully_shard pipeline replicate tensor_parallel with_precision zero_partition",
    "compile": "context_parallel expert_parallel fully_shard pipeline recompute replicate sync_batch_norm "
    "tensor_parallel with_precision zero_partition",
    "context_parallel": "recompute sync_batch_norm with_precision",
    "expert_parallel": "recompute sync_batch_norm with_precision",
    "fully_shard": "context_parallel expert_parallel local_steps pipeline recompute sync_batch_norm "
    "tensor_parallel with_precision",
    "fuse_step": "skip_nonfinite",
    "gather_step": "skip_nonfinite",
    "local_steps": "expert_parallel sync_batch_norm tensor_parallel with_precision",
    "pipeline": "context_parallel expert_parallel recompute tensor_parallel with_precision",
    "place": "with_precision",
    "recompute": "sync_batch_norm with_precision",
    "replicate": "context_parallel expert_parallel local_steps pipeline recompute sync_batch_norm "
    "tensor_parallel with_precision",
    "tensor_parallel": "recompute sync_batch_norm with_precision",
    "zero_partition": "context_parallel expert_parallel local_steps pipeline recompute skip_nonfinite "
    "sync_batch_norm tensor_parallel with_precision",
}
# Each, and what it excludes; a pair is written once.
NEVER_BOTH = {
    "average_weights": "local_steps place",
    "compile": "place",
    "context_parallel": "place",
    "expert_parallel": "place",
    "fully_shard": "place replicate zero_partition",
    "fuse_step": "gather_step step_in_backward zero_partition",
    "gather_step": "step_in_backward zero_partition",
    "local_steps": "pipeline place step_in_backward",
    "pipeline": "place sync_batch_norm",
    "place": "recompute replicate sync_batch_norm tensor_parallel zero_partition",
    "replicate": "zero_partition",
    "skip_nonfinite": "step_in_backward",
    "step_in_backward": "zero_partition",
}
OTHERS = ["hooked", "shard_data", "skip_nonfinite", "step_in_backward", "sync_batch_norm", "with_precision"]
LISTED = sorted({*TOO_LATE_AFTER, *NEVER_BOTH, *OTHERS})


# The rules of every transform of the package, and the objects that it takes.
RULES = {name: (rules_of(transform), {*objects_of(transform)}) for name, transform in TRANSFORMS.items()}


def _outcome(first, second):
    """What a transform is told that comes after another one, or None."""
    model = nn.Linear(2, 2)
    ctx = weft.local()
    model.__dict__[MARKS] = Marks((Mark(Applied(name=first.name, options=(), targets=()), first, "line", ()),))
    try:
        _check(second, model, ctx)
    except OrderError as error:
        return str(error)
    except weft.errors.StaleContext:  # what is checked next: this context has no record of the mark
        return None


@pytest.mark.parametrize("one", LISTED)
def test_what_may_come_after_a_transform_stays_as_it_was(one):
    rules, objects = RULES[one]
    for two in LISTED:
        if two == one or not objects & RULES[two][1]:
            continue  # they never meet
        refused = None
        if two in NEVER_BOTH.get(one, "").split() or one in NEVER_BOTH.get(two, "").split():
            refused = (
                f"{two}: cannot be combined with {one} on one Linear\n  found:    applied so far: {one}\n"
                f"  expected: either {two} or {one}\n  fix:      leave {one} or {two} out"
            )
        elif two in TOO_LATE_AFTER.get(one, "").split():
            refused = (
                f"{two}: comes too late, after {one}\n  found:    applied so far: {one}\n"
                f"  expected: {two}, then {one}\n  fix:      move the call of {two} before that of {one}"
            )
        assert _outcome(rules, RULES[two][0]) == refused, f"{two} after {one}"


def test_any_two_that_are_not_excluded_have_an_order():
    for one, two in itertools.permutations([rules for rules, _ in RULES.values()], 2):
        assert not (one.must_precede(two) and two.must_precede(one)), (one.name, two.name)


def test_transforms_of_the_package_name_no_others_but_for_single_pairs():
    named = {
        (name, other)
        for name, (rules, _) in RULES.items()
        for other in rules.before | rules.after | {o for o in rules.excludes if isinstance(o, str)}
    }
    assert len(named) <= 6 and {other for _, other in named} <= {*RULES}
    assert [name for name, (rules, _) in RULES.items() if rules.phase is None] == ["hooked"]


def _rules(name, phase=None, changes=Part.ALL, before=(), after=(), excludes=()):
    return Rules(name, phase, changes, frozenset(before), frozenset(after), frozenset(excludes))


def test_names_decide_before_phases_do():
    late = _rules("late", Phase.FINISH, before={"early"})
    early = _rules("early", Phase.PREPARE)
    assert late.must_precede(early) and not early.must_precede(late)
    follows = _rules("follows", Phase.PREPARE, after={"last"})
    last = _rules("last", Phase.FINISH)
    assert last.must_precede(follows) and not follows.must_precede(last)


def test_transforms_that_change_different_parts_come_in_any_order():
    early = _rules("early", Phase.PREPARE, Part.FORWARD)
    late = _rules("late", Phase.FINISH, Part.GRADIENTS)
    assert not early.must_precede(late) and not late.must_precede(early)
    assert not early.cannot_meet(_rules("other", excludes={Phase.PREPARE}, changes=Part.STEP))
    assert early.cannot_meet(_rules("other", excludes={Phase.PREPARE}, changes=Part.FORWARD | Part.STEP))


def test_a_transform_of_a_user_may_have_a_phase():
    @weft.transform(phase=Phase.STRATEGY, excludes={Phase.STRATEGY})
    def share(module, ctx):
        return module, ctx

    model, ctx = weft.with_precision(nn.Linear(2, 2), weft.local(), "bf16")
    model, ctx = share(model, ctx)
    with pytest.raises(OrderError, match="replicate: cannot be combined with share on one Linear"):
        weft.replicate(model, ctx)
    with pytest.raises(OrderError, match="recompute: comes too late, after share"):
        weft.recompute(model, ctx, blocks="")
    model, ctx = weft.average_weights(model, ctx)
    assert [record.name for record in ctx.records(model)] == ["with_precision", "share", "average_weights"]
