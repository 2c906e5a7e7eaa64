"""Refuses options that contradict low-rank factors, or that nothing reads beside them."""

from collections.abc import Iterator, Mapping

from mcore_rl.config.training import OptimizerConfig, TrainConfig
from mcore_rl.config.tree_checks import Unread

_FROZEN = (
    "train.freeze_router",
    "train.vision",
    "train.router_aux_loss_coef",
    "train.router_sequence_aux_loss_coef",
    "train.router_bias_rate",
)
"""Options of weights that are frozen under factors: routers, their biases and vision towers."""


def find_unread_beside_lora(
    train: TrainConfig, optimizers: Mapping[str, OptimizerConfig]
) -> Iterator[Unread]:
    """Yield the options that nothing reads. `optimizers`: by group; the critic has no factors."""
    if not train.lora.rank:
        yield Unread(("train.lora",), "train.lora.rank=0", "set train.lora.rank=32")
        return
    context = f"train.lora.rank={train.lora.rank}"
    remedy = "set train.lora.rank=0"
    yield Unread(_FROZEN, context, remedy)
    for group in _list_groups(optimizers):
        yield Unread((f"{group}.vision_lr",), context, remedy)


def check_lora(train: TrainConfig, optimizers: Mapping[str, OptimizerConfig]) -> None:
    """Raise ValueError if factors cannot be trained as the recipe says."""
    rank = train.lora.rank
    if not rank:
        return
    for group in _list_groups(optimizers):
        if optimizers[group].name == "muon":
            raise ValueError(
                f"{group}.name=muon with train.lora.rank={rank}: it makes the update of a matrix"
                " orthogonal, and the updates of two factors do not make that of their product;"
                f" set {group}.name=adam or lion"
            )
    if train.megatron.get("gradient_accumulation_fusion"):
        raise ValueError(
            f"train.megatron.gradient_accumulation_fusion=true with train.lora.rank={rank}: it adds"
            " gradients of weights to a buffer, which frozen weights do not have; leave it out"
        )
    if train.ddp.get("overlap_grad_reduce"):
        raise ValueError(
            f"train.ddp.overlap_grad_reduce=true with train.lora.rank={rank}: factors get their"
            " gradients outside of autograd, which it watches; set"
            " train.ddp.overlap_grad_reduce=false"
        )


def _list_groups(optimizers: Mapping[str, OptimizerConfig]) -> list[str]:
    return [group for group in optimizers if group != "critic.optimizer"]
