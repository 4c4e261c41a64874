"""The board: what strangers write into the store of a job is taken for absent, and said once; how its threads end."""

import json
import logging
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from tests.fix_lines.told import told
from weft.peers.store import RankStore

SECRET = "0123456789abcdef"
JUNK = [b"", b"garbage", b"\x00" * 40, b"[" * 100_000, b"7", b"1" * 5000, b"NaN", b"\xff\xfe", json.dumps([1]).encode()]


@pytest.fixture
def store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False), server


@pytest.fixture
def board(store):
    return RankStore(store[0], limit_s=10, secret=SECRET).below("part")


def _keys(store):
    if not hasattr(store[1], "list_keys"):
        pytest.skip("torch cannot list keys")
    return store[1].list_keys()


def test_values_of_the_job_are_read_by_those_who_know_its_secret_alone(store, board):
    board.write("a", {"b": [1, "ä"]})
    same, other = (RankStore(store[0], limit_s=10, secret=secret).below("part") for secret in (SECRET, "other"))
    assert same.read("a", "b") == {"b": [1, "ä"]} and same.has("a") and not other.has("a")
    with pytest.raises(Exception, match="holds a value that no rank has written: a\n  found: +nothing"):
        other.read("a")
    board.delete("a")
    assert not same.has("a")


@pytest.mark.parametrize("junk", JUNK)
def test_what_a_stranger_writes_is_absent_and_said_once(store, board, junk, caplog):
    board.set("a", "1")
    board.push("q", 1)
    board.add("n", 3)
    with caplog.at_level(logging.WARNING, logger="weft"):
        (key,) = [key for key in _keys(store) if key.endswith("/a")]
        store[1].set(key, junk)
        store[1].set(key.replace("/a", "/n"), junk)
        for _ in range(3):
            store[1].queue_push(key.replace("/a", "/q"), junk)
        _keys(store)  # answered when all of that is there
        board.push("q", 2)
        assert not board.has("a") and board.add("n", 0) in (0, 7)
        assert [board.pop("q"), board.pop("q"), board.pop("q")] == [1, 2, None]
    assert len(caplog.records) == 1 and "what none of its processes has written" in caplog.records[0].getMessage()
    assert SECRET not in caplog.text
    assert board.claim("a", "mine") and board.get("a") == b"mine" and not board.claim("a", "yours")


def test_a_value_counts_under_its_own_name_alone(store, board):
    board.set("a", "1")
    board.below("deep").set("a", "2")
    keys = _keys(store)
    found = {key: store[1].get(key) for key in keys}
    for one, other in zip(keys, reversed(keys), strict=True):
        store[1].set(one, found[other])
    assert not board.has("a") and not board.below("deep").has("a")


def test_strangers_see_neither_the_secret_nor_messages(store, board):
    board.set("a", "value")
    board.push("q", "message")
    keys = _keys(store)
    assert not any("q" in key.rpartition("/")[2] for key in keys)
    assert all(SECRET not in text for text in (*keys, *(str(store[1].get(key)) for key in keys)))
    assert not any(key.startswith("part") for key in keys)


def test_nobody_waits_for_a_value_that_a_stranger_has_removed(store, board):
    board.set("a", "1")
    for key in _keys(store):
        store[1].delete_key(key)
    begin = time.monotonic()
    with told("peers/store.py", "holds a value that no rank has written") as it:
        board.read("a")
    assert "found:    nothing" in str(it.error)
    assert board.pop("q", 0.05) is None and time.monotonic() - begin < 60
    assert it.fix == "give each job a store of its own: another MASTER_PORT, closed to others"
    own = RankStore(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), limit_s=10, secret=SECRET)
    own.set("a", "1")
    assert own.read("a") == 1


def test_a_message_that_is_too_long_is_passed_over(board):
    board.push("q", "x" * 2**20)
    board.push("q", 1)
    assert board.pop("q") == 1


@pytest.mark.parametrize("store", [dist.HashStore()])
def test_without_a_secret_anybody_writes(store):
    board = RankStore(store, limit_s=10)
    store.set("a", "1")
    assert board.read("a") == 1 and not board.has("b") and board.add("n", 2) == board.add("n", 0) == 2
    store.queue_push("q", "[1]")
    assert board.pop("q") == [1]


ENDS_LATE = """
import sys, time
import torch.distributed as dist
import weft
from weft.peers.store import RankStore

class Late:
    def __del__(self, sleep=time.sleep):
        print("late", flush=True)
        sleep(2)

sys.modules["late"] = Late()  # goes when the interpreter ends, after what is registered for that
client = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
store = RankStore(client, limit_s=10).below("part")
assert store.wait_for("never", 0.2) is None
"""


@pytest.mark.slow
def test_a_program_may_end_while_a_thread_waits_for_a_key():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", ENDS_LATE, str(server.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "late\n"
        del server  # whoever waits there still comes back, into an interpreter that is gone
        _, errors = program.communicate(timeout=60)
    assert (program.returncode, errors) == (0, "")


@pytest.mark.slow
def test_the_end_of_a_wait_leaves_a_key_as_if_it_were_not_there(store):
    before = set(threading.enumerate())
    first, second = (RankStore(each, limit_s=10) for each in store)
    assert first.wait_for("key", 0.1) is None and first.wait_for("other", 0.1) is None
    second.set("other", "there")
    first.end_waits()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    assert not second.has("key") and second.values(["key", "other"]) == [None, b"there"]
    assert first.wait_for("key", 0.1) is None
    assert second.claim("key", "mine") and not first.claim("key", "yours")
    assert first.wait_for("key", 10) == b"mine"
