"""`resilient`: the loop over steps that are made again, by those alive, if a replica was lost in them.

[Note: commit] A step counts on a replica that has averaged its gradients: they are those of all. If a replica is lost
in the exchange, some may have averaged and others not. Those who have not undo what the step has changed
(step_mark.py); when the replicas meet, they take over the state of those who have, or, if none has, make the step
again.

[Note: the end of a loop] The work of a replica is done if its context is left in good order after its loop: at the end
of an epoch, or by `break` or `return`. It is not if an exception leaves the loop, such as a SystemExit, whatever its
code. Python closes the iterator of a loop in each of these cases, and does not say which. But a frame that breaks out
of a loop is at an instruction that pops the iterator; one that an exception leaves is at the instruction that raised.
"""

from __future__ import annotations

import inspect
import logging
import opcode
import sys
import time
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from weft.checkpoint.state.collect import Checkpoint
from weft.checks import check_count
from weft.context import DistContext
from weft.data.split.sharded_loader import ShardedLoader
from weft.data.windows.window import Window
from weft.elastic.join import load_received, receive_state, send_state
from weft.elastic.memory_copy import MemoryCopy
from weft.elastic.requirements import check_program, facts_of_program
from weft.elastic.step_mark import StepMark
from weft.errors import ContextError, ContractError
from weft.peers.quorum import Answer, LoopPosition

B = TypeVar("B")

_ATTEMPTS = 5  # to meet, while no replica is lost


def resilient(
    loader: DataLoader[B], ctx: DistContext, *, state: Checkpoint, step: int = 0, copy_every: int | None = None
) -> Resilient[B]:
    """Yield the batches or windows of a loader; if a replica dies during a step, the others repeat the step.

    For jobs started by `weft launch --min-replicas`, with a context of `weft.start(elastic=...)`. The samples of a step
    are those of an uninterrupted run: when a replica dies or joins, they are redistributed. So the final parameters are
    those of a run without failures, and each sample is used once per epoch.

        state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
        batches = weft.resilient(loader, ctx, state=state)
        for epoch in range(batches.epoch, 10):
            for x, y in batches:
                loss = cross_entropy(model(x), y) * loader.share
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    One yield is one step, with one `optimizer.step()` in it. A step that failed ends like any other: its gradients are
    zero, its `optimizer.step()` does nothing, and what else it has changed (buffers, random states, learning rate,
    every object of `state`) is put back before the same samples are yielded again. A restarted replica copies model,
    optimizer, position, random states and step from a live one here, and continues with the others after their next
    step.

    Changes: the objects of `state`, if another replica has made more steps. A hook on the optimizer.
    Collectives: here, a meeting of all replicas, and the state sent to new ones. In each backward pass an all-reduce of
    1x the gradient bytes over the replicas, through the memory of the CPU.

    Args:
        loader: Of `shard_data` over a map-style dataset, or the windows of `accumulate_grads` over one.
        ctx: The current context, after all transforms.
        state: Everything that a new replica needs: modules that are replicated or sharded, their one optimizer,
            `loader` itself, and whatever else the loop changes.
        step: Number of steps made before, as returned by `restore`; all replicas use the state of the one with the
            most.
        copy_every: Every this many steps, the first replica copies the state into the machine's memory, in the format
            of `save`. If all replicas die, restarted ones begin with the copy, unless `step` is higher.

    Returns:
        An iterable over one epoch at a time, with `epoch`, `step` and `leads`.

    Raises:
        ContextError: It is no elastic job; or this replica is refused: it is another program than the others, or a
            second process of one replica. Or replicas cannot connect to each other.
        ContractError: A step could not be made again.
        CheckpointError: The state of the others does not fit the objects here.
        PeerError: The launcher is gone.
        TypeError: The loader or the state is something else.
        ValueError: The state is not complete.

    Example:
        >>> import weft
        >>> model = torch.nn.Linear(1, 1)
        >>> with weft.start(elastic="replica", device="cpu") as ctx:
        ...     loader, ctx = weft.shard_data(DataLoader(torch.ones(4, 1), batch_size=2), ctx)
        ...     model, ctx = weft.replicate(model, ctx)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     objects = {"model": model, "optimizer": optimizer, "loader": loader}
        ...     state, ctx = weft.checkpointable(objects, ctx)
        ...     batches = weft.resilient(loader, ctx, state=state)
        ...     for x in batches:
        ...         (model(x).mean() * loader.share).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> batches.step, batches.epoch
        (2, 1)
    """
    check_count("resilient", "step", step, least=0, fix="weft.resilient(loader, ctx, state=state, step=0)")
    if copy_every is not None:
        check_count(
            "resilient", "copy_every", copy_every, fix="weft.resilient(loader, ctx, state=state, copy_every=10)"
        )
    return Resilient(loader, ctx, state, step, copy_every)


class Resilient(Generic[B]):
    """The steps of an elastic job.

    Attributes:
        step: Steps that were made.
        again: Steps that this replica had to make again.
    """

    def __init__(self, loader: Any, ctx: DistContext, state: Checkpoint, step: int, copy_every: int | None) -> None:
        replicas, optimizer = check_program(loader, ctx, state)
        self.step, self.again = step, 0
        self._loader: ShardedLoader[B] = loader
        self._ctx, self._state, self._replicas = ctx, state, replicas
        self._facts = facts_of_program(state, loader, ctx)
        self._began = zlib.crc32(bytes(torch.get_rng_state().tolist()))
        self._mark, self._copy = StepMark(state, loader, ctx), MemoryCopy(replicas.memory(), copy_every, state, ctx)
        self._is_fresh = True
        self._steps = 0  # of the optimizer, in this step of the job
        self._exchanges = 0
        replicas.on_loss = self._mark.keep_weights
        replicas.is_done = self._is_done
        optimizer.register_step_pre_hook(self._before_step)
        self._meet(loader.state_dict())
        replicas.loop = LoopPosition(self.step, inside=False, whole=True)  # there may be nothing left to do

    @property
    def epoch(self) -> int:
        """Number of the running epoch, or of the next one."""
        return self._loader.epoch

    @property
    def leads(self) -> bool:
        """Whether this is a rank of the first of the replicas that live: the one to log and to save."""
        return self._replicas.index == 0

    def __iter__(self) -> Iterator[B]:
        epoch = self._loader.epoch
        self._mark.begin()
        self._replicas.report_position(LoopPosition(self.step))
        while self._loader.epoch == epoch:
            batches: Any = iter(self._loader)
            self._begin_step()
            for batch in batches:
                try:
                    yield batch
                except GeneratorExit:
                    is_over = self._replicas.broken or self._ctx.world.root.closed
                    if not is_over and _is_break(sys._getframe(1)):
                        self._replicas.report_position(LoopPosition(self._steps_made(), inside=False))
                    raise
                if not self._settle(batch):
                    break
                self._begin_step()
            else:
                break
            position = self._mark.position if self._replicas.broken else self._loader.state_dict()
            batches.close()
            self._meet(position)
        self._replicas.report_position(LoopPosition(self.step, inside=False, whole=True))

    # -- the end ---------------------------------------------------------------------------------

    def _steps_made(self) -> int:
        return self.step + (self._replicas.exchanges > self._exchanges and self._steps == 1)

    def _is_done(self, error: BaseException | None) -> bool:
        """Whether the work is done, of what the context was left with; see [Note: the end of a loop]."""
        replicas = self._replicas
        if not replicas.loop.inside or error is not None:
            return not replicas.loop.inside
        if replicas.broken:
            raise ContractError(
                "resilient: the loop was left in a step that has failed, and would have been made again",
                found="a `break` after a step in which another replica was lost",
                expected="a loop that ends between two steps",
                fix="for x, y in batches:\n    if batches.step >= 1000:  # first in the body, not last\n        break",
            )
        replicas.loop = LoopPosition(self._steps_made(), inside=False)
        return True

    # -- one step --------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._mark.take()
        self._steps, self._exchanges = 0, self._replicas.exchanges
        self._loader.weft_cursor.weighed = False

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if any(callable(value) for value in (*args[1:], *kwargs.values())):  # the first is the optimizer
            raise _wrong_loop("optimizer.step(closure)", "a step without a closure")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._replicas.exchanges == self._exchanges and any(p.grad is not None for p in parameters):
            raise _wrong_loop("gradients that came past the forward of the model", "a backward pass through it")
        if self._replicas.broken:
            for parameter in parameters:
                parameter.grad = None  # so the step changes nothing

    def _settle(self, batch: B) -> bool:
        """Whether the loop continues with the next batch; otherwise the replicas meet first."""
        replicas = self._replicas
        if replicas.exchanges == self._exchanges:  # no backward pass: nothing else tells the replicas apart
            replicas.add_up([])
        elif self._steps != 1:
            raise _wrong_loop(f"{self._steps} optimizer steps after a backward pass", "one step for each yield")
        if replicas.broken:
            self._mark.put_back()
            self.again += 1
            return False
        self._check_weighed(batch)
        self.step += 1
        if self.leads:
            self._copy.make(self.step)
        return not replicas.called

    def _check_weighed(self, batch: B) -> None:
        """Raise if means over batches of different sizes were averaged."""
        weighed = batch.weighed if isinstance(batch, Window) else self._loader.weft_cursor.weighed
        plan = self._loader.weft_reading.plan
        if not weighed and plan.per_step % plan.size:
            raise _wrong_loop(
                f"a step of {plan.per_step} samples on {plan.size} replicas, whose losses had no `share`",
                "loss = cross_entropy(model(x), y) * loader.share  # or window.share",
            )

    # -- between steps ---------------------------------------------------------------------------

    def _meet(self, position: dict[str, Any]) -> None:
        """Meet the other replicas, take over the state of those that have made more steps, and divide the samples."""
        begin = time.monotonic()
        self._loader.load_state_dict(position)
        replicas = self._replicas
        lost: list[str] = []
        failed = replicas.broken
        in_vain = 0
        while True:
            answer, has_met = self._try_to_meet(failed=failed)
            lost += answer.lost
            if has_met:
                break
            in_vain = 0 if answer.lost else in_vain + 1
            if in_vain >= _ATTEMPTS and replicas.index != answer.source:  # which has the state of all
                raise _out_of_reach(answer)
        self._mark.begin()
        self._loader.weft_divide(replicas.index, replicas.size)
        if self.leads and self._ctx.is_main and replicas.number > 1:
            logging.getLogger("weft").log(
                logging.WARNING if lost else logging.INFO,
                "%sstep %d%s: %d of %d replicas continue, after %.2f s", "".join(f"{each}; " for each in lost),
                self.step, " is made again" if answer.again else "", replicas.size, replicas.most,
                time.monotonic() - begin,
            )  # fmt: skip

    def _try_to_meet(self, *, failed: bool) -> tuple[Answer, bool]:
        """The quorum, and whether all of its members have met."""
        replicas = self._replicas
        copied = self._copy.step if self._is_fresh else -1
        answer = replicas.meet(max(self.step, copied), fresh=self._is_fresh, facts=self._facts, failed=failed)
        received = None
        if not replicas.broken and replicas.index == answer.source and copied > self.step:
            self.step = self._copy.load()  # no living replica has made more steps
        if not replicas.broken and replicas.index in answer.receivers:
            received = receive_state(answer.source, replicas, began=self._began)
        elif not replicas.broken and replicas.index == answer.source and answer.receivers:
            send_state(self._state, self.step, answer.receivers, replicas, self._ctx, began=self._began)
        if not replicas.vote():
            return answer, False
        if received is not None:
            self.step = load_received(received, self._state, self._ctx)
        self._is_fresh = False
        return answer, True


def _is_break(frame: FrameType | None) -> bool:
    """Whether the loop is left by `break` or `return`, of the frame that closes its iterator."""
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:  # it wraps the loop, and is closed itself
        frame = frame.f_back
    return frame is not None and opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("POP_")


def _out_of_reach(answer: Answer) -> ContextError:
    return ContextError(
        "resilient: replicas that live cannot connect to each other",
        found=f"{_ATTEMPTS} attempts of replicas {', '.join(answer.members)}",
        expected="a network over which the machines reach each other, at the address of their host's name",
        fix="export GLOO_SOCKET_IFNAME=eth0  # the interface of that network, on each node",
    )


def _wrong_loop(found: str, expected: str) -> ContractError:
    return ContractError(
        "resilient: this step could not be repeated by other replicas",
        found=found,
        expected=expected,
        fix="for x, y in batches:\n    (loss(model(x), y) * loader.share).backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()",
    )
