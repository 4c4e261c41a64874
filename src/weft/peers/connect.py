"""Can the address be reached at which ranks or nodes meet? If not, waiting ends soon, with an error.

A refused connection means that the machine is there and the first rank is not yet: that is waited for. A name
without an address, a network without a way there, or no answer at all rarely get better: that ends much sooner.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.environments import Topology
from weft.errors import ContextError

_SAY_S = 10.0  # after so long it is said that somebody waits
_HOPELESS_S = 60.0  # how long an address that cannot be reached is tried
_TRY_S = 5.0  # one attempt
_ANSWER_S = 30.0  # within which a store says its first word, however busy its process is
_GRACE_S = 1.0  # for torch to find out by itself that the time is over
_PAUSE_S = 0.5  # longest pause between two attempts
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_LOOPBACK, _TCP = "127.0.0.1", socket.SOCK_STREAM


def wait_for_listener(host: str, port: int, *, who: str, limit_s: float, patient: bool = False) -> None:
    """Wait until somebody listens at an address.

    Args:
        host: Its name or number.
        port: Its port.
        who: Waits, for the texts: "start: rank 1 of 2".
        limit_s: How long somebody who does not listen yet is waited for.
        patient: Wait as long for an address that cannot be reached at all.

    Raises:
        ContextError: Nothing does; the text has the address, the interface and what to do next.
    """
    begin = time.monotonic()
    hopeless_since: float | None = None
    said = False
    pause_s = 0.02
    while True:
        error = _attempt(host, port, limit_s)
        if error is None:
            return
        now = time.monotonic()
        if isinstance(error, (ConnectionRefusedError, ConnectionResetError)):
            hopeless_since = None
        elif hopeless_since is None:
            hopeless_since = max(now - _TRY_S, begin)
        hopeless = hopeless_since is not None and not patient and now - hopeless_since > min(_HOPELESS_S, limit_s)
        if hopeless or now - begin > limit_s:
            raise ContextError(
                f"{who} cannot reach {host}:{port}",
                found=f"{_words(error)}, for {now - begin:.0f} s, from {interface_to(host)}",
                expected="the first rank or node listens there, and no firewall is between them",
                fix=f"weft doctor --rdzv {host}:{port}; check the name and the port; "
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface",
            )
        if not said and now - begin > min(_SAY_S, limit_s / 2):
            said = True
            logging.getLogger("weft").warning(
                "%s waits for %s:%s (%s, from %s); next: weft doctor --rdzv %s:%s",
                who, host, port, _words(error), interface_to(host), host, port,
            )  # fmt: skip
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S)


def _attempt(host: str, port: int, limit_s: float) -> OSError | None:
    try:
        with socket.create_connection((host, port), timeout=min(_TRY_S, limit_s)):
            return None
    except OSError as error:
        return error


def _words(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    return str(error.strerror or error) or type(error).__name__


def is_here(host: str) -> bool:
    """Whether this machine has the address of `host`."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def listen_at(host: str, port: int) -> int | None:
    """A socket that listens at an address of this machine, and at no other; None if torch is to listen at all of them.

    That is so for a name that this machine knows as its loopback address, as many do: others know it by another one.
    """
    listening = None
    with contextlib.suppress(OSError):  # unknown; taken, or the address of another machine
        family, kind, _, _, address = socket.getaddrinfo(_LOOPBACK if host == "localhost" else host, port, type=_TCP)[0]
        is_number = host in ("localhost", address[0]) or ":" in host
        if not is_number and ipaddress.ip_address(address[0]).is_loopback:
            return None
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(socket.SOMAXCONN)
        return listening.detach()
    if listening is not None:
        listening.close()
    return None


def interface_to(host: str | None = None) -> str:
    """The interface and address from which this machine speaks to `host`, or to others; nothing is sent."""
    target = "192.0.2.1"  # an address kept for documentation
    if host is not None:
        with contextlib.suppress(OSError):
            target = socket.gethostbyname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return "no way out of this machine"
        address = str(probe.getsockname()[0])
        return " ".join(filter(None, [_name_of(address, probe), address]))


def _name_of(address: str, probe: socket.socket) -> str:
    """Name of the interface that has an address; "" where that cannot be known."""
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl  # noqa: PLC0415  (not on every system)

    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def open_store(place: Topology, limit_s: float, *, serves: bool, who: str = "") -> dist.TCPStore:
    """Serve the store at which the ranks meet, or connect to it; `who` does, if it is no rank.

    Raises:
        ContextError: It is not served, another program has the port, or the time is over.
    """
    made: list[dist.TCPStore] = []
    failed: list[Exception] = []
    answered = threading.Event()
    at, answer_s = (place.master_addr, place.master_port), min(_ANSWER_S, limit_s)
    limit = timedelta(seconds=limit_s)

    def make() -> None:
        try:
            if not serves and not place.store_served:  # the other one waits for all ranks
                dist.TCPStore(*at, is_master=False, wait_for_workers=False, timeout=limit)
                answered.set()
            ranks, fd = None if place.store_served else place.world_size, listen_at(*at) if serves else None
            store = dist.TCPStore(*at, ranks, is_master=serves, timeout=limit, multi_tenant=True, master_listen_fd=fd)
            made.append(store)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            failed.append(error)
        answered.set()

    if serves:
        make()  # raises by itself after the limit; a thread that outlived this one would abort the process at its end
    else:
        # torch's client waits without a limit for the first word of what listens there.
        thread = threading.Thread(target=make, name="weft start", daemon=True)
        thread.start()
        if answered.wait(answer_s):
            thread.join(limit_s + _GRACE_S)
    if made:
        return made[0]
    raise _not_connected(place, who, failed[0] if failed else None, limit_s if answered.is_set() else answer_s)


def store_of_launcher(host: str, port: int, limit_s: float) -> dist.TCPStore:
    """Connect to the store that the launcher of the first node serves.

    Raises:
        ContextError: It is not served, or another program has the port.
    """
    place = Topology(master_addr=host, master_port=port, source="--rdzv", store_served=True)
    return open_store(place, limit_s, serves=False, who="launch: this node")


def store_at(host: str, port: int, limit_s: float, *, serves: bool = True, **more: Any) -> dist.TCPStore:
    """A store of a launcher: one that listens at this address alone, or a connection to it.

    Args:
        host: Name or number of the address.
        port: Its port; 0 for a free one.
        limit_s: How long the launchers have to meet there, for the text.
        serves: Whether this process serves it.
        more: Options of torch's store.

    Raises:
        ContextError: Another program has the port.
    """
    fd = listen_at(host, port) if serves else None
    try:
        return dist.TCPStore(host, port, is_master=serves, multi_tenant=True, master_listen_fd=fd, **more)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        place = Topology(master_addr=host, master_port=port, source="--rdzv")
        raise _not_connected(place, "launch: this node", error, limit_s) from error


def _not_connected(place: Topology, who: str, error: Exception | None, waited_s: float) -> ContextError:
    """What to raise if there is no store of a job at an address: with an error of torch, or none if nothing answers."""
    held = error is None or "EADDRINUSE" in str(error)
    said = f"something listens there and has said nothing for {waited_s:g} s" if error is None else str(error)
    at = f"{place.master_addr}:{place.master_port}"
    found = f"{at} ({place.source}), from {interface_to(place.master_addr)}: {said.splitlines()[0]}"
    expected = f"all ranks of the job there within {waited_s:g} s"
    fix = f"see that every rank was launched, all with this address; weft doctor --rdzv {at}"
    if held:
        found += "; another program has this port"
        expected = f"a port for this job alone, at which the first rank or node listens within {waited_s:g} s"
        fix = "another port, in --rdzv or MASTER_PORT, on all nodes"
    who = who or f"start: rank {place.rank} of {place.world_size}"
    return ContextError(f"{who} cannot connect to the others of its job", found=found, expected=expected, fix=fix)
