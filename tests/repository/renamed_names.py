"""Train on two ranks with a torch in which one private name is another: prints what came of it, as JSON.

    python -m tests.repository.renamed_names [name ...]    # default: every name that these trainings use

Each name is tried in processes of its own, forked from this one, with two of the trainings that use it; a name that
is given, with all of them.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.repository.later_torch import rename
from weft import private_names, torch_internals

RANKS = 2
# Members of an enumeration; and what torch's C++ looks up by its spelling, so that no other version can have another.
BY_SPELLING = {
    "FORWARD",
    "IDLE",
    "_backward_cls",
    "_custom_op_handlers",
    "_dispatch_fast_path_python_tail",
    "_dispatch_get_local_results_slow_path",
    "_local_scalar_dense",
    "_local_tensor",
    "_op_dispatcher",
    "_propagate_op_sharding_dispatch_slow_path",
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.inner:
            x = layer(x).relu() + x
        return self.head(self.norm(x))


def _net():
    torch.manual_seed(3)
    return Net()


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _train(ctx, folder, *, strategy, policy=None, steps=1, updates=3, save=False, **options):
    model = _net()
    data = torch.utils.data.TensorDataset(torch.randn(8 * steps * updates, 6), torch.randn(8 * steps * updates, 3))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=0)
    loader, ctx = weft.shard_data(loader, ctx)
    if policy is not None:
        model, ctx = weft.with_precision(model, ctx, policy)
    if strategy in ("replicate", "fully_shard"):
        model, ctx = getattr(weft, strategy)(model, ctx, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if strategy == "zero_partition":
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, **options)
    if policy == "fp16":
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    if steps > 1:
        model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    for step, window in enumerate(loader):
        for x, y in window if steps > 1 else [window]:
            (nn.functional.mse_loss(model(x), y) * (window.share if steps > 1 else 1)).backward()
        weft.clip_grads(model, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        if save and step == 1:
            weft.save(state, folder, step, ctx)
    if save:
        weft.restore(state, folder, ctx)
    return [_whole(p.detach()).float().clone() for p in model.parameters()]


TRAININGS = {
    "replicate": partial(_train, strategy="replicate"),
    "replicate flat": partial(_train, strategy="replicate", flat=True, steps=2),
    "fully_shard": partial(_train, strategy="fully_shard", units=nn.Linear),
    "fully_shard windows": partial(_train, strategy="fully_shard", units=nn.Linear, steps=2, policy="bf16"),
    "zero 1": partial(_train, strategy="zero_partition", stage=1),
    "zero 2": partial(_train, strategy="zero_partition", stage=2, units=nn.Linear),
    "zero 3": partial(_train, strategy="zero_partition", stage=3, units=nn.Linear, steps=2),
    "fp16": partial(_train, strategy="replicate", policy="fp16"),
    "fp16 shards": partial(_train, strategy="fully_shard", policy="fp16"),
    "save and restore": partial(_train, strategy="replicate", save=True),
    "save and restore shards": partial(_train, strategy="fully_shard", units=nn.Linear, save=True),
    "save and restore zero": partial(_train, strategy="zero_partition", stage=1, save=True),
}


def _named():
    """The names of the table, by their spelling in torch."""
    found = {}
    for value in vars(torch_internals).values():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, (private_names.Private, private_names.Attribute)):
                found.setdefault(one.spelling, []).append(one)
    return found


def _note_uses(used):
    def noting(method):
        def call(self, *args):
            used.add(self.spelling)
            return method(self, *args)

        return call

    for cls, names in ((private_names.Private, ("found",)), (private_names.Attribute, ("name", "exists"))):
        for name in names:
            kept = vars(cls)[name]
            setattr(cls, name, property(noting(getattr(kept, "func", None) or kept.fget)))
    for name in ("of", "get", "set"):
        setattr(private_names.Attribute, name, noting(vars(private_names.Attribute)[name]))


def _rank(rank, ports, name, trainings, folder, answer):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    used = set()
    if name is None:
        _note_uses(used)
    else:
        for one in _named()[name]:
            for kept in ("found", "exists"):
                with contextlib.suppress(AttributeError):
                    delattr(one, kept)
        rename(name)
    found = {}
    for training in trainings:
        used.clear()
        os.environ["MASTER_PORT"] = str(ports[training])
        try:
            with weft.start(timeout_s=200, seed=1) as ctx:
                torch.manual_seed(4)
                values = TRAININGS[training](ctx, f"{folder}/{training}")
            found[training] = ("done", [v.tolist() for v in values], sorted(used))
        except weft.errors.WeftError as error:
            found[training] = ("told", str(error), sorted(used))
        except BaseException:  # noqa: BLE001
            found[training] = ("other", traceback.format_exc(), sorted(used))
    answer.send(found)
    answer.close()
    os._exit(0)


def run(name, trainings):
    """What each training ended with, on each rank."""
    fork, folder = multiprocessing.get_context("fork"), tempfile.mkdtemp()
    # Served here, where the system gives out the ports: another program may take one that a rank is told.
    stores = {one: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for one in trainings}
    ports = {training: store.port for training, store in stores.items()}
    ends = []
    for rank in range(RANKS):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=_rank, args=(rank, ports, name, trainings, folder, theirs))
        process.start()
        theirs.close()
        ends.append((process, ours))
    found = []
    for process, ours in ends:
        try:
            found.append(ours.recv() if ours.poll(900) else {})
        except EOFError:
            found.append({})
        process.kill()
        process.join()
    return found


def judged(expected, found, training):
    """In a word, what a renamed torch did to a training, and the reason."""
    version = f"torch {torch.__version__}"
    ends = [one.get(training, ("hung or died", "", [])) for one in found]
    for (kind, value, _), (_, right, _) in zip(ends, expected, strict=True):
        if kind == "done" and value != right:
            return "silent", "other numbers"
        if kind == "told" and not any(end == "told" and version in text for end, text, _ in ends):
            return "unnamed", value  # a rank may tell that another one has ended
        if kind not in ("done", "told"):
            return kind, value
    return ("told" if any(kind == "told" for kind, *_ in ends) else "right"), next(
        (v for k, v, _ in ends if k == "told"), ""
    )


def main(only):
    torch.set_num_threads(1)
    for module in ("_dynamo", "distributed.fsdp", "distributed.tensor", "distributed.tensor.debug", "utils.checkpoint"):
        importlib.import_module(f"torch.{module}")  # what is imported later would have the old name
    base = run(None, list(TRAININGS))
    for training in TRAININGS:
        assert all(one[training][0] == "done" for one in base), (training, base[0][training][1])
    uses = {training: {*base[0][training][2], *base[1][training][2]} for training in TRAININGS}
    for name in only or sorted(set().union(*uses.values()) - BY_SPELLING):
        trainings = [training for training in TRAININGS if name in uses[training]]
        if not only:
            trainings = trainings[:: -(-len(trainings) // 2)]  # at most two, of all kinds
        found = run(name, trainings)
        for training in trainings:
            expected = [one[training] for one in base]
            print(json.dumps([name, training, *judged(expected, found, training)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
