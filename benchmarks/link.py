"""Measures how long it takes to link an SGLang engine, by the number of the experts' tensors.

To link is to trace the engine's loader, to plan on all ranks, to compare the plans and to share
memory. Two trainer ranks with TP = EP = 2 and one engine link so many times for each number of
layers, with the layouts recorded, as in a run, and with layouts that the ranks list for one
another. One sync after the last link binds the buckets to the tensors. CPU seconds are those of the
engine and of the trainer ranks together, which other work on the machine leaves as they are. The
last line is JSON.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cpu_time import cpu_seconds, with_children
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.stream.controller.engine_control import LOADER
from mcore_rl.stream.controller.sync import SyncController
from sync_model import SHAPES, make_config, record_layouts
from sync_trainer import BenchRanks

os.environ.setdefault("OMP_NUM_THREADS", "1")
NUM_RANKS = 2
TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="4,15,29,58", help="58 have DeepSeek-V3's experts")
    parser.add_argument("--kind", default="tiny", choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    figures = {}
    for layers in map(int, args.layers.split(",")):
        with tempfile.TemporaryDirectory(prefix="link_") as folder:
            measured = measure(Path(folder), args.kind, layers, args.repeats)
        figures[f"{layers} layers"] = measured
        print(f"{layers} layers: {measured}", flush=True)
    print(json.dumps(figures))


def measure(folder: Path, kind: str, layers: int, repeats: int) -> dict[str, Any]:
    config = make_config(kind, layers)
    folder.joinpath("config.json").write_text(json.dumps(config))
    ranks = BenchRanks(config, NUM_RANKS)
    spec = EngineSpec(
        str(folder),
        str(folder / "engine.log"),
        kv_cache_len=1024,
        max_running=2,
        custom_weight_loaders=(LOADER,),
        extra_args=("--load-format", "dummy"),
    )
    figures: dict[str, Any] = {"expert_tensors": 3 * layers * config["num_experts"]}
    try:
        with EngineProcess(spec) as engine:
            for way in ("recorded", "listed"):
                figures |= link(engine, ranks, config, way, repeats)
    finally:
        ranks.stop()
    return figures


def link(
    engine: EngineProcess, ranks: BenchRanks, config: dict[str, Any], way: str, repeats: int
) -> dict[str, float]:
    """Return the seconds of a link with layouts found in `way`, and of the first sync over it."""
    record = record_layouts(config, NUM_RANKS) if way == "recorded" else None
    controller = SyncController(ranks, timeout_s=TIMEOUT_S, record=record)
    url = engine.url
    pids = [engine.pid, *ranks.pids]
    seconds = []
    cpu = []
    for _ in range(repeats):
        began_cpu_s = _used_s(pids)
        began_s = time.perf_counter()
        asyncio.run(controller.connect([url]))
        seconds.append(time.perf_counter() - began_s)
        cpu.append(_used_s(pids) - began_cpu_s)
    assert controller.agreed_layouts(url).startswith(way), controller.agreed_layouts(url)
    began_s = time.perf_counter()
    asyncio.run(controller.sync(0))
    first_sync_s = time.perf_counter() - began_s
    figures = {
        "first_link_s": seconds[0],
        "link_s": median(seconds),
        "least_s": min(seconds),
        "cpu_s": median(cpu),
        "first_sync_s": first_sync_s,
    }
    return {f"{way}_{name}": round(value, 3) for name, value in figures.items()}


def _used_s(pids: Sequence[int]) -> float:
    """Return the CPU time that the processes and their children have used."""
    return sum(map(cpu_seconds, with_children(pids)))


if __name__ == "__main__":
    main()
