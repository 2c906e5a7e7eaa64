"""Scores samples: combines numbers from the user's function and served models, and penalties.

A failure or a missed deadline costs its sample, which has no outcome, or reward.error_value if
reward.on_error=value.

Rehearsals add a pseudo-random number to each sample's reward. A random model earns the same reward
for each of its responses, so advantages and gradients would be zero, and a rehearsed step would
move no weights.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Self

from mcore_rl.config import RewardConfig
from mcore_rl.process.errors import describe_error, shorten
from mcore_rl.rewards.function_calls import FunctionCalls
from mcore_rl.rewards.model_scorers import ModelScorer, Post, ask
from mcore_rl.rewards.user_function import Answer, Fields, load_function
from mcore_rl.types import Sample, has_outcome
from mcore_rl.types.scores import ENVIRONMENT, Scores

_log = logging.getLogger(__name__)
LOGGED_ERRORS = 3
"""Errors logged per call; the others are only counted."""
LOGGED_CHARS = 300
"""Most characters of an error, an answer or a response in the log."""


def noise_of(sample: Sample, part: str) -> float:
    """Return a number in [0, 1) that depends only on prompt, response tokens and `part`."""
    tokens = (sample.prompt.token_ids, sample.response_ids)
    digest = hashlib.blake2b(f"{part} {tokens}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


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
        """Return one reward per sample, in order.

        Episodes whose environment failed are not scored: nobody is asked about them.
        """
        told = [i for i, sample in enumerate(samples) if not _why_untold(sample)]
        scored = [(math.nan, _why_untold(sample)) for sample in samples]
        numbers: list[dict[str, float]] = [{} for _ in samples]
        for i, given, error in zip(told, *self._numbers([samples[i] for i in told]), strict=True):
            scored[i] = self._score(given, error)
            # A failed sample counts as 0 in each part: a NaN would reach advantages made of parts.
            numbers[i] = _only_finite(given) if scored[i][1] else given
        errors = [error for _, error in scored]
        unpenalized_N = self._add_noise(samples, numbers, [reward for reward, _ in scored])
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
        return Scores(
            [reward + penalty for reward, penalty in zip(unpenalized_N, penalties, strict=True)],
            parts,
            errors,
            unpenalized_N=unpenalized_N,
            is_lost_N=[bool(_why_untold(sample)) for sample in samples],
        )

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
        if not samples:
            return [], []
        answers: list[Answer] = [{} for _ in samples]
        if self._calls is not None:
            answers = self._calls([_fields(sample) for sample in samples])
        numbers = [{} if isinstance(answer, str) else dict(answer) for answer in answers]
        errors = [answer if isinstance(answer, str) else "" for answer in answers]
        for role, values in (self._ask_models(samples) | self._read_environments(samples)).items():
            for i, value in enumerate(values):
                if role in numbers[i]:
                    error = f"the function gives a number {role!r}, as the {role} does"
                    errors[i] = errors[i] or error
                elif isinstance(value, Exception):
                    errors[i] = errors[i] or describe_error(value)
                else:
                    numbers[i][role] = value
        return numbers, errors

    def _read_environments(self, samples: Sequence[Sample]) -> dict[str, list[float | Exception]]:
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
        """Return (the reward before penalties, why it failed or "").

        A reward that failed is NaN, or reward.error_value if reward.on_error=value.
        """
        value = self._config.error_value if self._config.on_error == "value" else None
        failed = math.nan if value is None else value
        if error:
            return failed, error
        if missing := sorted(set(self._weights) - set(numbers)):
            return failed, f"no number {missing[0]!r} among {sorted(numbers)}"
        reward = sum(weight * numbers[name] for name, weight in self._weights.items())
        if not math.isfinite(reward):
            return failed, f"it is {reward}"
        return reward, ""

    def _add_noise(
        self,
        samples: Sequence[Sample],
        numbers: Sequence[dict[str, float]],
        rewards: Sequence[float],
    ) -> list[float]:
        """Add reward.noise to the parts in `numbers`, in place; return the rewards with it."""
        width = self._config.noise
        if not width:
            return list(rewards)
        with_noise: list[float] = []
        for sample, parts, reward in zip(samples, numbers, rewards, strict=True):
            for name, weight in self._weights.items():
                noise = width * noise_of(sample, name)
                parts[name] = parts.get(name, 0.0) + noise
                reward += weight * noise
            with_noise.append(reward)
        return with_noise


def log_failures(
    samples: Sequence[Sample], errors: Sequence[str], config: RewardConfig, held: str = ""
) -> None:
    """Log why the first of some samples have no reward of their own.

    `errors` has an entry per sample, empty if it has one; `samples` has those that have none, at
    least the first LOGGED_ERRORS of them. `held` tells of failures that were not logged before.
    """
    failures = [error for error in errors if error]
    fate = {
        "leave_out": "is left out",
        "value": f"counts as {config.error_value}",
        "stop": "ends the run",
    }[config.on_error]
    for sample, error in zip(samples, failures[:LOGGED_ERRORS], strict=False):
        prompt = sample.prompt
        _log.warning(
            "reward of prompt %d (%s) failed and %s: %s; ground truth %r, response %r",
            prompt.index,
            prompt.data_source,
            fate,
            shorten(error, LOGGED_CHARS),
            shorten(str(prompt.ground_truth), LOGGED_CHARS),
            shorten(sample.text, LOGGED_CHARS),
        )
    if held or len(failures) > LOGGED_ERRORS:
        _log.warning("%d rewards of %d failed%s", len(failures), len(errors), held)


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


def _why_untold(sample: Sample) -> str:
    """Return why an episode tells nothing of the policy; "" if the sample tells something."""
    if sample.episode is None or has_outcome(sample.episode):
        return ""
    return f"{sample.episode.end}: {sample.episode.detail or 'no reason is known'}"


def _reward_of_episode(sample: Sample) -> float | Exception:
    assert sample.episode is not None, "an environment rewards episodes"
    return sample.episode.reward


def _fields(sample: Sample) -> Fields:
    """Return the arguments of a function; an episode's numbers are in extra_info as well."""
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
