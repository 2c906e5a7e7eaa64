"""An advantage of your own: how far a reward is above the median of its group.

    mcore-rl data arithmetic --out data/arithmetic
    mcore-rl sft recipe=tiny_moe_grpo model.init=random run.dir=runs/sft
    mcore-rl train recipe=tiny_moe_grpo model.path=runs/sft/hf run.dir=runs/own_advantage \
        algorithm.path=examples/own_advantage.py algorithm.advantage=above_median

The file is read once, by the controller. `sees="samples"` says that numbers by sample are enough,
so no token leaves its node (docs/algorithms.md).
"""

from torch import Tensor

from mcore_rl.algo.outcomes import Groups, Outcomes
from mcore_rl.algo.registry import advantages
from mcore_rl.config import AlgorithmConfig


@advantages.register("above_median", sees="samples")
def compute_above_median(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """Return the reward minus the median reward of the prompt's samples, for each sample."""
    scores_N = outcomes.scores_N
    margin_N = scores_N.clone()
    for members in Groups.from_ids(outcomes.group_N).members:
        margin_N[members] -= scores_N[members].quantile(0.5)
    return outcomes.spread(margin_N)
