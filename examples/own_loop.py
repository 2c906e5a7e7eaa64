"""A loop of your own: train until the reward of five steps is high enough, then save and stop.

    mcore-rl data arithmetic --out data/arithmetic
    mcore-rl sft recipe=tiny_moe_grpo model.init=random run.dir=runs/sft
    python examples/own_loop.py 0.8 tiny_moe_grpo model.path=runs/sft/hf run.dir=runs/own_loop

`open_run` starts ranks and engines, and ends them; `run_step` is the step of `mcore-rl train`.
"""

import sys
from collections import deque

from mcore_rl.api import (
    Config,
    PhaseTimer,
    load_recipe,
    make_step_options,
    open_run,
    run_evaluation,
    run_step,
    save_checkpoint,
)


def train_until(config: Config, reward: float) -> None:
    """Train until the mean reward of five steps is `reward`, at most for `run.steps`."""
    sampling, training = make_step_options(config)
    latest: deque[float] = deque(maxlen=5)
    with open_run(config) as (roles, step):
        while step < config.run.steps and (len(latest) < 5 or sum(latest) / 5 < reward):
            step += 1
            seed = config.run.seed + step
            metrics = run_step(sampling, training, roles, PhaseTimer(step), seed)
            latest.append(metrics["reward/mean"])
            print(f"step {step}: reward {latest[-1]:.3f}")
        run_evaluation(config, roles, step)
        save_checkpoint(roles, PhaseTimer(step), step)


if __name__ == "__main__":
    wanted, recipe, *settings = sys.argv[1:]
    train_until(load_recipe(recipe, settings), float(wanted))
