"""Loads a user's reward function from a file and calls it, for each sample or for all at once.

Nothing heavy is imported here: worker processes of untrusted functions load only this module.
"""

import asyncio
import difflib
import functools
import inspect
import multiprocessing
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.config.shipped import HOME
from mcore_rl.process.errors import describe_error, make_encodable
from mcore_rl.process.user_files import import_file

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
ALL = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
Fields = tuple[Any, ...]
"""The arguments for one sample, in the order of ONE."""
Answer = dict[str, float] | str
"""The numbers of one sample by name, or the text of the error that cost them."""


@dataclass(frozen=True)
class UserFunction:
    """reward(*, data_source, solution_str, ground_truth, extra_info) -> number or mapping.

    With the plural of these names, each argument is a list and so is the result. These are verl's
    two forms. Either may be async.
    """

    function: Callable[..., Any]
    takes_all: bool
    is_async: bool
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments that the recipe gives (reward.kwargs)."""

    def call(self, fields: Fields) -> Any:
        """Return what the function returns for one sample, awaited if that is awaitable."""
        if self.takes_all:
            return self.call_all([fields])[0]
        if self.is_async:
            return asyncio.run(self.call_async(fields))
        result = self.begin(fields)
        return asyncio.run(_await(result)) if inspect.isawaitable(result) else result

    def begin(self, fields: Fields) -> Any:
        """Return what the function returns for one sample, which may be awaitable."""
        return self.function(**dict(zip(ONE, fields, strict=True)), **self.kwargs)

    async def call_async(self, fields: Fields) -> Any:
        """Await what an async function of one sample returns for `fields`."""
        return await self.begin(fields)

    def call_all(self, rows: Sequence[Fields]) -> Sequence[Any]:
        """Return the results of a function of all samples; single ones may be awaitable.

        Raises TypeError or ValueError if there is not one result per sample.
        """
        columns = [[row[i] for row in rows] for i in range(len(ALL))]
        result = self.function(**dict(zip(ALL, columns, strict=True)), **self.kwargs)
        answers = asyncio.run(_await(result)) if inspect.isawaitable(result) else result
        if isinstance(answers, str | bytes | Mapping) or not hasattr(answers, "__len__"):
            raise TypeError(
                f"{type(answers).__name__} instead of a list with the reward of each sample"
            )
        if len(answers) != len(rows):
            raise ValueError(f"{len(answers)} rewards for {len(rows)} samples")
        return answers


async def _await(awaitable: Any) -> Any:
    return await awaitable


def load_function(path: str, name: str, kwargs: Mapping[str, Any] | None = None) -> UserFunction:
    """Import the Python file `path`, once, and return its function `name`.

    kwargs   further arguments of each call

    Raises ValueError if there is no such file or function, if the file cannot be imported, or if
    the function takes the arguments of neither form.
    """
    kwargs = dict(kwargs or {})
    module = _import_file(path)
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
    is_async = _is_async(function)
    signature = inspect.signature(function)
    for arguments, takes_all in ((ONE, False), (ALL, True)):
        try:
            signature.bind(**dict.fromkeys(arguments), **kwargs)
        except TypeError:
            continue
        return UserFunction(function, takes_all, is_async, kwargs)
    further = f", and those of reward.kwargs: {', '.join(kwargs)}" if kwargs else ""
    raise ValueError(
        f"{path}:{name} must take the keyword arguments {', '.join(ONE)}, or"
        f" {', '.join(ALL)}{further}; it takes {signature}"
    )


def _is_async(function: Callable[..., Any]) -> bool:
    """Return whether each call gives an awaitable: async functions, objects and partials of them.

    A function that only wraps an async one may run it itself: its results tell.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    method = inspect.getattr_static(type(function), "__call__", None)
    return inspect.iscoroutinefunction(method)


@lru_cache
def _import_file(path: str) -> ModuleType:
    file = find_file("reward.path", path).resolve()
    try:
        return import_file(file)
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        reraise_interrupt(error)
        line = _last_line_in(file, error)
        raise ValueError(
            f"reward.path={path}: importing it failed{line}: {describe_failure(error)}"
        ) from error


def _last_line_in(file: Path, error: BaseException) -> str:
    """Return " at line <n>" for the innermost frame of `file` in the error's traceback, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f" at line {numbers[-1]}" if numbers else ""


def find_file(option: str, path: str) -> Path:
    """Return `path` in the working directory or beside recipes/.

    Raises ValueError that names `option` if it is in neither.
    """
    file = next((f for f in (Path(path), HOME / path) if f.is_file()), None)
    if file is None:
        places = " or ".join(dict.fromkeys(map(str, (Path.cwd(), HOME))))
        beside = sorted((HOME / path).parent.glob("*.py"))
        close = difflib.get_close_matches(Path(path).name, [each.name for each in beside], n=1)
        hint = f"; did you mean {Path(path).with_name(close[0])}?" if close else ""
        raise ValueError(f"{option}={path}: no such file in {places}{hint}")
    return file


def numbers_of(result: Any) -> dict[str, float]:
    """Return a function's result as numbers by name; a plain number is the "score".

    A number is what float() takes of any library, such as numpy.bool_, Decimal and tensors with one
    element, except text. Text, None, containers and the like in a mapping are notes, which are left
    out; the "score" has to be a number. Names become metric names, so they are made writable.

    Raises TypeError that names key and type of a value that should be a number and is none.
    """
    if not isinstance(result, Mapping):
        return {"score": _number("the reward", result)}
    return {
        make_encodable(str(name)): _number(f"the reward's {name!r}", value)
        for name, value in result.items()
        if name == "score" or _is_like_a_number(value)
    }


def _is_like_a_number(value: Any) -> bool:
    kind = type(value)
    has_value = any(hasattr(kind, name) for name in ("__float__", "__index__", "__complex__"))
    return has_value and not isinstance(value, str | bytes)


def _number(what: str, value: Any) -> float:
    if not isinstance(value, str | bytes):
        try:
            return float(value.item() if getattr(value, "size", 0) == 1 else value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    shape = getattr(value, "shape", None)
    of_shape = "" if shape is None else f" of shape {tuple(shape)}"
    raise TypeError(
        f"{what} is no number but {kind}{of_shape}: {value!r:.60}; return a number such as"
        " float(...), and other things in a mapping, as text"
    )


def answer_of(call: Callable[[], Any]) -> Answer:
    """Return the numbers in the result of `call`, or the text of the error that it raised.

    The user's code may raise anything. A SystemExit (from `exit()`) or another BaseException costs
    its sample like any error; only a Ctrl-C passes through.
    """
    try:
        return numbers_of(call())
    except BaseException as error:
        reraise_interrupt(error)
        return describe_failure(error)


async def answer_of_async(result: Awaitable[Any]) -> Answer:
    """Return `answer_of` for an awaitable result of one sample.

    A cancellation from outside (a deadline, a Ctrl-C) passes through; a CancelledError that the
    function raises by itself costs its sample.
    """
    try:
        return numbers_of(await result)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return describe_failure(error)
    except BaseException as error:
        reraise_interrupt(error)
        return describe_failure(error)


def reraise_interrupt(error: BaseException) -> None:
    """Raise `error` again if it is a Ctrl-C.

    Python delivers a Ctrl-C to the main thread only, and worker processes ignore the signal: a
    KeyboardInterrupt anywhere else was raised by the function.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    is_worker = multiprocessing.parent_process() is not None
    if type(error) is KeyboardInterrupt and is_main_thread and not is_worker:
        raise error


def describe_failure(error: BaseException) -> str:
    """Return describe_error, and what to do about an error that comes of where a function runs."""
    return f"{describe_error(error)}{_remedy(error)}"


def _remedy(error: BaseException) -> str:
    """Return what to do about an error that comes of where the function runs, or ""."""
    if isinstance(error, ModuleNotFoundError):
        return f": install it for {sys.executable}"
    if type(error) is ValueError and "signal only works in main thread" in str(error):
        return (
            ": set reward.workers=1 or more, whose processes call a function of one sample in their"
            " main thread"
        )
    return ""


def run_in_worker(path: str, name: str, kwargs: Mapping[str, Any], fields: Fields) -> Answer:
    """Score one sample in a worker process.

    An error returns as text, as an exception of the user's own class could not be unpickled in the
    controller.
    """
    return answer_of(lambda: load_function(path, name, kwargs).call(fields))
