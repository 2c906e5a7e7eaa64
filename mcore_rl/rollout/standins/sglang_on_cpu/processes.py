"""How SGLang's processes start on a CPU: forked from the server, which has imported everything already."""

import multiprocessing
import tempfile
from pathlib import Path


def fork_workers() -> None:
    """Fork the scheduler and detokenizer processes instead of spawning them.

    A spawned process imports torch and SGLang again, 7 core-seconds each. SGLang spawns because CUDA does not
    survive a fork; without CUDA nothing is lost. The server has no threads when it forks.
    """
    from sglang.srt.entrypoints import engine

    set_envs_and_config = engine._set_envs_and_config

    def set_envs_and_fork(server_args: object) -> None:
        set_envs_and_config(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_envs_and_fork


def keep_load_snapshots_in_temp_dir() -> None:
    """Put the file through which the scheduler publishes its load into the engine's temporary folder.

    SGLang puts it into /dev/shm, where it stays when the engine is killed.
    """
    from sglang.srt.managers import load_snapshot

    in_shared_memory = load_snapshot.shm_path_for
    load_snapshot.shm_path_for = lambda ipc_name: str(
        Path(tempfile.gettempdir(), Path(in_shared_memory(ipc_name)).name)
    )
