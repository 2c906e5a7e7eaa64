"""Compares the seconds of a weight sync with gather-and-broadcast and with SGLang's own updates.

Each model has one pair of layouts: TP = EP over the trainer ranks, and one SGLang engine. All
processes run on this machine and talk over loopback. The methods take turns, and the engine's
weights are compared after each. The last line is JSON.
"""

import argparse
import asyncio
import json
import math
import os
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_rl.process.network import find_free_port
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.weight_sync.controller.engine_control import LOADER
from mcore_rl.weight_sync.controller.sync import SyncController, SyncReport
from sync_model import SHAPES, Case, num_bytes, write_config
from sync_raw import checksum_cost, raw_seconds
from sync_trainer import BenchRanks

os.environ.setdefault("OMP_NUM_THREADS", "1")
OURS = "this"
GATHER = "gather and broadcast"
DISTRIBUTED = "sglang distributed"
"""Sends whole tensors that trainer rank 0 already holds, so the time to gather them is left out."""
DISK = "sglang disk"
"""Gathers, writes and loads, all through the page cache."""
DISK_LOAD = "sglang disk, load only"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="64,512,2048", help="MiB of weights, comma-separated")
    parser.add_argument(
        "--kinds", default="small,large", help=f"expert matrices, of {', '.join(SHAPES)}"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="syncs per method; the median counts"
    )
    parser.add_argument("--trainer-ranks", type=int, default=2)
    parser.add_argument("--engine-tp", type=int, default=1)
    parser.add_argument(
        "--skip-baselines", action="store_true", help="only this system and the raw copy"
    )
    args = parser.parse_args()
    cases = [
        Case(int(mib), kind) for mib in args.sizes.split(",") for kind in args.kinds.split(",")
    ]
    print(f"checksum: {checksum_cost():.2f} of the cost of a copy, on either side")
    figures = {}
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="sync_") as folder:
            figures[case.name] = run_case(case, Path(folder), args)
    print(json.dumps(figures))


def run_case(case: Case, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    config = case.config()
    model = write_config(case, folder / "model")
    raw = raw_seconds(num_bytes(config), args.repeats)
    ranks = BenchRanks(config, args.trainer_ranks)
    spec = EngineSpec(
        str(model),
        str(folder / "engine.log"),
        tp=args.engine_tp,
        kv_cache_len=4096,
        max_running=8,
        custom_weight_loaders=(LOADER,),
        extra_args=("--load-format", "dummy"),
    )
    try:
        with EngineProcess(spec) as engine:
            return measure(case, engine, ranks, model, raw, args)
    finally:
        ranks.stop()


def measure(
    case: Case,
    engine: EngineProcess,
    ranks: BenchRanks,
    model: Path,
    raw: dict[str, float],
    args: argparse.Namespace,
) -> dict[str, float]:
    url = engine.url
    # Everything is traced before, so that no trace runs beside the syncs that are timed.
    sync_controller = SyncController(ranks, timeout_s=300, trace_all=True)
    began_s = time.perf_counter()
    asyncio.run(sync_controller.connect([url]))
    connect_s = time.perf_counter() - began_s
    reports: list[SyncReport] = []

    def ours() -> float:
        reports.append(asyncio.run(sync_controller.sync(len(reports))))
        return reports[-1].seconds

    methods: dict[str, Callable[[], float]] = {OURS: ours}
    if not args.skip_baselines:
        methods |= baselines(url, ranks, model, args.engine_tp)
    seconds = take_turns(methods, url, args.repeats)
    return report(case, seconds, reports[1:], raw, connect_s)


def baselines(
    url: str, ranks: BenchRanks, model: Path, engine_tp: int
) -> dict[str, Callable[[], float]]:
    ranks.call("join_trainers", find_free_port("127.0.0.1"))
    ranks.call("join_engine", url, engine_tp, find_free_port("127.0.0.1"))
    stored = model.parent / "stored"
    shutil.copytree(model, stored)
    ranks.call("prepare_whole_model", str(stored))

    def load() -> float:
        began_s = time.perf_counter()
        post(url, "/update_weights_from_disk", model_path=str(stored), load_format="auto")
        return time.perf_counter() - began_s

    def write_and_load() -> float:
        began_s = time.perf_counter()
        ranks.call("prepare_whole_model", str(stored))
        return time.perf_counter() - began_s + load()

    return {
        GATHER: lambda: max(ranks.call("gather_and_broadcast", url)),
        DISTRIBUTED: lambda: max(ranks.call("broadcast", url)),
        DISK: write_and_load,
        DISK_LOAD: load,
    }


def take_turns(methods: dict[str, Callable[[], float]], url: str, repeats: int) -> dict[str, float]:
    """Return the median seconds per method, without the first turn.

    Asserts that all methods leave the same weights in the engine.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    expected = None
    for turn in range(repeats + 1):
        for name, method in methods.items():
            taken_s = method()
            if turn == 0:
                engine_ranks = post(url, "/weights_checker", action="checksum")["ranks"]
                weights = [rank["checksums"] for rank in engine_ranks]
                expected = expected or weights
                assert weights == expected, f"{name} left other weights in the engine than {OURS}"
            else:
                seconds[name].append(taken_s)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(
    case: Case,
    seconds: dict[str, float],
    reports: list[SyncReport],
    raw: dict[str, float],
    connect_s: float,
) -> dict[str, float]:
    """Print the case's table and return its figures."""
    mib = sum(engine.num_bytes for engine in reports[0].engines) / 2**20
    print(f"\n{case.name}: {mib:.0f} MiB per sync, connected in {connect_s:.2f} s")
    for name, value in {**seconds, **{f"raw {k}": v for k, v in raw.items()}}.items():
        print(f"  {name:24s}{value:9.4f} s{mib / 1024 / value:9.2f} GiB/s", flush=True)
    transfer_s = statistics.median(engine.transfer_seconds for r in reports for engine in r.engines)
    pause_s = statistics.median(engine.pause_seconds for r in reports for engine in r.engines)
    print(f"  of {OURS}: transfer {transfer_s:.4f} s, pause {pause_s:.4f} s")
    figures = {
        "seconds": seconds[OURS],
        "pause_seconds": pause_s,
        "vs_gather_broadcast": seconds.get(GATHER, math.nan) / seconds[OURS],
        "vs_sglang_distributed": seconds.get(DISTRIBUTED, math.nan) / seconds[OURS],
        "vs_sglang_disk": seconds.get(DISK, math.nan) / seconds[OURS],
        "vs_sglang_disk_load_only": seconds.get(DISK_LOAD, math.nan) / seconds[OURS],
        "share_of_raw_copy": raw["shared memory"] / seconds[OURS],
    }
    return {name: round(value, 4) for name, value in figures.items() if not math.isnan(value)}


def post(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.loads(response.read())
    assert answer.get("success", True), answer
    return answer


if __name__ == "__main__":
    main()
