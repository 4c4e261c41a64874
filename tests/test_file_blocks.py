"""Files are read block by block, past the page cache if nobody else reads them; blocks go where they are wanted."""

import contextlib
import errno
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from weft.checkpoint import blocks as file_blocks
from weft.checkpoint import passing
from weft.checkpoint.blocks import BLOCK, Block, Blocks, Places
from weft.checkpoint.passing import PLACES, Link, Passing
from weft.checkpoint.reading import Stretch


def _file(tmp_path, size):
    path = tmp_path / "bytes"
    path.write_bytes(os.urandom(size))
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    return handle, path.read_bytes()


def _drop(handle):
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _cached(handle, size, place):
    """How many megabytes of a file have the page at this place in the page cache; those are read now."""
    probe = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY)
    os.posix_fadvise(probe, 0, 0, os.POSIX_FADV_RANDOM)
    found = 0
    for start in range(0, size, BLOCK):
        try:
            found += os.preadv(probe, [bytearray(1)], start + place, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
    os.close(probe)
    return found


SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 4097]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("alone", [True, False])
def test_every_byte_comes_once_and_in_order(tmp_path, size, count, alone):
    handle, expected = _file(tmp_path, size)
    _drop(handle)
    found = b""
    with ThreadPoolExecutor(3) as threads, mock.patch.object(file_blocks, "_LEAST", 0):
        blocks = Blocks(count, threads)
        for _ in range(2):  # of one file after the other
            found = b""
            for block in blocks.of(handle, size, alone=alone):
                assert block.start == len(found)
                found += bytes(block.memory)
            assert found == expected
    os.close(handle)


def test_a_file_that_nobody_else_reads_does_not_go_through_the_page_cache(tmp_path):
    size = 16 * BLOCK
    handle, expected = _file(tmp_path, size)
    _drop(handle)
    cases = [(True, 0.0), (False, 1.0), (True, 1.0)]  # what is there is taken from there
    with contextlib.ExitStack() as closing:
        if _cached(handle, size, 4096) or file_blocks._opened_past_cache(handle, closing) is None:
            cases = cases[1:]  # a file system in memory, or one that cannot
    with ThreadPoolExecutor(2) as threads:
        for alone, share in cases:
            found = b"".join(bytes(block.memory) for block in Blocks(4, threads).of(handle, size, alone=alone))
            assert found == expected
            assert abs(_cached(handle, size, 10 * 4096) / 16 - share) <= 0.5, alone
    os.close(handle)


@pytest.mark.parametrize("what", ["open", "read", "short"])
def test_a_file_system_without_it_is_read_as_ever(tmp_path, what):
    size = 3 * BLOCK + 77
    handle, expected = _file(tmp_path, size)
    real_open, real_read = os.open, os.preadv

    def opened(path, flags, *rest):
        if flags & os.O_DIRECT:
            if what == "open":
                raise OSError(errno.EINVAL, "no")
            past.append(real_open(path, flags & ~os.O_DIRECT, *rest))
            return past[-1]
        return real_open(path, flags, *rest)

    def read(handle, buffers, *rest):
        if handle in past and what == "read":
            raise OSError(errno.EINVAL, "no")
        if handle in past and rest[0] == BLOCK:  # ends where it likes
            buffers = [buffers[0][:4096]]
        return real_read(handle, buffers, *rest)

    past = []
    with (
        ThreadPoolExecutor(2) as threads,
        mock.patch.object(file_blocks, "_LEAST", 0),
        mock.patch.object(file_blocks, "_is_cached", return_value=False),
        mock.patch.object(os, "open", opened),
        mock.patch.object(os, "preadv", read),
    ):
        found = b"".join(bytes(block.memory) for block in Blocks(2, threads).of(handle, size, alone=True))
    assert found == expected
    assert bool(past) == (what != "open")
    os.close(handle)


def test_a_file_that_ends_too_early_is_told(tmp_path):
    handle, _ = _file(tmp_path, 2 * BLOCK)
    with ThreadPoolExecutor(2) as threads, pytest.raises(ValueError, match="ends too early"):
        list(Blocks(3, threads).of(handle, 2 * BLOCK + 1, alone=True))
    os.close(handle)


@pytest.mark.parametrize("in_threads", [True, False])
def test_what_is_wanted_goes_to_its_place(tmp_path, in_threads):
    size = 3 * BLOCK + 50
    handle, expected = _file(tmp_path, size)
    cuts = [(0, 10), (10, 11), (500, BLOCK + 3), (BLOCK + 100, 3 * BLOCK + 1), (size - 1, size)]
    memories = [bytearray(end - start) for start, end in cuts]
    places = Places([Stretch("", start, memoryview(memory)) for (start, _), memory in zip(cuts, memories, strict=True)])
    with ThreadPoolExecutor(2) as threads:
        for block in Blocks(2, threads).of(handle, size, alone=False, places=places if in_threads else None):
            if not in_threads:
                places.put(block)
    assert memories == [expected[start:end] for start, end in cuts]
    os.close(handle)


# -- passing on --------------------------------------------------------------------------------------


def _pair():
    """Two ranks of this process that pass on to each other, and all ends of their pipes."""
    memories = [memoryview(mmap.mmap(-1, PLACES * BLOCK)) for _ in range(2)]
    told, done = [os.pipe(), os.pipe()], [os.pipe(), os.pipe()]  # by who tells
    links = [Link(told[me][1], done[me][0], told[1 - me][0], done[1 - me][1], memories[1 - me]) for me in range(2)]
    return [Passing(memories[me], {1 - me: links[me]}) for me in range(2)], links


def _given(one, data, number=3):
    for start in range(0, len(data), BLOCK):
        one.give(number, Block(start, memoryview(data[start : start + BLOCK])))


def test_more_is_passed_on_than_there_are_places():
    (one, other), _ = _pair()
    data = os.urandom((2 * PLACES + 1) * BLOCK + 5)
    found = bytearray(len(data))
    other.take({0: {3: Places([Stretch("", 0, memoryview(found))])}})
    _given(one, data, number=8)  # which nobody wants
    _given(one, data)
    one.all_given(3)
    one.end()
    other.end()
    assert other.taken() == {3}
    assert found == data
    one.close()
    other.close()


def test_who_does_not_listen_is_told_no_more_and_takes_nothing_as_whole():
    (one, other), links = _pair()
    data = os.urandom((PLACES + 2) * BLOCK)
    with mock.patch.object(passing, "_PATIENCE", 200):
        begin = time.monotonic()
        _given(one, data[: PLACES * BLOCK])
        one.all_given(3)
        assert time.monotonic() - begin < 0.2  # there was a place for each
        _given(one, data[PLACES * BLOCK :], number=4)
        assert 0.2 <= time.monotonic() - begin < 5
        # It wakes up, finds what it was told of long ago, and other bytes where those were.
        found = bytearray(PLACES * BLOCK)
        other.take({0: {3: Places([Stretch("", 0, memoryview(found))])}})
        assert other.taken() == set()
    one.close()
    other.close()
    for link in links:
        for end in (link.tell, link.hear_done, link.hear, link.tell_done):
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(end)


def test_who_hears_nothing_for_a_while_gives_up():
    (one, other), _ = _pair()
    with mock.patch.object(passing, "_PATIENCE", 100):
        other.take({0: {3: Places([])}})
        begin = time.monotonic()
        assert other.taken() == set()
        assert time.monotonic() - begin < 5
    one.close()
    other.close()


def test_who_waits_goes_on_when_the_other_has_ended():
    (one, _), links = _pair()
    _given(one, bytes(PLACES * BLOCK))

    def ends():
        time.sleep(0.2)
        os.close(links[1].hear)
        os.close(links[1].tell_done)

    thread = threading.Thread(target=ends)
    thread.start()
    begin = time.monotonic()
    _given(one, bytes(3 * BLOCK))
    assert time.monotonic() - begin < 5
    thread.join()
    one.close()
