"""An address that cannot be reached is told with host, port, interface and next step, well before the timeout."""

import contextlib
import logging
import re
import shlex
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import weft
import weft.cli
from tests.fix_lines.told import told
from weft.cli.doctor import check_network
from weft.environments import Topology
from weft.peers import connect as reaching
from weft.peers.connect import interface_to, listen_at, open_store, wait_for_listener

_start_module = sys.modules["weft.context.start"]  # the package has a function of this name
NOWHERE = "no-such-host.invalid"


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _server(port, after_s=0.0):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    timer = threading.Timer(after_s, server.listen)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        server.close()


@pytest.mark.parametrize("after_s", [0.0, 0.4])
def test_somebody_who_comes_late_is_waited_for(after_s):
    port = _free_port()
    with _server(port, after_s):
        begin = time.monotonic()
        wait_for_listener("127.0.0.1", port, who="test", limit_s=20)
        assert after_s <= time.monotonic() - begin + 0.01 < 10


@pytest.mark.slow
def test_nobody_comes(caplog):
    port = _free_port()
    with caplog.at_level(logging.WARNING, logger="weft"):
        with told("peers/connect.py", "{who} cannot reach {host}:{port}") as it:
            wait_for_listener("127.0.0.1", port, who="test", limit_s=0.6)
    text = rf"test cannot reach 127.0.0.1:{port}\n  found: +nobody listens there, for \d s, from .*127.0.0.1\n"
    assert re.match(text, str(it.error))
    doctor, check, interface = it.fix.split("; ")
    asked = weft.cli.parser().parse_args(shlex.split(doctor)[1:]).rdzv
    assert check == "check the name and the port" and interface.endswith("_SOCKET_IFNAME choose the interface")
    assert "nobody listens" in next(iter(check_network(asked, {}))).text
    with _server(port):
        wait_for_listener("127.0.0.1", port, who="test", limit_s=20)
        assert "answers in" in next(iter(check_network(asked, {}))).text
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.match(rf"test waits for 127.0.0.1:{port} \(nobody listens there, from .*\); next: weft doctor", said)


def test_what_is_hopeless_ends_before_the_timeout(monkeypatch):
    monkeypatch.setattr(reaching, "_HOPELESS_S", 0.3)
    begin = time.monotonic()
    with pytest.raises(
        weft.errors.ContextError, match=rf"(?s){NOWHERE}:1234\n  found: .*(not known|resolution|No address)"
    ):
        wait_for_listener(NOWHERE, 1234, who="test", limit_s=600)
    assert time.monotonic() - begin < 30
    monkeypatch.setattr(reaching, "_HOPELESS_S", 0.0)
    begin = time.monotonic()
    with pytest.raises(weft.errors.ContextError, match=NOWHERE):
        wait_for_listener(NOWHERE, 1234, who="test", limit_s=0.5, patient=True)
    assert time.monotonic() - begin > 0.5


def test_a_rank_without_its_first_rank(monkeypatch):
    port = _free_port()
    place = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        weft.errors.ContextError, match=rf"(?s)start: rank 1 of 2 \(torchrun\) cannot reach 127.0.0.1:{port}.*fix:"
    ):
        weft.start(device="cpu", timeout_s=0.3)
    monkeypatch.setattr(reaching, "_HOPELESS_S", 0.1)
    monkeypatch.setenv("MASTER_ADDR", NOWHERE)
    begin = time.monotonic()
    with pytest.raises(weft.errors.ContextError, match=f"cannot reach {NOWHERE}:{port}"):
        weft.start(device="cpu")  # long before the 600 s that are the default
    assert time.monotonic() - begin < 30


def test_a_node_without_its_first_node(monkeypatch, capsys, tmp_path):
    (tmp_path / "x.py").touch()
    monkeypatch.setattr(reaching, "_HOPELESS_S", 0.1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for rank in (["--node-rank", "1"], []):
        line = ["launch", "--nnodes", "2", *rank, "--rdzv", f"{NOWHERE}:29500", str(tmp_path / "x.py")]
        assert weft.cli.main(line) == 2
        text = capsys.readouterr().err
        assert text.startswith(f"weft launch: this node cannot reach {NOWHERE}:29500\n  found: "), text
        assert "fix:      weft doctor --rdzv" in text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of interfaces are known on Linux")
def test_the_interface_has_a_name():
    assert interface_to("127.0.0.1") == "lo 127.0.0.1"
    assert interface_to(NOWHERE) == interface_to() and interface_to()


# -- the store ---------------------------------------------------------------------------------------


def test_a_port_at_which_somebody_listens_and_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Topology(rank=1, world_size=2, master_addr="127.0.0.1", master_port=silent.getsockname()[1])
        begin = time.monotonic()
        with pytest.raises(
            weft.errors.ContextError, match=r"(?s)rank 1 of 2 cannot connect.*said nothing for 0\.5 s.*fix:"
        ):
            open_store(place, 0.5, serves=False)
        assert time.monotonic() - begin < 10


@pytest.mark.slow
def test_a_rank_that_was_not_launched():
    place = Topology(rank=0, world_size=2, master_addr="127.0.0.1", master_port=_free_port())
    with told("peers/connect.py", "cannot connect to the others of its job") as it:
        open_store(place, 0.5, serves=True)
    at = f"127.0.0.1:{place.master_port}"
    assert it.fix == f"see that every rank was launched, all with this address; weft doctor --rdzv {at}"
    _both_meet(place)


def _both_meet(place):
    """Rank 0 and rank 1 at one store."""
    with ThreadPoolExecutor(1) as other:
        found = other.submit(open_store, replace(place, rank=1), 20, serves=False)
        store = open_store(place, 20, serves=True)
        store.set("a", "b")
        assert found.result().get("a") == b"b"


@pytest.mark.slow
def test_a_port_that_the_first_rank_finds_taken():
    with socket.create_server(("127.0.0.1", 0)) as held:
        place = Topology(rank=0, world_size=2, master_addr="127.0.0.1", master_port=held.getsockname()[1])
        with told("peers/connect.py", "cannot connect to the others of its job") as it:
            open_store(place, 5, serves=True)
        assert re.search(r"rank 0 of 2(.|\n)*another program has this port", str(it.error))
        assert it.fix == "another port, in --rdzv or MASTER_PORT, on all nodes"
        _both_meet(replace(place, master_port=_free_port()))


@pytest.mark.parametrize("elastic", [[], ["--min-replicas", "1"]])
@pytest.mark.parametrize("node", [["--nnodes", "2", "--node-rank", "0"], ["--nnodes", "2"]])
def test_a_port_that_the_first_node_finds_taken(monkeypatch, capsys, tmp_path, node, elastic):
    (tmp_path / "x.py").touch()
    monkeypatch.setattr(reaching, "_ANSWER_S", 0.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")  # torch's launcher sets it
    with socket.create_server(("127.0.0.1", 0)) as held:
        at = f"127.0.0.1:{held.getsockname()[1]}"
        assert weft.cli.main(["launch", *node, *elastic, "--rdzv", at, str(tmp_path / "x.py")]) == 2
    text = capsys.readouterr().err
    assert f"cannot connect to the others of its job\n  found:    {at}" in text
    assert "another program has this port" in text and "fix:      another port" in text


@pytest.mark.parametrize(
    ("host", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("192.0.2.1", None), ("a-name", None), ("", None)],
)
def test_the_store_listens_at_the_address_that_was_chosen(host, bound):
    number = listen_at(host, 0)
    assert (number is None) == (bound is None)
    if number is not None:
        with socket.socket(fileno=number) as listening:
            assert listening.getsockname()[0] == bound
            assert listen_at(host, listening.getsockname()[1]) is None  # taken


@pytest.mark.parametrize(
    ("known_as", "bound"),
    [("127.0.1.1", None), ("127.0.0.1", None), ("::1", None), ("192.0.2.77", None), (None, "here")],
)
def test_a_name_is_listened_at_where_other_machines_find_it(monkeypatch, known_as, bound):
    here = interface_to().rpartition(" ")[2]
    if bound and not re.fullmatch(r"[\d.]+", here):
        pytest.skip("no address but the loopback one")
    asked = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **kind: asked(known_as or here, *more, **kind))
    number = listen_at("this-machine", 0)
    assert (number is None) == (bound is None)
    if number is not None:
        with socket.socket(fileno=number) as listening:
            assert listening.getsockname()[0] == here


def test_the_store_of_rank_0_is_at_the_chosen_address_only():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = open_store(Topology(world_size=1, master_addr="127.0.0.1", master_port=port), 5, serves=True)
    store.set("a", "b")
    with socket.create_server(("127.0.0.2", port)):  # would be taken, if it listened everywhere
        assert store.get("a") == b"b"
