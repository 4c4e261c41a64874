"""One of four ranks on one device: groups of axes, of parts of the ranks, and of parts of these; see test_nccl.py.

NVIDIA does not support several ranks on one device. NCCL accepts them if each says that it is on a host of its own.
"""

import sys

import torch
import torch.distributed as dist

import weft


def total(ctx):
    return float(weft.reduce(torch.full((1,), 2.0 ** ctx.ranks[ctx.rank], device=ctx.device), ctx, "sum"))


def splits(device):
    """How often the communicator of the default group has been split; None if torch does not count that."""
    count = getattr(dist.group.WORLD._get_backend(device), "comm_split_count", None)
    return None if count is None else count()


def main(device):
    with weft.start(device=device, mesh={"data": 2, "tensor": 2}, timeout_s=60) as ctx:
        split = splits(ctx.device)
        assert split in (None, 2), f"{split} splits for two axes"
        rank = ctx.rank
        assert total(ctx.on("data")) == (5.0 if rank in (0, 2) else 10.0)
        assert total(ctx.on("tensor")) == (3.0 if rank in (0, 1) else 12.0)
        three = ctx.subset([0, 1, 2])  # of which rank 3 has to know
        if three.here:
            assert total(three) == 7.0
            pair = three.subset([0, 2])  # which rank 3 does not come to
            if pair.here:
                assert total(pair) == 5.0
        own = ctx.on("tensor").subset([1])
        assert not own.here or total(own) == 2.0**rank
        assert dist.group.WORLD.bound_device_id == ctx.device
        weft.barrier(ctx)
    print("all ok")


if __name__ == "__main__":
    main(sys.argv[1])
