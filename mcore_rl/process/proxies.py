"""Keeps requests to a run's own servers away from proxies, which cannot reach loopback.

`HTTP_PROXY`, `HTTPS_PROXY` and `ALL_PROXY` stay set for downloads and for programs of the user.
"""

import ipaddress
import socket
import urllib.request
from collections.abc import Collection, Mapping
from http.client import HTTPResponse

import psutil

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_EXCEPTIONS = ("no_proxy", "NO_PROXY")
"""Libraries read one or the other; most prefer the first."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
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
    hosts = [host.strip() for host in (*named, *_LOOPBACK, *_own_addresses(), *hosts)]
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
