"""Tells addresses that only this machine reaches, and keeps a local run's collectives on them."""

import ipaddress
import os
import socket

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


def stay_on_loopback() -> None:
    """Have this process's collectives use the loopback interface, unless the user chose another."""
    for name, value in loopback_interfaces().items():
        os.environ.setdefault(name, value)


def is_loopback(host: str) -> bool:
    """Return whether `host` is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
