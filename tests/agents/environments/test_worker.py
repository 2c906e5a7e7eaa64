"""A worker runs under an interpreter that has nothing but the standard library."""

import asyncio
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from mcore_rl.agents.environments import worker
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.worker_process import EnvironmentOptions, make_import_folder
from mcore_rl.process.log_files import find_segments, rotate_logs
from tests.agents.environments import episodes

WHAT_IT_IMPORTS = """
import pkgutil, sys
before = set(sys.modules)
import mcore_rl.agents.environments as package
import mcore_rl.agents.environments.worker
import mcore_rl.agents.environments.check
from mcore_rl.agents.environments.adapters import ADAPTERS, load
for kind in ADAPTERS:
    load(kind)
foreign = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(foreign - set(sys.stdlib_module_names) - {"__mp_main__"}))
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False)
    return str(folder / "bin/python")


def test_worker_and_adapters_import_the_standard_library_only(bare_python, tmp_path):
    make_import_folder(tmp_path)
    done = subprocess.run(
        [bare_python, "-c", WHAT_IT_IMPORTS],
        cwd="/",
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "['mcore_rl']\n", done.stderr


def test_the_log_of_a_worker_is_rotated(tmp_path):
    log = tmp_path / "worker_0.log"

    async def run():
        options = EnvironmentOptions(f"{episodes.HERE}:Countdown", log_folder=str(tmp_path))
        async with EnvironmentPool(options) as pool:
            episode = await pool.open({"index": 1})
            await episode.step({"content": f"PRINT {'x' * 5000}"})
            async with asyncio.timeout(30):
                while not find_segments(log):
                    await asyncio.sleep(0.1)

    with rotate_logs(4000):
        asyncio.run(run())
    assert "x" * 5000 in find_segments(log)[0].read_text()


def test_an_episode_runs_under_a_foreign_interpreter(bare_python, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where no mcore_rl can be imported from the working folder
    monkeypatch.setenv("PYTHONPATH", str(Path(sys.prefix)))

    async def run():
        options = EnvironmentOptions(
            f"{episodes.HERE}:Countdown", python=bare_python, variables={"LEVEL": "9"}
        )
        async with EnvironmentPool(options) as pool:
            episode = await pool.open({"index": 1})
            pid = int((await episode.step({"content": "go"})).metrics["pid"])
            return Path(f"/proc/{pid}/environ").read_bytes(), Path(
                f"/proc/{pid}/cmdline"
            ).read_text()

    environment, command = asyncio.run(run())
    assert b"LEVEL=9" in environment.split(b"\0")
    assert str(sys.prefix).encode() not in environment.split(b"PYTHONPATH=")[1].split(b"\0")[0]
    assert command.startswith(bare_python) and worker.__name__ in command
