"""Every stand-in and patch for SGLang on CPU works, and is still needed.

The checks run in a process of their own (tests/support/sglang_on_cpu_checks.py), one test per
check.
"""

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
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", sglang_on_cpu_checks.checks())
def test_sglang_on_cpu(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
