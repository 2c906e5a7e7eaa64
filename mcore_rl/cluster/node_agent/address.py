"""Chooses the address at which the other nodes of a job reach this one."""

import socket

import psutil


def own_address(interface: str, own_name: str, peer_name: str | None) -> str:
    """Return this node's IPv4 address.

    It is that of `interface` if one is given. Otherwise it is what `own_name` resolves to, if that
    is an address of this machine, or else the one from which `peer_name` is reached. Raises
    ValueError naming the interface, or the names that lead nowhere.
    """
    if interface:
        return _address_of(interface)
    if (address := _resolve(own_name)) and _is_here(address):
        return address
    if peer_name is None:
        return "127.0.0.1"
    if peer := _resolve(peer_name):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends nothing: the kernel picks the route
            return probe.getsockname()[0]
    raise ValueError(
        f"neither this node's name {own_name!r} nor its peer's {peer_name!r} resolves to an"
        " address: name the network interface with launch.interface=<name>"
    )


def interface_of(address: str) -> str:
    """Return the name of the interface that has `address`, empty if none has."""
    for name, addresses in _ipv4_addresses().items():
        if address in addresses:
            return name
    return ""


def _address_of(interface: str) -> str:
    found = _ipv4_addresses()
    if not found.get(interface):
        known = ", ".join(f"{name} ({', '.join(a)})" for name, a in found.items())
        raise ValueError(
            f"launch.interface={interface}: {socket.gethostname()} has no such interface with an"
            f" IPv4 address; there are {known}"
        )
    return found[interface][0]


def _ipv4_addresses() -> dict[str, list[str]]:
    return {
        name: ipv4
        for name, entries in psutil.net_if_addrs().items()
        if (ipv4 := [entry.address for entry in entries if entry.family == socket.AF_INET])
    }


def _resolve(name: str) -> str | None:
    try:
        return socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0]  # pyright: ignore
    except OSError:
        return None


def _is_here(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True
