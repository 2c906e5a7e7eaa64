"""Makes the scorer that a recipe describes; the controller checks it, collectors use it."""

from mcore_rl.config import Config
from mcore_rl.rewards.model_scorers import JudgeScorer, ModelScorer, RewardModelScorer
from mcore_rl.rewards.scorer import Scorer


def make_scorer(config: Config) -> Scorer:
    """Return the scorer of a run.

    Raises ValueError if its function, template or tokenizer cannot be used.
    """
    model_scorers: dict[str, ModelScorer] = {}
    if config.judge.is_used:
        model_scorers["judge"] = JudgeScorer(config.reward.judge)
    if config.reward_model.is_used:
        folder = config.reward.model_tokenizer or config.reward_model.path
        trust_remote_code = config.model.trust_remote_code
        model_scorers["reward_model"] = RewardModelScorer(folder, trust_remote_code)
    return Scorer(
        config.reward,
        config.rollout.max_response_len,
        model_scorers,
        has_environment=config.agents.is_used,
    )
