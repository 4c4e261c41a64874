"""Functions of the user that are called before and after the objects are saved or restored."""

import pytest
import torch
from torch import nn

import weft
from tests.variants import variants
from weft.errors import PeerError
from weft.testing import run_ranks


def _swapped(ctx, folder, save):
    """What is saved is ten times what is trained, as with an optimizer whose weights at rest are others."""
    model, ctx = weft.fully_shard(nn.Linear(4, 4), ctx)
    calls = []

    def times(factor):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor)

    def before(what):
        calls.append(f"before {what}")
        times(10)

    def after(what):
        calls.append(f"after {what}")
        times(0.1)

    state, ctx = weft.checkpointable({"model": model}, ctx, before=before, after=after)
    with weft.full_params(model, ctx):
        own = model.weight.detach().clone()
    done = save(state, folder, 1, ctx)
    if save is weft.save_async:
        done.wait()
    times(0)
    assert weft.restore(state, folder, ctx).step == 1
    with weft.full_params(model, ctx):
        torch.testing.assert_close(model.weight.detach(), own)
    return calls, own


@pytest.mark.parametrize("save", variants(weft.save, weft.save_async))
def test_they_see_what_is_saved_and_what_was_restored(tmp_path, save):
    for calls, own in run_ranks(_swapped, 2, tmp_path, save):
        assert calls == ["before save", "after save", "before restore", "after restore"]
        read = weft.weights.read(weft.checkpoint.latest(tmp_path))
        torch.testing.assert_close(read["weight"], 10 * own)


def _failing(ctx, folder, part):
    model = nn.Linear(2, 2)
    calls = []

    def fail(what):
        if ctx.rank == 1:
            raise KeyError(f"{what} on rank 1")

    state, ctx = weft.checkpointable({"model": model}, ctx, **{"after": calls.append, part: fail})
    try:
        weft.save(state, folder, 1, ctx)
    except (KeyError, PeerError) as error:
        return str(error), calls
    return None


@pytest.mark.parametrize("part", variants("before", "after"))
def test_an_error_in_one_is_raised_on_all_ranks(tmp_path, part):
    texts, calls = zip(*run_ranks(_failing, 2, tmp_path, part), strict=True)
    assert all("save on rank 1" in text for text in texts)
    assert f"save: {part}" in texts[0]
    assert list(calls) == [[], []]


class _Unsavable:
    def state_dict(self):
        raise OverflowError("not now")

    def load_state_dict(self, state):
        pass


def test_what_was_begun_is_taken_back_if_the_save_fails(tmp_path):
    calls = []
    objects = {"model": nn.Linear(2, 2), "own": _Unsavable()}
    state, ctx = weft.checkpointable(objects, weft.local(), before=calls.append, after=calls.append)
    with pytest.raises(OverflowError, match="not now"):
        weft.save(state, tmp_path, 1, ctx)
    assert calls == ["save", "save"]
    with pytest.raises(TypeError, match="before cannot be called"):
        weft.checkpointable(objects, ctx, before=3)
