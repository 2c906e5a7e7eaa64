"""A server is forked or started, its end is noticed, and it ends with whoever started it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from mcore_rl.cpu.engine_forks import engine_forks
from mcore_rl.cpu.fork_server import read_by_imports
from mcore_rl.rollout.engine import FORKS, ServerProcess, can_be_forked, make_environment
from mcore_rl.rollout.engine_spec import EngineSpec

pytestmark = pytest.mark.e2e


@pytest.fixture(params=["forked", "started"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How the servers of a test come into being."""
    if request.param == "started":
        monkeypatch.delenv(FORKS, raising=False)
    with engine_forks() if request.param == "forked" else nullcontext():
        yield request.param


def run(folder: Path, *arguments: str) -> ServerProcess:
    with (folder / "log").open("wb") as log:
        return ServerProcess(arguments, dict(os.environ), None, log)


def test_how_it_failed_is_known(way: str, tmp_path: Path) -> None:
    process = run(tmp_path, "--model-path", "no/such/model")
    forked = psutil.Process(process.pid).ppid() != os.getpid()
    process.join(120.0)
    assert process.exit_status == 1
    assert forked == (way == "forked")
    assert "no/such/model" in (tmp_path / "log").read_text()


def test_a_kill_is_noticed(way: str, tmp_path: Path) -> None:
    process = run(tmp_path, "--model-path", "no/such/model")
    assert process.exit_status is None
    process.kill()
    while process.exit_status is None:
        time.sleep(0.01)
    assert process.exit_status == -signal.SIGKILL
    process.kill()  # nobody is there any more


def test_where_imports_differ_none_is_forked() -> None:
    assert can_be_forked(["--model-path", "x"])
    assert not can_be_forked(["--uncompiled", "--model-path", "x"])


@pytest.mark.parametrize(
    "spec",
    [
        EngineSpec("m", "log"),
        EngineSpec("m", "log", dtype="bfloat16", deterministic=True, routed_experts=True),
        EngineSpec("m", "log", indexer_topk=True),
        EngineSpec("m", "log", tp=2, num_nodes=2, dist_init_addr="127.0.0.1:1"),
    ],
)
def test_engines_get_no_variable_with_which_the_fork_server_would_refuse_them(
    spec: EngineSpec,
) -> None:
    assert read_by_imports(make_environment(spec, "/tmp/x")) == read_by_imports(os.environ)
