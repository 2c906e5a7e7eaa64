"""Patches of how SGLang's processes start, wait and clean up."""

import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any


def fork_workers() -> None:
    """Fork the scheduler and detokenizer processes instead of spawning them.

    A spawned process imports torch and SGLang again, 7 core-seconds each. SGLang spawns because
    CUDA does not survive a fork. The server has no threads when it forks.
    """
    from sglang.srt.entrypoints import engine

    set_envs_and_config = engine._set_envs_and_config

    def set_envs_and_fork(server_args: object) -> None:
        set_envs_and_config(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_envs_and_fork


def leave_megatron_out() -> None:
    """Make `import megatron` fail in SGLang's processes.

    SGLang's debug dumper imports it if it is installed, which costs each rank half a core-second
    and all of them 100 MB.
    """
    sys.modules["megatron"] = None  # type: ignore[assignment]


def keep_load_snapshots_in_temp_dir() -> None:
    """Put the file in which the scheduler publishes its load into the engine's temporary folder.

    SGLang puts it into /dev/shm, where it stays when the engine is killed.
    """
    from sglang.srt.managers import load_snapshot

    in_shared_memory = load_snapshot.shm_path_for
    load_snapshot.shm_path_for = lambda ipc_name: str(
        Path(tempfile.gettempdir(), Path(in_shared_memory(ipc_name)).name)
    )


def sleep_while_paused() -> None:
    """Block until the next message between /pause_generation and /continue_generation.

    SGLang's --sleep-on-idle covers only an idle scheduler; a paused one polls its sockets in a busy
    loop.
    """
    from sglang.srt.managers.scheduler import Scheduler

    record_state = Scheduler._record_scheduler_state_for_paused_engine

    def record_state_and_sleep(self: Any) -> None:
        record_state(self)
        self.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_state_and_sleep
