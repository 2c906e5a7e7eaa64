"""Runs any program that talks with a model at OPENAI_BASE_URL or ANTHROPIC_BASE_URL as an episode.

The program gets the task in its working folder, runs the episode against the gateway whose address
the task has, and ends. Its exit status, and a command that scores what it left, make the result.

Keeps the beginning and the end of a program's output.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.agents.environments.environment import ProgramResult, join_texts
from mcore_rl.data.rows import get_mapping

_CHUNK_BYTES = 64 * 1024


class BoundedOutput:
    """At most `most_bytes` of an output: the first half as it began, the second as it ended."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._num_dropped = 0

    async def read_all(self, stream: asyncio.StreamReader) -> None:
        """Take everything up to the end of a stream; memory stays bounded."""
        while chunk := await stream.read(_CHUNK_BYTES):
            self.add(chunk)

    def add(self, chunk: bytes) -> None:
        room = self._most_bytes - self._most_bytes // 2 - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if (excess := len(self._tail) - self._most_bytes // 2) > 0:
            del self._tail[:excess]
            self._num_dropped += excess

    @property
    def text(self) -> str:
        """The output, with a note where some was left out."""
        note = f"\n[{self._num_dropped} bytes left out]\n".encode() if self._num_dropped else b""
        return bytes(self._head + note + self._tail).decode(errors="replace")


_TERMINATE_S = 3.0
_DRAIN_S = 2.0
_DETAIL_LEN = 2000


@dataclass(frozen=True)
class CommandOptions:
    """Which program runs an episode, and who scores it.

    command        program and arguments; in each, {prompt} is the text of the task's last message
                   and {folder} the working folder
    files          files to put into the working folder: name -> text; the task's extra_info.files
                   come on top, and task.json has the whole task
    variables      environment variables of the program, besides those of the worker; HOME is the
                   working folder if they do not name it
    model          name of the model, as OPENAI_MODEL and ANTHROPIC_MODEL
    score          command that runs in the working folder after a program that ended well, with the
                   same braces; empty: the program itself prints the reward
    score_timeout_s
                   for that command
    output_folder  where the output of each episode goes; empty: nowhere
    output_bytes   of such a file, at most

    A reward is the last line {"reward": 0.5} of the output of `score`, or of the program without
    it. A `score` that prints none gives 1 for exit status 0, and 0 for any other.
    """

    command: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    model: str = "policy"
    score: Sequence[str] = ()
    score_timeout_s: float = 120.0
    output_folder: str = ""
    output_bytes: int = 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("command", "score"):
            words = getattr(self, name)
            if isinstance(words, str) or (name == "command" and not words):
                raise ValueError(f"{name} is {words!r}: a list of the program and its arguments")
        if self.output_bytes < 2 or not self.score_timeout_s > 0:
            raise ValueError(
                f"output_bytes is {self.output_bytes}, score_timeout_s {self.score_timeout_s}: at "
                "least 2 and more than 0"
            )
        for name in self.files:
            find_inner_path(Path("/"), name)
        program = self.command[0]
        if "{" not in program and shutil.which(program) is None:
            raise ValueError(f"command: there is no program {program!r}; install it or give a path")

    @property
    def after_deadline_s(self) -> float:
        """Seconds that `score` may take after a program that ended at its deadline."""
        return self.score_timeout_s if self.score else 0.0


@dataclass(frozen=True)
class _Ended:
    """status is None if the program ran into its deadline."""

    status: int | None
    output: str


class CommandEpisode:
    """One episode, run by one process group."""

    def __init__(self, options: CommandOptions) -> None:
        self._options = options

    async def run(self, task: Mapping[str, Any], deadline_s: float) -> ProgramResult:
        """Run the program for at most `deadline_s` seconds, then score what it left.

        Raises ValueError if the task lacks gateway_url or gateway_key, or has files outside of the
        folder; OSError if the program cannot be started.
        """
        variables = {**os.environ, **make_gateway_variables(task), **self._options.variables}
        variables |= {"OPENAI_MODEL": self._options.model, "ANTHROPIC_MODEL": self._options.model}
        variables.pop("PYTHONPATH", None)  # it is the worker's
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(
            prefix="mcore_rl_episode_", ignore_cleanup_errors=True
        ) as folder:
            self._fill(Path(folder), task)
            variables["HOME"] = self._options.variables.get("HOME", folder)
            ended = await self._execute(self._options.command, folder, task, variables, deadline_s)
            self._keep(ended.output, task)
            metrics = {"program/seconds": time.monotonic() - began_s}
            if ended.status is None:
                detail = f"it took more than {deadline_s:g} s{_end_of(ended.output)}"
                return ProgramResult(None, "deadline", detail, metrics)
            if ended.status != 0:
                detail = f"it ended with status {ended.status}{_end_of(ended.output)}"
                return ProgramResult(None, "tool_error", detail, metrics)
            return await self._score(folder, task, variables, ended.output, metrics)

    async def _score(
        self,
        folder: str,
        task: Mapping[str, Any],
        variables: Mapping[str, str],
        output: str,
        metrics: Mapping[str, float],
    ) -> ProgramResult:
        if not self._options.score:
            return ProgramResult(read_reward(output), "done", "", metrics)
        limit_s = self._options.score_timeout_s
        score = await self._execute(self._options.score, folder, task, variables, limit_s)
        if score.status is None:
            detail = f"score took more than {limit_s:g} s{_end_of(score.output)}"
            return ProgramResult(None, "env_error", detail, metrics)
        reward = read_reward(score.output)
        if reward is None:
            reward = float(score.status == 0)
        return ProgramResult(reward, "done", "", metrics)

    def _fill(self, folder: Path, task: Mapping[str, Any]) -> None:
        hidden = {key: value for key, value in task.items() if key != "gateway_key"}
        files = {
            **self._options.files,
            **get_mapping(task.get("extra_info") or {}, "files", "the task's extra_info"),
            "task.json": json.dumps(hidden),
        }
        for name, text in files.items():
            path = find_inner_path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def _keep(self, output: str, task: Mapping[str, Any]) -> None:
        if self._options.output_folder:
            parts = [str(task.get(key, "")) for key in ("data_source", "index", "sample_index")]
            name = re.sub(r"[^\w.-]", "_", "_".join(parts))
            path = Path(self._options.output_folder) / f"{name}_{os.getpid()}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(output)

    async def _execute(
        self,
        command: Sequence[str],
        folder: str,
        task: Mapping[str, Any],
        variables: Mapping[str, str],
        limit_s: float,
    ) -> _Ended:
        prompt = join_texts((task.get("messages") or [{}])[-1])
        words = [word.replace("{folder}", folder).replace("{prompt}", prompt) for word in command]
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=folder,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        output = BoundedOutput(self._options.output_bytes)
        reading = asyncio.ensure_future(output.read_all(process.stdout))
        try:
            await asyncio.wait_for(process.wait(), limit_s)
            status = process.returncode
        except TimeoutError:
            status = None
        finally:
            await _end_group(process)
            # A process that left the group may hold the pipe open; it ends with the worker.
            await asyncio.wait([reading], timeout=_DRAIN_S)
            reading.cancel()
        return _Ended(status, output.text)


def make_gateway_variables(task: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables by which SDKs find their server, from gateway_url and gateway_key.

    Both are fields of the task, or of its extra_info. The URL is without or with /v1 at its end.
    """
    places = (task, task.get("extra_info") or {})
    found: dict[str, str] = {}
    for name in ("gateway_url", "gateway_key"):
        found[name] = next((str(place[name]) for place in places if place.get(name)), "")
        if not found[name]:
            raise ValueError(f"the task has no {name}: a program needs a gateway to talk with")
    root = found["gateway_url"].rstrip("/").removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_BASE": f"{root}/v1",
        "OPENAI_API_KEY": found["gateway_key"],
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": found["gateway_key"],
    }


def find_inner_path(folder: Path, name: str) -> Path:
    """Return the path of a file in `folder`; ValueError if it would lie outside."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts:
        raise ValueError(f"files: {name!r} lies outside of the working folder; name it below it")
    return path


def read_reward(output: str) -> float | None:
    """Return the finite reward of the last line that is a JSON object with one; None without."""
    for line in reversed(output.splitlines()):
        if not line.strip().startswith("{"):
            continue
        with contextlib.suppress(ValueError):
            reward = json.loads(line).get("reward")
            if isinstance(reward, int | float) and math.isfinite(reward):
                return float(reward)
    return None


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of a process group; its leader may end by itself first."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _TERMINATE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _end_of(output: str) -> str:
    return f"; its output ends:\n{output[-_DETAIL_LEN:].strip()}" if output.strip() else ""
