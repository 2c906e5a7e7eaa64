"""Tries programs of an episode: public tests with feedback for the policy, then hidden ones.

Each program has a sandbox of its own. Programs of a PairLanguage are harmless, and those that
come at the same time share one.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from mcore_rl.rewards.code.driver import pack, unpack
from mcore_rl.rewards.code.execution import CaseRun, CaseSettings, call_case, run_cases
from mcore_rl.rewards.code.languages import PAIRS_FUNCTION, PairLanguage, Program, program_of
from mcore_rl.rewards.code.tests import ProgramTests, is_passed, read_tests

_GATHER_S = 0.02
"""Programs of a PairLanguage that come within this time share a sandbox."""
_SHOWN_LEN = 500


@dataclass(frozen=True)
class PublicVerdict:
    """The outcome of a program on the public tests.

    feedback  what the policy is told; empty if they pass
    program   to be tried on the hidden tests; None: there is none, or `values` has its outcome
    values    what a program of a PairLanguage gave on all tests; empty for other languages
    """

    passes_public: bool
    feedback: str = ""
    program: Program | None = None
    values: Sequence[int | None] = ()


class Trial(Protocol):
    """The tests of one problem. Both methods raise SandboxError if there is no sandbox."""

    async def run(self, response: str) -> PublicVerdict:
        """Try the program of a response on the public tests."""
        ...

    async def run_hidden(self, verdict: PublicVerdict) -> list[bool]:
        """Return whether the program passes each hidden test."""
        ...


def make_trial(
    language: str | PairLanguage, truth: Mapping[str, Any], sandbox_url: str = ""
) -> Trial:
    """Return the trial of a ground truth, whose "public" tests have the form of the others.

    language      of programs: one of PROGRAM_LANGUAGES, instead of which a ground truth may name
                  another one, or a PairLanguage
    sandbox_url   as in CaseSettings

    Raises ValueError if it lacks hidden tests.
    """
    if isinstance(language, PairLanguage):
        return PairTrial(language, truth, sandbox_url)
    return ProgramTrial({"language": language, **truth}, sandbox_url)


class ProgramTrial:
    """The program is the response's last fenced block."""

    def __init__(self, truth: Mapping[str, Any], sandbox_url: str = "") -> None:
        self._settings = CaseSettings(sandbox_url=sandbox_url)
        shared = {key: truth[key] for key in ("fn_name", "language") if key in truth}
        public = truth.get("public")
        self._public = read_tests({**shared, **public}) if public else ProgramTests()
        self._hidden = read_tests({key: truth[key] for key in truth if key != "public"})
        if self._public.assertions:
            raise ValueError('the public tests are assertions: give them as "inputs", "outputs"')

    async def run(self, response: str) -> PublicVerdict:
        languages = self._hidden.languages
        program = program_of(response, languages)
        if program is None:
            told = f"There is no program: write it as a ```{languages[0]} block."
            return PublicVerdict(False, told)
        if not self._public.cases:
            return PublicVerdict(True, program=program)
        runs = await _run_in_thread(self._public.runs, program, self._settings)
        for run, (test, expected) in zip(runs, self._public.cases, strict=True):
            if not is_passed(run, test, expected):
                return PublicVerdict(False, _describe_failure(run, test, expected), program)
        return PublicVerdict(True, program=program)

    async def run_hidden(self, verdict: PublicVerdict) -> list[bool]:
        if verdict.program is None:
            return [False] * len(self._hidden)
        return await _run_in_thread(self._hidden.results, verdict.program, self._settings)


class PairTrial:
    """The whole response is a program of a PairLanguage."""

    def __init__(
        self, language: PairLanguage, truth: Mapping[str, Any], sandbox_url: str = ""
    ) -> None:
        self._language = language
        self._sandbox_url = sandbox_url
        public = truth.get("public") or {"inputs": [], "outputs": []}
        self._num_public = len(public["inputs"])
        self._cases = [*public["inputs"], *truth["inputs"]]
        self._expected = [*public["outputs"], *truth["outputs"]]
        if len(self._cases) != len(self._expected) or self._num_public == len(self._cases):
            raise ValueError(
                f"{len(truth['inputs'])} hidden inputs, {len(truth['outputs'])} outputs: a problem"
                " needs as many of both, and one at least"
            )

    async def run(self, response: str) -> PublicVerdict:
        values: Sequence[int | None] = [None] * len(self._cases)
        source = self._language.to_python(response)
        if source is not None:
            batcher = _batcher(self._sandbox_url)
            values = await batcher.values(source, self._cases)
        for i in range(self._num_public):
            if values[i] != self._expected[i]:
                a, b = self._cases[i]
                told = self._language.tell_failure(a, b, values[i], self._expected[i])
                return PublicVerdict(False, told, values=values)
        return PublicVerdict(True, values=values)

    async def run_hidden(self, verdict: PublicVerdict) -> list[bool]:
        pairs = zip(verdict.values, self._expected, strict=True)
        return [got == wanted for got, wanted in pairs][self._num_public :]


@dataclass(frozen=True)
class _Waiting:
    """A program that is to be called with `cases`, and who waits for its values."""

    program: str
    cases: list[list[int]]
    future: asyncio.Future[CaseRun]


class _Batcher:
    """Runs what is asked for at about the same time in one sandbox, and equal programs once."""

    def __init__(self, sandbox_url: str) -> None:
        self._settings = replace(_PAIR_SETTINGS, sandbox_url=sandbox_url)
        self._waiting: dict[str, _Waiting] = {}
        self._task: asyncio.Task[None] | None = None

    async def values(self, program: str, cases: Sequence[Sequence[int]]) -> list[int | None]:
        """Return the value of the program's function for each case, None where it has none."""
        given = [list(case) for case in cases]
        key = f"{program}{given}"
        if key not in self._waiting:
            future = asyncio.get_running_loop().create_future()
            self._waiting[key] = _Waiting(program, given, future)
        future = self._waiting[key].future
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        run = await asyncio.shield(future)  # others may wait for the same
        return unpack(json.loads(run.result)) if run.result else [None] * len(cases)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_GATHER_S)
            batch = list(self._waiting.values())
            self._waiting = {}
            if not batch:
                return
            programs = [one.program for one in batch]
            calls = enumerate(pack([one.cases]) for one in batch)
            tests = [call_case(PAIRS_FUNCTION, arguments, i) for i, arguments in calls]
            try:
                runs = await _run_in_thread(run_cases, programs, tests, self._settings)
            except Exception as error:  # handed on to everyone who waits
                for one in batch:
                    one.future.set_exception(error)
                continue
            for run, one in zip(runs, batch, strict=True):
                one.future.set_result(run)


_PAIR_SETTINGS = CaseSettings(wall_s=10.0, total_s=100.0, output_kib=8)
_batchers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Batcher]] = WeakKeyDictionary()
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _batcher(sandbox_url: str) -> _Batcher:
    batchers = _batchers.setdefault(asyncio.get_running_loop(), {})
    return batchers.setdefault(sandbox_url, _Batcher(sandbox_url))


async def _run_in_thread(function: Any, *arguments: Any) -> Any:
    """Call a function in a thread; as many at once as there are cores."""
    loop = asyncio.get_running_loop()
    cores = asyncio.Semaphore(len(os.sched_getaffinity(0)))
    async with _semaphores.setdefault(loop, cores):
        return await asyncio.to_thread(function, *arguments)


def _describe_failure(run: CaseRun, test: Mapping[str, Any], expected: Any) -> str:
    """Return what the policy is told of a public test that failed."""
    is_call = "function" in test
    given = f"{test['function']}{tuple(unpack(test['arguments']))!r}" if is_call else test["stdin"]
    why = run.killed or (f"{run.error}\nexit status {run.status}" if run.status else "")
    got = _show_value(run.result) if is_call else run.out
    lines = ["A test failed.", f"Input: {given:.{_SHOWN_LEN}}"]
    lines.append(f"Expected: {expected!s:.{_SHOWN_LEN}}")
    lines.append(f"Error: {why[-_SHOWN_LEN:]}" if why else f"Got: {got:.{_SHOWN_LEN}}")
    return "\n".join([*lines, "Write the whole program again."])


def _show_value(result: str) -> str:
    try:
        return repr(unpack(json.loads(result)))
    except (ValueError, TypeError, RecursionError):
        return "no value"
