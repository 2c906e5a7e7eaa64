"""No process waits for another without a deadline, but for those named here with a reason."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.policy import parse, python_files

WAITS = ("accept", "acquire", "communicate", "join", "recv", "wait")
ENDED = "it is over, or there is something to take: a poll or a wait with a deadline said so"
OF_ITS_THREAD = "a thread of its own, which the process does not wait for"
OF_GROUP = "the process group has a deadline"
SERVES = "a server waits for whoever comes; it ends with its socket or its parent"
NO_DEADLINE = {
    ("checkpoint_tools/pool.py", "self._thread.join()"): "the thread sleeps for a tenth second",
    (
        "checkpoint_tools/pool.py",
        "connection.recv()",
    ): "a worker waits for tasks until it is killed",
    (
        "checkpoint_tools/pool.py",
        "wait(list(busy))",
    ): "a file may take hours; Ctrl-C ends the command",
    ("launch/submit.py", "shown.wait()"): "it prints logs for as long as the user likes",
    ("mcore_rl/cluster/answers.py", "ray.get(ref)"): ENDED,
    ("mcore_rl/cluster/group.py", "answers.wait()"): "Answers have a deadline",
    (
        "mcore_rl/cluster/run.py",
        "wait([sampling, lost], return_when=FIRST_COMPLETED)",
    ): "requests have deadlines, and so have the calls that watch ranks",
    ("mcore_rl/process/event_loop.py", "wait([outcome])"): "what runs beside has deadlines",
    ("mcore_rl/data/streamed/workers.py", "self._pool.join()"): "its workers were killed",
    ("mcore_rl/cpu/megatron_patches.py", "all_works.wait()"): OF_GROUP,
    ("mcore_rl/device/probes.py", "group.allreduce([values]).wait()"): OF_GROUP,
    ("mcore_rl/tools/doctor/machine/traffic.py", "server.accept()"): "the socket has a time-out",
    ("mcore_rl/tools/doctor/machine/traffic.py", "work.wait()"): OF_GROUP,
    ("mcore_rl/tools/doctor/megatron_checks.py", "ours.recv()"): ENDED,
    ("mcore_rl/tools/doctor/step_checks.py", "pipe.recv()"): SERVES,
    ("mcore_rl/tools/doctor/step_checks.py", "self._pipe.recv()"): ENDED,
    ("mcore_rl/tools/doctor/warm_start.py", "subprocess.run(command, stdin=subprocess.DEVNULL)"): (
        "a training run that the user watches"
    ),
    ("mcore_rl/cpu/fork_server.py", "self._listener.accept()"): ENDED,
    ("mcore_rl/rewards/function_calls.py", "connection.recv()"): SERVES,
    ("mcore_rl/rewards/function_calls.py", "self._connection.recv()"): ENDED,
    ("mcore_rl/rewards/function_calls.py", "wait([parent.sentinel])"): OF_ITS_THREAD,
    ("mcore_rl/rollout/engine.py", "fork.wait()"): OF_ITS_THREAD,
    ("mcore_rl/rollout/engine.py", "process.wait()"): OF_ITS_THREAD,
    ("mcore_rl/rollout/engine.py", "self._waiting.join()"): ENDED,
    (
        "mcore_rl/weight_sync/full_trace.py",
        "self._turn.acquire()",
    ): "held for parts of a decode step",
    ("mcore_rl/weight_sync/link_end.py", "self._listener.accept()"): ENDED,
    ("mcore_rl/train/export.py", "work.wait()"): OF_GROUP,
}
"""(file, call) -> why the call needs no deadline of its own."""
LONGEST = {
    "mcore_rl/device/gpu_groups.py": "callers have deadlines of their own below it",
}
"""Files with time spans of a day or more -> why."""


def has_deadline(call: ast.Call) -> bool:
    names = {keyword.arg for keyword in call.keywords}
    return bool(names & {"timeout", "timeout_s", "deadline_s"})


def waits_for_ever(call: ast.Call) -> bool:
    """Whether a call that nobody awaits waits for another process or thread, without a deadline."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="ray"), attr="get" | "wait"):
            return not has_deadline(call)
        case ast.Attribute(
            value=ast.Name(id="subprocess"), attr="run" | "call" | "check_call" | "check_output"
        ):
            return not has_deadline(call)
        case ast.Attribute(attr=name) if name in WAITS:
            return not call.args and not has_deadline(call)
        case ast.Name(id="wait"):
            return len(call.args) < 2 and not has_deadline(call)
    return False


def find_waits(tree: ast.AST) -> Iterator[str]:
    """Yield the calls; what is awaited, or handed to what waits with a deadline, is none."""
    nodes = list(ast.walk(tree))
    elsewhere = {id(node.value) for node in nodes if isinstance(node, ast.Await)}
    elsewhere |= {id(part) for node in nodes if isinstance(node, ast.Call) for part in node.args}
    for node in nodes:
        if isinstance(node, ast.Call) and id(node) not in elsewhere and waits_for_ever(node):
            yield ast.unparse(node)


def find_days(tree: ast.AST) -> Iterator[str]:
    """Yield time spans of a day or more."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="timedelta"), keywords=keywords):
                if any(keyword.arg in ("days", "weeks") for keyword in keywords):
                    yield ast.unparse(node)


def test_every_wait_has_a_deadline_or_a_reason() -> None:
    found = {
        (str(path), call)
        for path in python_files("mcore_rl", "checkpoint_tools", "launch")
        for call in find_waits(parse(path))
    }
    # Deadlines are given where Answers are made.
    found = {(path, call) for path, call in found if not call.startswith("Answers(")}
    assert found - NO_DEADLINE.keys() == set(), "they lack a deadline"
    assert NO_DEADLINE.keys() - found == set(), "they are gone: remove them here"


def test_no_deadline_is_a_day_away() -> None:
    found = {
        str(path)
        for path in python_files("mcore_rl", "checkpoint_tools", "launch")
        if list(find_days(parse(path)))
    }
    assert found == LONGEST.keys()


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("process.wait()", True),
        ("process.wait(5)", False),
        ("thread.join(timeout=5)", False),
        ("', '.join(words)", False),
        ("subprocess.run(command)", True),
        ("subprocess.run(command, timeout=5)", False),
        ("ray.get(ref)", True),
        ("wait([pipe])", True),
        ("wait([pipe], 5)", False),
        ("lock.acquire()", True),
    ],
)
def test_waits_are_found(code: str, is_found: bool) -> None:
    assert list(find_waits(ast.parse(code))) == ([code] if is_found else [])


def test_awaited_calls_are_left_to_their_tasks() -> None:
    code = "async def f():\n    await event.wait()\n    await wait_for(event.wait(), 3)\n"
    assert list(find_waits(ast.parse(code))) == []
    assert list(find_days(ast.parse("timedelta(days=1)"))) == ["timedelta(days=1)"]
