"""Import-only triton: SGLang decorates GPU kernels when it is imported.

Launching a kernel raises NotImplementedError with its name.
"""

from collections.abc import Callable
from typing import Any

from import_standin import missing, stand_in

__version__ = "0.0.0"


class Kernel:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        return missing(f"triton kernel {self.__name__}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self[None](*args, **kwargs)


class Config:
    def __init__(self, kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        self.kwargs = kwargs or {}


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Kernel if fn is None else Kernel(fn)


def autotune(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


heuristics = autotune


def cdiv(numerator: int, denominator: int) -> int:
    return -(numerator // -denominator)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 1


stand_in(globals())

import triton.language  # noqa: E402


class _Constexpr:
    """tl.constexpr, which SGLang uses as an annotation and as a wrapper of module constants."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


triton.language.constexpr = _Constexpr
