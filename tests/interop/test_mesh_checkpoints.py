"""A checkpoint of every mesh is restored on every other, in the middle of an epoch of a training with dropout."""

import pytest

pytest.importorskip("transformers")

import weft
from tests.interop.model_matrix import TOLERANCE, compose, documented, fit, held, on_ranks, reference

NAME = "Mixtral"
MESHES = [mesh for mesh, why in documented()[NAME].items() if why == "exact"]


def _prepared(ctx, sequence):
    model, optimizer, loader, ctx = compose(NAME, ctx, sequence=sequence)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    return model, optimizer, loader, state, ctx


def _save(ctx, directory, sequence):
    model, optimizer, loader, state, ctx = _prepared(ctx, sequence)
    fit(model, optimizer, loader, ctx, 1)
    weft.save(state, directory, 1, ctx)


def _continue(ctx, directories, expected, sequence):
    """How far parameters are from those of one process, after the short window that comes then, by the mesh that saved.

    All are restored into one model, which has gone on from the one before.
    """
    model, optimizer, loader, state, ctx = _prepared(ctx, sequence)
    apart = {}
    for mesh, directory in directories.items():
        weft.restore(state, directory, ctx)
        fit(model, optimizer, loader, ctx, 1)
        apart[mesh] = max(float((p - expected[own]).abs().max()) for own, p in held(model, ctx).items())
    return apart


@pytest.mark.slow
def test_a_checkpoint_of_every_mesh_is_restored_on_every_other(tmp_path):
    directories = {mesh: tmp_path / str(number) for number, mesh in enumerate(MESHES)}
    for mesh, directory in directories.items():
        on_ranks(_save, mesh, directory)
    expected = reference(NAME, 2)
    for mesh in MESHES:
        for found in on_ranks(_continue, mesh, directories, expected):
            assert max(found.values()) < TOLERANCE, f"on {mesh}: {found}"
