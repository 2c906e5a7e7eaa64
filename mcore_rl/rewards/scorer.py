"""Samples in, their Scores out: the user's function, called in this process or in others, and what is added.

Served models are asked for further numbers. What function or model fails to answer, or not in time, costs its
sample the configured value and is counted. It never ends the run.
"""

import asyncio
import logging
import math
import multiprocessing
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext
from itertools import chain
from types import TracebackType
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.model_scorers import ModelScorer, Post, ask
from mcore_rl.rewards.user_function import (
    Fields,
    UserFunction,
    load_function,
    numbers_of,
    run_in_worker,
)
from mcore_rl.types import Sample, Scores

_log = logging.getLogger(__name__)
LOGGED_ERRORS = 3
"""Per call; the others are counted."""
Answer = dict[str, float] | Exception


class Scorer:
    """Scores samples by a recipe. `with Scorer(...) as scorer:` ends its processes."""

    def __init__(
        self,
        config: RewardConfig,
        max_response_len: int,
        questions: Mapping[str, ModelScorer] | None = None,
    ) -> None:
        """`questions`: by role, what served models are asked; `connect` says where they are.

        ValueError if there is no such function, it cannot be called as the recipe wants, or nothing says what
        the reward is.
        """
        self._config, self._max_response_len = config, max_response_len
        self._questions = dict(questions or {})
        self._posts: Mapping[str, Post] = {}
        self._watched: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run
        self._weights = config.part_weights or _sole_part(config, list(self._questions))
        self._function = load_function(config.path, config.name) if config.path else None
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()
        """Several threads may score samples; a function that is not async is called by one at a time."""
        if config.workers and self._function is not None and self._function.takes_all:
            raise ValueError(
                f"reward.workers={config.workers}: {config.path}:{config.name} takes all samples at once;"
                " use reward.workers=0"
            )

    def connect(
        self, posts: Mapping[str, Post], watched: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        """`posts`: by role, how to reach the served models. `watched` runs a coroutine, them watched."""
        self._posts, self._watched = posts, watched

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """One reward per sample, in order."""
        numbers, errors = self._numbers(samples)
        scored = [self._score(*of_sample) for of_sample in zip(numbers, errors, strict=True)]
        errors = [error for _, error in scored]
        self._tell(samples, errors)
        names = dict.fromkeys([*self._config.parts, *chain(*numbers)])
        parts = {
            name: [of_sample.get(name, 0.0) for of_sample in numbers]
            for name in names
            if name != "score" or len(names) > 1
        }
        penalties = [
            overlong_penalty(len(s.response_ids), self._max_response_len, self._config)
            for s in samples
        ]
        if self._config.overlong_buffer_len:
            parts["overlong_penalty"] = penalties
        unpenalized_N = [reward for reward, _ in scored]
        rewards_N = [
            reward + penalty for reward, penalty in zip(unpenalized_N, penalties, strict=True)
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
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _numbers(self, samples: Sequence[Sample]) -> tuple[list[dict[str, float]], list[str]]:
        """Per sample, the numbers that function and served models gave, and what went wrong."""
        answers: list[Answer] = [{} for _ in samples]
        if self._function is not None:
            answers = self._answers(self._function, [_fields(sample) for sample in samples])
        numbers = [{} if isinstance(answer, Exception) else dict(answer) for answer in answers]
        errors = [_told(answer) if isinstance(answer, Exception) else "" for answer in answers]
        for role, values in self._asked(samples).items():
            for i, value in enumerate(values):
                if role in numbers[i]:
                    errors[i] = (
                        errors[i] or f"the function gives a number {role!r}, as the {role} does"
                    )
                elif isinstance(value, Exception):
                    errors[i] = errors[i] or _told(value)
                else:
                    numbers[i][role] = value
        return numbers, errors

    def _asked(self, samples: Sequence[Sample]) -> dict[str, list[float | Exception]]:
        async def ask_all() -> list[list[float | Exception]]:
            asked = (ask(q, self._posts[role], samples) for role, q in self._questions.items())
            return await asyncio.gather(*asked)

        if not self._questions:
            return {}
        return dict(zip(self._questions, self._watched(ask_all()), strict=True))

    def _score(self, numbers: Mapping[str, float], error: str) -> tuple[float, str]:
        """(the reward before penalties, what went wrong)."""
        if error:
            return self._config.error_value, error
        if missing := sorted(set(self._weights) - set(numbers)):
            return self._config.error_value, f"no number {missing[0]!r} among {sorted(numbers)}"
        reward = sum(weight * numbers[name] for name, weight in self._weights.items())
        return (
            (reward, "") if math.isfinite(reward) else (self._config.error_value, f"it is {reward}")
        )

    def _answers(self, function: UserFunction, rows: Sequence[Fields]) -> list[Answer]:
        if self._config.workers:
            return self._in_processes(rows)
        if function.is_async and not function.takes_all:
            return asyncio.run(self._all_at_once(function, rows))
        with nullcontext() if function.is_async else self._lock:
            return _in_this_thread(function, rows)

    async def _all_at_once(self, function: UserFunction, rows: Sequence[Fields]) -> list[Answer]:
        async def one(row: Fields) -> Answer:
            try:
                return numbers_of(
                    await asyncio.wait_for(function.call_async(row), self._config.timeout_s)
                )
            except TimeoutError:
                return self._too_late()
            except Exception as error:  # the user's code may raise anything
                return error

        return await asyncio.gather(*map(one, rows))

    def _in_processes(self, rows: Sequence[Fields]) -> list[Answer]:
        """A process that takes too long is killed and started anew."""
        config = self._config
        with self._lock:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(max_workers=config.workers, context=context)
            pool = self._pool
        futures = [
            pool.schedule(
                run_in_worker, args=(config.path, config.name, row), timeout=config.timeout_s
            )
            for row in rows
        ]
        answers: list[Answer] = []
        for future in futures:
            try:
                answers.append(future.result())
            except FutureTimeout:
                answers.append(self._too_late())
            except ProcessExpired as error:
                answers.append(RuntimeError(f"its process ended with status {error.exitcode}"))
            except Exception as error:  # the user's code may raise anything
                answers.append(error)
        return answers

    def _too_late(self) -> TimeoutError:
        return TimeoutError(f"no answer within reward.timeout_s={self._config.timeout_s:g}")

    def _tell(self, samples: Sequence[Sample], errors: Sequence[str]) -> None:
        failed = [(sample, error) for sample, error in zip(samples, errors, strict=True) if error]
        for sample, error in failed[:LOGGED_ERRORS]:
            prompt = sample.prompt
            _log.warning(
                "reward of prompt %d (%s) failed and counts as %g: %s; ground truth %r, response %r",
                *(prompt.index, prompt.data_source, self._config.error_value, error),
                *(prompt.ground_truth, sample.text[:200]),
            )
        if len(failed) > LOGGED_ERRORS:
            _log.warning("%d rewards of %d failed", len(failed), len(samples))


def overlong_penalty(response_len: int, max_response_len: int, config: RewardConfig) -> float:
    """0 up to max_response_len - overlong_buffer_len tokens, then falling evenly to -overlong_penalty.

    DAPO's soft overlong punishment, arXiv:2503.14476, eq. 13.
    """
    if not config.overlong_buffer_len:
        return 0.0
    beyond = response_len - (max_response_len - config.overlong_buffer_len)
    return -config.overlong_penalty * min(max(beyond / config.overlong_buffer_len, 0.0), 1.0)


def _fields(sample: Sample) -> Fields:
    prompt = sample.prompt
    return prompt.data_source, sample.text, prompt.ground_truth, prompt.extra_info


def _sole_part(config: RewardConfig, roles: Sequence[str]) -> dict[str, float]:
    """The one number that is the reward where reward.parts names none; ValueError if several could be."""
    found = [*([f"reward.path={config.path}"] if config.path else []), *roles]
    if not found:
        raise ValueError(
            "reward.path is not set: give a function as reward.path=<file>, or a model as judge.path=<folder>"
            " or reward_model.path=<folder>"
        )
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(found)} each give rewards: say what each is worth, as in"
            f" reward.parts=[{','.join(['score', *roles][-len(found) :])}]"
            f" reward.weights=[{','.join(['1.0'] * len(found))}]"
        )
    return {"score" if config.path else roles[0]: 1.0}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _in_this_thread(function: UserFunction, rows: Sequence[Fields]) -> list[Answer]:
    if not function.takes_all:
        return [_guarded(lambda row=row: numbers_of(function.call(row))) for row in rows]
    try:
        return [_guarded(numbers_of, answer) for answer in function.call_all(rows)]
    except Exception as error:  # the user's code may raise anything
        return [error] * len(rows)


def _guarded(call: Any, *args: object) -> Answer:
    try:
        return call(*args)
    except Exception as error:  # the user's code may raise anything
        return error
