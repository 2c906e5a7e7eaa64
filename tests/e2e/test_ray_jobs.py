"""`ray job submit` runs a recipe on a Ray of one's own, and tells what became of it."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_rl.cluster.process_tags import make_ray_temp_dir
from mcore_rl.process.network import find_free_port
from tests.support.debuggers import wait_for_match
from tests.support.policy import ROOT
from tests.support.runs import tiny_settings

pytestmark = pytest.mark.e2e
RAY = Path(sys.executable).with_name("ray")
HOST = "127.0.0.1"
STEPS = ("run.steps=2", "parallel.ep=1", "eval.data=[]", "checkpoint.export_hf=false")


@dataclass(frozen=True)
class OwnRay:
    """A head with a dashboard that asks for a token; `environment` has that and its address."""

    environment: dict[str, str]

    def submit(self, *words: str, variables: str = "{}") -> subprocess.CompletedProcess[str]:
        """Do as a user: `ray job submit -- mcore-rl ...`, which follows the job to its end."""
        mcore_rl = Path(sys.executable).with_name("mcore-rl")
        return subprocess.run(
            [RAY, "job", "submit", "--runtime-env-json", variables, "--", mcore_rl, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=150,
        )


@pytest.fixture(scope="module")
def own_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRay]:
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(16))
    # As in a new shell: what Ray sessions of other tests left here is not for this one.
    shell = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    shell |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT)}
    ports = {name: find_free_port(HOST) for name in ("port", "dashboard-port")}
    ports |= {"ray-client-server-port": find_free_port(HOST)}
    options = [f"--{name}={port}" for name, port in ports.items()]
    options += ["--min-worker-port=0", "--max-worker-port=0", "--num-cpus=4"]
    options += [f"--node-ip-address={HOST}", f"--object-store-memory={80 * 2**20}"]
    log = token.with_name("head.log")
    with make_ray_temp_dir() as folder, log.open("wb") as out:
        head = subprocess.Popen(
            [RAY, "start", "--head", "--block", f"--temp-dir={folder}", *options],
            stdout=out,
            stderr=out,
            env={**shell, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        )
        try:
            wait_for_match("Ray runtime started", log.read_text, 60)
            url = f"http://{HOST}:{ports['dashboard-port']}"
            yield OwnRay({**shell, "RAY_API_SERVER_ADDRESS": url})
        finally:
            head.terminate()
            head.wait(30)


@pytest.mark.slow
def test_a_job_trains_prints_its_log_and_succeeds(
    own_ray: OwnRay, arithmetic: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = ("train", *tiny_settings(arithmetic), *STEPS, f"run.dir={run_dir}")
    variables = '{"env_vars": {"NCCL_DEBUG": "WARN"}}'
    done = own_ray.submit(*words, "cluster.address=auto", variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout, done.stdout
    assert (run_dir / "summary.json").is_file()


@pytest.mark.slow
def test_wrong_settings_fail_the_job_with_our_message(own_ray: OwnRay, arithmetic: Path) -> None:
    done = own_ray.submit("train", *tiny_settings(arithmetic), "rollout.engines=0")
    assert done.returncode == 1
    assert "mcore-rl: recipe tiny_moe_grpo: rollout.engines=0: must be at least 1" in done.stdout, (
        done.stdout
    )
    assert "exit code 2" in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.slow
def test_who_has_no_token_submits_nothing(own_ray: OwnRay) -> None:
    done = OwnRay({**own_ray.environment, "RAY_AUTH_TOKEN": "0" * 32}).submit("--version")
    assert done.returncode != 0 and "mcore-rl 0" not in done.stdout, done.stdout
    assert "token" in (done.stdout + done.stderr).lower(), done.stderr
