"""An environment on the unchanged package verifiers plays against an OpenAI server."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import psutil
import pytest

from mcore_rl.agents.environments import verifiers_env
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.verifiers_env import VerifiersOptions, add_modules
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from tests.agents.environments.foreign import PYTHON, needs_agents_venv
from tests.agents.environments.pools import kept_pool
from tests.support.policy import ROOT

ENV = {
    "taskset": {"id": "sums-taskset"},
    "agent": {"harness": {"id": "sums-taskset"}, "runtime": {"type": "subprocess"}},
}


@pytest.fixture
def model() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """An OpenAI server that adds one to the number in a prompt, and what it was asked."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept, as the gateway keeps them

        def do_POST(self):
            request = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.headers["Authorization"], request))
            first = request["messages"][0]["content"][0]
            text = str(int(first) + 1) if first.isdigit() else "1"
            message = {"role": "assistant", "content": text}
            body = orjson.dumps(
                {
                    "id": "x",
                    "object": "chat.completion",
                    "created": 0,
                    "model": request["model"],
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                }
            )
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., list[Any]]]:
    """run(url, *indices) of tasks, in a worker that has imported verifiers once."""
    options = EnvironmentOptions(
        "verifiers",
        {"env": ENV},
        python=PYTHON,
        workers=1,
        run_timeout_s=90.0,
        variables={"PYTHONPATH": str(Path(__file__).parent)},
    )

    def run_all(url: str, *indices: int) -> list[Any]:
        async def use(pool: EnvironmentPool) -> list[Any]:
            return await asyncio.gather(*(pool.run(task_of(url, n)) for n in indices))

        return call(use)

    with kept_pool(options) as call:
        yield run_all


@needs_agents_venv()
def test_its_rollout_asks_the_gateway_and_its_rewards_count(model, run):
    url, asked = model
    for result in run(url, 0, 2):
        assert (result.reward, result.end_reason, result.detail) == (1.0, "done", "")
        assert result.metrics["turns"] == 2
    assert sorted({key for key, _ in asked}) == ["Bearer key0", "Bearer key2"]
    assert len(asked) == 4 and all(request["model"] == "policy" for _, request in asked)


@pytest.mark.slow
@needs_agents_venv()
def test_an_episode_leaves_neither_connections_nor_certificates_in_its_worker(model):
    url, asked = model
    module = str(ROOT / "recipes/tools/verifiers_sums.py")
    env = {
        "taskset": {"id": f"{module}:Sums", "num_tasks": 100},
        "agent": {
            "harness": {"id": f"{module}:CalculatorHarness"},
            "runtime": {"type": "subprocess"},
        },
    }

    async def play():
        options = EnvironmentOptions("verifiers", {"env": env}, python=PYTHON, workers=1)
        async with EnvironmentPool(options) as pool:
            used = []
            for first in (0, 10, 50):
                numbers = range(first, first + (10 if not first else 40))
                await asyncio.gather(*(pool.run(task_of(url, number)) for number in numbers))
                [worker] = psutil.Process(pool._workers[0]._process.pid).children()
                used.append((worker.num_fds(), worker.memory_info().rss / 2**20))
            return used

    _, (fds, mib), (more_fds, more_mib) = asyncio.run(play())
    assert len(asked) == 90
    print(f"{fds} and {more_fds} descriptors, {mib:.0f} and {more_mib:.0f} MiB")
    assert more_fds < fds + 10 and more_mib < mib + 20


def task_of(url, number):
    return {"messages": [], "index": number, "gateway_url": url, "gateway_key": f"key{number}"}


@pytest.mark.slow
@needs_agents_venv()
def test_a_gateway_that_is_not_there_is_an_error_of_the_environment(run):
    (result,) = run("http://127.0.0.1:9", 0)
    assert result.reward is None and result.end_reason == "env_error" and result.detail


class Serving:
    """An environment of verifiers whose servers start or not, and may end, as told."""

    def __init__(self, starts: bool) -> None:
        self.starts = starts
        self.taskset = range(9)
        self._interception = SimpleNamespace(servers=[])

    @asynccontextmanager
    async def serving(self):
        if not self.starts:
            raise OSError("no port is free")
        yield

    async def run_episode(self, task: int, context: Any) -> Any:
        trace = SimpleNamespace(reward=task, errors=[], metrics={})
        return SimpleNamespace(traces=[trace], errors=[], ok=True)


@pytest.fixture
def made(monkeypatch) -> list[Serving]:
    """Stand in for the package; return the environments that it makes. One does not start."""
    made: list[Serving] = []

    def make(config: Any) -> Serving:
        made.append(Serving(starts=bool(made)))
        return made[-1]

    loaders = SimpleNamespace(resolve_env_config=dict, load_environment=make)
    clients = SimpleNamespace(
        EvalClientConfig=dict, ModelContext=lambda *_: SimpleNamespace(client=None)
    )
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", loaders)
    monkeypatch.setitem(sys.modules, "verifiers.v1.clients", clients)
    monkeypatch.setattr(verifiers_env, "share_certificates", lambda: None)
    monkeypatch.setattr(verifiers_env, "_served", {})
    return made


def test_servers_that_did_not_start_or_ended_are_started_for_the_next_episode(made):
    options = VerifiersOptions(ENV)
    key = repr(options)

    async def run():
        def play() -> Any:
            return verifiers_env.VerifiersEpisode(options).run(task_of("http://a", 3), 60.0)

        failed = await asyncio.gather(play(), play(), return_exceptions=True)
        rewards = [(await play()).reward, (await play()).reward]
        holding = verifiers_env._served[key].holding
        holding.cancel()
        await asyncio.wait([holding])
        rewards.append((await play()).reward)
        return [str(error) for error in failed], rewards

    failed, rewards = asyncio.run(run())
    assert failed == ["verifiers does not start: no port is free"] * 2
    assert rewards == [3.0] * 3 and len(made) == 3


def test_an_environment_without_a_taskset_is_refused():
    with pytest.raises(ValueError, match=r"env is {}: it needs taskset.id"):
        VerifiersOptions()


def test_prompts_of_a_split_count_from_its_first_task():
    options = VerifiersOptions({"taskset": {"id": "sums-taskset"}}, {"heldout": 6000})
    held_out = {"extra_info": {"split": "heldout"}, "index": 3}
    assert options.read_number(held_out) == 6003
    assert options.read_number({"extra_info": {"split": "train"}, "index": 3}) == 3
    assert options.read_number({"extra_info": {"split": "heldout", "verifiers_index": 9}}) == 6009
    assert options.read_number({"index": 4}) == 4
    with pytest.raises(ValueError, match="splits: heldout begins at -1"):
        VerifiersOptions({"taskset": {"id": "sums-taskset"}}, {"heldout": -1})


def test_a_file_is_named_as_the_module_that_verifiers_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/lib"])
    env = {
        "taskset": {"id": "/mine/sums.py:Sums", "num_tasks": 3},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }
    assert add_modules(env) == {**env, "taskset": {"id": "sums", "num_tasks": 3}}
    assert sys.path == ["/lib", "/mine"]
