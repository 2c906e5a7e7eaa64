"""Rewards programs and unit tests that one policy writes for the same problem (CURE).

All programs of a problem run on all of its tests; the rewards follow from what passes:

                 generated tests T    ground-truth tests
    programs P [ passes_PT          | passes_PG         ]
                   |                     |
                   +-> rewards of tests  +-> rewards of programs, which programs are right

Source: CURE, arXiv:2506.03136. Axes: P programs, T generated tests, G tests of the ground truth.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_rl.rewards.code.driver import pack, unpack
from mcore_rl.rewards.code.execution import CaseSettings, call_case, run_cases, script_case
from mcore_rl.rewards.code.languages import PAIRS_FUNCTION, PairLanguage, blocks_of, program_of
from mcore_rl.rewards.code.score import run_in_parallel
from mcore_rl.rewards.code.tests import read_tests
from mcore_rl.services.sandbox.limits import SandboxError

Matrix = Sequence[Sequence[bool]]
"""[P][tests], whether a program passes a test."""
ROLE = "is_test"
"""The number that says whether a sample is a unit test: for algorithm.role_part."""
_LIMITS = CaseSettings(wall_s=10.0, total_s=200.0, output_kib=16)
Matrices = tuple[list[list[bool]], list[list[bool]]]
"""(passes_PG, passes_PT) of cure.py; a test that is none is passed by no program."""
RateTests = Callable[[Any, Any], list[float]]


def rate_programs(passes_PG: Matrix) -> list[float]:
    """Return the share of ground-truth tests that each program passes.

    The paper has their number; GRPO's advantages are the same. Raises ValueError if there is none.
    """
    for passes_G in passes_PG:
        if not passes_G:
            raise ValueError("a program without ground-truth tests cannot be rewarded")
    return [sum(passes_G) / len(passes_G) for passes_G in passes_PG]


def rate_tests(passes_PG: Matrix, passes_PT: Matrix) -> list[float]:
    """Return the reward of each generated test, as the paper has it.

    Program l is right, I_l = 1, if it passes all tests of the ground truth. With B the matrix,

        R_k = -sum_l (1 - I_l) B_lk + prod_l (B_lk or 1 - I_l) * sum_l (1 - I_l)

    A test that all right programs pass gets the number of wrong programs that it finds; any other
    gets minus the number of wrong programs that pass it. Without a right program nothing is known,
    and each test gets 0, as in the authors' code.
    """
    right, wrong = _split(passes_PG)
    if not right:
        return [0.0] * _num_tests(passes_PT)
    rewards = []
    for k in range(_num_tests(passes_PT)):
        num_passing_wrong = sum(passes_PT[j][k] for j in wrong)
        is_accepted = all(passes_PT[j][k] for j in right)
        rewards.append(float(is_accepted * len(wrong) - num_passing_wrong))
    return rewards


def rate_tests_scaled(passes_PG: Matrix, passes_PT: Matrix) -> list[float]:
    """Return the same in [-1, 1]: divided by the number of wrong programs.

    If every program is right, a test gets 1 if all pass it, else -1, as in the authors' code; the
    formula would say 0.
    """
    right, wrong = _split(passes_PG)
    if wrong:
        return [reward / len(wrong) for reward in rate_tests(passes_PG, passes_PT)]
    if not right:
        return [0.0] * _num_tests(passes_PT)
    columns = range(_num_tests(passes_PT))
    return [1.0 if all(passes_PT[j][k] for j in right) else -1.0 for k in columns]


def _split(passes_PG: Matrix) -> tuple[list[int], list[int]]:
    """Return the numbers of the programs that are right, and of those that are wrong."""
    right = [j for j, passes_G in enumerate(passes_PG) if all(passes_G)]
    return right, [j for j in range(len(passes_PG)) if j not in right]


def _num_tests(passes_PT: Matrix) -> int:
    return len(passes_PT[0]) if passes_PT else 0


@dataclass
class Problem:
    """The samples of one problem: their numbers in the call, and what they wrote."""

    ground_truth: Any
    programs: list[tuple[int, str]] = field(default_factory=list)
    tests: list[tuple[int, str]] = field(default_factory=list)


Execution = Callable[[Problem, str], Matrices]
"""(problem, address of a sandbox's server or "") -> matrices"""


def score_samples(
    responses: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    execution: Execution,
    rate_tests: RateTests = rate_tests_scaled,
    sandbox_url: str = "",
) -> list[dict[str, float] | Exception]:
    """Return the numbers of each sample: `program` or `test`, and `is_test`.

    `extra_info["episode"]["is_test"]` says what a sample is; the environment `cure` sets it before
    the answer. One that was cut off is rated as it stands: half a program passes no test, and no
    program passes half a test. A problem without tests, or whose sandbox does not start, costs its
    samples.
    """
    problems = _problems_of(responses, ground_truths, extra_infos)
    answers: list[dict[str, float] | Exception] = [
        ValueError(
            "the sample does not say whether it is a unit test: set agents.environment=cure, or"
            f" give {ROLE!r} among the metrics of an environment of your own"
        )
        for _ in responses
    ]

    def execute(problem: Problem) -> Matrices | Exception:
        try:
            return execution(problem, sandbox_url)
        except (ValueError, SandboxError) as error:
            return error

    for problem, matrices in zip(
        problems, run_in_parallel(execute, problems, sandbox_url), strict=True
    ):
        numbers = [number for number, _ in [*problem.programs, *problem.tests]]
        if isinstance(matrices, Exception):
            values: list[Any] = [matrices] * len(numbers)
        else:
            values = _numbers_of(*matrices, len(problem.tests), rate_tests)
        for number, value in zip(numbers, values, strict=True):
            answers[number] = value
    return answers


def execute_programs(problem: Problem, sandbox_url: str = "") -> Matrices:
    """Run programs, each in a sandbox of its own, on texts of input and output.

    A test is written as two fenced blocks: the input and what must be printed.
    """
    truth = read_tests(problem.ground_truth)
    if truth.assertions or any("function" in test for test, _ in truth.cases):
        raise ValueError("unit tests are written for programs that read standard input")
    written = [[text for _, text in blocks_of(answer)[-2:]] for _, answer in problem.tests]
    cases = [(script_case(pair[0]), pair[1]) for pair in written if len(pair) == 2]
    both = replace(truth, cases=[*truth.cases, *cases])
    settings = CaseSettings(sandbox_url=sandbox_url)
    matrices: Matrices = ([], [])
    for _, response in problem.programs:
        program = program_of(response, both.languages)
        results = [False] * len(both) if program is None else both.results(program, settings)
        generated = iter(results[len(truth) :])
        matrices[0].append(results[: len(truth)])
        matrices[1].append([len(pair) == 2 and next(generated) for pair in written])
    return matrices


def execute_pairs(language: PairLanguage, problem: Problem, sandbox_url: str = "") -> Matrices:
    """Run programs of a PairLanguage, which share a sandbox."""
    truth = json.loads(problem.ground_truth)
    tests = [language.read_test(text) for _, text in problem.tests]
    cases = [*truth["inputs"], *(list(test[0]) if test else [0, 1] for test in tests)]
    wanted = [*truth["outputs"], *(test[1] if test else None for test in tests)]
    texts = [text.strip() for _, text in problem.programs]
    sources = {text: language.to_python(text) for text in texts}
    programs = {text: source for text, source in sources.items() if source is not None}
    runs = [call_case(PAIRS_FUNCTION, pack([cases]), number) for number in range(len(programs))]
    values: dict[str, list[Any]] = {}
    settings = replace(_LIMITS, sandbox_url=sandbox_url)
    ends = run_cases(list(programs.values()), runs, settings)
    for text, run in zip(programs, ends, strict=True):
        if run.is_clean:
            values[text] = unpack(json.loads(run.result))
    passes = [
        [value is not None and value == want for value, want in zip(got, wanted, strict=True)]
        for got in (values.get(text, [None] * len(cases)) for text in texts)
    ]
    num_truth = len(truth["inputs"])
    return [row[:num_truth] for row in passes], [row[num_truth:] for row in passes]


def _problems_of(
    responses: Sequence[str], ground_truths: Sequence[Any], extra_infos: Sequence[Mapping[str, Any]]
) -> list[Problem]:
    problems: dict[str, Problem] = {}
    rows = zip(responses, ground_truths, extra_infos, strict=True)
    for number, (response, truth, extra_info) in enumerate(rows):
        is_test = extra_info.get("episode", {}).get(ROLE)
        if is_test is None:
            continue
        problem = problems.setdefault(json.dumps(truth, sort_keys=True), Problem(truth))
        (problem.tests if is_test else problem.programs).append((number, response))
    return list(problems.values())


def _numbers_of(
    passes_PG: list[list[bool]],
    passes_PT: list[list[bool]],
    num_tests: int,
    rate_tests: RateTests,
) -> list[dict[str, float]]:
    of_tests = rate_tests(passes_PG, passes_PT) if passes_PG else [0.0] * num_tests
    programs = [{"program": r, "test": 0.0, ROLE: 0.0} for r in rate_programs(passes_PG)]
    return [*programs, *({"program": 0.0, "test": r, ROLE: 1.0} for r in of_tests)]
