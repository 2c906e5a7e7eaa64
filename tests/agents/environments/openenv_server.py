"""A server of OpenEnv as its users write one: a secret number is guessed. Takes its port."""

import sys

import uvicorn
from openenv.core.env_server import (  # pyright: ignore[reportMissingImports]
    Environment,
    create_fastapi_app,
)
from openenv.core.env_server.types import (  # pyright: ignore[reportMissingImports]
    Action,
    Observation,
    State,
)


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, secret=None, **kwargs):
        self.secret = str(secret if secret is not None else seed)
        return Hint(hint="guess")

    def step(self, action, timeout_s=None, **kwargs):
        right = action.message == self.secret
        return Hint(hint=f"not {action.message}", done=right, reward=float(right))

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
