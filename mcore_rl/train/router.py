"""The MoE router of training: megatron-core's, with the auxiliary loss weighted by all tokens of the
micro-batch.
"""

from megatron.core.transformer.moe.moe_utils import (
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

AUX_LOSS = "load_balancing_loss"
"""megatron-core's name of the loss in its tracker."""


class TokenWeightedRouter(TopKRouter):
    """Auxiliary loss of an optimizer step = token-weighted mean over its micro-batches, in every layout.

    With calculate_per_token_loss gradients are divided by the tokens of the step. megatron-core 0.16.1
    multiplies a rank's share of the loss by that rank's tokens; as the shares of the TP x CP ranks add up to
    the loss, that is too little by TP * CP, and uneven where padding is. The whole micro-batch's tokens are
    the right factor.
    """

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
