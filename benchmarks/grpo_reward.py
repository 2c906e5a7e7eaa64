"""The reward of benchmarks/grpo_step.py, in a module that all systems load: it imports nothing."""

from typing import Any


def reward(*, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return a cheap score that differs between samples, so that no group's advantages vanish."""
    return len(set(solution_str)) / max(len(solution_str), 1)
