"""The end of an episode names its reason."""

from mcore_rl.agents.messages import EndReason, EpisodeEndedError


def test_the_error_says_why_an_episode_is_over() -> None:
    ended = EpisodeEndedError(EndReason.MAX_TOKENS, "41 of 40 tokens")
    assert ended.reason is EndReason.MAX_TOKENS and str(ended) == "max_tokens: 41 of 40 tokens"
    assert str(EpisodeEndedError(EndReason.DONE)) == "done"
