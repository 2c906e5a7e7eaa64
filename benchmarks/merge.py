"""Measures time and memory of converting a Megatron checkpoint of 2 GiB at TP2 PP2 EP2.

megatron-core itself writes the checkpoint, on four gloo ranks. Then `cp -r` and `mcore-rl-ckpt
to-hf`, as whole processes, make pairs: the one that is first in a pair is second in the next. Each
begins with the checkpoint in the page cache, nothing left to write to the disk, and twice the
memory that it will write touched and given back: on a virtual machine the first use of a page can
cost more than everything else done with it, and chance would decide which of the two pays. Half of
the pairs also wait until the disk has all files (fsync). Last, a merge is killed (SIGKILL) in the
middle and run again, and the results are compared. Prints a table, and last a JSON object.
"""

import argparse
import json
import mmap
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_tools.options import show_bytes
from checkpoint_tools.pool import measure_proportional
from mcore_rl.process.network import find_free_port
from mcore_rl.tasks.tiny_models import qwen3_moe_config

LAYOUT: dict[str, Any] = {"tp": 2, "pp": 2, "ep": 2}
RANKS = 4
SAMPLE_EVERY_S = 0.01
MODEL = qwen3_moe_config(
    32000,
    hidden_size=1024,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=3072,
    moe_intermediate_size=768,
    num_experts=36,
    num_experts_per_tok=4,
    max_position_embeddings=4096,
    torch_dtype="bfloat16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-budget", default="512MiB")
    parser.add_argument("--repeats", type=int, default=5, help="pairs with fsync, and without")
    parser.add_argument("--experts", type=int, default=MODEL["num_experts"])
    parser.add_argument("--vocab", type=int, default=MODEL["vocab_size"])
    parser.add_argument(
        "--layers", type=int, default=MODEL["num_hidden_layers"], help="12 make 2 GiB"
    )
    parser.add_argument(
        "--folder", type=Path, help="work here and keep the files; by default a temporary one"
    )
    args = parser.parse_args()
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
        measure(args.folder, args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    hf_dir = folder / "hf"
    checkpoint = folder / "step_000001"
    if not checkpoint.exists():
        changes = {"num_hidden_layers": args.layers, "num_experts": args.experts}
        make_checkpoint(hf_dir, checkpoint, {**MODEL, **changes, "vocab_size": args.vocab})
    num_bytes = sum(path.stat().st_size for path in checkpoint.iterdir())
    options = [
        "--source-hf",
        str(hf_dir),
        "--memory-budget",
        args.memory_budget,
        "--workers",
        str(args.workers),
    ]
    cached = Pairs(folder, checkpoint, options, num_bytes, is_synced=False)
    synced = Pairs(folder, checkpoint, options, num_bytes, is_synced=True)
    for turn in range(args.repeats):
        cached.take(turn)
        synced.take(turn)
    peak = peak_of_merge(checkpoint, removed(folder / "merged"), options)
    kept = kill_and_rerun(checkpoint, removed(folder / "killed"), options)
    merged_sums = (folder / "merged/checksums.json").read_text()
    same = merged_sums == (folder / "killed/checksums.json").read_text()
    verify = command("verify", checkpoint, folder / "killed", *options[2:])
    equal = subprocess.run(verify).returncode == 0
    num_processes = args.workers + 1
    rows = {
        "checkpoint": f"{show_bytes(num_bytes)}, {LAYOUT}",
        **cached.rows(),
        **synced.rows(),
        "peak memory of to-hf": f"{show_bytes(peak)}: Pss of {num_processes} processes per 10 ms",
        "killed in the middle": kept,
        "the rerun's files": f"those of the first merge: {same}; equal to the checkpoint: {equal}",
    }
    for name, value in rows.items():
        print(f"{name:24s}{value}")
    figures = {
        "bytes": num_bytes,
        "page_cache": cached.figures(),
        "fsync": synced.figures(),
        "peak_bytes": peak,
        "resumed_equal": same and equal,
    }
    print(json.dumps(figures))


@dataclass
class Pairs:
    """Seconds of `cp -r` and of the merge, pair by pair.

    is_synced   each also waits for its files to be on the disk
    """

    folder: Path
    checkpoint: Path
    options: Sequence[str]
    num_bytes: int
    is_synced: bool
    copies: list[float] = field(default_factory=list)
    merges: list[float] = field(default_factory=list)

    def take(self, turn: int) -> None:
        both = [self._copy, self._merge]
        for run in both if turn % 2 == 0 else reversed(both):
            run()

    def rows(self) -> dict[str, str]:
        way = ", fsync" if self.is_synced else ""
        figures = self.figures()
        both = {"cp -r": self.copies, "to-hf": self.merges}
        rows = {
            f"{name}{way}, seconds": f"best {min(seconds):.2f}, median {median(seconds):.2f} of"
            f" {[round(s, 2) for s in seconds]}"
            for name, seconds in both.items()
        }
        ratios = f"best {figures['best_ratio']:.0%}, median {figures['median_ratio']:.0%}"
        return {**rows, f"throughput to cp{way}": ratios}

    def figures(self) -> dict[str, float]:
        """Return medians and ratios; the median ratio is that of the pairs' ratios."""
        ratios = [copy / merge for copy, merge in zip(self.copies, self.merges, strict=True)]
        return {
            "cp_s": median(self.copies),
            "to_hf_s": median(self.merges),
            "best_ratio": round(min(self.copies) / min(self.merges), 3),
            "median_ratio": round(median(ratios), 3),
        }

    def _copy(self) -> None:
        out = removed(self.folder / "copy")
        copy = ["cp", "-r", str(self.checkpoint), str(out)]
        self.copies.append(self._time(copy, out))
        removed(out)

    def _merge(self) -> None:
        out = removed(self.folder / "merged")
        merge = command("to-hf", self.checkpoint, out, *self.options)
        self.merges.append(self._time(merge, out))

    def _time(self, arguments: Sequence[str], out: Path) -> float:
        """Return the seconds of a whole process that writes `num_bytes` to `out`."""
        os.sync()
        for path in self.checkpoint.iterdir():
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass
        touch = mp.Process(target=touch_pages, args=(2 * self.num_bytes,))
        touch.start()
        touch.join()
        begun = time.monotonic()
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
        if self.is_synced:
            for path in out.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        return time.monotonic() - begun


def make_checkpoint(hf_dir: Path, checkpoint: Path, model: dict[str, Any]) -> None:
    """Save a random model in bfloat16, and its HuggingFace directory without weights."""
    hf_dir.mkdir(parents=True, exist_ok=True)
    (hf_dir / "config.json").write_text(json.dumps(model))
    (hf_dir / "tokenizer_config.json").write_text("{}")
    context = mp.get_context("spawn")
    port = find_free_port("127.0.0.1")
    ranks = [
        context.Process(target=save_rank, args=(rank, port, hf_dir, checkpoint))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")


def save_rank(rank: int, port: int, hf_dir: Path, checkpoint: Path) -> None:
    import torch

    from mcore_rl.config import ParallelConfig, TrainConfig
    from mcore_rl.train.checkpoint_save import start_save
    from mcore_rl.train.model import make_chunks
    from mcore_rl.train.runtime import init_distributed
    from mcore_rl.train.transformer_config import make_transformer_config
    from mcore_rl.weights.hf.config import read_hf_config

    torch.set_num_threads(1)
    parallel = ParallelConfig(**LAYOUT)
    init_distributed(rank, RANKS, "127.0.0.1", port, parallel, seed=rank, timeout_s=600.0)
    config = read_hf_config(hf_dir)
    settings = make_transformer_config(config, parallel, torch.bfloat16, TrainConfig())
    (chunk,) = make_chunks(settings, config)
    state: dict[str, Any] = {"model": model_state(chunk), "step": 1, "layout": LAYOUT, "extra": {}}
    start_save(state, checkpoint).finish(600.0)


def model_state(chunk: Any) -> dict[str, Any]:
    from megatron.core import parallel_state as ps

    group = ps.get_data_parallel_group(with_context_parallel=True)
    return chunk.sharded_state_dict(metadata={"dp_cp_group": group})


def command(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "checkpoint_tools.cli", name, *map(str, arguments)]


def removed(folder: Path) -> Path:
    """Remove a folder, if it exists, and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def touch_pages(num_bytes: int) -> None:
    with mmap.mmap(-1, num_bytes) as memory:
        for start in range(0, num_bytes, mmap.PAGESIZE):
            memory[start] = 1


def peak_of_merge(checkpoint: Path, out: Path, options: Sequence[str]) -> int:
    """Return the peak memory of the process and its workers together, sampled from outside."""
    merge = command("to-hf", checkpoint, out, *options)
    process = subprocess.Popen(merge, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(measure_proportional, [process.pid, *children(process.pid)])))
        time.sleep(SAMPLE_EVERY_S)
    if process.returncode:
        raise SystemExit(f"to-hf ended with {process.returncode}")
    return peak


def children(process_id: int) -> list[int]:
    try:
        text = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def kill_and_rerun(checkpoint: Path, out: Path, options: Sequence[str]) -> str:
    """Kill a merge in the middle and rerun it; return what the rerun reports."""
    partial = removed(out.with_name(out.name + ".partial"))
    process = subprocess.Popen(command("to-hf", checkpoint, out, *options))
    while finished_units(partial / ".journal") < 10:
        if process.poll() is not None:
            raise SystemExit("to-hf ended before it could be killed")
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    units = finished_units(partial / ".journal")
    if out.exists():
        raise SystemExit(f"{out} exists after the kill")
    rerun = command("to-hf", checkpoint, out, *options)
    finished = subprocess.run(rerun, check=True, capture_output=True, text=True)
    return f"after {units} units, rerun: {finished.stdout.strip().split(': ', 1)[1]}"


def finished_units(journal: Path) -> int:
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


if __name__ == "__main__":
    main()
