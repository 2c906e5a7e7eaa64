"""Runs an environment of OpenEnv over the web socket of its server."""

import asyncio
import contextlib
import importlib
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.agents.environments.environment import (
    Message,
    Start,
    Step,
    add_text,
    cut,
    join_texts,
)
from mcore_rl.data.rows import get_mapping
from mcore_rl.process.errors import describe_error

logger = logging.getLogger(__name__)
_MAX_MESSAGE_BYTES = 100 * 1024 * 1024
_REFUSED = "VALIDATION_ERROR"
"""Code of a server's error for fields that are no action (openenv, env_server/types.py)."""
_PROBLEMS_LEN = 1000


@dataclass(frozen=True)
class OpenEnvOptions:
    """Where the server is, and how its actions and observations become text.

    url              of a running server, such as http://host:8000; or else
    command          program that serves at 127.0.0.1:{port}; each worker starts one of its own
    action           fields of an action; {answer} in a text is the answer's text
    action_is_json   the answer itself is a JSON object with the fields, and `action` adds to them
    observation      template of the text: {observation} is all of it as JSON, other names in braces
                     are fields of it
    instructions     said before the first observation
    parse_penalty, max_parse_errors
                     for answers that are no JSON object, or whose values the server refuses as
                     fields of an action, as in GymnasiumOptions
    connect_timeout_s
                     for the server to start and accept a session

    The task's extra_info.reset is passed to the environment's reset, with the task's seed.
    """

    url: str = ""
    command: Sequence[str] = ()
    action: Mapping[str, Any] = field(default_factory=lambda: {"message": "{answer}"})
    action_is_json: bool = False
    observation: str = "{observation}"
    instructions: str = ""
    parse_penalty: float = 0.0
    max_parse_errors: int = 3
    connect_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.command) or isinstance(self.command, str):
            raise ValueError(
                f"url is {self.url!r} and command {self.command!r}: give one of them, the command "
                "as a list"
            )
        if self.command and not any("{port}" in word for word in self.command):
            raise ValueError(f"command {list(self.command)} does not use {{port}}")
        if self.max_parse_errors < 1 or not self.connect_timeout_s > 0:
            raise ValueError(
                f"max_parse_errors is {self.max_parse_errors}, connect_timeout_s "
                f"{self.connect_timeout_s}: at least 1 and more than 0"
            )


@dataclass(frozen=True)
class _Server:
    url: str
    process: asyncio.subprocess.Process


_servers: dict[tuple[str, ...], asyncio.Future[_Server]] = {}
"""The servers that this worker started, by command; they end with it."""


class _RefusedFieldsError(RuntimeError):
    """The server does not take fields; `problems` has pydantic's errors: loc, type, msg."""

    def __init__(self, text: str, problems: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(text)
        self.problems = problems


class OpenEnvEnvironment:
    """One episode, which is one session of the server."""

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._session: Any = None
        self._num_parse_errors = 0
        self._num_steps = 0

    async def reset(self, task: Mapping[str, Any]) -> Start:
        """Begin a session; TimeoutError or RuntimeError says why the server gives none."""
        connect = importlib.import_module("websockets.asyncio.client").connect
        limit_s = self._options.connect_timeout_s
        url = self._options.url or await _start_server(tuple(self._options.command), limit_s)
        address = url.rstrip("/").replace("http", "ws", 1) + "/ws"
        try:
            self._session = await asyncio.wait_for(
                connect(address, max_size=_MAX_MESSAGE_BYTES, proxy=None), limit_s
            )
        except OSError as error:
            silent = f"no answer within connect_timeout_s={limit_s:g}"
            raise RuntimeError(
                f"the OpenEnv server at {address} gives no session: {describe_error(error, silent)}"
            ) from error
        given = get_mapping(task.get("extra_info") or {}, "reset", "the task's extra_info")
        data = await self._ask("reset", {"seed": task.get("seed"), **given})
        text = self._text(data)
        if self._options.instructions:
            text = f"{self._options.instructions}\n\n{text}"
        return Start(add_text(task.get("messages") or (), text))

    async def step(self, message: Message) -> Step:
        action = self._action(join_texts(message))
        if action is None:
            return self._tell_no_action("answer with one JSON object.")
        try:
            data = await self._ask("step", action)
        except _RefusedFieldsError as error:
            if not self._blames_answer(error.problems):
                raise
            return self._tell_no_action(_describe_problems(error.problems))
        self._num_steps += 1
        return self._step(self._text(data), float(data.get("reward") or 0.0), bool(data["done"]))

    async def close(self) -> None:
        if self._session is not None:
            with contextlib.suppress(OSError):
                await self._session.close()

    def _tell_no_action(self, why: str) -> Step:
        self._num_parse_errors += 1
        ends = self._num_parse_errors >= self._options.max_parse_errors
        text = f"This answer has no action: {why}"
        reward = -self._options.parse_penalty
        return self._step(text, reward, ends, "parse_error" if ends else "")

    def _step(self, text: str, reward: float, done: bool, end_reason: str = "") -> Step:
        messages: list[Message] = [] if done else [{"role": "user", "content": text}]
        metrics = {"steps": float(self._num_steps), "parse_errors": float(self._num_parse_errors)}
        return Step(messages, reward, done, metrics, end_reason)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        await self._session.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await self._session.recv())
        if reply["type"] != "observation":
            text = f"the OpenEnv server answers {kind} by {reply['type']}: {reply['data']}"
            if reply["data"].get("code") == _REFUSED:
                raise _RefusedFieldsError(text, reply["data"].get("errors") or ())
            raise RuntimeError(text)
        return reply["data"]

    def _blames_answer(self, problems: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the answer's own words are refused, not what `action` says for all."""
        places = [str(problem["loc"][0]) if problem["loc"] else "" for problem in problems]
        if self._options.action_is_json:
            return not places or any(place not in self._list_fixed_fields() for place in places)
        action = self._options.action.items()
        said = {key for key, value in action if "{answer}" in json.dumps(value)}
        is_unknown = any(problem["type"] == "extra_forbidden" for problem in problems)
        return not is_unknown and all(place in said for place in places)

    def _action(self, answer: str) -> dict[str, Any] | None:
        if not self._options.action_is_json:
            return _fill(self._options.action, answer)
        try:
            found = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
        except (ValueError, RecursionError):
            return None
        return {**found, **self._list_fixed_fields()}

    def _list_fixed_fields(self) -> dict[str, Any]:
        """Return the fields that `action` adds to those of a JSON answer."""
        return {key: value for key, value in self._options.action.items() if value != "{answer}"}

    def _text(self, data: Mapping[str, Any]) -> str:
        observation = data["observation"]
        whole = json.dumps(observation, ensure_ascii=False)
        try:
            return self._options.observation.format(**{"observation": whole, **observation})
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"observation {self._options.observation!r} asks for {error}: the server's has "
                f"{', '.join(observation)}"
            ) from error


def _describe_problems(problems: Sequence[Mapping[str, Any]]) -> str:
    """Return what the policy is told of fields that are refused."""
    texts = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in problems]
    return cut(f"its fields are refused: {'; '.join(texts)}", _PROBLEMS_LEN)


def _fill(value: Any, answer: str) -> Any:
    """Return a value of JSON with {answer} replaced in its texts."""
    if isinstance(value, str):
        return value.replace("{answer}", answer)
    if isinstance(value, Mapping):
        return {key: _fill(part, answer) for key, part in value.items()}
    return [_fill(part, answer) for part in value] if isinstance(value, list) else value


async def _start_server(command: tuple[str, ...], limit_s: float) -> str:
    """Return the URL of this worker's server.

    The first episode starts the server, and so does the first one after the server has ended.
    """
    if command not in _servers or _has_ended(_servers[command]):
        _servers[command] = asyncio.ensure_future(_start(command, limit_s))
    return (await asyncio.shield(_servers[command])).url


def _has_ended(starting: asyncio.Future[_Server]) -> bool:
    """Return whether a server did not start, or its process is over."""
    if not starting.done() or starting.exception():
        return starting.done()
    server = starting.result()
    if (status := server.process.returncode) is None:
        return False
    logger.warning("the OpenEnv server at %s ended with status %d", server.url, status)
    return True


async def _start(command: tuple[str, ...], limit_s: float) -> _Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in command]
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    while loop.time() < deadline_s:
        if process.returncode is not None:
            raise RuntimeError(f"the OpenEnv server {words} ended with status {process.returncode}")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return _Server(f"http://127.0.0.1:{port}", process)
    process.kill()
    raise TimeoutError(
        f"the OpenEnv server {words} did not listen at port {port} within {limit_s:g} s "
        f"(connect_timeout_s) of worker {os.getpid()}"
    )
