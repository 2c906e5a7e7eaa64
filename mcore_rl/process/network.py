"""Tells addresses that only this machine reaches, and keeps a local run's collectives on them."""

import ipaddress
import os
import socket
from collections.abc import Collection

import psutil

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
