"""Reward functions given by file and name; samples in, one float per sample out."""

import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mcore_rl.types import Sample

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., float | Mapping[str, Any]]
"""reward(*, data_source, solution_str, ground_truth, extra_info) -> number, or mapping with a "score"."""

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward(path: str, name: str) -> RewardFunction:
    """The function `name` of the Python file `path`.

    ValueError: no such file or function, or one that does not take the four keyword arguments.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"reward.path={path}: no such file (looked from {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(f"mcore_rl_reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        names = sorted(
            n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__
        )
        raise ValueError(
            f"reward.name={name}: {path} has no such function; it has {', '.join(names) or 'none'}"
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise ValueError(
            f"{path}:{name} must take the keyword arguments {', '.join(ARGUMENTS)}: {error}"
        ) from None
    return cast(RewardFunction, function)


def score_samples(function: RewardFunction, samples: Sequence[Sample]) -> list[float]:
    """One reward per sample, in order. What the function raises names the sample it was given."""
    return [_score(function, sample) for sample in samples]


def _score(function: RewardFunction, sample: Sample) -> float:
    prompt = sample.prompt
    try:
        result = function(
            data_source=prompt.data_source,
            solution_str=sample.text,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )
        return float(result["score"] if isinstance(result, Mapping) else result)
    except Exception as error:
        # The user's code: whatever it raises, the message must say on which sample.
        raise RuntimeError(
            f"reward of prompt {prompt.index} ({prompt.data_source}) raised {type(error).__name__}: {error};"
            f" ground truth {prompt.ground_truth!r}, response {sample.text[:200]!r}"
        ) from error
