"""Has each scheduler process of an SGLang server call functions of ours before it begins."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

SetUp = Callable[[], None]
"""Changes SGLang in the process that calls it; a function of a module, as processes are spawned."""


def set_schedulers_up(set_ups: Sequence[SetUp]) -> None:
    """Have the schedulers of the server that this process is to start call `set_ups` in order."""
    http_server: Any = import_module("sglang.srt.entrypoints.http_server")
    http_server.launch_server = partial(
        http_server.launch_server, run_scheduler_process_func=partial(run_scheduler, set_ups)
    )


def run_scheduler(set_ups: Sequence[SetUp], *args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process, with the arguments that SGLang gives it."""
    for set_up in set_ups:
        set_up()
    import_module("sglang.srt.managers.scheduler").run_scheduler_process(*args, **kwargs)
