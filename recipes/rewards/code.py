"""Rewards of Python programs: the share of tests passed, each run in a sandbox.

The program is the last fenced block of the response. The ground truth is a mapping, or its JSON
text, in one of three forms:

{"inputs": [text, ...], "outputs": [text, ...]}
    each input is given on standard input; the program must print the output
{"fn_name": "f", "inputs": [[arguments], ...], "outputs": [...]}
    the function f is called with the arguments and must return the output
{"asserts": ["assert f(1) == 2", ...]}
    each statement must not raise

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
"""Limits of the run of each test."""
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
    """Yield (program, standard input, expected output, mark) of each test.

    The output is compared on the line after the mark; without a mark ("") all of it is compared.
    Raises ValueError if there is no test.
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
    found = [
        line.removeprefix(mark) for line in outcome.stdout.splitlines() if line.startswith(mark)
    ]
    try:
        return len(found) == 1 and json.loads(found[0]) == expected
    except json.JSONDecodeError:
        return False


def _plain(text: str) -> list[str]:
    """Return the lines without trailing blanks, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
