"""Runs Ray's processes on one node of a job, and finds the node's address."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mcore_rl.cluster.node_agent.job import NAME_LABEL, ORDER_LABEL
from mcore_rl.process.network import find_free_port
from mcore_rl.process.process_state import wait_killed
from mcore_rl.process.safe_path import safe_module

STOP_TIMEOUT_S = 5.0
_RAY_START = (*safe_module("ray.scripts.scripts"), "start", "--block")
_NO_METRICS = {"DASHBOARD_METRIC_PORT": "-1"}
"""No such port exists. So the server of the dashboard's metrics does not start, which would listen
on all interfaces without a token (ray/dashboard/head.py)."""
KEPT_LOGS = ("raylet.out", "raylet.err", "gcs_server.out", "gcs_server.err")


class JoinedNodes:
    """Asks the Ray at `address` for its nodes by another process, which `end` ends."""

    def __init__(self, address: str, num_nodes: int, folder: Path) -> None:
        self._path = folder / "joined.json"
        self._path.unlink(missing_ok=True)
        with (folder / "roll_call.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *safe_module("mcore_rl.cluster.node_agent.roll_call"),
                    *(address, str(num_nodes), str(self._path)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def names(self) -> Sequence[str]:
        """Return the names of the nodes that have joined; [] while the head does not answer."""
        return json.loads(self._path.read_text()) if self._path.exists() else []

    def end(self) -> None:
        self._process.kill()
        wait_killed(self._process, "the watcher of joined nodes")


def find_own_address(interface: str, own_name: str, peer_name: str | None) -> str:
    """Return this node's IPv4 address.

    With `interface`, it is the interface's address. Otherwise it is the address to which `own_name`
    resolves, if this machine has that address, or else the address from which this machine reaches
    `peer_name`. Raises ValueError, which names the interface or the unresolved names.
    """
    if interface:
        return _find_address(interface)
    if (address := _resolve(own_name)) and _is_here(address):
        return address
    if peer_name is None:
        return "127.0.0.1"
    if peer := _resolve(peer_name):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # Sends nothing; the kernel picks the route.
            return probe.getsockname()[0]
    raise ValueError(
        f"neither this node's name {own_name!r} nor its peer's {peer_name!r} resolves to an"
        " address: name the network interface with launch.interface=<name>"
    )


def find_interface(address: str) -> str:
    """Return the name of the interface that has `address`; "" if no interface has it."""
    for name, addresses in _ipv4_addresses().items():
        if address in addresses:
            return name
    return ""


def _find_address(interface: str) -> str:
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


@dataclass(frozen=True)
class RayNode:
    """A node as Ray is started on it.

    order        place in an order in which neighbors share switches
    resources    Ray's custom resources
    """

    name: str
    order: str
    address: str
    num_cpus: int
    num_gpus: int
    object_store_mib: int
    resources: Mapping[str, float]


class RayProcesses:
    """Ray's processes on this node; `head_address`: the head to join, or None to be the head."""

    def __init__(
        self, facts: RayNode, head_address: str | None, temp_dir: Path, log_path: Path
    ) -> None:
        self.log_path = log_path
        self._temp_dir = temp_dir
        if head_address is None:
            port = find_free_port(facts.address)
            self.head_address = f"{facts.address}:{port}"
            client_port = find_free_port(facts.address)
            role = ["--head", f"--port={port}", f"--ray-client-server-port={client_port}"]
            # The monitor would scale the cluster, and tell its size to anyone.
            role += ["--include-dashboard=false", "--no-monitor"]
        else:
            self.head_address = head_address
            role = [f"--address={head_address}"]
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                [*_RAY_START, *role, *_arguments(facts, temp_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # The agent handles signals to its process group.
                env={**os.environ, **_NO_METRICS},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        """Ray's exit status on this node; None while Ray runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Stop Ray on this node; kill it after STOP_TIMEOUT_S."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            wait_killed(self._process, "Ray")

    def keep_logs(self) -> None:
        """Copy the logs of Ray's processes beside `log_path`, before Ray's folder is removed."""
        folder = self.log_path.with_suffix("")
        for log in (self._temp_dir / "session_latest" / "logs").glob("*"):
            if log.name in KEPT_LOGS:
                folder.mkdir(exist_ok=True)
                shutil.copy(log, folder / log.name)


def _arguments(facts: RayNode, temp_dir: Path) -> list[str]:
    """Return Ray's arguments, with free ports, as the fixed ones may belong to another job."""
    labels = {NAME_LABEL: facts.name, ORDER_LABEL: facts.order}
    options = {
        "node-ip-address": facts.address,
        "num-cpus": facts.num_cpus,
        "num-gpus": facts.num_gpus,
        "object-store-memory": facts.object_store_mib * 2**20,
        "temp-dir": temp_dir,
        "resources": json.dumps(dict(facts.resources)),
        "labels": ",".join(f"{key}={value}" for key, value in labels.items() if value),
        "min-worker-port": 0,
        "max-worker-port": 0,
        "dashboard-agent-listen-port": find_free_port(facts.address),
        "disable-usage-stats": None,
    }
    return [f"--{key}" if value is None else f"--{key}={value}" for key, value in options.items()]
