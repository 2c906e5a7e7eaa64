"""Replaces the output layer of a critic: turns hidden states into one number per token."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class ValueHead(MegatronModule):
    """Replaces GPTModel.output_layer and takes its arguments; computes in float32.

    Every tensor-parallel rank holds the whole head. Under sequence parallelism each rank computes
    its own tokens, and Megatron sums the gradients of the head over the ranks.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        weight = torch.empty(1, config.hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_THx: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """Return values [T, 1, 1] of hidden states [T, 1, hidden].

        Under sequence parallelism the input is this rank's [T / tp, 1, hidden].
        """
        values_T11 = F.linear(hidden_THx.float(), self.weight.float())
        if self.sequence_parallel:
            values_T11 = gather_from_sequence_parallel_region(
                values_T11, tensor_parallel_output_grad=False
            )
        return values_T11, None
