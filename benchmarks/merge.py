"""Measures time and memory of converting a Megatron checkpoint of 2 GiB at TP2 PP2 EP2.

megatron-core itself writes the checkpoint, on four gloo ranks. Then `cp -r` and `mcore-rl-ckpt
to-hf`, as whole processes, take turns. Before each, twice the memory that it will write is touched
and given back: on a virtual machine the first use of a page can cost more than everything else
done with it, and chance would decide which of the two pays. Last, a merge is killed (SIGKILL) in
the middle and run again, and the results are compared. Prints a table, and last a JSON object.
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
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_tools.memory import proportional_bytes
from checkpoint_tools.options import show_bytes
from mcore_rl.data.tiny_model import qwen3_moe_config
from mcore_rl.process.ports import find_free_port

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
    parser.add_argument("--repeats", type=int, default=5)
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
        make_checkpoint(hf_dir, checkpoint, args.layers)
    num_bytes = sum(path.stat().st_size for path in checkpoint.iterdir())
    options = [
        "--source-hf",
        str(hf_dir),
        "--memory-budget",
        args.memory_budget,
        "--workers",
        str(args.workers),
    ]
    copies: list[float] = []
    merges: list[float] = []
    for _ in range(args.repeats):
        copy = ["cp", "-r", str(checkpoint), str(removed(folder / "copy"))]
        copies.append(time_process(copy, num_bytes))
        removed(folder / "copy")
        merge = command("to-hf", checkpoint, removed(folder / "merged"), *options)
        merges.append(time_process(merge, num_bytes))
    peak = peak_of_merge(checkpoint, removed(folder / "merged"), options)
    kept = kill_and_rerun(checkpoint, removed(folder / "killed"), options)
    merged_sums = (folder / "merged/checksums.json").read_text()
    same = merged_sums == (folder / "killed/checksums.json").read_text()
    verify = command("verify", checkpoint, folder / "killed", *options[2:])
    equal = subprocess.run(verify).returncode == 0
    ratio = median(copies) / median(merges)
    num_processes = args.workers + 1
    rows = {
        "checkpoint": f"{show_bytes(num_bytes)}, {LAYOUT}",
        "cp -r, seconds": f"{median(copies):.2f} of {[round(s, 2) for s in copies]}",
        "to-hf, seconds": f"{median(merges):.2f} of {[round(s, 2) for s in merges]}, whole process",
        "throughput to cp": f"{ratio:.0%}",
        "peak memory of to-hf": f"{show_bytes(peak)}: Pss of {num_processes} processes per 10 ms",
        "killed in the middle": kept,
        "the rerun's files": f"those of the first merge: {same}; equal to the checkpoint: {equal}",
    }
    for name, value in rows.items():
        print(f"{name:24s}{value}")
    figures = {
        "bytes": num_bytes,
        "cp_s": median(copies),
        "to_hf_s": median(merges),
        "throughput_ratio": round(ratio, 3),
        "peak_bytes": peak,
        "resumed_equal": same and equal,
    }
    print(json.dumps(figures))


def make_checkpoint(hf_dir: Path, checkpoint: Path, num_layers: int) -> None:
    """Save a random model in bfloat16, and its HuggingFace directory without weights."""
    hf_dir.mkdir(parents=True, exist_ok=True)
    (hf_dir / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": num_layers}))
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
    from mcore_rl.slices.hf.config import read_hf_config
    from mcore_rl.train.checkpoint_save import start_save
    from mcore_rl.train.model import make_chunks
    from mcore_rl.train.runtime import init_distributed
    from mcore_rl.train.transformer_config import make_transformer_config

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


def time_process(arguments: Sequence[str], num_bytes: int) -> float:
    """Return the seconds of a whole process that writes `num_bytes`."""
    os.sync()
    touch = mp.Process(target=touch_pages, args=(2 * num_bytes,))
    touch.start()
    touch.join()
    begun = time.monotonic()
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begun


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
        peak = max(peak, sum(map(proportional_bytes, [process.pid, *children(process.pid)])))
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
