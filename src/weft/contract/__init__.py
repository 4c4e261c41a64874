"""What a transform is. This package is the whole extension guide.

A transform is a function `f(obj, ..., ctx, *, options) -> (obj, ..., ctx')` that takes plain torch
objects and returns plain torch objects. `@transform` makes it keep the rules:

1.  Once: a second application to the same object raises `AlreadyApplied`.
2.  In order: transforms of an earlier `phase` come first; `before` and `after` name single ones it must precede or
    follow, `excludes` those it cannot be combined with; else `OrderError` names the right order.
3.  With the right context: the one that the transform before returned, or `StaleContext`.
4.  Names stay: parameter names and order, state_dict keys and the class of a module.
5.  On all ranks: if one rank refuses, all raise (`collective=True`; see `DistContext.agree`).

transform.py       the decorator, and `compose`
rules.py           what a transform may be combined with, and in which order: phases, names
protocols.py       what transforms offer each other: GradSync, Placed with its Layout, Stateful, ...
no_sync.py         backward passes that do not communicate, for loops without windows
layout.py          where each parameter lies: what cuts it, who owns it, what its gradient is summed over
marks.py           what was applied to an object: the mark on it, and the record in the context
module_checks.py   modules that a strategy cannot take
select_modules.py  parts of a module by class, name, size or function
name_table.py      what parts and parameters get by their names: the first pattern that fits

[Note: how packages meet] What was applied is written in two places: a record in `ctx.applied`, which
is a value, and a mark on the object, which holds what the transform offers to later ones. Offers
are small protocols: `accumulate_grads` asks for every `GradSync` on a module and does not know
who offered it. There is nothing to register.

Tested by: tests/contract, tests/laws
"""

from weft.contract.layout import gradient_axes, is_here, layouts, owners, part_axes, slice_axes
from weft.contract.marks import applied_to, check_known, forget, offered
from weft.contract.module_checks import (
    agree_on_parameters,
    buffers_alone,
    check_data_axes,
    check_methods,
    check_not_elsewhere,
    check_not_streamed,
    check_plain_module,
    check_quantized_weights,
    check_strategy_module,
    reduce_dtype,
    trained_alone,
    wrapper_of_torch,
)
from weft.contract.no_sync import no_sync
from weft.contract.protocols import (
    Chooses,
    ComputesAlone,
    EndsBackward,
    KeepsOrder,
    KeepsParameters,
    Layout,
    OwnsState,
    Placed,
    ReducesIn,
    ReducesOver,
    ScattersGradients,
    SlicesInside,
    Stateful,
    StepsApart,
    StreamsParts,
)
from weft.contract.rules import Part, Phase
from weft.contract.transform import compose, transform
from weft.engines.probes import Probe
from weft.engines.results import GradSync, Undoable

__all__ = [
    "Chooses",
    "ComputesAlone",
    "EndsBackward",
    "GradSync",
    "KeepsOrder",
    "KeepsParameters",
    "Layout",
    "OwnsState",
    "Part",
    "Phase",
    "Placed",
    "Probe",
    "ReducesIn",
    "ReducesOver",
    "ScattersGradients",
    "SlicesInside",
    "Stateful",
    "StepsApart",
    "StreamsParts",
    "Undoable",
    "agree_on_parameters",
    "applied_to",
    "buffers_alone",
    "check_data_axes",
    "check_known",
    "check_methods",
    "check_not_elsewhere",
    "check_not_streamed",
    "check_plain_module",
    "check_quantized_weights",
    "check_strategy_module",
    "compose",
    "forget",
    "gradient_axes",
    "is_here",
    "layouts",
    "no_sync",
    "offered",
    "owners",
    "part_axes",
    "reduce_dtype",
    "slice_axes",
    "trained_alone",
    "transform",
    "wrapper_of_torch",
]
