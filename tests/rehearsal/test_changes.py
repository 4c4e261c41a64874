"""Which changes are tried to make a program smaller, and which is named."""

from weft.rehearsal import Memory, Rehearsal
from weft.rehearsal.changes import changes, first_that_fits


def test_small_changes_come_first():
    found = [str(change) for change in changes({"replica": 6, "shard": 4, "tensor": 2})]
    both = "weft.recompute(model, ctx, blocks=...) before the strategy"
    assert found == [
        "--mesh replica=3,shard=8,tensor=2",
        both,
        "--mesh replica=1,shard=24,tensor=2",
        f"--mesh replica=1,shard=24,tensor=2, and {both}",
        f"--mesh replica=1,shard=24,tensor=2, and {both.replace('...)', '..., offload=True)')}",
    ]
    assert [change.offloads for change in changes(None)] == [False, True]


def test_the_first_that_fits_is_named_and_those_that_fail_are_passed_over():
    def rehearse(change):
        shards = (change.mesh or {}).get("shard", 8)
        if shards == 16:
            raise ValueError("heads cannot be divided")
        memory = Memory(parameters=1024 // shards, activations=32 if change.recomputes else 64)
        return Rehearsal(
            program="train.py", rank=0, world_size=64, mesh=(), device="cpu", steps=1, at_rest=memory, peak=memory
        )

    mesh = {"replica": 8, "shard": 8}
    change, found = first_that_fits(96, mesh, rehearse)
    assert (change.mesh, found.peak.parameters) == ({"replica": 2, "shard": 32}, 32)
    assert first_that_fits(32, mesh, rehearse) is None
