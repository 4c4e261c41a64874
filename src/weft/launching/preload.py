"""Imported once by the process that ranks are forked from, so that no rank has to.

torch's compiler is imported by every optimizer when it is made; here it is shared too.

The process ignores the signals that tell a job to end: sent to a whole process group they would end it
first, and with it the ranks, in the middle of what they do to end in good order. It ends with the launcher.
"""

import gc
import importlib
import pkgutil
import signal
import sys

import torch

import weft.transforms

torch.optim.SGD([torch.zeros(1)])  # imports it

for module in pkgutil.iter_modules(weft.transforms.__path__, "weft.transforms."):  # what nearly every program uses
    importlib.import_module(module.name)

# Only there: multiprocessing starts that process as `python -c`. Who imports this elsewhere keeps what it has.
if sys.argv[0] == "-c" and "multiprocessing.forkserver" in sys.modules:
    numbers = {getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2")}
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    # A rank starts with them blocked, too: what ends the job while a rank is started waits until it can end it.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    gc.collect()
    gc.freeze()  # collections in a rank need not look at all this again
