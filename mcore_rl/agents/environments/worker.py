"""A process that hosts episodes: reads requests of a pool from a socket, and writes the replies.

Run by keeper.py as `python -m mcore_rl.agents.environments.worker --socket-fd N --keeper-pid N`,
under any interpreter from Python 3.11 on: whatever is imported here needs the standard library
only.

The episodes of one worker: carries out what the pool asks, and says what came of it.
"""

import argparse
import asyncio
import inspect
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mcore_rl.agents.environments.adapters import load
from mcore_rl.agents.environments.environment import ProgramResult, Start, Step
from mcore_rl.agents.environments.wire import encode, read_frame
from mcore_rl.process.errors import describe_error
from mcore_rl.process.log_files import keep_output_lasting, rotate_output
from mcore_rl.process.parent_death import die_with_parent

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

    @property
    def after_deadline_s(self) -> float:
        """Seconds that `run` may take beyond its deadline, as the options say; 0 without."""
        return float(getattr(self._options, "after_deadline_s", 0.0))

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


_CLOSE_ALL_S = 2.0


async def serve(connection: socket.socket) -> None:
    """Serve a pool until it closes the connection or sends None.

    The first frame names kind and options; if they are right, the reply has the process id and
    the seconds that a run may take beyond its deadline. Each further frame is a request, answered
    when it is done, in any order.
    """
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    first = await read_frame(reader)
    if first is None:
        return
    host = await _make_host(first, writer)
    tasks: set[asyncio.Task[None]] = set()
    while host is not None and (request := await read_frame(reader)) is not None:
        if request["do"] == "stop":
            await asyncio.wait([asyncio.ensure_future(host.close_all())], timeout=_CLOSE_ALL_S)
            return
        if request["do"] == "abandon":
            leaves_thread = host.abandon(request["episode"])
            await _send(writer, {"call": request["call"], "value": leaves_thread})
        else:
            task = asyncio.ensure_future(_answer(host, request, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def _make_host(first: dict[str, Any], writer: asyncio.StreamWriter) -> Host | None:
    try:
        host = Host(first["kind"], first["options"])
    except Exception as error:  # the pool gets it, and raises it where the user sees it
        await _send(writer, {"call": first["call"], "error": describe(error)})
        return None
    value = {"pid": os.getpid(), "after_deadline_s": host.after_deadline_s}
    await _send(writer, {"call": first["call"], "value": value})
    return host


async def _answer(host: Host, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    reply = await host.call(request)
    try:
        await _send(writer, {"call": request["call"], **reply})
    except ValueError as error:  # the environment's messages or metrics are not JSON
        await _send(writer, {"call": request["call"], "error": describe(error)})


async def _send(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    writer.write(encode(value))
    await writer.drain()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--keeper-pid", type=int, required=True)
    given = parser.parse_args(arguments)
    die_with_parent(given.keeper_pid)
    os.set_inheritable(given.socket_fd, False)
    keep_output_lasting()
    rotate_output()
    asyncio.run(serve(socket.socket(fileno=given.socket_fd)))


def _main_and_exit() -> None:
    """Exit without waiting for threads: one that hangs in an environment would keep the process."""
    status = 1
    try:
        main(sys.argv[1:])
        status = 0
    except BaseException:  # the interpreter would print it, too, but then wait for the threads
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _main_and_exit()
