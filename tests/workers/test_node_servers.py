"""A node's sandbox and search serve at addresses that its processes find in their environment."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from mcore_rl.agents.environments.search_env import Searcher, SearchOptions
from mcore_rl.config import SandboxConfig, SearchConfig
from mcore_rl.process.server_keys import read_sandbox_url, read_search_url, split_key
from mcore_rl.services.search.build import build_index
from mcore_rl.services.search.layout import IndexOptions
from mcore_rl.workers.node_servers import (
    NodeServers,
    NodeServersSpec,
    list_sandbox_arguments,
    list_search_arguments,
)
from tests.services.search.corpora import write_corpus

START_S = 240.0


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[NodeServers]:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["bova\nthe town of bova is dorm"])
    build_index(corpus, tmp_path / "index", IndexOptions(), None)
    spec = NodeServersSpec(
        SandboxConfig(workers=1, max_sessions=0),
        SearchConfig(index=str(tmp_path / "index"), threads=1),
        tmp_path / "logs",
        START_S,
    )
    servers = NodeServers(spec, "7")
    try:
        servers.wait_healthy()
        yield servers
    finally:
        servers.close()


def post(url: str, body: Mapping[str, object]) -> Mapping[str, object]:
    """Ask with the key as the password of basic authentication, as clients of verl do."""
    address, key = split_key(url)
    headers = {"Authorization": f"Basic {b64encode(f'run:{key}'.encode()).decode()}"} if key else {}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return json.load(answer)


def test_they_serve_with_a_key_and_are_started_again_and_end(
    servers: NodeServers, tmp_path: Path
) -> None:
    program = {"code": "print(6 * 7)", "language": "python"}
    assert post(read_sandbox_url(), program)["status"] == "Success"
    searcher = Searcher(SearchOptions(topk=1, deadline_s=START_S))
    assert "dorm" in searcher.show("town of bova")
    for url in (read_sandbox_url(), read_search_url()):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(split_key(url)[0], program)

    killed = [psutil.Process(pid) for pid in servers.pids.values()]
    for process in killed:
        process.send_signal(signal.SIGKILL)
    assert "dorm" in searcher.show("town of bova"), "it is asked again until it is back"
    until_s = time.monotonic() + START_S
    while True:
        try:
            assert post(read_sandbox_url(), program)["status"] == "Success"
            break
        except urllib.error.URLError:
            assert time.monotonic() < until_s, "the sandbox did not come back"
            time.sleep(0.2)

    started = [psutil.Process(pid) for pid in servers.pids.values()]
    assert not {process.pid for process in killed} & {process.pid for process in started}
    key = split_key(read_sandbox_url())[1]
    for process in started:
        assert key not in " ".join(process.cmdline())
    servers.close()
    assert read_sandbox_url() == read_search_url() == ""
    assert not any(process.is_running() for process in [*killed, *started])
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == ["sandbox_7.log", "search_7.log"]
    groups = Path("/sys/fs/cgroup").rglob(f"mcore_rl_sandbox_{started[0].pid}_*")
    assert not list(groups)


def test_a_server_that_cannot_start_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    before = dict(os.environ)
    search = SearchConfig(index=str(tmp_path / "nothing"))
    servers = NodeServers(NodeServersSpec(SandboxConfig(), search, tmp_path, START_S), "0")
    with pytest.raises(RuntimeError, match=r"(?s)search server http.*search_0.log.*no finished in"):
        servers.wait_healthy()
    servers.close()
    assert dict(os.environ) == before


def test_all_options_become_arguments_of_the_commands() -> None:
    found = " ".join(list_sandbox_arguments(SandboxConfig(workers=5, wall_s=2.5, cgroups=False)))
    assert "--workers 5" in found and "--wall-s 2.5" in found
    assert found.endswith("--busy-status 504 --no-cgroups")
    found = " ".join(list_search_arguments(SearchConfig(index="/i", method="hybrid", queue_len=9)))
    assert found == "--index /i --method hybrid --threads 4 --queue-len 9 --deadline-s 60.0"
