"""The commands of docs/search.md, one after the other, with its server beside them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.services.search.client import SearchClient
from tests.services.search.corpora import record
from tests.support.documented import documented
from tests.support.policy import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TIMEOUT_S = 900


@pytest.fixture
def servers() -> Iterator[list[subprocess.Popen[str]]]:
    """Collect started servers; they are killed at the end."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for server in started:
        server.kill()
        server.wait(60)


@pytest.mark.timeout(3600)
def test_the_documents_commands_run_in_their_order(
    tmp_path: Path, servers: list[subprocess.Popen[str]]
) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    record(tmp_path / "web.jsonl", {"who": "A\nb"})
    (tmp_path / "key").write_text("k" * 32)
    (tmp_path / "key").chmod(0o600)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    num_tried = 0
    for command in documented("docs/search.md"):
        words = command.words if command.words[1] == "search" else command.attempt()
        line = [sys.executable, "-m", "mcore_rl.cli", *words[1:]]
        num_tried += 1
        if words[1:3] == ("search", "serve"):
            server = subprocess.Popen(
                line, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
            )
            servers.append(server)
            assert server.stdout is not None
            assert server.stdout.readline().startswith("serving "), words
            continue
        done = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    assert num_tried >= 10
    assert SearchClient("http://127.0.0.1:8018/retrieve").retrieve(["who"], 3)[0]
