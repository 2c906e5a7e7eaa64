"""The MoE router of training: megatron-core's, with the auxiliary loss weighted by all tokens of the
micro-batch, and compared with the engine's choice of experts.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer.moe.moe_utils import (
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mcore_rl.train.packing import RankBatch

AUX_LOSS = "load_balancing_loss"
"""megatron-core's name of the loss in its tracker."""


class TokenWeightedRouter(TopKRouter):
    """Auxiliary loss of an optimizer step = token-weighted mean over its micro-batches, in every layout.

    With calculate_per_token_loss gradients are divided by the tokens of the step. megatron-core 0.16.1
    multiplies a rank's share of the loss by that rank's tokens; as the shares of the TP x CP ranks add up to
    the loss, that is too little by TP * CP, and uneven where padding is. The whole micro-batch's tokens are
    the right factor.
    """

    flips: "RouterFlips | None" = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs_TE, routing_map_TE = super().routing(logits, padding_mask=padding_mask)
        if self.flips is not None and self.layer_number is not None:
            self.flips.observe(self.layer_number, routing_map_TE)
        return probs_TE, routing_map_TE

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Do not count tokens per expert: the experts' bias stays as it was loaded.

        megatron-core 0.16.1 would fail to count where there is a padding mask.
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
        coef = self.get_aux_loss_coeff("aux_loss")
        if coef == 0:
            return probs
        tokens_per_expert, _, num_tokens = get_tokens_per_expert_and_token_count(
            routing_map=routing_map,
            reduce_group=self.tp_cp_group,
            topk=self.topk,
            with_padding_mask=with_padding_mask,
        )
        aux_loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=num_tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coef,
        )
        return self.attach_and_log_load_balancing_loss(
            probs, coef, aux_loss, AUX_LOSS, self.tp_cp_group, valid_token_count=num_tokens
        )


class RouterFlips:
    """Counts, for each token, the layers whose router chooses other experts than the engine's did."""

    def __init__(self, chunks: Sequence[torch.nn.Module], *, full_recompute: bool) -> None:
        """Watch the routers of this rank's chunks."""
        self._full_recompute = full_recompute
        self._forward_only = False
        self._batch: RankBatch | None = None
        self._counts: dict[int, Tensor] = {}
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TokenWeightedRouter):
                    module.flips = self

    def begin(self, batches: Sequence[RankBatch], *, forward_only: bool) -> None:
        """Count anew, for these micro-batches."""
        self._forward_only, self._batch = forward_only, None
        self._counts = {
            id(batch): torch.zeros_like(batch.tokens_T, dtype=torch.int32)
            for batch in batches
            if batch.routed_experts_TLK is not None
        }

    def enter(self, batch: RankBatch) -> None:
        """The routers run on `batch` from now on."""
        self._batch = batch

    def observe(self, layer_number: int, routing_map_TE: Tensor) -> None:
        """Layer `layer_number`, counted from 1, sends this rank's tokens to the experts marked True."""
        batch = self._batch
        if batch is None or batch.routed_experts_TLK is None or self._recomputing():
            return
        if layer_number > batch.routed_experts_TLK.shape[1]:  # of multi-token prediction
            return
        first = 0
        if len(routing_map_TE) < len(batch.tokens_T):  # sequence parallelism
            first = ps.get_tensor_model_parallel_rank() * len(routing_map_TE)
        own = slice(first, first + len(routing_map_TE))
        engine_TK = batch.routed_experts_TLK[own, layer_number - 1].long()
        known_T = (engine_TK >= 0).all(1)
        same_T = routing_map_TE.gather(1, engine_TK.clamp(min=0)).bool().all(1)
        self._counts[id(batch)][own] += known_T & ~same_T

    def take(self, batches: Sequence[RankBatch]) -> list[Tensor] | None:
        """int32 [T] of each micro-batch's local tokens, over all layers; None without the engine's choice.

        Collective over the tensor- and pipeline-parallel ranks.
        """
        if not self._counts:
            return None
        counts = [self._counts[id(batch)] for batch in batches]
        whole = torch.cat(counts)
        for group in (ps.get_tensor_model_parallel_group(), ps.get_pipeline_model_parallel_group()):
            if group.size() > 1:
                dist.all_reduce(whole, group=group)
        self._counts = {}
        return list(whole.split([len(count) for count in counts]))

    def _recomputing(self) -> bool:
        """Full activation recompute runs a layer without gradients first, and again in the backward pass."""
        return not self._forward_only and torch.is_grad_enabled() == self._full_recompute
