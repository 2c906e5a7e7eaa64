"""Compares ways to spread requests over engines, by simulation of one recipe on the same prompts.

    python benchmarks/routing.py

round robin     each request to the next engine, prompts in their order
affinity        requests of a prompt to the engine that has it cached, else to the least loaded
longest first   the same, and prompts with long responses in earlier epochs begin first

Half of the variance of response lengths lies between prompts; lengths are drawn anew in each epoch.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import fmean
from unittest.mock import patch

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.models import read_models
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine_load import EngineLoad
from mcore_rl.rollout.least_loaded import LeastLoaded
from mcore_rl.rollout.length_history import LengthHistory
from mcore_rl.rollout.request import Request
from mcore_rl.simulation.command import checked
from mcore_rl.simulation.hardware import ReachedShares
from mcore_rl.simulation.recipe_costs import RecipeCosts
from mcore_rl.simulation.simulate import simulate
from mcore_rl.types import Prompt

WAYS = ("round robin", "affinity", "longest first")
EPOCH = 2
"""Steps of an epoch."""


@contextmanager
def routed(way: str) -> Iterator[None]:
    """Have collectors and their pool spread requests this way."""
    turns: dict[int, Iterator[int]] = {}

    def in_turn(thing: object, num: int) -> int:
        return next(turns.setdefault(id(thing), itertools.cycle(range(num))))

    def pick(client: RolloutClient, request: Request, failed: Sequence[EngineLoad]) -> EngineLoad:
        return client._own[in_turn(client, len(client._own))]

    def least(loads: LeastLoaded) -> int:
        return in_turn(loads, len(loads._loads))

    def as_given(history: LengthHistory, prompts: Sequence[Prompt]) -> list[int]:
        return list(range(len(prompts)))

    with ExitStack() as stack:
        if way == "round robin":
            stack.enter_context(patch.object(RolloutClient, "_pick", pick))
            stack.enter_context(patch.object(LeastLoaded, "least", least))
        if way != "longest first":
            stack.enter_context(patch.object(LengthHistory, "longest_first", as_given))
        yield


def rollout_seconds(way: str, recipe: str, seed: int, steps: int) -> float:
    """Return the mean seconds of a rollout, from the second epoch on."""
    config = load_recipe(recipe, [f"run.seed={seed}", f"simulate.steps={steps}"])
    prompts = EPOCH * config.rollout.prompts_per_step
    config = load_recipe(
        recipe,
        [f"run.seed={seed}", f"simulate.steps={steps}", f"simulate.prompts={prompts}"],
    )
    config = checked(config)
    with routed(way):
        result = simulate(config, RecipeCosts.of(config, read_models(config), ReachedShares()))
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
