"""Chooses addresses and ports for a run's servers and collectives; keeps out other clients.

A local run stays on loopback. Requests to a run's own servers bypass proxies, which cannot reach
loopback; `HTTP_PROXY`, `HTTPS_PROXY` and `ALL_PROXY` stay set for downloads and user programs.
The TCPStore of a process group listens on one interface only: torch would let it listen on all
interfaces, whatever its address, without a key, so that anyone could read and write it.
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
from datetime import timedelta
from http.client import HTTPResponse
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil


def make_meeting_store(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta, **options: Any
) -> Any:
    """Return the store's client; on rank 0 also serve the store, only at `host`:`port`.

    `host` is the address of rank 0's machine by which all ranks reach it. Waits up to `timeout` for
    all ranks.
    """
    from torch import distributed

    store: Any = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    is_server = rank == 0
    if is_server:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=max(128, world_size))
        options["master_listen_fd"] = listener.detach()
    return store(host, port, world_size, is_server, timeout, multi_tenant=True, **options)


def bind_meetings_to_their_host() -> None:
    """Make torch's `tcp://host:port` rendezvous in this process listen at `host` only.

    This is for process groups that another library creates.
    """
    # torch.distributed has a function of the same name.
    rendezvous: Any = import_module("torch.distributed.rendezvous")

    torchs_own = rendezvous._create_c10d_store

    def create(
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        use_libuv: bool = True,
    ) -> Any:
        if rendezvous._torchelastic_use_agent_store():
            return torchs_own(hostname, port, rank, world_size, timeout, use_libuv)
        return make_meeting_store(hostname, port, rank, world_size, timeout)

    rendezvous._create_c10d_store = create


_FIRST_PORT = 20000
# SGLang 0.5.23 derives further ports with DP attention (srt/server_args.py): six after the port
# where ranks meet, which on a single node is 233 after the server's own, and one for the handshake
# 13 after either.
_DERIVED_PORTS = (*range(7), 13, *range(233, 240), 246)
RESERVED_S = 60.0
"""Seconds for which no other caller gets a port, so that its server can bind it."""


def find_free_port(host: str) -> int:
    """Return a free port below the range of outgoing connections.

    The server binds the port seconds later, when a port from bind(0) could be taken again. Until
    then no other caller on this machine gets the same port. The ports that SGLang derives from it
    are also free and below that range. Raises RuntimeError if 64 tries find none.
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
    """Ports that this process has chosen and its servers may not have bound yet.

    Each reserved port is the name of a socket in Linux's abstract namespace. A name there is unique
    across users, and the namespace belongs to the same network as the ports. The kernel frees the
    names when the process ends.
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
"""A library reads one of the two; most prefer the first."""
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_directly(request: str | urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Open a URL as urllib.request.urlopen does, with its errors, but never through a proxy."""
    return _direct.open(request, timeout=timeout_s)


def open_outside(request: urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Open a URL outside of the run: through a proxy where the environment names one."""
    return urllib.request.build_opener().open(request, timeout=timeout_s)


def bypass_proxies(environ: Mapping[str, str], hosts: Collection[str] = ()) -> dict[str, str]:
    """Return variables with which programs reach this machine and `hosts` without a proxy.

    The variables are for clients of other packages: SGLang's requests to itself (requests), SDKs of
    agents (httpx) and Ray (gRPC). Exceptions in `environ` are kept. Returns {} if `environ` names
    no proxy.
    """
    if not any(name.lower() in _PROXIES and value for name, value in environ.items()):
        return {}
    named = [host for name in _EXCEPTIONS for host in environ.get(name, "").split(",")]
    hosts = [host.strip() for host in (*named, *_LOOPBACK_NAMES, *_list_own_addresses(), *hosts)]
    return dict.fromkeys(_EXCEPTIONS, ",".join(dict.fromkeys(filter(None, hosts))))


def _list_own_addresses() -> list[str]:
    """Return this machine's name and addresses, except link-local addresses."""
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


def find_loopback_interfaces() -> dict[str, str]:
    """Return the environment variables that keep collectives' sockets on the loopback interface.

    By default gloo listens on the interface of the host's name, and NCCL on the first interface
    that is not loopback. Returns {} if there is no loopback interface.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == _LOOPBACK for a in addresses):
            return dict.fromkeys(VARIABLES, name)
    return {}


def restrict_zmq_peers(host: str, node_addresses: Collection[str]) -> dict[str, str]:
    """Return the variables that let SGLang's zmq sockets accept only the machines of one engine.

    SGLang would unpickle messages from anyone. Returns {} unless all addresses are IP addresses.
    `host` is the address from which the engine's other machines get this machine's messages.
    """
    peers = {_LOOPBACK, host, *node_addresses}
    if not all(map(_is_ip, peers)):
        return {}
    variables = {"SGLANG_ZMQ_ALLOWED_PEERS": ",".join(sorted(peers))}
    if len(set(node_addresses)) > 1:
        variables["SGLANG_ZMQ_SOURCE_IP"] = host
    return variables


def stay_on_loopback() -> None:
    """Keep this process's collectives on the loopback interface, unless the user chose another."""
    for name, value in find_loopback_interfaces().items():
        os.environ.setdefault(name, value)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def refuse_open_door(host: str, what: str) -> None:
    """Raise ValueError if other machines can reach a server at `host` that asks for no key.

    `what` is the harm that anyone who reaches the server could do.
    """
    if not is_loopback(host):
        raise ValueError(
            f"--host={host}: whoever reaches it could {what}; give --key-file, or serve at"
            " --host 127.0.0.1"
        )


def url_of(host: str, port: int) -> str:
    """Return the URL of a server, with an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
