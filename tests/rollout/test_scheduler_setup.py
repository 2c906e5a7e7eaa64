"""Schedulers call functions before they begin; tests/scenarios/rollout starts real ones."""

import pickle
import sys
from types import ModuleType
from typing import Any

import pytest

from mcore_rl.rollout.scheduler_setup import set_schedulers_up

CALLS: list[Any] = []


def first() -> None:
    CALLS.append("first")


def second() -> None:
    CALLS.append("second")


def note_call(*args: Any, **kwargs: Any) -> None:
    CALLS.append((args, kwargs))


def launch(server_args: str, *, run_scheduler_process_func: Any = note_call) -> None:
    """Call the function as a process does that is spawned: it gets a pickle."""
    pickle.loads(pickle.dumps(run_scheduler_process_func))(server_args, gpu_id=1)


def test_a_scheduler_is_set_up_in_order_and_gets_sglangs_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's two modules are left out: importing them takes longer than all else here."""
    http_server: Any = ModuleType("http_server")
    scheduler: Any = ModuleType("scheduler")
    http_server.launch_server = launch
    scheduler.run_scheduler_process = note_call
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", http_server)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", scheduler)
    CALLS.clear()
    set_schedulers_up([first, second])
    http_server.launch_server("arguments")
    assert CALLS == ["first", "second", (("arguments",), {"gpu_id": 1})]
