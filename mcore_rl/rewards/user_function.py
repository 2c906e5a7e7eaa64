"""A user's reward function: file and name in, a call per sample (or for all at once) out.

Nothing heavy is imported here: processes that run untrusted functions load this module alone.
"""

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any

from mcore_rl.config.shipped import HOME

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
ALL = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
Fields = tuple[Any, ...]
"""What the function gets of one sample, in the order of ONE."""


@dataclass(frozen=True)
class UserFunction:
    """reward(*, data_source, solution_str, ground_truth, extra_info) -> number, or mapping with numbers.

    Or with these names in the plural, each a list, -> a list of those; verl's two forms. Either may be async.
    """

    function: Callable[..., Any]
    takes_all: bool
    is_async: bool

    def call(self, fields: Fields) -> Any:
        """The answer for one sample."""
        if self.takes_all:
            return self.call_all([fields])[0]
        result = self.function(**dict(zip(ONE, fields, strict=True)))
        return asyncio.run(_await(result)) if self.is_async else result

    async def call_async(self, fields: Fields) -> Any:
        """Likewise, of an async function of one sample."""
        return await self.function(**dict(zip(ONE, fields, strict=True)))

    def call_all(self, rows: Sequence[Fields]) -> Sequence[Any]:
        """The answers of a function that takes all samples. ValueError if they are not one per sample."""
        columns = [[row[i] for row in rows] for i in range(len(ALL))]
        result = self.function(**dict(zip(ALL, columns, strict=True)))
        answers = asyncio.run(_await(result)) if self.is_async else result
        if len(answers) != len(rows):
            raise ValueError(f"{len(answers)} rewards for {len(rows)} samples")
        return answers


async def _await(awaitable: Any) -> Any:
    return await awaitable


@lru_cache
def load_function(path: str, name: str) -> UserFunction:
    """The function `name` of the Python file `path`.

    ValueError: no such file or function, or one that takes the arguments of neither form.
    """
    file = find_file("reward.path", path)
    spec = importlib.util.spec_from_file_location(f"mcore_rl_reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        names = sorted(
            n
            for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__
        )
        raise ValueError(
            f"reward.name={name}: {path} has no such function; it has {', '.join(names) or 'none'}"
        )
    is_async = inspect.iscoroutinefunction(function)
    signature = inspect.signature(function)
    for arguments, takes_all in ((ONE, False), (ALL, True)):
        try:
            signature.bind(**dict.fromkeys(arguments))
        except TypeError:
            continue
        return UserFunction(function, takes_all, is_async)
    raise ValueError(
        f"{path}:{name} must take the keyword arguments {', '.join(ONE)}, or {', '.join(ALL)}"
    )


def find_file(option: str, path: str) -> Path:
    """A file of the working directory or beside recipes/; ValueError, naming `option`, if in neither."""
    file = next((f for f in (Path(path), HOME / path) if f.is_file()), None)
    if file is None:
        raise ValueError(f"{option}={path}: no such file in {Path.cwd()} or {HOME}")
    return file


def numbers_of(answer: Any) -> dict[str, float]:
    """What the function said as numbers by name; a plain number is the "score"."""
    if not isinstance(answer, Mapping):
        return {"score": float(answer)}
    return {name: float(value) for name, value in answer.items() if isinstance(value, Real)}


def run_in_worker(path: str, name: str, fields: Fields) -> dict[str, float]:
    """One sample in a process of its own pool."""
    return numbers_of(load_function(path, name).call(fields))
