"""Tells addresses that only this machine reaches, and keeps a local run's collectives on them.

Finds a port on a host that a server can bind a little later.

Keeps requests to a run's own servers away from proxies, which cannot reach loopback.

`HTTP_PROXY`, `HTTPS_PROXY` and `ALL_PROXY` stay set for downloads and for programs of the user.
"""

import contextlib
import errno
import ipaddress
import os
import random
import socket
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import psutil

_FIRST_PORT = 20000
# SGLang 0.5.23 derives further ports with DP attention (srt/server_args.py): six after the port
# where ranks meet, which on a single node is 233 after the server's own, and one for the handshake
# 13 after either.
_DERIVED_PORTS = (*range(7), 13, *range(233, 240), 246)
RESERVED_S = 60.0
"""So long at least no other caller gets a port that was found: its server binds it within that."""


def find_free_port(host: str) -> int:
    """Return a port nobody listens on, below the range that outgoing connections use.

    The server binds it seconds later, when a port from bind(0) could be taken again. Until then no
    other caller on this machine gets it. The ports that SGLang derives from it are free and below
    that range as well. Raises RuntimeError if 64 tries find none.
    """
    port_range = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    ephemeral_start = int(port_range.split()[0])
    end = max(ephemeral_start - max(_DERIVED_PORTS), _FIRST_PORT + 1)
    for port in random.SystemRandom().sample(range(_FIRST_PORT, end), min(64, end - _FIRST_PORT)):
        wanted = [port + derived for derived in _DERIVED_PORTS]
        if _reservations.add(wanted) and all(is_free(host, each) for each in wanted):
            return port
    raise RuntimeError(f"no free port between {_FIRST_PORT} and {ephemeral_start} on {host}")


def is_free(host: str, port: int) -> bool:
    """Return whether a server could bind this port now."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((host, port))
        return True
    return False


class _Reservations:
    """Ports that this process has chosen and its servers have perhaps not bound yet.

    Each is the name of a socket in Linux's abstract namespace. There only one socket has a name,
    whoever the users are, and the namespace belongs to the same network as the ports. The kernel
    frees the names of a process that ends.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[float, ExitStack]] = deque()
        self._lock = threading.Lock()

    def add(self, ports: Sequence[int]) -> bool:
        """Reserve these ports for RESERVED_S; return False if one is reserved already."""
        with self._lock, ExitStack() as names:
            self._drop_old()
            for port in ports:
                name = names.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                try:
                    name.bind(f"\0mcore_rl_port_{port}")
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    return False
            self._held.append((time.monotonic(), names.pop_all()))
        return True

    def _drop_old(self) -> None:
        while self._held and time.monotonic() - self._held[0][0] > RESERVED_S:
            self._held.popleft()[1].close()


_reservations = _Reservations()


_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_EXCEPTIONS = ("no_proxy", "NO_PROXY")
"""Libraries read one or the other; most prefer the first."""
_LOOPBACK_PROXIES = ("localhost", "127.0.0.1", "::1")
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_directly(request: str | urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Answer as urllib.request.urlopen does, with its errors, but never ask a proxy."""
    return _direct.open(request, timeout=timeout_s)


def bypass_proxies(environ: Mapping[str, str], hosts: Collection[str] = ()) -> dict[str, str]:
    """Return variables by which programs with `environ` reach this machine and `hosts` directly.

    They are for clients that are not ours, such as SGLang's requests to itself (requests), SDKs
    of agents (httpx) and Ray (gRPC). Exceptions that `environ` names are kept. Empty if it names no
    proxy.
    """
    if not any(name.lower() in _PROXIES and value for name, value in environ.items()):
        return {}
    named = [host for name in _EXCEPTIONS for host in environ.get(name, "").split(",")]
    hosts = [host.strip() for host in (*named, *_LOOPBACK_PROXIES, *_own_addresses(), *hosts)]
    return dict.fromkeys(_EXCEPTIONS, ",".join(dict.fromkeys(filter(None, hosts))))


def _own_addresses() -> list[str]:
    """Return this machine's name and addresses, without those that only one link knows."""
    found = [socket.gethostname()]
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if not ipaddress.ip_address(address.address).is_link_local:
                found.append(address.address)
    return found


_LOOPBACK = "127.0.0.1"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def loopback_interfaces() -> dict[str, str]:
    """Return the environment variables that keep collectives' sockets on the loopback interface.

    By default gloo listens on the interface of the host's name, and NCCL on the first that is not
    loopback. Empty if no interface has that address.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == _LOOPBACK for a in addresses):
            return dict.fromkeys(VARIABLES, name)
    return {}


def zmq_peers(host: str, node_addresses: Collection[str]) -> dict[str, str]:
    """Return the environment variables by which SGLang's zmq sockets take messages only from the
    machines of one engine, which it would unpickle from anyone. Empty unless all are IP addresses.

    `host` is this machine's address, which the engine's other machines see as the sender's.
    """
    peers = {_LOOPBACK, host, *node_addresses}
    if not all(map(_is_ip, peers)):
        return {}
    variables = {"SGLANG_ZMQ_ALLOWED_PEERS": ",".join(sorted(peers))}
    if len(set(node_addresses)) > 1:
        variables["SGLANG_ZMQ_SOURCE_IP"] = host
    return variables


def stay_on_loopback() -> None:
    """Have this process's collectives use the loopback interface, unless the user chose another."""
    for name, value in loopback_interfaces().items():
        os.environ.setdefault(name, value)


def is_loopback(host: str) -> bool:
    """Return whether `host` is reached from this machine only."""
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def refuse_open_door(host: str, what: str) -> None:
    """Raise ValueError if other machines reach a server at `host` that asks for no key.

    `what`: that which anyone who reaches it could do.
    """
    if not is_loopback(host):
        raise ValueError(
            f"--host={host}: whoever reaches it could {what}; give --key-file, or serve at"
            " --host 127.0.0.1"
        )


def url_of(host: str, port: int) -> str:
    """Return the URL of a server; an IPv6 address stands in brackets there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
