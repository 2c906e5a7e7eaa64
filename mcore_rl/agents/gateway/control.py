"""The gateway's answers about models and sessions, and rewards that programs report."""

import math
from typing import Any

from mcore_rl.agents.gateway.episode_chat import EpisodeChat
from mcore_rl.agents.gateway.errors import BadRequest, episode_over
from mcore_rl.agents.gateway.fields import Body, optional
from mcore_rl.agents.gateway.sessions import OpenSession
from mcore_rl.agents.messages import EpisodeEnded

_SINCE = "2025-01-01T00:00:00Z"
_SINCE_S = 1735689600


def model_list(model: str) -> dict[str, Any]:
    """Return a list of one model, with the fields of OpenAI's and of Anthropic's."""
    entry = {
        "id": model,
        "object": "model",
        "created": _SINCE_S,
        "owned_by": "mcore_rl",
        "type": "model",
        "display_name": model,
        "created_at": _SINCE,
    }
    ends = {"first_id": model, "last_id": model, "has_more": False}
    return {"object": "list", "data": [entry], **ends}


def session_report(opened: OpenSession) -> dict[str, int]:
    """Return how far an episode is, for the program that runs it."""
    return {
        "turns": opened.num_turns,
        "prompt_tokens": opened.num_prompt_tokens,
        "sampled_tokens": opened.num_sampled_tokens,
    }


def read_reward(body: Body) -> tuple[float, int | None]:
    """Return a reward, and the number of the turn that it is for; None: for the episode."""
    value = body.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest("reward", "must be a finite number")
    turn = optional(body, "turn", int)
    if turn is not None and turn < 0:
        raise BadRequest("turn", f"is {turn}; turns are counted from 0")
    return float(value), turn


def add_reward(chat: EpisodeChat, reward: float, turn: int | None) -> None:
    """Give a reward to the recorder; the client is told if it refuses the turn."""
    try:
        chat.add_reward(reward, turn)
    except EpisodeEnded as ended:
        raise episode_over(ended) from ended
    except ValueError as error:
        raise BadRequest("turn", str(error)) from error
