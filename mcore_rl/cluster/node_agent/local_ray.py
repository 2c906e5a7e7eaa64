"""Starts Ray's processes of one node, on ports of their own, and ends them."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.cluster.labels import NAME_LABEL, ORDER_LABEL
from mcore_rl.process.network import find_free_port
from mcore_rl.process.process_state import wait_killed
from mcore_rl.process.safe_path import safe_module

STOP_TIMEOUT_S = 5.0
_RAY_START = (*safe_module("ray.scripts.scripts"), "start", "--block")
_NO_METRICS = {"DASHBOARD_METRIC_PORT": "-1"}
"""No such port exists, so the server of the dashboard's metrics, which needs no token and listens
on all interfaces, does not start (ray/dashboard/head.py)."""
KEPT_LOGS = ("raylet.out", "raylet.err", "gcs_server.out", "gcs_server.err")


@dataclass(frozen=True)
class RayNode:
    """A node as Ray gets to know it.

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


class LocalRay:
    """Ray's processes of this node; `head_address` is the head's, or None to be the head."""

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
            # The monitor scales clusters up and down, and tells everybody who asks how large it is.
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
                start_new_session=True,  # signals to the agent's group are the agent's to handle
                env={**os.environ, **_NO_METRICS},
            )

    def exit_status(self) -> int | None:
        """Return None while Ray runs on this node."""
        return self._process.poll()

    def stop(self) -> None:
        """End Ray on this node: by itself, or by force after STOP_TIMEOUT_S."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            wait_killed(self._process, "Ray")

    def keep_logs(self) -> None:
        """Copy the logs of Ray's own processes beside `log_path`; Ray's folder is removed."""
        folder = self.log_path.with_suffix("")
        for log in (self._temp_dir / "session_latest" / "logs").glob("*"):
            if log.name in KEPT_LOGS:
                folder.mkdir(exist_ok=True)
                shutil.copy(log, folder / log.name)


def _arguments(facts: RayNode, temp_dir: Path) -> list[str]:
    """Ports that have fixed numbers by default are free ones here, as another job may run here."""
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
