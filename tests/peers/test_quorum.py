"""Which replicas make steps together: decided without processes, stores or clocks."""

from weft.peers.quorum import Ask, LoopPosition, Quorums

FACTS = {"objects": "abc"}


def _ask(step=0, *, fresh=False, facts=FACTS):
    return Ask(step, fresh, facts, 20.0)


def _three(least=1):
    quorums = Quorums(least=least)
    for name in ("0.0", "1.0", "2.0"):
        quorums.started(name)
        assert quorums.ask(name, _ask(fresh=True), 0.0) == ""
    return quorums, quorums.next(0.0)


def test_the_first_quorum_waits_for_all_and_the_first_gives_its_state():
    quorums = Quorums(least=2)
    for name in ("10.0", "2.0", "3.0"):
        quorums.started(name)
    quorums.ask("10.0", _ask(fresh=True), 0.0)
    assert quorums.next(40.0) is None, "fewer than the least"
    quorums.ask("2.0", _ask(fresh=True), 1.0)
    assert quorums.next(29.0) is None and not quorums.calls
    answer = quorums.next(31.0)
    assert answer.members == ("2.0", "10.0") and answer.source == 0 and answer.receivers == (1,)


def test_when_all_were_lost_the_newest_copy_is_waited_for():
    quorums, _ = _three()
    for name in ("0.0", "1.0", "2.0"):
        quorums.ended(name)
        quorums.started(name.replace(".0", ".1"))
    quorums.ask("0.1", _ask(20, fresh=True), 1.0)
    assert quorums.next(1.0) is None, "another one may have a newer copy"
    for name in ("1.1", "2.1"):
        quorums.ask(name, _ask(40, fresh=True), 1.0)
    answer = quorums.next(1.0)
    assert (answer.step, answer.source, answer.receivers) == (40, 1, (0, 2))


def test_those_who_have_made_more_steps_have_the_state():
    quorums, _ = _three()
    quorums.ended("1.0")
    quorums.ask("0.0", _ask(5), 1.0)
    assert quorums.next(1.0) is None and quorums.waiting_for == {"2.0"}
    quorums.ask("2.0", _ask(6), 1.1)
    answer = quorums.next(1.1)
    assert (answer.number, answer.members, answer.source, answer.receivers, answer.step) == (
        2, ("0.0", "2.0"), 1, (0,), 6,
    )  # fmt: skip


def test_a_step_that_was_lost_is_made_again_unless_somebody_has_finished_it():
    for steps, again in (((5, 5), True), ((5, 6), False)):
        quorums, _ = _three()
        quorums.ended("1.0")
        for name, step in zip(("0.0", "2.0"), steps, strict=True):
            quorums.ask(name, Ask(step, fresh=False, facts=FACTS, patience_s=20.0, failed=step == 5), 1.0)
        assert quorums.next(1.0).again is again


def test_a_new_one_calls_the_others_together_and_takes_their_state_whatever_it_has():
    quorums, _ = _three()
    quorums.ended("1.0")
    quorums.started("1.1")
    quorums.ask("1.1", _ask(99, fresh=True), 1.0)
    assert quorums.calls and quorums.next(1.0) is None
    for name in ("0.0", "2.0"):
        quorums.ask(name, _ask(7), 1.0)
    answer = quorums.next(1.0)
    assert answer.members == ("0.0", "1.1", "2.0") and answer.receivers == (1,) and answer.step == 7
    assert not quorums.calls


def test_who_never_comes_is_overdue():
    quorums, _ = _three()
    quorums.ask("0.0", _ask(1), 5.0)
    assert quorums.overdue(24.0) == set()
    assert quorums.overdue(26.0) == {"1.0", "2.0"}


def test_who_is_refused():
    quorums, _ = _three()
    assert "no replica that this launcher has started" in quorums.ask("7.0", _ask(), 1.0)
    first = next(iter(FACTS))
    other = {first: "def", "model.py": "only one has it"}
    assert f"is another program: {first}: def, where the others have {FACTS[first]}; start" in quorums.ask(
        "2.0", _ask(facts=other), 1.0
    )
    assert "objects: xyz, where the others have abc" in quorums.ask("1.0", _ask(facts={"objects": "xyz"}), 1.0)


def test_nobody_begins_from_nothing_when_the_job_is_done():
    quorums, _ = _three()
    quorums.note_position("0.0", LoopPosition(5, inside=False, whole=True))
    quorums.ended("0.0", done=True)
    quorums.ended("1.0")
    quorums.started("1.1")
    quorums.ask("1.1", _ask(fresh=True), 1.0)
    assert quorums.next(1.0) is None
    quorums.ask("2.0", _ask(4), 2.0)
    assert quorums.next(2.0).members == ("1.1", "2.0")


# -- the end of the work -----------------------------------------------------------------------------


def _ended(quorums, name, step, *, whole=False):
    quorums.note_position(name, LoopPosition(step, inside=False, whole=whole))
    quorums.ended(name, done=True)


def test_all_leave_after_the_same_step():
    quorums, _ = _three()
    for name in ("0.0", "1.0", "2.0"):
        _ended(quorums, name, 5)
    assert set(quorums.ends) == {"0.0", "1.0", "2.0"} and not quorums.early


def test_who_leaves_while_others_continue_has_left_too_early_and_who_is_behind_shows_nothing():
    for step, early in ((5, ["1.0"]), (6, ["1.0"]), (4, [])):
        for asks_first in (True, False):
            quorums, _ = _three()
            if asks_first:
                quorums.ask("0.0", _ask(step), 1.0)
            _ended(quorums, "1.0", 5, whole=True)
            if not asks_first:
                quorums.ask("0.0", _ask(step), 1.0)
            assert quorums.early == early and bool(quorums.ends) is not bool(early)


def test_who_is_behind_makes_the_last_step_again_with_fewer_than_the_least():
    quorums, _ = _three(least=3)
    _ended(quorums, "1.0", 5)
    quorums.ended("2.0")
    quorums.ask("0.0", _ask(4), 1.0)
    assert quorums.next(1.0).members == ("0.0",)


def test_if_all_others_vanish_in_their_loops_a_break_is_no_end_of_the_work():
    quorums, _ = _three()
    quorums.note_position("0.0", LoopPosition(0))
    _ended(quorums, "1.0", 5)
    quorums.ended("0.0")
    assert quorums.ends, "2.0 may still say something"
    quorums.ended("2.0")
    assert quorums.early == ["1.0"] and not quorums.ends
    quorums.started("1.1")
    quorums.ask("1.1", _ask(fresh=True), 2.0)
    assert quorums.next(2.0).members == ("1.1",), "the work is done from the beginning"


def test_if_others_vanish_the_end_of_an_epoch_counts_unless_one_of_them_was_in_the_next_one():
    for begun, early in ((0, []), (5, ["1.0"])):
        quorums, _ = _three()
        quorums.note_position("0.0", LoopPosition(begun))
        _ended(quorums, "1.0", 5, whole=True)
        quorums.ended("2.0")
        quorums.ended("0.0")
        assert quorums.early == early


def test_if_others_vanish_one_that_agrees_is_enough():
    quorums, _ = _three()
    quorums.note_position("2.0", LoopPosition(5, inside=False, whole=True))
    _ended(quorums, "1.0", 5)
    quorums.ended("0.0")
    quorums.ended("2.0")
    assert set(quorums.ends) == {"1.0"} and not quorums.early
