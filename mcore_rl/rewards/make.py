"""Makes the scorer that a recipe describes; the controller checks it, collectors use it."""

from collections.abc import Mapping

from mcore_rl.config import RewardConfig, ServedModelConfig
from mcore_rl.rewards.model_scorers import JudgeScorer, ModelScorer, RewardModelScorer
from mcore_rl.rewards.scorer import Scorer


def make_scorer(
    reward: RewardConfig,
    max_response_len: int,
    served: Mapping[str, ServedModelConfig],
    *,
    trust_remote_code: bool = False,
    has_environment: bool = False,
) -> Scorer:
    """Return the scorer of a run; `served` are the models that are served beside the policy.

    Raises ValueError if its function, template or tokenizer cannot be used.
    """
    model_scorers: dict[str, ModelScorer] = {}
    if "judge" in served:
        model_scorers["judge"] = JudgeScorer(reward.judge)
    if "reward_model" in served:
        folder = reward.model_tokenizer or served["reward_model"].path
        model_scorers["reward_model"] = RewardModelScorer(folder, trust_remote_code)
    return Scorer(reward, max_response_len, model_scorers, has_environment=has_environment)
