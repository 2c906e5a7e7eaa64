"""Rewards of Python programs: the share of tests that the response's program passes in a sandbox.

The program is the response's last fenced block. The ground truth is a mapping, or its JSON text, in
one of three forms:

{"inputs": [text, ...], "outputs": [text, ...]}
    texts on standard input, and what the program must print for each
{"fn_name": "f", "inputs": [[arguments], ...], "outputs": [...]}
    calls of a function, and what each must return
{"asserts": ["assert f(1) == 2", ...]}
    statements that must not raise

score    share of tests passed
passed   the same number, for reward.parts
solved   1 if all tests pass
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rl.sandbox.run import Limits, run_program

LIMITS = Limits(wall_s=6.0, cpu_s=5, memory_mib=1024, processes=8)
"""Limits of each test."""
BLOCK = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def reward(
    *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    blocks = BLOCK.findall(solution_str)
    results = [_passes(*test) for test in _tests(blocks[-1], truth)] if blocks else [False]
    share = sum(results) / len(results)
    return {"score": share, "passed": share, "solved": float(share == 1)}


def _tests(program: str, truth: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, str]]:
    """Yield (program, standard input, expected, mark) for each test.

    The line of output that starts with the mark is compared; without a mark, all output is. The
    mark is random, so that a program cannot print it. Raises ValueError if there is no test.
    """
    if not (truth.get("asserts") or truth.get("inputs")):
        raise ValueError(f"no tests in the ground truth, whose keys are {sorted(truth)}")
    for statement in truth.get("asserts", ()):
        mark = secrets.token_hex(16)
        yield f"{program}\n{statement}\nprint('\\n{mark}true')\n", "", True, mark
    for given, expected in zip(truth.get("inputs", ()), truth.get("outputs", ()), strict=True):
        if "fn_name" not in truth:
            yield program, given, expected, ""
            continue
        mark = secrets.token_hex(16)
        arguments = ", ".join(map(repr, given))
        call = f"print('\\n{mark}' + __import__('json').dumps({truth['fn_name']}({arguments})))"
        yield f"{program}\n{call}\n", "", expected, mark


def _passes(program: str, stdin: str, expected: Any, mark: str) -> bool:
    outcome = run_program(program, stdin, LIMITS)
    if outcome.killed or outcome.status:
        return False
    if not mark:
        return _plain(outcome.stdout) == _plain(expected)
    lines = outcome.stdout.split("\n")  # splitlines would cut a text at U+2028 as well
    marked = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    try:
        return len(marked) == 1 and json.loads(marked[0]) == expected
    except json.JSONDecodeError:
        return False


def _plain(text: str) -> list[str]:
    """Return the lines without blanks at their ends and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
