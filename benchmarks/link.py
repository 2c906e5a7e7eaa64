"""Measures how long it takes to link an SGLang engine, by the number of the experts' tensors.

To link is to trace the engine's loader, to plan on all ranks, to compare the plans and to share
memory. Two trainer ranks with TP = EP = 2 and one engine link so many times for each number of
layers, with the layouts recorded, as in a run, and with layouts that the ranks list for one
another. One sync after the last link binds the buckets to the tensors. CPU seconds are those of the
engine and of the trainer ranks together, which other work on the machine leaves as they are. The
last line is JSON.

With --ranks 2048,512 stand-ins for so many trainer ranks and engine ranks link in this machine's
processes, all engines at once: everything but the trace and the weights (stand_in_ranks.py). CPU
seconds of the controller, of all trainer ranks and of all engine ranks are apart, and so are those
of the slowest rank of each side: in a run each rank has a core of its own, so the controller and
the slowest rank together (critical_cpu_s) are what the machines of a run have to wait for.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from cpu_time import cpu_seconds, with_children
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.weight_sync.controller.engine_control import LOADER
from mcore_rl.weight_sync.controller.sync import SyncController
from stand_in_ranks import StandInEngines, StandIns, StandInTrainers
from sync_model import SHAPES, make_config, record_layouts
from sync_trainer import BenchRanks

os.environ.setdefault("OMP_NUM_THREADS", "1")
NUM_RANKS = 2
SIDES = ("trainer", "engine")
TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="4,15,29,58", help="58 have DeepSeek-V3's experts")
    parser.add_argument("--kind", default="tiny", choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", help="trainer ranks, engine ranks of all engines: 2048,512")
    parser.add_argument("--engine-ranks", type=int, default=32, help="of one engine, with --ranks")
    args = parser.parse_args()
    if args.ranks:
        trainer_ranks, engine_ranks = map(int, args.ranks.split(","))
        sizes = StandIns(trainer_ranks, args.engine_ranks, int(args.layers.split(",")[0]))
        print(json.dumps(measure_stand_ins(sizes, engine_ranks // args.engine_ranks, args.repeats)))
        return
    figures = {}
    for layers in map(int, args.layers.split(",")):
        with tempfile.TemporaryDirectory(prefix="link_") as folder:
            measured = measure(Path(folder), args.kind, layers, args.repeats)
        figures[f"{layers} layers"] = measured
        print(f"{layers} layers: {measured}", flush=True)
    print(json.dumps(figures))


def measure_stand_ins(sizes: StandIns, num_engines: int, repeats: int) -> dict[str, Any]:
    """Return seconds and CPU seconds of linking all engines, the medians of `repeats` links.

    The first link of a process imports modules and computes plans that later links find ready.
    """
    trainers = StandInTrainers(sizes)
    engines = StandInEngines(sizes, num_engines)
    pids = {"controller": [os.getpid()], "trainers": trainers.pids, "engines": engines.pids}
    layouts = sizes.recorded()
    controller = SyncController(trainers, timeout_s=TIMEOUT_S, record=lambda _: layouts)
    figures: dict[str, list[float]] = defaultdict(list)
    try:
        for _ in range(repeats):
            before = {name: _used_of(own) for name, own in pids.items()}
            began_s = time.perf_counter()
            asyncio.run(controller.connect(engines.urls))
            figures["all_engines_s"].append(time.perf_counter() - began_s)
            for name, own in pids.items():
                figures[f"{name}_cpu_s"].append(_used_of(own) - before[name])
            figures["slowest_trainer_rank_cpu_s"].append(asyncio.run(trainers.slowest_cpu_s()))
            figures["slowest_engine_rank_cpu_s"].append(engines.slowest_cpu_s())
            slowest_s = max(figures[f"slowest_{side}_rank_cpu_s"][-1] for side in SIDES)
            figures["critical_cpu_s"].append(figures["controller_cpu_s"][-1] + slowest_s)
            print({name: round(values[-1], 2) for name, values in figures.items()}, flush=True)
        began_s = time.perf_counter()
        asyncio.run(controller.connect(engines.urls[:1]))
        figures["one_engine_s"].append(time.perf_counter() - began_s)
    finally:
        trainers.stop()
        engines.stop()
    first_s = figures["all_engines_s"][0]
    return {
        "trainer_ranks": sizes.trainer_ranks,
        "engines": num_engines,
        "ranks_per_engine": sizes.engine_ranks,
        "first_s": round(first_s, 3),
        **{name: round(median(values), 3) for name, values in figures.items()},
    }


def _used_of(pids: Sequence[int]) -> float:
    """Return the CPU time that the processes have used, without those they started."""
    return sum(cpu_seconds(psutil.Process(pid)) for pid in pids)


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
    assert controller.get_agreed_layouts(url).startswith(way), controller.get_agreed_layouts(url)
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
