"""Processes stand for the pods of a RayJob: Ray starts as KubeRay starts it, the scripts run from
the ConfigMap, and a pod that is to end has the run save first.
"""

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.kuberay import MANIFEST
from launch.kuberay_pod import JOB_SCRIPT, STOP_SCRIPT
from mcore_rl.cluster.process_tags import make_ray_temp_dir
from mcore_rl.process.network import find_free_port
from mcore_rl.process.signals import EXIT_STATUS
from tests.support.launches import files_of
from tests.support.runs import tiny_settings

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
HEAD = "127.0.0.2"
WORKER = "127.0.0.3"


@contextmanager
def ray_start(group: Mapping[str, Any], address: str, head: str, token: str) -> Iterator[None]:
    """Run `ray start` with a group's parameters, put into a command of a shell as KubeRay does."""
    [container] = group["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    role = (
        f"--head --port={head.rpartition(':')[2]} --include-dashboard=false"
        f" --ray-client-server-port={find_free_port(address)}"
        if address == HEAD
        else f"--address={head}"
    )
    params = " ".join(f"--{k}={v}" for k, v in group["rayStartParams"].items())
    with make_ray_temp_dir() as folder:
        # Here pods share a machine, so each has an address and ports of its own.
        own = f"--node-ip-address={address} --temp-dir={folder} --min-worker-port=0"
        own += f" --max-worker-port=0 --dashboard-agent-listen-port={find_free_port(address)}"
        ray = f"exec {shlex.quote(sys.executable)} -m ray.scripts.scripts start"
        process = subprocess.Popen(
            ["bash", "-c", f"{ray} {role} {params} {own} --block"],
            env={**os.environ, **environment, **token_of(token)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def token_of(token: str) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def test_a_pod_that_ends_has_the_run_save_and_the_next_attempt_goes_on(
    arithmetic: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    steps = ("run.steps=40", "eval.data=[]", "cluster.separate_nodes=true")
    nodes = ("launch.gpus_per_node=0", "launch.cpus_per_node=2", "launch.image=i")
    here = (f"launch.claims={{runs: {tmp_path}}}", f"launch.python={sys.executable}")
    words = (*tiny_settings(arithmetic), f"run.dir={run_dir}", "launch=kuberay", *steps)
    [files, job] = yaml.safe_load_all(files_of(*words, *nodes, *here)[MANIFEST])
    for name, text in files["data"].items():
        (tmp_path / name).write_text(text)
    cluster = job["spec"]["rayClusterSpec"]
    [engines] = cluster["workerGroupSpecs"]
    token, head = secrets.token_hex(16), f"{HEAD}:{find_free_port(HEAD)}"
    with ExitStack() as pods:
        pods.enter_context(ray_start(cluster["headGroupSpec"], HEAD, head, token))
        pods.enter_context(ray_start(engines, WORKER, head, token))
        pod = {**os.environ, **token_of(token), "RAY_ADDRESS": head}
        first = {**pod, "RAY_CLUSTER_NAME": "first"}
        log = run_dir / "launch" / "train-run" / "first" / "job.log"
        run = subprocess.Popen(["bash", str(tmp_path / JOB_SCRIPT)], env=first)
        try:
            wait_for("step 2/40", log, run)
            stop = ["bash", str(tmp_path / STOP_SCRIPT), "120"]
            subprocess.run(stop, env=first, check=True, timeout=150)
            assert run.wait(30) == EXIT_STATUS, log.read_text()
        finally:
            run.kill()
        assert "stopped on request after step" in log.read_text()
        second = {**pod, "RAY_CLUSTER_NAME": "second"}
        done = subprocess.run(
            ["bash", str(tmp_path / JOB_SCRIPT)], env=second, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout
    assert "resumed from" in done.stdout


def wait_for(text: str, log: Path, run: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while not (log.exists() and text in log.read_text()):
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.5)
