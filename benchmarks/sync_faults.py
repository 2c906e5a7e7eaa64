"""Kills or stops random processes during weight syncs and checks the outcomes.

Two trainer ranks send to two SGLang engines. A victim is a trainer rank (sender), the rank of the
engine that passes slices on (relay), the rank of the other engine (receiver), or all processes of
the other engine. After each fault the benchmark asserts that no engine in rotation has weights
other than its version's, that the sync ended by its deadline, that the survivors sync on, and that
the victim is readmitted once it is restarted or continued. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil

from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.weight_sync.controller.engine_control import LOADER
from mcore_rl.weight_sync.controller.sync import SyncController, SyncError
from sync import post
from sync_model import Case, write_config
from sync_trainer import BenchRanks

VICTIMS = ("sender", "relay", "receiver", "engine")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
TIMEOUT_S = 8.0
DEADLINE_S = 2 * (TIMEOUT_S + 10) + 5
"""The SyncController's deadline for a sync that leaves engines behind, with the least swap time."""
SLACK_S = 5.0
MAX_SYNCS = 3


class Stage:
    """Trainer ranks and two engines. Version v has the model's weights, negated if v is odd."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case = case
        self._model = write_config(case, folder / "model")
        self.engines = [self._start(folder / f"engine{i}.log") for i in range(2)]
        for engine in self.engines:
            engine.wait_healthy()
        self.version = 0
        self.expected: dict[int, str] = {}
        self.start_trainer()

    def start_trainer(self) -> None:
        self.ranks = BenchRanks(self._case.config(), 2)
        for _ in range(2 + self.version % 2):
            self.ranks.call("flip_sign")
        self.ranks.timeout_s = TIMEOUT_S + 12
        self.sync_controller = SyncController(self.ranks, timeout_s=TIMEOUT_S)
        asyncio.run(self.sync_controller.connect([engine.url for engine in self.engines]))

    def _start(self, log: Path) -> EngineProcess:
        spec = EngineSpec(
            str(self._model),
            str(log),
            kv_cache_len=1024,
            max_running=2,
            custom_weight_loaders=(LOADER,),
            extra_args=("--load-format", "dummy"),
        )
        engine = EngineProcess(spec)
        engine.start()
        return engine

    def sync(self) -> float:
        """Sync the next version; return the seconds it took, even if it failed for some engine."""
        self.ranks.call("flip_sign")
        self.version += 1
        began_s = time.monotonic()
        lost = [
            engine.url for engine in self.engines if engine.url not in self.sync_controller.linked
        ]
        with contextlib.suppress(SyncError):  # tried again before the next sync
            asyncio.run(self.sync_controller.connect(lost))
        asyncio.run(self.sync_controller.sync(self.version))
        return time.monotonic() - began_s

    def sync_until_all_serve(self) -> int:
        """Sync until both engines are in rotation; return the number of syncs.

        On a busy machine, linking an engine can outlast its deadline.
        """
        for num_syncs in range(1, MAX_SYNCS + 1):
            self.sync()
            if set(self.sync_controller.in_rotation) == {engine.url for engine in self.engines}:
                return num_syncs
        raise AssertionError(
            f"only {self.sync_controller.in_rotation} serve after {MAX_SYNCS} syncs"
        )

    def learn(self) -> None:
        """Record what the engines hold after clean syncs of even and odd versions."""
        for _ in range(3):
            self.sync()
            first, second = (weights_of(engine.url) for engine in self.engines)
            assert first == second, "two engines took different weights"
            known = self.expected.setdefault(self.version % 2, first)
            assert known == first, "the same version left different weights"

    def check_rotation(self) -> None:
        for url in self.sync_controller.in_rotation:
            version = self.sync_controller.find_version(url)
            assert version is not None
            assert weights_of(url) == self.expected[version % 2], (
                f"{url} is in rotation with mixed weights"
            )

    def restart_engine(self, index: int) -> None:
        old = self.engines[index]
        try:
            old.stop()
        except TimeoutError:  # a busy machine takes its time over the dead
            old.stop()
        self.engines[index] = EngineProcess(replace(old.spec, port=int(old.url.rsplit(":", 1)[1])))
        self.engines[index].start()
        self.engines[index].wait_healthy()

    def stop(self) -> None:
        self.ranks.stop()
        for engine in self.engines:
            engine.stop()


def weights_of(url: str) -> str:
    """Return the checksums of an engine's weights, rank by rank."""
    ranks = post(url, "/weights_checker", action="checksum")["ranks"]
    return json.dumps([rank["checksums"] for rank in ranks])


def pids_of(stage: Stage, victim: str, engine: EngineProcess) -> list[int]:
    """Return the processes to strike."""
    if victim == "sender":
        return [random.choice(stage.ranks.pids)]
    parent = psutil.Process(engine.pid)
    processes = [parent, *parent.children(recursive=True)]
    if victim == "engine":
        return [process.pid for process in processes]
    schedulers = [p.pid for p in processes if "scheduler" in " ".join(p.cmdline())]
    return schedulers[:1]


def strike(stage: Stage, victim: str, kind: str, typical_s: float) -> str:
    """Cause one fault during one sync and recover from it; return the outcome of the sync."""
    url = stage.sync_controller.linked[0 if victim == "relay" else -1]
    index = [engine.url for engine in stage.engines].index(url)
    pids = pids_of(stage, victim, stage.engines[index])
    delay_s = random.uniform(0, 0.8 * typical_s)
    outcome = "all engines took it"
    began_s = time.monotonic()

    async def sync() -> None:
        async def hit() -> None:
            await asyncio.sleep(delay_s)
            for pid in pids:
                os.kill(pid, SIGNALS[kind])

        hitting = asyncio.ensure_future(hit())
        try:
            report = await stage.sync_controller.sync(stage.version)
        finally:
            await hitting
        if report.failed:
            nonlocal outcome
            outcome = "one engine failed"

    stage.ranks.call("flip_sign")
    stage.version += 1
    try:
        asyncio.run(sync())
    except SyncError:
        outcome = "no engine took it"
    took_s = time.monotonic() - began_s
    assert took_s < DEADLINE_S + SLACK_S, f"{kind} of {victim}: the sync hung for {took_s:.1f} s"
    if victim == "sender":
        stage.check_rotation()
        stage.ranks.stop()
        stage.start_trainer()
    else:
        survivor = stage.engines[1 - index].url
        assert survivor in stage.sync_controller.in_rotation, (
            "the fault took another engine with it"
        )
        if kind == "stop":
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        else:
            stage.restart_engine(index)
            outcome += ", restarted"
    num_syncs = stage.sync_until_all_serve()
    stage.check_rotation()
    return outcome + (f", readmitted by sync {num_syncs}" if num_syncs > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="faults per signal and victim")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    logging.basicConfig(level=logging.WARNING)
    outcomes: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="sync_faults_") as folder:
        stage = Stage(Case(args.mib, "large"), Path(folder))
        try:
            stage.learn()
            typical_s = sorted(stage.sync() for _ in range(5))[2]
            print(f"a sync takes {typical_s:.3f} s", flush=True)
            for victim in args.victims.split(","):
                for kind in SIGNALS:
                    counts = outcomes.setdefault(f"{kind} {victim}", Counter())
                    for _ in range(args.times):
                        counts[strike(stage, victim, kind, typical_s)] += 1
                    print(f"{kind} {victim}: {dict(counts)}", flush=True)
        finally:
            stage.stop()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
