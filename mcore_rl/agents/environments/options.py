"""The options of a pool of environments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EnvironmentOptions:
    """Which environment, and the worker processes that host its episodes.

    kind                 a name of adapters.ADAPTERS, module:Class or folder/file.py:Class
    options              what the environment itself is given
    python               interpreter of the workers; empty: this one
    workers              processes at most; they start when they are needed
    episodes_per_worker  at once, at most; a worker that becomes slow takes fewer
    memory_gib           resident memory of one worker with its processes; 0: not bounded
    start_timeout_s      for a worker to start and import what it needs
    place_timeout_s      for an episode to wait until a worker takes it
    reset_timeout_s, step_timeout_s, close_timeout_s
                         for one call of an environment
    run_timeout_s        for a program that plays a whole episode
    variables            environment variables of the workers, besides those of this process
    log_folder           where the output of each worker goes; empty: a temporary folder
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""
    workers: int = 2
    episodes_per_worker: int = 32
    memory_gib: float = 0.0
    start_timeout_s: float = 60.0
    place_timeout_s: float = 3600.0
    reset_timeout_s: float = 120.0
    step_timeout_s: float = 120.0
    close_timeout_s: float = 20.0
    run_timeout_s: float = 1800.0
    variables: Mapping[str, str] = field(default_factory=dict)
    log_folder: str = ""

    def __post_init__(self) -> None:
        if not self.kind:
            raise ValueError("an environment needs a kind, for example gymnasium")
        for name in ("workers", "episodes_per_worker"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1")
        if self.memory_gib < 0:
            raise ValueError(f"memory_gib is {self.memory_gib}: 0 for no bound, or more")
        for name in ("start", "place", "reset", "step", "close", "run"):
            seconds = getattr(self, f"{name}_timeout_s")
            if not seconds > 0:
                raise ValueError(f"{name}_timeout_s is {seconds}: more than 0 seconds")
        for name, value in self.variables.items():
            if not isinstance(value, str):
                raise ValueError(f"variables: {name} is {value!r}, not text: quote it")
