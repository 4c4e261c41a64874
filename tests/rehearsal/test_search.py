"""Meshes and options of a script side by side."""

import pytest

from weft.rehearsal import Links, Memory, Message, Rehearsal
from weft.rehearsal.search import Candidate, Trial, candidates, pareto_front, table, try_candidate

ARGUMENTS = ["--mesh", "{mesh}", "tensor={tensor}", "--batch={batch}", '{"json": 1}']


def test_every_division_of_the_ranks_and_every_value_is_a_choice():
    found = candidates(ARGUMENTS, 6, ["data", "tensor"], {"batch": ["8", "16"]})
    assert len(found) == 4 * 2
    assert [each.label for each in found[:3]] == [
        "data=6, tensor=1, batch=8",
        "data=6, tensor=1, batch=16",
        "data=3, tensor=2, batch=8",
    ]
    assert found[2].arguments == ("--mesh", "data=3,tensor=2", "tensor=2", "--batch=8", '{"json": 1}')
    assert found[2].mesh is None  # the script makes it


def test_a_mesh_that_the_script_does_not_take_is_that_of_the_context():
    found = candidates(["--depth", "2"], 8, ["replica", "shard"], {})
    assert [each.mesh for each in found] == [{"replica": n, "shard": 8 // n} for n in (8, 4, 2, 1)]
    assert len(candidates([], 64, ["a", "b", "c"], {})) == 28


@pytest.mark.parametrize(("name", "text"), [("rows", "occurs in no argument"), ("tensor", "name of an axis")])
def test_an_option_that_cannot_be_varied_is_refused(name, text):
    with pytest.raises(ValueError, match=rf"(?s)--vary {name} .*{text}.*found:.*fix: +weft rehearse .*{{{name}}}"):
        candidates(ARGUMENTS, 6, ["data", "tensor"], {name: ["1"]})


def trial(label, peak, sent):
    message = Message("all_gather", "shard", 8, 1, sent, sent)
    memory = Memory(activations=peak)
    found = Rehearsal(
        program="train.py", rank=0, world_size=8, mesh=(("shard", 8),), device="cpu", steps=1,
        at_rest=Memory(parameters=512), peak=memory, messages=(message,), links=Links((0, 1e3), (0, 1e3)),
    )  # fmt: skip
    return try_candidate(Candidate((), None, label), lambda _: found)


def fails(choice):
    raise ValueError("heads = 6 cannot be divided\n  found: 4")


TRIALS = [
    trial("worse", 3072, 2048),
    trial("small", 1024, 4096),
    trial("large", 2048, 1024),
    try_candidate(Candidate((), None, "broken"), fails),
]


def test_the_least_are_those_that_no_other_beats():
    assert [each.choice.label for each in pareto_front(TRIALS)] == ["small", "large"]
    twins = [trial("one", 1024, 1024), trial("two", 1024, 1024)]
    assert pareto_front(twins) == twins
    assert pareto_front([Trial(Candidate((), None, "broken"), error=ValueError())]) == []


def test_the_table_has_all_of_them_with_marks_and_errors():
    rows = [line.split() for line in table(TRIALS, limit=2048).splitlines()]
    assert rows[1:4] == [
        ["*", "small", "512", "B", "1", "KiB", "4", "KiB", "4.1", "s", "yes"],
        ["*", "large", "512", "B", "2", "KiB", "1", "KiB", "1.02", "s", "yes"],
        ["worse", "512", "B", "3", "KiB", "2", "KiB", "2.05", "s", "no"],
    ]
    assert "within 2 KiB" in table(TRIALS, limit=2048).splitlines()[0]
    assert table(TRIALS).endswith("failed\n  broken: ValueError: heads = 6 cannot be divided")
    assert "within" not in table(TRIALS)
