"""Programs that come in pairs: a sound one is trained as in one process, its unsound twin is refused before a step."""

from typing import NamedTuple

import torch

from weft.errors import ContractError

STEPS, EXACT = 3, 1e-10


class Refused(NamedTuple):
    """What became of an unsound program on one rank."""

    error: str
    text: str
    is_unchanged: bool


class Watch:
    """Sees whether a module was trained."""

    def __init__(self):
        self._module, self._before, self._steps = None, {}, 0

    def begin(self, module):
        """Remember the values of a module, before or after a transform."""
        self._module, self._before = module, _bits(module)

    def count(self, *_):
        """One step of the optimizer is about to be made."""
        self._steps += 1

    def is_unchanged(self):
        after = _bits(self._module)
        same = all(torch.equal(after[name], value) for name, value in self._before.items())
        return not self._steps and after.keys() == self._before.keys() and same


def _bits(module):
    return {name: _local(p).clone() for name, p in module.named_parameters() if not p.is_meta}


def _local(parameter):
    value = parameter.detach()
    return value.to_local() if hasattr(value, "to_local") else value


def whole(module):
    """The parameters that this rank has, and of divided ones all of it."""
    named = {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for name, p in named.items()}


def attempt(train, *args):
    """Run `train(*args, watch)`; None if nothing was raised."""
    watch = Watch()
    try:
        train(*args, watch)
    except ContractError as error:
        return Refused(type(error).__name__, str(error), watch.is_unchanged())
    return None


def fit(module, batches, loss_of, watch=None, learning_rate=0.1):
    """Three steps."""
    optimizer = torch.optim.SGD(module.parameters(), learning_rate, momentum=0.9)
    if watch is not None:
        watch.begin(module)
        optimizer.register_step_pre_hook(watch.count)
    for batch in batches:
        loss_of(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(module)


def check_refused(found):
    """All ranks have raised, before any of them made a step."""
    assert all(found), f"not refused on ranks {[rank for rank, one in enumerate(found) if not one]}"
    assert all(one.is_unchanged for one in found)


def check_exact(found, expected):
    """Together, the ranks have the parameters of one process."""
    together = {name: value for own in found for name, value in own.items()}
    assert sorted(together) == sorted(expected)
    for own in found:
        for name, value in own.items():
            assert float((value - expected[name]).abs().max()) < EXACT, name
