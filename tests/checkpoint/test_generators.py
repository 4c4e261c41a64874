"""Random generators of the user's own, in checkpoints."""

import copy
import hashlib
import json
import random

import numpy as np
import pytest
import torch

import weft
from weft.errors import CheckpointError
from weft.testing import run_ranks

GENERATORS = {
    "torch": (torch.Generator, lambda g: torch.randn(3, generator=g).tolist(), lambda g, n: g.manual_seed(n)),
    "python": (random.Random, lambda g: [g.random(), g.gauss(0, 1)], lambda g, n: g.seed(n)),
    "pcg": (np.random.default_rng, lambda g: g.normal(size=3).tolist(), None),
    "philox": (lambda: np.random.Generator(np.random.Philox(3)), lambda g: g.integers(9, size=5).tolist(), None),
    "twister": (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.random(3, dtype="f4").tolist(), None),
    "legacy": (np.random.RandomState, lambda g: g.randn(3).tolist(), lambda g, n: g.seed(n)),
}


def _generators_saved(ctx, folder):
    alike = {name: make() for name, (make, _, _) in GENERATORS.items() if name in ("philox", "twister")}
    differ = {name: make() for name, (make, _, _) in GENERATORS.items() if name not in alike}
    for name, generator in differ.items():
        if GENERATORS[name][2]:
            GENERATORS[name][2](generator, ctx.rank)
    objects = differ | alike
    for name, generator in objects.items():
        GENERATORS[name][1](generator)
    state, ctx = weft.checkpointable(objects, ctx)
    weft.save(state, folder, 1, ctx)
    return {name: GENERATORS[name][1](generator) for name, generator in objects.items()}


def _generators_restored(ctx, folder):
    objects = {name: make() for name, (make, _, _) in GENERATORS.items()}
    state, ctx = weft.checkpointable(objects, ctx)
    weft.restore(state, folder, ctx)
    return {name: GENERATORS[name][1](generator) for name, generator in objects.items()}


def test_generators_of_ones_own_go_on_on_each_rank(tmp_path):
    went_on = run_ranks(_generators_saved, 2, str(tmp_path))
    assert went_on[0]["torch"] != went_on[1]["torch"] and went_on[0]["philox"] == went_on[1]["philox"]
    assert run_ranks(_generators_restored, 2, str(tmp_path)) == went_on
    elsewhere = run_ranks(_generators_restored, 4, str(tmp_path))
    assert [found["philox"] for found in elsewhere] == [went_on[0]["philox"]] * 4  # alike, and so they stay
    for name in ("torch", "python", "pcg", "legacy"):
        assert len({str(found[name]) for found in elsewhere}) == 4  # others are drawn anew, for each rank
    assert elsewhere == run_ranks(_generators_restored, 4, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("torch", ""), ("torch", 3), ("torch", "00"), ("python", [3, "00", None]), ("python", {}), ("pcg", []),
        ("pcg", {"bit_generator": "SFC64"}), ("twister", {"state": {"key": "00" * 2496, "pos": 625}}),
        ("twister", {"state": {"key": "00", "pos": 0}}), ("philox", {"buffer_pos": "x"}), ("legacy", []),
        ("legacy", None),
    ],
)  # fmt: skip
def test_a_wrong_state_of_a_generator_is_refused_and_nothing_is_changed(tmp_path, name, wrong):
    objects = {key: make() for key, (make, _, _) in GENERATORS.items()}
    state, ctx = weft.checkpointable(objects, weft.local())
    path = weft.save(state, tmp_path, 1, ctx)
    manifest = path / "manifest.json"
    data = json.loads(manifest.read_text())
    states = data["ranks"][0]["generators"]
    states[name] = {**states[name], **wrong} if isinstance(wrong, dict) and isinstance(states[name], dict) else wrong
    del data["sha256"]
    rest = json.dumps(data)[1:]
    manifest.write_text(f'{{"sha256": "{hashlib.sha256(rest.encode()).hexdigest()}",\n{rest}')
    before = objects["torch"].get_state()
    others = {key: generator for key, generator in objects.items() if key != "torch"}
    copies = copy.deepcopy(others)
    with pytest.raises(CheckpointError, match=f"the values of {name} in .* cannot be used"):
        weft.restore(state, tmp_path, ctx)
    assert torch.equal(objects["torch"].get_state(), before)
    for key, generator in others.items():
        assert GENERATORS[key][1](generator) == GENERATORS[key][1](copies[key])


def test_a_generator_without_a_state_and_one_of_another_kind_are_refused(tmp_path):
    with pytest.raises(TypeError, match="objects without state_dict.*\n.*g: SystemRandom"):
        weft.checkpointable({"g": random.SystemRandom()}, weft.local())
    state, ctx = weft.checkpointable({"g": np.random.default_rng(0)}, weft.local())
    weft.save(state, tmp_path, 1, ctx)
    other, ctx = weft.checkpointable({"g": random.Random(0)}, weft.local())
    with pytest.raises(CheckpointError, match=r"the values of g in (.|\n)*numpy.random.Generator of PCG64"):
        weft.restore(other, tmp_path, ctx)
