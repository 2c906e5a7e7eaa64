"""Looks at a run as a stranger does: its open ports, and its answers without a key."""

import contextlib
import http.client
import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping

import psutil

COMMANDS = {
    "/update_weights_from_tensor": {"serialized_named_tensors": ["gASVAAAAAAAAAAAu"]},
    "/update_weights_from_disk": {"model_path": "/tmp/other"},
    "/update_weights_from_distributed": {"names": []},
    "/update_weight_version": {"new_version": "99"},
    "/load_lora_adapter_from_tensors": {"lora_name": "a"},
    "/pause_generation": {"mode": "abort"},
    "/flush_cache": {},
    "/release_memory_occupation": {"tags": ["weights"]},
    "/abort_request": {"abort_all": True},
    "/begin_weight_update": {"selector": "target"},
    "/generate": {"input_ids": [5]},
}


def listening_sockets(
    processes: Iterable[psutil.Process],
) -> Iterator[tuple[tuple[str, int], str]]:
    """Yield ((address, port), name of the process) of every socket that listens."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    yield (connection.laddr.ip, connection.laddr.port), process.name()


def find_open_doors(listening: Mapping[tuple[str, int], str]) -> dict[tuple[str, int], str]:
    """Return those of some sockets that listen beyond this machine."""
    return {
        at: name
        for at, name in listening.items()
        if not ipaddress.ip_address(at[0].removeprefix("::ffff:")).is_loopback
    }


def answers_http(host: str, port: int) -> bool:
    """Return whether a stranger's GET is answered with success."""
    connection = http.client.HTTPConnection(host, port, timeout=3)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def answers_without_key(url: str) -> dict[str, int]:
    """Return the HTTP status of each command that an engine is given without a key."""
    return {path: post(url + path, body) for path, body in COMMANDS.items()}


def post(url: str, body: object) -> int:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
