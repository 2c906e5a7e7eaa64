"""Helpers of the rollout tests: a tiny model on disk, an engine's processes, its idle CPU time."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from tests.support.engine_keys import KEYS

VOCAB_SIZE = 128
EOS_ID = 1


def save_tiny_moe(path: Path, dtype: torch.dtype = torch.float32) -> str:
    """A random Qwen3-MoE of 0.2 M parameters whose next tokens are neither certain nor uniform."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=EOS_ID,
        pad_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    config.head_dim = 16
    config.dtype = dtype
    model = Qwen3MoeForCausalLM._from_config(config)
    model.lm_head.weight.data.mul_(4.0)
    model.save_pretrained(path)
    return str(path)


def live_processes(group_id: int) -> list[int]:
    """Return the process ids of a process group, without zombies."""
    alive = []
    for process in psutil.process_iter(["status"]):
        try:
            if (
                os.getpgid(process.pid) == group_id
                and process.info["status"] != psutil.STATUS_ZOMBIE
            ):
                alive.append(process.pid)
        except ProcessLookupError:
            continue
    return alive


def wait_until_gone(group_id: int, timeout_s: float) -> list[int]:
    """Return the processes of the group that are left after at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := live_processes(group_id)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def thread_cpu_seconds(group_id: int) -> dict[tuple[int, str], float]:
    """Return (thread id, name) -> CPU time of each thread of the group."""
    seconds = {}
    for pid in live_processes(group_id):
        for thread in psutil.Process(pid).threads():
            with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
                name = Path(f"/proc/{pid}/task/{thread.id}/comm").read_text().strip()
                seconds[thread.id, name] = thread.user_time + thread.system_time
    return seconds


def measure_idle_cpu(group_id: int, duration_s: float, enough_s: float) -> float:
    """Return the least CPU seconds of the group in up to four waits, each of `duration_s`.

    The first wait with less than `enough_s` is the last. On a busy host a few wake-ups may cost
    much in one wait or another; a group that spins does so in all of them.
    """
    time.sleep(1.0)  # to settle
    least_s = _measure_wait(group_id, duration_s)
    for _ in range(3):
        if least_s < enough_s:
            break
        least_s = min(least_s, _measure_wait(group_id, duration_s))
    return least_s


def _measure_wait(group_id: int, duration_s: float) -> float:
    """Return the CPU time that the group uses in `duration_s` of waiting.

    gloo's threads are left out: each wakes a hundred times a second, at a cost that depends on the
    host.
    """
    before = thread_cpu_seconds(group_id)
    time.sleep(duration_s)
    after = thread_cpu_seconds(group_id)
    assert any(name.startswith("sglang::schedul") for _, name in after), after
    return sum(
        s - before.get(thread, 0.0) for thread, s in after.items() if thread[1] != "gloo_tcp_loop"
    )


@contextlib.contextmanager
def serve_versions(
    paths: Mapping[int, str | Path], log_dir: Path, **options: Any
) -> Iterator[list[EngineProcess]]:
    """Start an engine for each version of weights, all at once; `options` are of their specs."""
    engines = [
        EngineProcess(
            EngineSpec(
                *(str(path), str(log_dir / f"{version}.log")),
                **{"weight_version": version, "keys": KEYS, **options},
            )
        )
        for version, path in paths.items()
    ]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            engine.start()
            stack.callback(engine.stop)
        for engine in engines:
            engine.wait_healthy()
        yield engines
