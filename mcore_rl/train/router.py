"""The MoE router of training: megatron-core's, with balance losses that do not depend on the layout, and
with experts that may be given instead of chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.train.packing import RankBatch

AUX_LOSS, SEQUENCE_AUX_LOSS = "aux_loss", "seq_aux_loss"
"""megatron-core's names of the losses."""


def balance_losses(config: TransformerConfig) -> list[str]:
    """Names of the losses that have a coefficient."""
    names, coefs = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    assert isinstance(names, list) and isinstance(coefs, list), (names, coefs)
    return [name for name, coef in zip(names, coefs, strict=True) if coef]


@dataclass(frozen=True)
class RouterCall:
    """One run of one router.

    layer_number   counted from 1
    rows           which tokens of the batch are this rank's (sequence parallelism)
    given_TK       int64, experts that the batch names for these tokens, -1 where it does not
    replays        whether tokens go to `given_TK`
    again          a recomputation, which counts nowhere
    """

    layer_number: int
    rows: slice
    batch: RankBatch
    given_TK: Tensor | None
    replays: bool
    again: bool


class RoutingPass(Protocol):
    """What routers ask and tell; see train/routing.py."""

    def start_call(self, layer_number: int, num_rows: int) -> RouterCall: ...

    def end_call(
        self, call: RouterCall, own_TK: Tensor, taken_TK: Tensor, routing_map_TE: Tensor
    ) -> None: ...

    def add_loss(self, name: str, layer_number: int, loss: Tensor) -> None: ...


class ExpertChoice:
    """Stands where megatron-core asks for the experts with the best scores: given ones come first.

    megatron-core computes the gating weights of whatever is chosen here from its own scores, so they have the
    model's form and a gradient. Its own RouterReplay knows no tokens without given experts, and takes turns
    where this asks which micro-batch is meant.
    """

    def __init__(self) -> None:
        self.given_TK: Tensor | None = None
        self.own_TK = self.taken_TK = torch.empty(0)

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: Any,
        group_topk: Any,
        compute_topk: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        """(scores, numbers) of each token's experts; called by topk_routing_with_score_function."""
        scores_TK, self.own_TK = compute_topk(scores_TE, topk, num_groups, group_topk)
        self.taken_TK = self.own_TK
        if self.given_TK is None:
            return scores_TK, self.own_TK
        known_T1 = (self.given_TK >= 0).all(1, keepdim=True)
        self.taken_TK = torch.where(known_T1, self.given_TK, self.own_TK)
        return scores_TE.gather(1, self.taken_TK), self.taken_TK


class TokenWeightedRouter(TopKRouter):
    """Balance loss of an optimizer step = token-weighted mean over its micro-batches (aux_loss) or sequences
    (seq_aux_loss), in every layout.

    With calculate_per_token_loss gradients are divided by the tokens of the step. megatron-core 0.16.1
    multiplies a rank's share of the loss by that rank's tokens; as the shares of the TP x CP ranks add up to
    the loss, that is too little by TP * CP, and uneven where padding is. Its sequence loss takes a packed
    micro-batch for one sequence.
    """

    routing_pass: RoutingPass
    _call: RouterCall

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert not self.config.moe_router_fusion, "a fused router does not ask for experts"
        self.router_replay = ExpertChoice()  # type: ignore[assignment]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert self.layer_number is not None
        choice: Any = self.router_replay
        call = self._call = self.routing_pass.start_call(
            self.layer_number, logits.shape[:-1].numel()
        )
        choice.given_TK = call.given_TK if call.replays else None
        probs_TE, routing_map_TE = super().routing(logits, padding_mask=padding_mask)
        self.routing_pass.end_call(call, choice.own_TK, choice.taken_TK, routing_map_TE)
        return probs_TE, routing_map_TE

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Do not count tokens per expert: Routing.move_bias steers the bias, by the load of the whole step.

        megatron-core 0.16.1 would fail to count where there is a padding mask, and count a recomputation.
        """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TokenWeightedRouter":
        """Cast or move, but leave the experts' bias in float32, where small differences decide."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.weight.device)
        return self

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        first_T = torch.zeros_like(self._call.batch.sequences_T)
        return self._with_balance_loss(AUX_LOSS, probs, scores_for_aux_loss, routing_map, first_T)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        sequences_T = self._call.batch.sequences_T
        return self._with_balance_loss(
            SEQUENCE_AUX_LOSS, probs, scores_for_aux_loss, routing_map, sequences_T
        )

    def _with_balance_loss(
        self,
        name: str,
        probs_TE: Tensor,
        scores_TE: Tensor,
        routing_map_TE: Tensor,
        groups_T: Tensor,
    ) -> Tensor:
        """Attach coef * sum over groups of (tokens of the group * balance loss of the group).

        scores_TE, routing_map_TE   0 on padding
        groups_T                    group of each token of the whole local batch: micro-batch or sequence
        A group's loss is E * sum over experts of (share of choices * mean score), 1 where the load is even:
        Switch Transformer, arXiv:2101.03961, equations 4 to 6; per sequence DeepSeek-V3, arXiv:2412.19437,
        equations 17 to 20.
        """
        coef = self.get_aux_loss_coeff(name)
        if coef == 0:
            return probs_TE
        call, num_groups = self._call, len(self._call.batch.cu_seqlens_N1) - 1
        own_T = groups_T[call.rows]
        chosen_GE = scores_TE.new_zeros(num_groups, scores_TE.shape[1], dtype=torch.float32)
        chosen_GE.index_add_(0, own_T, routing_map_TE.float())
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(chosen_GE, group=self.tp_cp_group)
        num_choices_G1 = chosen_GE.sum(1, keepdim=True).clamp(min=1)
        factor_GE = chosen_GE * (chosen_GE.shape[1] / num_choices_G1)
        loss = (scores_TE * factor_GE[own_T]).sum()
        self.routing_pass.add_loss(name, call.layer_number, loss.detach())
        return MoEAuxLossAutoScaler.apply(probs_TE, coef * loss)  # type: ignore[return-value]
