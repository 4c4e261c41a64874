"""Workers of a loader end with their rank, and not before it."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import weft
from weft.testing import run_ranks

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Pids(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20 if get_worker_info() else 40))


def _pids(samples):
    """Which process reads each sample."""
    return torch.tensor([os.getpid() for _ in samples])


def _reads(ctx, data, persistent, method):
    loader = DataLoader(
        data(), 2, num_workers=2, persistent_workers=persistent, multiprocessing_context=method, collate_fn=_pids
    )
    loader, ctx = weft.shard_data(loader, ctx, uneven="empty")
    workers, epochs = [], 2
    for _ in range(epochs):
        found = set()
        for number, batch in enumerate(loader):
            found |= set(batch.tolist())
            if number == 1:
                for pid in found:
                    for each in SIGNALS:
                        os.kill(pid, each)
        assert len(found) == 2
        workers.append(found)
    assert (workers[0] == workers[1]) is persistent
    del loader
    end = time.monotonic() + 20
    while [pid for pid in set.union(*workers) if _lives(pid)]:
        assert time.monotonic() < end
        time.sleep(0.02)
    return True


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("data", [Pids, Stream])
def test_signals_that_come_to_workers_do_not_end_them_before_their_rank_is_done(data, persistent):
    assert run_ranks(_reads, 2, data, persistent, "fork") == [True, True]


@pytest.mark.slow
def test_workers_that_are_spawned_are_no_exception():
    assert _reads(weft.local(), Pids, True, "spawn")


STUCK = """
import multiprocessing, os, signal, sys, time
import torch, weft
from torch.utils.data import DataLoader, Dataset

stuck = multiprocessing.Event()

class Stuck(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index == 50:
            print(os.getpid(), flush=True)
            stuck.set()
            time.sleep(1000)
        return index

loader, ctx = weft.shard_data(DataLoader(Stuck(), batch_size=10, num_workers=1, persistent_workers=True), weft.local())
batches = iter(loader)
for _ in range(5):
    next(batches)
stuck.wait()  # what the worker is asked may be on its way still
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["ends", "killed"])
def test_a_worker_that_is_stuck_ends_with_its_rank(end):
    with subprocess.Popen([sys.executable, "-c", STUCK, end], stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        process.wait(60)
        if end == "killed":  # nobody ends it; a signal of the scheduler finds that its rank is gone
            os.kill(worker, signal.SIGTERM)
        limit = time.monotonic() + 30
        while _lives(worker):
            assert time.monotonic() < limit
            time.sleep(0.02)


def test_a_handler_of_the_users_own_is_kept():
    def init(worker):
        signal.signal(signal.SIGUSR1, lambda number, frame: None)

    class Handlers(Pids):
        def __getitem__(self, index):
            kept = signal.getsignal(signal.SIGUSR1)
            return torch.tensor(
                [getattr(kept, "__name__", "") == "<lambda>", signal.SIGTERM in signal.pthread_sigmask(0, [])]
            )

    loader, _ = weft.shard_data(DataLoader(Handlers(), batch_size=4, num_workers=1, worker_init_fn=init), weft.local())
    assert next(iter(loader)).tolist() == [[True, False]] * 4
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
