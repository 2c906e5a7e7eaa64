"""Scores samples: combines numbers from the user's function and served models, and penalties.

A failure or a missed deadline costs its sample: it gets reward.error_value and is counted. It
never ends the run.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Self

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.function_calls import FunctionCalls
from mcore_rl.rewards.model_scorers import ModelScorer, Post, ask
from mcore_rl.rewards.noise import noise_of
from mcore_rl.rewards.user_function import Answer, Fields, describe_error, load_function
from mcore_rl.scores import ENVIRONMENT, Scores
from mcore_rl.types import Sample, has_outcome

_log = logging.getLogger(__name__)
LOGGED_ERRORS = 3
"""Errors logged per call; the others are only counted."""


class Scorer:
    """Scores samples as a recipe says. Use it as a context manager, which ends its processes."""

    def __init__(
        self,
        config: RewardConfig,
        max_response_len: int,
        model_scorers: Mapping[str, ModelScorer] | None = None,
        has_environment: bool = False,
    ) -> None:
        """`model_scorers`: the scorer of each served model, by role; `connect` gives the servers.

        has_environment   samples are episodes, whose environment rewards them

        Raises ValueError if there is no such function, if it cannot be called as the recipe wants,
        or if the recipe does not say which number is the reward.
        """
        self._config = config
        self._max_response_len = max_response_len
        self._model_scorers = dict(model_scorers or {})
        self._posts: Mapping[str, Post] = {}
        self._watched: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run
        self._has_environment = has_environment
        roles = [*self._model_scorers, *([ENVIRONMENT] if has_environment else [])]
        self._weights = config.part_weights or _sole_part(config, roles)
        self._calls: FunctionCalls | None = None
        if config.path:
            function = load_function(config.path, config.name, config.kwargs)
            self._calls = FunctionCalls(config, function)

    def connect(
        self, posts: Mapping[str, Post], watched: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        """Give the scorer its served models.

        `posts` maps each role to a function that posts requests to its servers. `watched` runs a
        coroutine and fails as soon as a server is lost.
        """
        self._posts = posts
        self._watched = watched

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return one reward per sample, in order."""
        numbers, errors = self._numbers(samples)
        scored = [self._score(*pair) for pair in zip(numbers, errors, strict=True)]
        errors = [error for _, error in scored]
        # A failed sample counts as 0 in each part: a NaN would reach advantages made of parts.
        numbers = [
            _only_finite(sample_numbers) if error else sample_numbers
            for sample_numbers, error in zip(numbers, errors, strict=True)
        ]
        unpenalized_N = [reward for reward, _ in scored]
        scored = self._add_noise(samples, numbers, scored)
        names = dict.fromkeys([*self._config.parts, *chain(*numbers)])
        parts = {
            name: [sample_numbers.get(name, 0.0) for sample_numbers in numbers]
            for name in names
            if name != "score" or len(names) > 1
        }
        penalties = [
            overlong_penalty(len(s.response_ids), self._max_response_len, self._config)
            for s in samples
        ]
        if self._config.overlong_buffer_len:
            parts["overlong_penalty"] = penalties
        rewards_N = [
            reward + penalty for (reward, _), penalty in zip(scored, penalties, strict=True)
        ]
        return Scores(rewards_N, parts, errors, unpenalized_N=unpenalized_N)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._calls is not None:
            self._calls.close()

    def _numbers(self, samples: Sequence[Sample]) -> tuple[list[dict[str, float]], list[str]]:
        """Return, per sample, the numbers of function and served models and the first error."""
        answers: list[Answer] = [{} for _ in samples]
        if self._calls is not None:
            answers = self._calls([_fields(sample) for sample in samples])
        numbers = [{} if isinstance(answer, str) else dict(answer) for answer in answers]
        errors = [answer if isinstance(answer, str) else "" for answer in answers]
        for role, values in (self._ask_models(samples) | self._of_environments(samples)).items():
            for i, value in enumerate(values):
                if role in numbers[i]:
                    error = f"the function gives a number {role!r}, as the {role} does"
                    errors[i] = errors[i] or error
                elif isinstance(value, Exception):
                    errors[i] = errors[i] or describe_error(value)
                else:
                    numbers[i][role] = value
        return numbers, errors

    def _of_environments(self, samples: Sequence[Sample]) -> dict[str, list[float | Exception]]:
        if not self._has_environment:
            return {}
        return {ENVIRONMENT: [_reward_of_episode(sample) for sample in samples]}

    def _ask_models(self, samples: Sequence[Sample]) -> dict[str, list[float | Exception]]:
        async def ask_all() -> list[list[float | Exception]]:
            answers = (
                ask(question, self._posts[role], samples)
                for role, question in self._model_scorers.items()
            )
            return await asyncio.gather(*answers)

        if not self._model_scorers:
            return {}
        return dict(zip(self._model_scorers, self._watched(ask_all()), strict=True))

    def _score(self, numbers: Mapping[str, float], error: str) -> tuple[float, str]:
        """Return (the reward before penalties, why it is reward.error_value or "")."""
        if error:
            return self._config.error_value, error
        if missing := sorted(set(self._weights) - set(numbers)):
            return self._config.error_value, f"no number {missing[0]!r} among {sorted(numbers)}"
        reward = sum(weight * numbers[name] for name, weight in self._weights.items())
        if not math.isfinite(reward):
            return self._config.error_value, f"it is {reward}"
        return reward, ""

    def _add_noise(
        self,
        samples: Sequence[Sample],
        numbers: Sequence[dict[str, float]],
        scored: list[tuple[float, str]],
    ) -> list[tuple[float, str]]:
        """Add reward.noise to the parts in `numbers`, in place; return `scored` with it."""
        width = self._config.noise
        if not width:
            return scored
        with_noise = []
        for sample, parts, (reward, error) in zip(samples, numbers, scored, strict=True):
            for name, weight in self._weights.items():
                noise = width * noise_of(sample, name)
                parts[name] = parts.get(name, 0.0) + noise
                reward += weight * noise
            with_noise.append((reward, error))
        return with_noise


def log_failures(samples: Sequence[Sample], errors: Sequence[str], config: RewardConfig) -> None:
    """Log why the first of some samples have no reward of their own.

    `errors` has an entry per sample, empty if it has one; `samples` has those that have none, at
    least the first LOGGED_ERRORS of them.
    """
    failures = [error for error in errors if error]
    for sample, error in zip(samples, failures[:LOGGED_ERRORS], strict=False):
        prompt = sample.prompt
        _log.warning(
            "reward of prompt %d (%s) failed and counts as %g: %s; ground truth %r, response %r",
            prompt.index,
            prompt.data_source,
            config.error_value,
            error,
            prompt.ground_truth,
            sample.text[:200],
        )
    if len(failures) > LOGGED_ERRORS:
        _log.warning("%d rewards of %d failed", len(failures), len(errors))


def overlong_penalty(response_len: int, max_response_len: int, config: RewardConfig) -> float:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), at most 0.

    It is 0 up to max_response_len - overlong_buffer_len tokens, then falls linearly to
    -overlong_penalty.
    """
    if not config.overlong_buffer_len:
        return 0.0
    beyond = response_len - (max_response_len - config.overlong_buffer_len)
    return -config.overlong_penalty * min(max(beyond / config.overlong_buffer_len, 0.0), 1.0)


def _only_finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _reward_of_episode(sample: Sample) -> float | Exception:
    episode = sample.episode
    assert episode is not None, "an environment rewards episodes"
    return episode.reward if has_outcome(episode) else RuntimeError(episode.detail or episode.end)


def _fields(sample: Sample) -> Fields:
    """Return the arguments of a function; of an episode, extra_info has its numbers as well."""
    prompt = sample.prompt
    extra_info = prompt.extra_info
    if sample.episode is not None:
        extra_info = {**extra_info, "episode": dict(sample.episode.metrics)}
    return prompt.data_source, sample.text, prompt.ground_truth, extra_info


def _sole_part(config: RewardConfig, roles: Sequence[str]) -> dict[str, float]:
    """Return the one number that is the reward if reward.parts is empty, with weight 1.

    Raises ValueError if there is none or several could be meant.
    """
    sources = list(roles)
    if config.path:
        sources = [f"reward.path={config.path}", *roles]
    if not sources:
        raise ValueError(
            "reward.path is not set: give a function as reward.path=<file>, or a model as"
            " judge.path=<folder> or reward_model.path=<folder>"
        )
    if len(sources) > 1:
        names = ["score", *roles] if config.path else list(roles)
        weights = ["1.0"] * len(names)
        raise ValueError(
            f"{' and '.join(sources)} each give rewards: say what each is worth, as in"
            f" reward.parts=[{','.join(names)}] reward.weights=[{','.join(weights)}]"
        )
    return {"score" if config.path else roles[0]: 1.0}
