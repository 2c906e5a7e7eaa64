"""Measures the stream of prompts over a large data set, which it generates in a folder.

It reports seconds from the start of Python to the first prompt, peak memory, prompts per second
with and without tokenization, and whether a process that resumes in the middle of an epoch draws
exactly what the one before it would have drawn. Each number comes from a process of its own. For
comparison it takes rows by a permutation of the whole data set, each from its row group. The last
line is JSON.
"""

import argparse
import hashlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import torch

from mcore_rl.config import DataConfig
from mcore_rl.data.files import data_files
from mcore_rl.data.streamed.index import index_rows
from mcore_rl.data.streamed.mixed import MixedPrompts
from mcore_rl.data.streamed.open import open_prompts
from mcore_rl.data.streamed.prompts import RowRules
from mcore_rl.data.streamed.windows import CHUNKS_PER_WINDOW, Windows
from mcore_rl.data.tokenizer import load_tokenizer

DEADLINE_S = 3600.0
STEP_PROMPTS = 128
RANDOM_ROWS = 20
"""Rows that are taken by a permutation of the whole data set."""


def main() -> None:
    args = parse_arguments()
    if args.measure:
        print(json.dumps(MEASURES[args.measure](args)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or temporary
        from prompt_rows import generate  # here: it imports models that no measurement needs

        began_s = time.monotonic()
        generate(Path(args.folder), args.rows, args.files, args.format, args.group_rows)
        print(f"{args.rows:,} rows are there after {time.monotonic() - began_s:.0f} s")
        results = {name: run(args, name) for name in MEASURES}
    is_exact = results["rest"]["digest"] == results["resumed"].pop("digest")
    summary = {
        "rows": args.rows,
        "format": args.format,
        **results["stream"],
        **results["rows"],
        **results["resumed"],
        "state_bytes": results["rest"]["state_bytes"],
        "resume_is_exact": is_exact,
    }
    print(json.dumps(summary))
    if not is_exact:
        sys.exit("the resumed stream drew other prompts")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--group-rows", type=int, default=100_000, help="rows of a row group")
    parser.add_argument("--draw", type=int, default=100_000, help="prompts of each measurement")
    parser.add_argument("--workers", type=int, default=DataConfig.workers)
    parser.add_argument("--window-mib", type=int, default=DataConfig.window_mib)
    parser.add_argument("--folder", default="", help="keeps the rows here; empty: a temporary one")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--began-s", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, measure: str) -> dict[str, Any]:
    """Take a measurement in a new process."""
    given = {**vars(args), "measure": measure, "began_s": time.time()}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    if done.returncode:
        sys.exit(f"the measurement {measure} failed")
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{measure}: {result}")
    return result


def measure_stream(args: argparse.Namespace) -> dict[str, Any]:
    """Return start-up, speed and memory of a stream that is drawn by the step."""
    imported_mib = peak_mib()
    stream = open_stream(args)
    opened_s = time.time() - args.began_s
    stream.take(1)
    startup_s = time.time() - args.began_s
    began_s = time.monotonic()
    for _ in range(0, args.draw, STEP_PROMPTS):
        stream.take(STEP_PROMPTS)
    seconds = time.monotonic() - began_s
    workers = psutil.Process().children(recursive=True)
    # Proportional: pages that workers share with the process that forks them count once.
    workers_mib = sum(worker.memory_full_info().pss for worker in workers) / 2**20
    stream.close()
    return {
        "opened_s": round(opened_s, 2),
        "startup_s": round(startup_s, 2),
        "prompts_per_s": round(args.draw / seconds),
        "peak_mib": round(peak_mib()),
        "imported_mib": round(imported_mib),
        "workers_mib": round(workers_mib),
    }


def measure_rows(args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows per second without tokenization, in the stream's order and in a random
    one.
    """
    rules = RowRules(max_prompt_len=512, overlong="filter")
    files = data_files([str(Path(args.folder) / "rows")])
    chunk_bytes = (args.window_mib << 20) // CHUNKS_PER_WINDOW
    index = index_rows(files, rules.columns, chunk_bytes, rules.check_columns)
    windows = Windows(index, rules.columns, 0, True)
    began_s = time.monotonic()
    position = 0
    while position < args.draw:
        position += len(windows.rows(position, STEP_PROMPTS))
    rows_per_s = args.draw / (time.monotonic() - began_s)
    windows.close()
    result = {"rows_per_s": round(rows_per_s)}
    if args.format == "parquet":
        began_s = time.monotonic()
        for _ in range(RANDOM_ROWS):
            file = pq.ParquetFile(random.choice(files))
            group = file.read_row_group(random.randrange(file.num_row_groups), rules.columns)
            group.slice(random.randrange(group.num_rows), 1).to_pylist()
        seconds = time.monotonic() - began_s
        result["rows_per_s_by_full_permutation"] = round(RANDOM_ROWS / seconds)
    return result


def measure_rest(args: argparse.Namespace) -> dict[str, Any]:
    """Return a hash of the prompts after a save in the middle of the first epoch."""
    stream = open_stream(args)
    state = stream.state_dict()
    state["sources"][0]["position"] = args.rows // 2
    stream.load_state_dict(state)
    stream.take(args.draw // 4)
    opened = [stream.begin() for _ in range(5)]
    stream.end([number for number, _ in opened[1::2]])
    path = Path(args.folder) / "state.pt"
    torch.save(stream.state_dict(), path)
    # A resumed stream first hands out again what was begun and not ended.
    again = [prompt for _, prompt in opened[::2]]
    digest = digest_of([*again, *stream.take(args.draw // 4)])
    stream.close()
    return {"digest": digest, "state_bytes": path.stat().st_size}


def measure_resumed(args: argparse.Namespace) -> dict[str, Any]:
    """Return a hash of the prompts that a stream draws which continues from the save."""
    stream = open_stream(args)
    stream.load_state_dict(torch.load(Path(args.folder) / "state.pt", weights_only=True))
    first = stream.take(1)
    resume_s = time.time() - args.began_s
    digest = digest_of([*first, *stream.take(args.draw // 4 + 2)])
    stream.close()
    return {"digest": digest, "resume_s": round(resume_s, 2)}


MEASURES = {
    "stream": measure_stream,
    "rows": measure_rows,
    "rest": measure_rest,
    "resumed": measure_resumed,
}


def open_stream(args: argparse.Namespace) -> MixedPrompts:
    rows = str(Path(args.folder) / "rows")
    config = DataConfig(train=[rows], workers=args.workers, window_mib=args.window_mib)
    tokenizer = partial(load_tokenizer, str(Path(args.folder) / "tokenizer"), "model.path")
    return open_prompts(config, seed=0, make_tokenizer=tokenizer, are_right=lambda scores: [])


def digest_of(prompts: list[Any]) -> str:
    rows = [(prompt.index, prompt.token_ids, prompt.ground_truth) for prompt in prompts]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
