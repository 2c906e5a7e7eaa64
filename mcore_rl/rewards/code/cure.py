"""Rewards of programs and of unit tests that one policy writes for the same problem.

                 generated tests T    ground-truth tests
    programs P [ passes_PT          | passes_PG         ]
                   |                     |
                   +-> rewards of tests  +-> rewards of programs, which programs are right

Source: CURE, arXiv:2506.03136. Axes: P programs, T generated tests, G tests of the ground truth.
"""

from collections.abc import Sequence

Matrix = Sequence[Sequence[bool]]
"""[P][tests], whether a program passes a test."""


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
