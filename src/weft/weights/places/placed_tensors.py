"""The tensors of a module on their way to the places of a plan, and back.

All is settled and checked, then read, and only then put in place: an error leaves the module as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from weft.checkpoint.format.transfer import Stored, Transfer, read_blocks
from weft.engines.torch.streaming.placeholder import stand_in
from weft.engines.torch.streaming.stream import StreamedPart, StreamedTensor
from weft.errors import listed, value_error
from weft.sharding.meta import own_tensors, tensor_slots
from weft.tensors.blocks import whole
from weft.tensors.remote_parameter import forget_elsewhere
from weft.weights.assign import compare
from weft.weights.places.plan_placement import PlacementPlan
from weft.weights.sources import WeightFiles
from weft.weights.targets import in_place_of, targets


class _PlacedTensor:
    """One parameter or buffer.

    Attributes:
        owners: The modules that have it, and its name there.
        before: What they had before.
        home: The device it was on.
        place: Where its values lie; None: in a file.
        stored: Where in the files; None: they come from `before`.
        streamed: Whether it lies elsewhere than it computes.
        now: What the owners have.
        values: Where they lie, unless in a file.
    """

    def __init__(self, name: str, before: torch.Tensor, place: torch.device | None, *, streamed: bool) -> None:
        self.owners: list[tuple[nn.Module, str]] = []
        self.before = before
        self.home = before.device
        self.place = place
        self.streamed = streamed
        self.stored: Stored | None = None
        self.now: torch.Tensor = stand_in(before, name) if streamed else before
        self.values: torch.Tensor | None = None

    def put(self, tensor: torch.Tensor) -> None:
        """Give a tensor to the owners."""
        for owner, name in self.owners:
            next(kind for kind, own, _ in tensor_slots(owner) if own == name)[name] = tensor


class PlacedTensors:
    """The tensors of a module, and where they go; nothing is changed before `put`.

    Args:
        module: Whose.
        plan: Of the module.
        source: Files with its weights; None: it has them.
        strict: Whether names have to be the same.
        num_threads: That read.

    Raises:
        CheckpointError: Files and module do not fit, or a file is damaged.
        ValueError: Values are missing, or the plan is one for another module.
    """

    def __init__(
        self, module: nn.Module, plan: PlacementPlan, source: WeightFiles | None, *, strict: bool, num_threads: int
    ) -> None:
        plan.check(module)
        self._module, self._plan, self._source, self._threads = module, plan, source, num_threads
        self._placed: dict[int, _PlacedTensor] = {}
        for prefix, part in module.named_modules():
            for own, tensor in own_tensors(part):
                if id(tensor) not in self._placed:
                    self._placed[id(tensor)] = self._settle(f"{prefix}.{own}".lstrip("."), tensor)
                self._placed[id(tensor)].owners.append((part, own))
        if source is not None:
            held = targets(module, {}, what="place")
            compare("place", module, source, held, strict=strict, within=None)
            for one in held:
                name = next((name for name in one.names if name in source.tensors), None)
                if name is not None:
                    self._placed[one.parameter].stored = source.tensors[name]
        self._check_values()
        self._verify()

    def _settle(self, name: str, tensor: torch.Tensor) -> _PlacedTensor:
        fast, place = self._plan.computes_on, self._plan.place_of(name)
        streamed = place not in fast and isinstance(tensor, nn.Parameter)
        place = place if streamed or place in fast else fast[0]  # buffers lie where they are used
        return _PlacedTensor(name, tensor, None if place == "disk" else torch.device(place), streamed=streamed)

    def _check_values(self) -> None:
        """Raise if a tensor has no values, or none on a disk."""
        names = {id(t): n for n, t in (*self._module.named_parameters(), *self._module.named_buffers())}
        lost = [names[i] for i, one in self._placed.items() if one.before.is_meta and one.stored is None]
        unsaved = [names[i] for i, one in self._placed.items() if one.place is None and one.stored is None]
        if lost or unsaved:
            raise value_error(
                f"place: values are missing for this {type(self._module).__name__}",
                found=f"on meta and in no file: {listed(lost)}" if lost else f"to be placed on disk: {listed(unsaved)}",
                expected="weights= with files that contain everything that is on meta or placed on disk",
                fix="with weft.weights.on_meta(): model = ...  # its buffers are real, also those that are not saved"
                if lost and self._source is not None
                else "model, ctx = weft.place(model, ctx, plan, weights=path)  # a file, a folder or a checkpoint",
            )

    def _verify(self) -> None:
        """Look whether the files hold what will be read from them."""
        if self._source is not None:
            used = [one.stored for one in self._placed.values() if one.stored is not None]
            self._source.verify(used)
            for stored in used:
                self._source.files.check(stored.key, stored.entry, whole(stored.entry.shape))

    def read(self) -> None:
        """Take memory for what is not streamed from files, and fill it."""
        wanted = []
        for one in self._placed.values():
            if one.place is None:
                continue
            if one.stored is None:
                one.values = one.before.detach().to(one.place)
                if one.streamed and not one.values.is_pinned():
                    one.values = one.values.pin_memory()
            else:
                shape, dtype = one.before.shape, one.before.dtype
                one.values = torch.empty(shape, dtype=dtype, device=one.place, pin_memory=one.streamed)
                wanted.append((one, one.values))
        self.fill(wanted, num_threads=self._threads)

    def fill(self, wanted: Sequence[tuple[Any, torch.Tensor]], *, num_threads: int = 1) -> None:
        """Fill tensors with the values of others, which lie on the CPU or in files.

        By one thread while parts compute: more would take cores from them, and their stacks count as memory.
        """
        stored = [
            Transfer(one.stored, whole(out.shape), out)
            for one, out in wanted
            if one.values is None or one.values is out
        ]
        for one, out in wanted:
            if one.values is not None and one.values is not out:
                out.copy_(one.values, non_blocking=True)
        if stored:
            assert self._source is not None
            read_blocks(self._source.files, stored, num_threads=num_threads)

    @torch.no_grad()
    def put(self) -> None:
        """Give the module what was read, and stand-ins for what is streamed."""
        for one in self._placed.values():
            if not one.streamed:
                assert one.values is not None
                if one.before.is_meta or (one.stored is not None and not isinstance(one.before, nn.Parameter)):
                    one.now = in_place_of(one.before, one.values)
                else:
                    one.now.data = one.values
                one.values = None
            elif not one.before.is_meta:
                one.before.data = one.before.data.new_empty(0)
            one.put(one.now)

    @torch.no_grad()
    def undo(self) -> None:
        """Give the module what it had: tensors on meta, and others with values on the devices they were on."""
        for one in self._placed.values():
            if one.streamed:
                forget_elsewhere(one.now)  # what hangs on a parameter is carried over by `weft.undo`
            if one.before.is_meta or (one.now is not one.before and not one.streamed):
                one.put(one.before)
                continue
            if one.streamed and one.values is not None:
                one.before.data = one.values.to(one.home)
            elif one.streamed:
                values = torch.empty(one.now.shape, dtype=one.now.dtype, device=one.home)
                self.fill([(one, values)])
                one.before.data = values
            else:
                one.before.data = one.now.data.to(one.home)
            one.put(one.before)
        if self._source is not None:
            self._source.files.close()

    def parts(self) -> tuple[StreamedPart, ...]:
        """What is streamed, in the order of the module."""
        names = {name for unit in self._plan.streamed for name in unit.names}
        found = []
        for name, part in self._module.named_modules():
            if name not in names:
                continue
            inside = {id(one) for one in part.modules()}
            tensors: list[StreamedTensor] = []
            for one in self._placed.values():
                owners = tuple((owner, own) for owner, own in one.owners if id(owner) in inside)
                if one.streamed and owners:
                    tensors.append(StreamedTensor(owners, cast("nn.Parameter", one.now), one))
            found.append(StreamedPart(name, part, tuple(tensors)))
        return tuple(found)
