"""A process group on the CPU that fails as NCCL does: who waits in it for a rank that does not come waits until the
group is aborted, and goes on then without an error.

The numbers travel through gloo. What gloo notices of a peer that is gone is kept from whoever waits; a wait is in C++,
from where the handlers of signals are not called. A collective that begins after the abort raises.
"""

import threading
import time

import torch
import torch.distributed as dist

NAME = "waiting"
_living = []


class _Work(dist.Work):
    def __init__(self, future, outputs):
        super().__init__()
        self._future, self._outputs = future, outputs

    def wait(self, timeout=None):
        self._future.wait()
        return True

    def is_completed(self):
        return self._future.done()

    is_success = is_completed

    def get_future(self):
        return self._future

    def result(self):
        return self._outputs

    def synchronize(self):
        self._future.wait()

    def block_current_stream(self):
        self._future.wait()

    def exception(self):
        return None


def _has_arrived(work):
    try:
        return work.wait()
    except RuntimeError:
        return False


class WaitingGroup(dist.ProcessGroup):
    supports_splitting = False
    supports_coalescing = False
    bound_device_id = None
    _name = NAME

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._begun = 0
        self._pending = []
        self._lost = []  # those whose peers are gone
        self._lock = threading.Lock()
        self.aborted = False
        _living.append(self)
        threading.Thread(target=self._look, daemon=True, name="waiting group").start()

    # -- how a wait ends -------------------------------------------------------------------------

    def _look(self):
        while not self.aborted:
            with self._lock:
                over = [each for each in self._pending if each[1].is_completed()]
                for each in over:
                    self._pending.remove(each)
                    if not _has_arrived(each[1]):
                        self._lost.append(each)
                        continue
                    future, _, finish, outputs = each
                    finish()
                    future.set_result(outputs)
            time.sleep(0.001)

    def _start(self, outputs, begin, finish=lambda: None):
        self._begun += 1
        future = torch.futures.Future()
        with self._lock:  # an abort comes before it or after it, and then ends it
            if self.aborted:
                raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")
            self._pending.append((future, begin(), finish, outputs))
        return _Work(future, outputs)

    def abort(self):
        with self._lock:
            self.aborted = True
            pending, self._pending, self._lost = [*self._pending, *self._lost], [], []
        for future, _, _, outputs in pending:
            future.set_result(outputs)

    def shutdown(self):
        """Waits for what was begun, as NCCL's own."""
        self.wait_for_all()

    def wait_for_all(self):
        """What reading a value does on a device."""
        for future, *_ in [*self._pending, *self._lost]:
            future.wait()

    # -- what torch asks -------------------------------------------------------------------------

    def size(self):
        return self._inner.size()

    def rank(self):
        return self._inner.rank()

    def name(self):
        return NAME

    getBackendName = name  # noqa: N815

    @property
    def group_name(self):
        return self._name

    def _set_group_name(self, name):
        self._name = name
        super()._set_group_name(name)

    def _set_group_desc(self, name):
        pass

    def _set_default_timeout(self, timeout):
        pass

    def _get_backend(self, device):
        return self

    def _has_hooks(self):
        return False

    def _get_sequence_number_for_group(self):
        return self._begun

    def _set_sequence_number_for_group(self):
        pass

    # -- collectives -----------------------------------------------------------------------------

    def _sum(self, tensors, operation):
        """Options of gloo, which cannot divide, and what divides."""
        options = dist.AllreduceOptions()
        averages = operation == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if averages else operation
        return options, lambda: [t.div_(self.size()) for t in tensors] if averages else None

    def allreduce(self, tensors, opts=None):
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        options, finish = self._sum(tensors, getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        return self._start(tensors, lambda: self._inner.allreduce(tensors, options), finish)

    def allreduce_coalesced(self, tensors, opts=None):
        return [self.allreduce([each], opts) for each in tensors][-1]

    def broadcast(self, tensors, opts=None):
        options = opts or dist.BroadcastOptions()
        return self._start(list(tensors), lambda: self._inner.broadcast(list(tensors), options))

    def allgather(self, outputs, inputs, opts=None):
        return self._start(list(outputs[0]), lambda: self._inner.allgather(outputs, inputs))

    def _allgather_base(self, output, value, opts=None):
        mine = value.clone().view(-1)
        return self._start([output], lambda: self._inner._allgather_base(output.view(-1), mine))

    def all_gather_single(self, output, value, opts=None):
        return self._allgather_base(output, value, opts)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        return [self._allgather_base(one, two) for one, two in zip(outputs, inputs, strict=True)][-1]

    def _reduce_scatter_base(self, output, value, opts=None):
        whole = value.clone()
        options, divide = self._sum([whole], getattr(opts, "reduceOp", dist.ReduceOp.SUM))

        def finish():
            divide()
            output.view(-1).copy_(whole.view(self.size(), -1)[self.rank()])

        return self._start([output], lambda: self._inner.allreduce([whole], options), finish)

    def reduce_scatter_single(self, output, value, opts=None):
        return self._reduce_scatter_base(output, value, opts)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        return [self._reduce_scatter_base(one, two, opts) for one, two in zip(outputs, inputs, strict=True)][-1]

    def alltoall_base(self, output, value, theirs, ours, opts=None):
        return self._start([output], lambda: self._inner.alltoall_base(output, value, theirs, ours))

    def all_to_all_single(self, output, value, theirs, ours, opts=None):
        return self.alltoall_base(output, value, theirs, ours)

    def barrier(self, opts=None):
        return self._start([], self._inner.barrier)

    def send(self, tensors, to, tag):
        return self._start(tensors, lambda: self._inner.send(tensors, to, tag))

    def recv(self, tensors, source, tag):
        return self._start(tensors, lambda: self._inner.recv(tensors, source, tag))


def register():
    """Let torch know of it, as of the backend `waiting`."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, WaitingGroup, devices=["cpu"])


def wait_for_all():
    """What `Tensor.item` does on a device: wait for the collectives before it, of all groups."""
    for group in _living:
        group.wait_for_all()
