"""The episodes of one worker: carries out what the pool asks, and says what came of it."""

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mcore_rl.agents.environments.adapters import load
from mcore_rl.agents.environments.environment import ProgramResult, Start, Step
from mcore_rl.process.errors import describe_error

_TRACEBACK_LEN = 4000


class Host:
    """Makes environments of one kind and calls them.

    Coroutines run on the worker's event loop. Everything else of an episode, its construction
    included, runs in one thread of its own, so an environment may depend on its thread.
    """

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        self._make, make_options = load(kind)
        self._options = make_options(**options)
        self._episodes: dict[int, _Episode] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one request; return the fields of its reply, an error among them."""
        try:
            return {"value": await self._do(request)}
        except asyncio.CancelledError:
            return {"error": {"kind": "CancelledError", "text": "canceled by the pool"}}
        except (Exception, SystemExit) as error:  # handed on to the caller in the other process
            return {"error": describe(error)}

    def abandon(self, episode: int) -> bool:
        """Forget an episode whose call takes too long; return whether it leaves a thread behind.

        A coroutine is canceled and its environment closed; a thread cannot be stopped.
        """
        found = self._episodes.pop(episode, None)
        if found is None:
            return False
        if found.abandon():
            return True
        closing = asyncio.ensure_future(_close_quietly(found))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return False

    async def close_all(self) -> None:
        """Close every episode that is still open, as far as it lets itself be closed."""
        episodes = list(self._episodes.values())
        self._episodes.clear()
        await asyncio.gather(*(found.close() for found in episodes), return_exceptions=True)

    async def _do(self, request: Mapping[str, Any]) -> Any:
        name, verb = request["episode"], request["do"]
        if verb == "reset":
            episode = self._episodes[name] = _Episode()
            await episode.make(self._make, self._options)
            return _start(await episode.call("reset", request["task"]))
        if verb == "run":
            episode = self._episodes[name] = _Episode()
            try:
                await episode.make(self._make, self._options)
                return _result(await episode.call("run", request["task"], request["deadline_s"]))
            finally:
                self._episodes.pop(name, None)
                episode.release_thread()
        if verb == "step":
            return _step(await self._episodes[name].call("step", request["message"]))
        if verb == "close":
            if found := self._episodes.get(name):
                try:
                    await found.close()
                finally:
                    self._episodes.pop(name, None)
            return None
        raise AssertionError(f"the pool asked for {verb!r}")


class _Episode:
    def __init__(self) -> None:
        self._environment: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="episode")
        self._num_in_thread = 0
        self._waits: asyncio.Task[Any] | None = None

    async def make(self, make: Callable[[Any], Any], options: Any) -> None:
        self._environment = await self._in_thread(make, options)

    async def call(self, method: str, *arguments: Any) -> Any:
        self._waits = asyncio.current_task()
        try:
            function = getattr(self._environment, method)
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            return await self._in_thread(function, *arguments)
        finally:
            self._waits = None

    async def close(self) -> None:
        try:
            if hasattr(self._environment, "close"):
                await self.call("close")
        finally:
            self.release_thread()

    def abandon(self) -> bool:
        """End a call that waits; return whether its thread goes on."""
        if self._waits is not None:
            self._waits.cancel()
        if self._num_in_thread:
            self.release_thread()
        return self._num_in_thread > 0

    def release_thread(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        def run() -> Any:
            try:
                return function(*arguments)
            finally:
                self._num_in_thread -= 1

        self._num_in_thread += 1
        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


async def _close_quietly(episode: _Episode) -> None:
    try:
        await episode.close()
    except Exception:  # nobody waits for it any more; the log is the only reader
        traceback.print_exc()


def describe(error: BaseException) -> dict[str, str]:
    """Return the error's type, its text and the end of its traceback."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return {
        "kind": type(error).__name__,
        "text": describe_error(error).removeprefix(f"{type(error).__name__}: "),
        "traceback": "".join(lines)[-_TRACEBACK_LEN:],
    }


def _start(value: Any) -> dict[str, Any]:
    if not isinstance(value, Start):
        raise TypeError(f"reset returned a {type(value).__name__}, not a Start")
    return {
        "messages": list(value.messages),
        "tools": list(value.tools),
        "metrics": _finite_metrics(value.metrics),
    }


def _step(value: Any) -> dict[str, Any]:
    if not isinstance(value, Step):
        raise TypeError(f"step returned a {type(value).__name__}, not a Step")
    return {
        "messages": list(value.messages),
        "reward": _finite(value.reward, "reward"),
        "done": bool(value.done),
        "metrics": _finite_metrics(value.metrics),
        "end_reason": value.end_reason,
    }


def _result(value: Any) -> dict[str, Any]:
    if not isinstance(value, ProgramResult):
        raise TypeError(f"run returned a {type(value).__name__}, not a ProgramResult")
    return {
        "reward": None if value.reward is None else _finite(value.reward, "reward"),
        "end_reason": value.end_reason,
        "detail": value.detail,
        "metrics": _finite_metrics(value.metrics),
    }


def _finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: _finite(number, name) for name, number in metrics.items()}


def _finite(number: Any, name: str) -> float:
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}: rewards and metrics are finite numbers")
    return float(number)
