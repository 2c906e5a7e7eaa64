"""An environment of your own: the policy guesses a number, and is told "higher" or "lower".

    mcore-rl data arithmetic --out data/arithmetic
    mcore-rl agent run recipe=tiny_agent_calculator model.path=Qwen/Qwen3-0.6B \
        data.train=[data/arithmetic/train.parquet] \
        agents.environment=examples/own_environment.py:HigherLower agents.options={max_guesses:6} \
        data.max_prompt_len=512 rollout.max_response_len=512

The number is the answer of the prompt's problem. `mcore-rl train` takes the same options. Methods
may be coroutines; each episode has an object of its own, in a worker process (docs/agents.md).
"""

import re
from collections.abc import Mapping
from typing import Any

from mcore_rl.agents.environments.environment import Start, Step


class HigherLower:
    def __init__(self, max_guesses: int = 6) -> None:
        self.guesses_left = max_guesses

    def reset(self, task: Mapping[str, Any]) -> Start:
        self.number = int(task["ground_truth"])
        return Start([{"role": "user", "content": "Guess my number, from 0 to 99."}])

    def step(self, message: Mapping[str, Any]) -> Step:
        found = re.search(r"-?\d+", message["content"] or "")
        self.guesses_left -= 1
        if found and int(found[0]) == self.number:
            return Step(reward=1.0, done=True, metrics={"guesses_left": float(self.guesses_left)})
        if not self.guesses_left:
            return Step(done=True)
        if found is None:
            return Step([{"role": "user", "content": "That is no number."}])
        told = "higher" if int(found[0]) < self.number else "lower"
        return Step([{"role": "user", "content": f"My number is {told}."}])

    def close(self) -> None:
        pass
