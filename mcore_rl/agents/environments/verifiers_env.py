"""Runs episodes of the package `verifiers`, from 0.4 on: its own rollout, its own rewards.

Its harness, a program, talks with an interception server of verifiers, which asks the model at the
gateway of the episode. So an episode is one call of `run`, as for any other program.
"""

import asyncio
import importlib
import logging
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mcore_rl.agents.environments.command import make_gateway_variables
from mcore_rl.agents.environments.environment import ProgramResult
from mcore_rl.process.errors import describe_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerifiersOptions:
    """Which environment of verifiers.

    env     what its configuration file has under [env]: taskset.id at least, agent.harness.id; an
            id may also be folder/file.py:Class, a file of your own that is not installed
    splits  number of the task that a split begins with, by extra_info.split of the prompts: with
            {heldout: 6000}, held-out prompt 3 is task 6003; a split that is not named begins at 0
    model   name of the model in requests

    The task's extra_info.verifiers_index, or else its index, counts the tasks of its split.
    """

    env: Mapping[str, Any] = field(default_factory=dict)
    splits: Mapping[str, int] = field(default_factory=dict)
    model: str = "policy"

    def __post_init__(self) -> None:
        if not (self.env.get("taskset") or {}).get("id"):
            raise ValueError(f"env is {dict(self.env)}: it needs taskset.id, an installed taskset")
        for split, first in self.splits.items():
            if not isinstance(first, int) or first < 0:
                raise ValueError(f"splits: {split} begins at {first!r}: give the number of a task")

    def check_imports(self) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        loaders.import_taskset(add_modules(self.env)["taskset"]["id"])

    def read_number(self, task: Mapping[str, Any]) -> int:
        """Return the place in the taskset of a prompt's task."""
        extra = task.get("extra_info") or {}
        number = int(extra.get("verifiers_index", task.get("index") or 0))
        return number + self.splits.get(extra.get("split") or "", 0)


class _Served:
    """An environment of verifiers with its servers, which all episodes of a worker share."""

    def __init__(self, options: VerifiersOptions) -> None:
        share_certificates()
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self.env = loaders.load_environment(loaders.resolve_env_config(add_modules(options.env)))
        self.tasks = iter(self.env.taskset)
        self.known: list[Any] = []
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.holding = asyncio.ensure_future(self._hold())

    def task(self, index: int) -> Any:
        """Return a task by its place; a taskset may go on for ever."""
        while len(self.known) <= index:
            try:
                self.known.append(next(self.tasks))
            except StopIteration:
                raise ValueError(
                    f"the taskset has {len(self.known)} tasks, none at {index}: set "
                    "extra_info.verifiers_index"
                ) from None
        return self.known[index]

    async def _hold(self) -> None:
        """Keep the servers up, in the task that started them, as long as the worker lives."""
        try:
            async with self.env.serving():
                self.ready.set_result(None)
                await asyncio.Event().wait()
        except (Exception, SystemExit) as error:  # every episode that waits gets it
            if self.ready.done():
                logger.warning("the servers of verifiers ended: %s", describe_error(error))
            else:
                self.ready.set_exception(RuntimeError(f"verifiers does not start: {error}"))


_served: dict[str, _Served] = {}
"""Environments by their options, in this worker."""


def _find_served(options: VerifiersOptions) -> _Served:
    """Return this worker's environment; made anew if its servers did not start, or ended."""
    key = repr(options)
    if key not in _served or _served[key].holding.done():
        _served[key] = _Served(options)
    return _served[key]


class VerifiersEpisode:
    """One episode. The reward is the mean over the traces of its agents; mostly there is one."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options

    async def run(self, task: Mapping[str, Any], deadline_s: float) -> ProgramResult:
        """Run the episode; ValueError if the task lacks a gateway, or the taskset the task."""
        served = _find_served(self._options)
        await asyncio.shield(served.ready)
        number = self._options.read_number(task)
        gateway = make_gateway_variables(task)
        # verifiers reads a key from a variable, whose name is in the client's configuration.
        variable = f"MCORE_RL_GATEWAY_{uuid.uuid4().hex}"
        os.environ[variable] = gateway["OPENAI_API_KEY"]
        try:
            clients = importlib.import_module("verifiers.v1.clients")
            context = clients.ModelContext(
                self._options.model,
                clients.EvalClientConfig(base_url=gateway["OPENAI_BASE_URL"], api_key_var=variable),
            )
            try:
                async with asyncio.timeout(deadline_s):
                    return _result(await served.env.run_episode(served.task(number), context))
            finally:
                await _close_client(served.env, context.client)
        except TimeoutError:
            return ProgramResult(None, "deadline", f"it took more than {deadline_s:g} s")
        finally:
            del os.environ[variable]


@cache
def share_certificates() -> None:
    """Have all clients of verifiers share one SSL context.

    Each episode's endpoint has a client of its own. To read all certificates for each, to talk with
    a gateway that has none, took most of a worker's time and a megabyte of its memory.
    """
    httpx = importlib.import_module("httpx")
    base = importlib.import_module("verifiers.v1.clients.base")
    certificates = httpx.create_ssl_context()

    def build_async_httpx(config: Any) -> Any:
        timeout = httpx.Timeout(**config.timeout.model_dump())
        return httpx.AsyncClient(verify=certificates, timeout=timeout, limits=base.DEFAULT_LIMITS)

    clients: Any = importlib.import_module("verifiers.v1.clients.eval")
    clients.build_async_httpx = build_async_httpx


async def _close_client(env: Any, config: Any) -> None:
    """Close the client of an episode's endpoint.

    verifiers keeps it, with its connections, for the next rollout at the same endpoint, of which
    there is none.
    """
    interception = env._interception
    for server in getattr(interception, "servers", [interception]):
        client = server.clients.pop(config.model_dump_json(), None)
        if client is not None:
            await client.close()


def add_modules(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with modules in place of files named as folder/file.py:Class.

    verifiers imports an id as a module and takes the class that `__all__` lists, so the folder is
    put on the import path.
    """
    named: dict[str, Any] = {}
    for key, value in env.items():
        if isinstance(value, Mapping):
            value = add_modules(value)
        elif key == "id" and isinstance(value, str) and ".py:" in value:
            file = Path(value.rpartition(":")[0])
            if str(file.parent) not in sys.path:
                sys.path.append(str(file.parent))
            value = file.stem
        named[key] = value
    return named


def _result(episode: Any) -> ProgramResult:
    traces = episode.traces
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    metrics: dict[str, float] = {}
    for trace in traces:
        for name, value in trace.metrics.items():
            if value is not None:
                metrics[name] = metrics.get(name, 0.0) + float(value) / len(traces)
    if not episode.ok:
        detail = "; ".join(f"{error.type}: {error.message}" for error in errors[:3])
        reason = "deadline" if episode.is_timeout else "env_error"
        return ProgramResult(None, reason, detail or "its run is not ok", metrics)
    reward = sum(float(trace.reward) for trace in traces) / len(traces)
    return ProgramResult(reward, "done", "", metrics)
