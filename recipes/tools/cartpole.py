"""CartPole as an environment of one's own: it says four words, and takes one as the answer."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from mcore_rl.agents.environments.environment import Start, Step

RANGES = {  # bounds of the ranges of position, velocity, angle and angular velocity
    "x": (-1.6, -0.8, -0.3, 0, 0.3, 0.8, 1.6),
    "v": (-1, -0.5, -0.2, 0, 0.2, 0.5, 1),
    "a": (-0.12, -0.07, -0.03, -0.01, 0.01, 0.03, 0.07, 0.12),
    "w": (-1.2, -0.7, -0.3, -0.1, 0.1, 0.3, 0.7, 1.2),
}


class CartPole:
    def __init__(self, action_repeat: int = 2) -> None:
        self.action_repeat = action_repeat
        self.env = gymnasium.make("CartPole-v1")

    def reset(self, task: Mapping[str, Any]) -> Start:
        observation, _ = self.env.reset(seed=task["extra_info"]["seed"])
        self.state = self.say(observation)
        return Start([self.state])

    def step(self, message: Mapping[str, Any]) -> Step:
        answer = message["content"].strip()
        if answer not in ("left", "right"):
            return Step(done=True)
        reward = 0.0
        for _ in range(self.action_repeat):
            observation, one, has_fallen, is_over, _ = self.env.step(int(answer == "right"))
            reward += float(one)
            self.state = self.say(observation)
            if has_fallen or is_over:
                return Step(reward=reward, done=True)
        return Step([self.state], reward)

    def say(self, observation: Sequence[float]) -> dict[str, str]:
        pairs = zip(RANGES.items(), observation, strict=True)
        words = [f"{name}{bisect_left(bounds, number)}" for (name, bounds), number in pairs]
        return {"role": "user", "content": " ".join(words)}

    def close(self) -> None:
        self.env.close()
