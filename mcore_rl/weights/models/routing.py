"""Refuses the routing options of a recipe that its model cannot use."""

from mcore_rl.config import TrainConfig
from mcore_rl.weights.hf.config import moe_layers
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig


def check_routing(train: TrainConfig, config: HfConfig) -> None:
    """Raises ValueError naming the first option of `train` that the model has no use for."""
    architecture = config["architectures"][0]
    unused = {
        "router_replay": "none",
        "router_aux_loss_coef": 0.0,
        "router_sequence_aux_loss_coef": 0.0,
        "router_bias_rate": 0.0,
        "freeze_router": False,
    }
    for name, off in unused.items():
        if getattr(train, name) != off and not any(moe_layers(config)):
            raise ValueError(
                f"train.{name}={getattr(train, name)}, but {architecture} has no experts:"
                f" set train.{name}={str(off).lower()}"
            )
    has_bias = family_of(config).options(config).get("moe_router_enable_expert_bias")
    if train.router_bias_rate and not has_bias:
        raise ValueError(
            f"train.router_bias_rate={train.router_bias_rate}, but routers of {architecture} have"
            " no bias that engines would know of: set train.router_bias_rate=0;"
            " train.router_sequence_aux_loss_coef balances, too"
        )
