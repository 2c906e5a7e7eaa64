"""The episode behind a session, as the gateway sees it."""

from typing import Protocol

from mcore_rl.agents.messages import ChatRequest, Completion


class Overloaded(Exception):
    """The policy takes no further request now; the client may ask again after `retry_after_s`."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the engines are busy; ask again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class EpisodeChat(Protocol):
    """Records one episode. All calls come on the gateway's event loop."""

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample the policy's next message; raises EpisodeEnded or Overloaded."""
        ...

    def add_reward(self, reward: float, turn: int | None) -> None:
        """Add to the reward of a turn, or of the episode if `turn` is None.

        ValueError: the episode has no such turn. EpisodeEnded: it takes no more rewards.
        """
        ...
