"""Options of the experts' routing against config.json; what the model cannot do is refused."""

from mcore_rl.config import TrainConfig
from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.hf_config import moe_layers


def check_routing(train: TrainConfig, config: HfConfig) -> None:
    """ValueError naming the first option of `train` that a model of this config.json has no use for."""
    if train.router_replay != "none" and not any(moe_layers(config)):
        raise ValueError(
            f"train.router_replay={train.router_replay}, but {config['architectures'][0]} has no experts:"
            " set train.router_replay=none"
        )
