"""Compares ways to spread requests over engines, by simulation of one recipe on the same prompts.

    python benchmarks/routing.py

round robin     each request to the next engine, prompts in their order
affinity        requests of a prompt to the engine that has it cached, else to the least loaded
longest first   the same, and prompts with long responses in earlier epochs begin first: the product
admission       the same with rollout.min_free_kv=0.2: a request waits in its collector, in its
                order, while every engine of the node has less of its KV cache free
migration       as longest first, with rollout.migration_gap=4: a node's engine with more requests
                hands its newest to the idlest one of the node, where they are prefilled again
all migrate     the same between all engines, without delay and knowing each

The last one is not built: it bounds what moving could gain, as it knows each engine's queue at any
moment. Half of the variance of response lengths lies between prompts; lengths
are drawn anew in each epoch.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import Any
from unittest.mock import patch

from mcore_rl.config.recipe import load_recipe
from mcore_rl.rollout.client import EngineSet
from mcore_rl.rollout.collector_pool import LeastLoaded, LengthHistory
from mcore_rl.rollout.engine_health import EngineLoad
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.engine import SimulatedEngine
from mcore_rl.tools.simulate.prediction import make_checked
from mcore_rl.tools.simulate.simulate import simulate
from mcore_rl.tools.simulate.virtual_time import ReachedShares, VirtualLoop
from mcore_rl.types import Prompt

WAYS = ("round robin", "affinity", "longest first", "admission", "migration", "all migrate")
EPOCH = 2
"""Steps of an epoch."""
MIN_FREE_KV = 0.2
"""Share of its KV cache that an engine has free to be given a request, with admission."""
LEAST_GAP = 4
"""Requests that an engine has more than another before one of them moves."""
POLL_S = 1.0


@contextmanager
def routed(way: str) -> Iterator[None]:
    """Have collectors and their pool spread requests this way."""
    turns: dict[int, Iterator[int]] = {}

    def in_turn(thing: object, num: int) -> int:
        return next(turns.setdefault(id(thing), itertools.cycle(range(num))))

    def pick(engines: EngineSet, *_: object) -> EngineLoad:
        own = engines.list_own()
        return own[in_turn(engines, len(own))]

    def least(loads: LeastLoaded) -> int:
        return in_turn(loads, len(loads._loads))

    def as_given(history: LengthHistory, prompts: Sequence[Prompt]) -> list[int]:
        return list(range(len(prompts)))

    with ExitStack() as stack:
        if way == "all migrate":
            stack.enter_context(migration())
        if way == "round robin":
            stack.enter_context(patch.object(EngineSet, "pick", pick))
            stack.enter_context(patch.object(LeastLoaded, "least", least))
        if way in ("round robin", "affinity"):
            stack.enter_context(patch.object(LengthHistory, "sort_longest_first", as_given))
        yield


@contextmanager
def all_engines() -> Iterator[dict[str, SimulatedEngine]]:
    """Yield the engines of the simulation that runs in the block, by url."""
    engines: dict[str, SimulatedEngine] = {}
    make = SimulatedEngine.__init__

    def made(engine: SimulatedEngine, loop: VirtualLoop, url: str, *args: Any) -> None:
        make(engine, loop, url, *args)
        engines[url] = engine

    with patch.object(SimulatedEngine, "__init__", made):
        yield engines


@contextmanager
def migration() -> Iterator[None]:
    """Have engines hand requests over once a second, while no request waits at the idler one."""
    step = SimulatedEngine._step
    moved_s = [0.0]

    with all_engines() as engines:

        def moving(engine: SimulatedEngine) -> None:
            step(engine)
            now_s = engine._loop.time()
            if moved_s[0] <= now_s < moved_s[0] + POLL_S or engine._is_paused:
                return
            moved_s[0] = now_s
            while _hand_over(sorted(engines.values(), key=_num_requests)):
                pass

        with patch.object(SimulatedEngine, "_step", moving):
            yield


def _num_requests(engine: SimulatedEngine) -> int:
    return len(engine._running) + len(engine._waiting)


def _hand_over(by_load: Sequence[SimulatedEngine]) -> bool:
    """Move the newest request of the most loaded engine to the least loaded; return if one did."""
    least, most = by_load[0], by_load[-1]
    if least._waiting or _num_requests(most) - _num_requests(least) < LEAST_GAP:
        return False
    if most._waiting:
        request = most._waiting.pop()
    else:
        most._advance()
        request = most._leave(next(reversed(most._running)))
        most._poke()
    least._advance()
    least._waiting.append(request)
    least._poke()
    return True


def rollout_seconds(way: str, recipe: str, seed: int, steps: int) -> float:
    """Return the mean seconds of a rollout, from the second epoch on."""
    config = load_recipe(recipe, [f"run.seed={seed}", f"simulate.steps={steps}"])
    prompts = EPOCH * config.rollout.prompts_per_step
    settings = [f"run.seed={seed}", f"simulate.steps={steps}", f"simulate.prompts={prompts}"]
    if way == "admission":
        settings += [f"rollout.min_free_kv={MIN_FREE_KV}"]
    if way == "migration":
        settings += [f"rollout.migration_gap={LEAST_GAP}"]
    config = load_recipe(recipe, settings)
    config = make_checked(config)
    with routed(way):
        result = simulate(config, RecipeCosts.make(config, ReachedShares()))
    return fmean(m["time/rollout"] for step, m in result.steps.items() if step > EPOCH)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="qwen3_30b_a3b_grpo_8", help="with rollout.mode=sync")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    seconds = {
        way: [rollout_seconds(way, args.recipe, seed, args.steps) for seed in range(args.seeds)]
        for way in WAYS
    }
    ratios = {
        way: [s / first for s, first in zip(seconds[way], seconds[WAYS[0]], strict=True)]
        for way in WAYS
    }
    for way in WAYS:
        shown = " ".join(f"{value:.1f}" for value in seconds[way])
        print(f"{way:14} {shown}   {fmean(ratios[way]):.3f} of round robin")
    print(
        json.dumps(
            {
                "recipe": args.recipe,
                "rollout_s": {way: round(fmean(seconds[way]), 2) for way in WAYS},
                "of_round_robin": {way: round(fmean(ratios[way]), 4) for way in WAYS},
            }
        )
    )


if __name__ == "__main__":
    main()
