"""Runs sglang_on_cpu_checks.py in its own process; one test per check."""

import json
import os
import subprocess
import sys

import pytest

from mcore_rl.device.sglang_setup import CPU_ENVIRONMENT, STANDINS_DIR
from tests.support import sglang_on_cpu_checks


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{STANDINS_DIR}:{os.getcwd()}",
        **CPU_ENVIRONMENT,
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, sglang_on_cpu_checks.__file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", sglang_on_cpu_checks.names())
def test_on_cpu(name, results):
    assert not results[name], results[name]
