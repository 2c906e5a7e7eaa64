"""Compares a weight sync with other systems' ways on equal terms: one host, gloo or one GPU.

All work counts, gathers included. What is fast over shared memory of one host says nothing about
GPUs or about several hosts. Trainer ranks with TP = EP and one SGLang engine, as separate
processes. The ways take turns, and the weights change before each: every turn but the first two
must leave exactly what SGLang's own loader makes of a checkpoint of the weights as they are then.

this                      slices by shared memory, summed on both sides, staged
gather, each tensor       gathered on rank 0 with asynchronous calls and broadcast one by one, as
                          slime does (update_weights_from_distributed)
gather, flat, gloo        the same, each bucket of 512 MiB as one tensor
gather, flat, memory      the same, each bucket in shared memory (update_weights_from_tensor)

On a GPU one trainer rank and the engine share it. Only the last way is compared there, through the
trainer's GPU memory, as slime and SGLang's own examples do; --pull has this system do without
buckets (sync.pull). The plain copy is then one on the GPU.

A plain copy of as many bytes between two processes, through a socket and through shared memory,
takes its turn as well. The first sync counts everything that comes before the second: groups,
tracing, planning, handshakes. Memory is what the trainer ranks and the engine have more at the
peak of the second turn than before: before this system was linked, or before the first of the other
ways, which may reuse one another's memory. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from checkpoint_tools.pool import PeakMemory, measure_proportional
from mcore_rl.config import SyncConfig
from mcore_rl.device import device, has_cuda, synchronize
from mcore_rl.process.network import find_free_port
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.weight_sync.controller.engine_control import LOADER
from mcore_rl.weight_sync.controller.sync import RecordLayouts, SyncController
from refit_ranks import RefitRank
from sync_model import SHAPES, Case, num_bytes, record_layouts, write_config
from sync_raw import raw_seconds
from sync_trainer import BenchRanks, post

os.environ.setdefault("OMP_NUM_THREADS", "1")
OURS = "this"
RIVALS = {
    "gather, each tensor": "each_tensor",
    "gather, flat, gloo": "flat_broadcast",
    "gather, flat, memory": "flat_shared_memory",
}
ON_GPU = ("gather, flat, memory",)
"""The rivals on a GPU that trainer rank and engine share."""
LABELS = {
    OURS: "this system",
    "gather, each tensor": "gather, broadcast each tensor",
    "gather, flat, gloo": "gather, broadcast flat buckets",
    "gather, flat, memory": "gather, flat buckets in shared memory",
}
KIND_LABELS = {"small": "many small tensors", "large": "few large tensors"}
COLORS = ("#4477aa", "#bbbbbb", "#999999", "#666666")
TIMEOUT_S = 300.0


@dataclass
class Way:
    """How to send once, and what was measured.

    first_s     seconds of the set-up and the first sync
    peak_bytes  memory at the peak of a sync, beyond what there was without this way
    """

    send: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    first_s: float = 0.0
    peak_bytes: int = 0


class Scene:
    """Trainer ranks and an engine; `sign` says which of two versions the ranks have."""

    def __init__(
        self,
        engine: EngineProcess,
        ranks: BenchRanks,
        model: Path,
        tp: int,
        record: RecordLayouts,
        pull: bool = False,
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._model = model
        self._tp = tp
        self._record = record
        self._pull = pull
        self._sign = 1
        self._expected: dict[int, list[Any]] = {}
        self._version = 0
        self.ways: dict[str, Way] = {}

    @property
    def url(self) -> str:
        """Where the engine answers."""
        return self._engine.url

    def change_weights(self) -> None:
        self._ranks.call("flip_sign")
        self._sign = -self._sign

    def set_up(self) -> None:
        """Make groups and links, have each way sync once, and note what that took."""
        url = self._engine.url
        began_s = time.perf_counter()
        self._ranks.call("join_trainers", find_free_port("127.0.0.1"))
        if has_cuda():
            self._ranks.call("count_engine_ranks", self._tp)
        else:
            self._ranks.call("join_engine", url, self._tp, find_free_port("127.0.0.1"))
        groups_s = time.perf_counter() - began_s
        self._learn()
        before = self._memory()
        for name, method in list_rivals().items():
            self._start(name, lambda m=method: max(self._ranks.call(m, url)), groups_s, before)
        before = self._memory()
        began_s = time.perf_counter()
        # Everything is traced before, so that no trace runs beside the syncs that are timed.
        controller = SyncController(
            self._ranks,
            bucket_mib=256 if has_cuda() else SyncConfig().bucket_mib,
            timeout_s=TIMEOUT_S,
            pull=self._pull,
            record=self._record,
            trace_all=True,
        )
        asyncio.run(controller.connect([url]))

        def sync() -> float:
            self._version += 1
            return asyncio.run(controller.sync(self._version)).seconds

        self._start(OURS, sync, time.perf_counter() - began_s, before)

    def take_turn(self, name: str) -> float:
        """Send the other version in one way, check what the engine has, and return the seconds."""
        self.change_weights()
        seconds = self.ways[name].send()
        assert self._held() == self._expected[self._sign], f"{name} left other weights than it sent"
        return seconds

    def _start(self, name: str, send: Callable[[], float], set_up_s: float, before: int) -> None:
        """Take the first turn, and the second, in which memory is watched instead of the time."""
        self.ways[name] = Way(send)
        self.ways[name].first_s = set_up_s + self.take_turn(name)
        with PeakMemory(self._processes()) as memory:
            self.take_turn(name)
        self.ways[name].peak_bytes = memory.peak_bytes - before

    def _learn(self) -> None:
        """Have SGLang load both versions from files, and note the checksums of what it has then."""
        for _ in range(2):
            self.change_weights()
            self._ranks.call("prepare_whole_model", str(self._model))
            path = "/update_weights_from_disk"
            post(self._engine.url, path, model_path=str(self._model), load_format="auto")
            self._expected[self._sign] = self._held()
        self._ranks.call("forget_whole_model")
        assert self._expected[1] != self._expected[-1], "the two versions have the same checksums"

    def _held(self) -> list[Any]:
        answer = post(self._engine.url, "/weights_checker", action="checksum")
        return [rank["checksums"] for rank in answer["ranks"]]

    def _processes(self) -> list[int]:
        engine = psutil.Process(self._engine.pid)
        return [engine.pid, *(p.pid for p in engine.children(recursive=True)), *self._ranks.pids]

    def _memory(self) -> int:
        return sum(map(measure_proportional, self._processes()))


@contextmanager
def running(
    case: Case,
    folder: Path,
    args: argparse.Namespace,
    kv_cache_len: int = 1024,
    max_running: int = 2,
) -> Iterator[Scene]:
    model = write_config(case, folder / "model")
    ranks = BenchRanks(case.config(), args.trainer_ranks, rank_class=RefitRank)
    spec = EngineSpec(
        str(model),
        str(folder / "engine.log"),
        tp=args.engine_tp,
        kv_cache_len=kv_cache_len,
        max_running=max_running,
        custom_weight_loaders=(LOADER,),
        extra_args=("--load-format", "dummy"),
    )
    try:
        with EngineProcess(spec) as engine:
            record = record_layouts(case.config(), args.trainer_ranks)
            yield Scene(engine, ranks, model, args.engine_tp, record, args.pull)
    finally:
        ranks.stop()


def measure(case: Case, scene: Scene, repeats: int) -> dict[str, Any]:
    size = num_bytes(case.config())
    scene.set_up()
    raw: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name, way in scene.ways.items():
            way.seconds.append(scene.take_turn(name))
        copies = {"GPU": copy_on_gpu(size)} if has_cuda() else raw_seconds(size, 2)
        for name, seconds in copies.items():
            raw[name].append(seconds)
    return report(case, size, scene.ways, raw)


def list_rivals() -> dict[str, str]:
    """Return the other ways that this machine compares, and their methods."""
    return {name: RIVALS[name] for name in ON_GPU} if has_cuda() else RIVALS


def copy_on_gpu(num_bytes: int) -> float:
    """Return the seconds of a copy from the GPU's memory into the same."""
    source_u8 = torch.zeros(num_bytes, dtype=torch.uint8, device=device())
    target_u8 = torch.empty_like(source_u8)
    synchronize()
    began_s = time.perf_counter()
    target_u8.copy_(source_u8)
    synchronize()
    return time.perf_counter() - began_s


def report(
    case: Case, size: int, ways: dict[str, Way], raw: dict[str, list[float]]
) -> dict[str, Any]:
    """Print the table of a case and return its figures: medians, and ratios to this system."""
    print(f"\n{case.name}: {size / 2**20:.0f} MiB of weights")
    print(f"  {'':24s}{'seconds':>9s}{'first':>9s}{'peak MiB':>10s}{'times this':>12s}")
    ours_s = median(ways[OURS].seconds)
    figures: dict[str, Any] = {"mib": round(size / 2**20, 1)}
    for name, way in ways.items():
        taken_s = median(way.seconds)
        peak_mib = way.peak_bytes / 2**20
        print(
            f"  {name:24s}{taken_s:9.3f}{way.first_s:9.2f}{peak_mib:10.0f}{taken_s / ours_s:12.2f}"
        )
        figures[name] = {
            "seconds": round(taken_s, 4),
            "least_seconds": round(min(way.seconds), 4),
            "first_sync_seconds": round(way.first_s, 3),
            "peak_mib": round(peak_mib, 1),
            "times_this": round(taken_s / ours_s, 3),
        }
    for name, seconds in raw.items():
        taken_s = median(seconds)
        print(f"  plain copy, {name:12s}{taken_s:9.3f}{'':19s}{taken_s / ours_s:12.2f}")
        figures[f"share of a plain copy by {name}"] = round(taken_s / ours_s, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="64,512", help="MiB of weights")
    parser.add_argument("--kinds", default="small,large", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trainer-ranks", type=int, default=2)
    parser.add_argument("--engine-tp", type=int, default=1)
    parser.add_argument("--pull", action="store_true", help="read the trainer's GPU memory")
    parser.add_argument("--png", type=Path, help="draw the seconds of a sync")
    args = parser.parse_args()
    if has_cuda() and args.trainer_ranks > 1:
        parser.error("on a GPU one trainer rank is compared: --trainer-ranks 1")
    figures = {}
    for mib in args.sizes.split(","):
        for kind in args.kinds.split(","):
            case = Case(int(mib), kind)
            with (
                tempfile.TemporaryDirectory(prefix="refit_") as folder,
                running(case, Path(folder), args) as scene,
            ):
                figures[case.name] = measure(case, scene, args.repeats)
    if args.png:
        draw(figures, args.png)
    print(json.dumps(figures))


def draw(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the seconds of a sync of each case in each way, as bars on a logarithmic scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    names = (OURS, *list_rivals())
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [case + (i - (len(names) - 1) / 2) * width for case in range(len(figures))]
        seconds = [of_case[name]["seconds"] for of_case in figures.values()]
        bars = axes.bar(at, seconds, width, label=LABELS[name], color=COLORS[i])
        axes.bar_label(bars, labels=[f"{s:.2g}" for s in seconds], fontsize=6)
    titles = [
        f"{of_case['mib']:.0f} MiB,\n{KIND_LABELS[case.split()[-1]]}"
        for case, of_case in figures.items()
    ]
    axes.set_xticks(range(len(figures)), titles, fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("seconds of a sync")
    figure.legend(loc="outside upper center", ncols=2, fontsize=7)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
