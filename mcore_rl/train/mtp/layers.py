"""Makes the layers for multi-token prediction (MTP) of the model's last chunk.

    hidden states of tokens t    -> hnorm -+
                                           +-> eh_proj -> a layer like the model's last -> norm
    embedding of tokens t + 1    -> enorm -+

megatron-core has the modules and their names in checkpoints. Its way to run them is not used: it
moves packed tokens sequence by sequence, takes its loss from all tokens, and has its pipeline stage
share the embedding's gradient, which changes the policy's.
"""

from copy import copy, deepcopy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mcore_rl.train.router import SteadyRouter


class DraftRouter(SteadyRouter):
    """The router of an MTP layer: nothing is replayed, counted, or balanced."""

    def _apply_aux_loss(self, probs: Tensor, *_: Any, **__: Any) -> Tensor:
        return probs

    def _apply_seq_aux_loss(self, probs: Tensor, *_: Any, **__: Any) -> Tensor:
        return probs


class DraftLayer(MultiTokenPredictionLayer):
    """An MTP layer that is given what it reads, with the embeddings of the tokens ahead."""

    def forward(  # type: ignore[override]
        self, hidden_T1H: Tensor, ahead_T1H: Tensor, **of_decoder: Any
    ) -> Tensor:
        """Return hidden states [T, 1, H], or this rank's part under sequence parallelism.

        hidden_T1H   hidden states of the layer before this one, or of the model
        ahead_T1H    embeddings of the tokens that follow
        of_decoder   what the decoder's layers get beside hidden states
        """
        run = self._proj_and_transformer_layer
        if self.config.recompute_granularity == "full" and self.training:
            run = self._checkpointed_forward
        return run(hidden_states=hidden_T1H, decoder_input=ahead_T1H, **of_decoder)


def make_mtp_block(
    config: TransformerConfig,
    layer: ModuleSpec,
    num_layers: int,
    vp_stage: int | None,
) -> MultiTokenPredictionBlock:
    """Return the MTP layers, parameters uninitialized; their gradients are clipped by themselves.

    layer   spec of the model's last layer

    They have a config of their own: with MTP layers in the model's, megatron-core sums the
    embedding's gradient over stages.
    """
    own = copy(config)
    own.mtp_num_layers = num_layers
    own.mtp_detach_heads = True
    own.pipeline_model_parallel_layout = None
    spec = get_gpt_mtp_block_spec(
        own, _adapt(layer), use_transformer_engine=True, vp_stage=vp_stage
    )
    for mtp_layer in spec.layer_specs or ():
        mtp_layer.module = DraftLayer
    return MultiTokenPredictionBlock(
        own, spec, vp_stage, ProcessGroupCollection.use_mpu_process_groups()
    )


def _adapt(layer: ModuleSpec) -> ModuleSpec:
    """Return a copy of a layer's spec with another router."""
    own = deepcopy(layer)
    experts: Any = own.submodules.mlp.keywords["submodules"]  # type: ignore[union-attr]
    if isinstance(experts, MoESubmodules):
        experts.router = DraftRouter
    return own
