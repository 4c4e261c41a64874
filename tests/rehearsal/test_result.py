"""The value a rehearsal returns: it prints, compares, and becomes JSON and back."""

import dataclasses

import pytest

from weft.rehearsal import Holder, Links, Memory, Message, Moment, Rehearsal, sent_bytes

GIB = 2**30
REST = Memory(parameters=GIB, gradients=GIB, optimizer=2 * GIB, where="train.py:12")
PEAK = Memory(
    parameters=GIB,
    gathered=GIB,
    activations=5 * GIB,
    where="train.py:41",
    holders=(Holder("activations", GIB, "m.py:3"),),
)

BUILD = Memory(parameters=9 * GIB, where="train.py:7")


def result(**changes):
    values = {
        "program": "train.py",
        "rank": 3,
        "world_size": 16,
        "mesh": (("replica", 2), ("shard", 8)),
        "device": "cuda",
        "steps": 2,
        "at_rest": REST,
        "peak": BUILD,
        "timeline": (Moment("build", REST, BUILD), Moment("step 1", REST, PEAK)),
        "messages": (
            Message("all_gather", "shard", 8, 4, 8 * GIB, 7 * GIB),
            Message("all_reduce", "replica", 2, 1, GIB, GIB, nodes=2),
        ),
        "assumed": ("finite",),
        "same_as": (0, 1, 2, 3, 9),
    }
    return Rehearsal(**{**values, **changes})


def test_it_is_the_same_after_json():
    assert Rehearsal.from_json(result().to_json()) == result()


@pytest.mark.parametrize("text", ["{}", "[]", '{"loss": 1}'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match=r"not a rehearsal(.|\n)*fix: +weft rehearse"):
        Rehearsal.from_json(text)


def test_it_prints_every_fact():
    text = str(result())
    for fact in (
        "train.py: rank 3 of 16 (replica=2, shard=8), cuda, 2 steps; the same on ranks 0-3, 9",
        "total          4 GiB           7 GiB  at train.py:41",
        "the peak before the first step is 9 GiB, at train.py:7",
        "m.py:3  activations  1 GiB",
        "all_gather        shard        8      4  8 GiB  7 GiB",
        "sent in a step: 8 GiB",
        "a model",
        "finite",
    ):
        assert fact in text, text
    assert "buffers" not in text


def test_a_comparison_shows_what_differs_and_nothing_else():
    assert str(result().compare(result())) == "no difference"
    other = result(at_rest=dataclasses.replace(REST, gradients=0, buffers=GIB), messages=result().messages[:1])
    assert result().compare(other).rows == (
        ("at rest, gradients", GIB, 0),
        ("at rest, buffers", 0, GIB),
        ("all_reduce along replica, messages", 1, 0),
        ("all_reduce along replica, sent", GIB, 0),
        ("sent in a step", 8 * GIB, 7 * GIB),
    )
    assert "new" in str(result().compare(other))


def test_the_time_model_is_latency_of_a_tree_and_bytes_of_a_ring():
    links = Links(intra=(1e-6, 1e9), inter=(1e-5, 1e8))
    inside = Message("all_gather", "shard", 8, 4, 8000, 7000)
    assert links.seconds(inside) == pytest.approx(4 * 3e-6 + 7000 / 1e9)
    across = Message("all_reduce", "all", 64, 1, 640, sent_bytes("all_reduce", 640, 64), nodes=8)
    assert links.seconds(across) == pytest.approx(2 * 6e-5 + 1260 / 1e8)
    assert links.seconds(Message("all_reduce", "all", 1, 9, 640, 0)) == 0


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all_reduce", 1600),
        ("all_gather", 800),
        ("reduce_scatter", 800),
        ("all_to_all", 800),
        ("send", 1000),
        ("recv", 0),
    ],
)
def test_bytes_sent_are_those_of_rings(kind, sent):
    assert sent_bytes(kind, 1000, 5) == sent
    assert sent_bytes(kind, 1000, 1) == 0
