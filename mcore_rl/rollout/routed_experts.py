"""Which experts an engine's routers chose: its answer in, checked numbers of experts out."""

import base64
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoutedExpertsShape:
    """What an answer must hold.

    moe_layers   for each hidden layer of the model whether it has experts; engines tell of dense ones, too,
                 but nothing that means anything
    """

    moe_layers: tuple[bool, ...]
    top_k: int
    num_experts: int

    def decode(self, encoded: str | None, num_tokens: int, where: str) -> Tensor:
        """int16 [num_tokens, L, K] of SGLang's base64 of int32. ValueError names `where` and the layer."""
        remedy = (
            "the engine serves another model than model.path says, or chose physical copies of experts"
            " (expert load balancing of engines must be off); drift.routed_experts=false does without,"
            " train.router_replay=engine cannot"
        )
        if encoded is None:
            raise ValueError(f"{where}: the engine did not tell which experts it chose: {remedy}")
        shape = (num_tokens, len(self.moe_layers), self.top_k)
        flat = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.int32)
        if flat.numel() != num_tokens * shape[1] * shape[2]:
            raise ValueError(
                f"{where}: the engine told of {flat.numel()} choices of experts, expected {num_tokens} tokens"
                f" * {shape[1]} layers * {shape[2]} experts per token: {remedy}"
            )
        experts_TLK = flat.view(shape)
        in_range_TLK = (experts_TLK >= 0) & (experts_TLK < self.num_experts)
        columns = experts_TLK.unbind(2)
        twice_TL = torch.zeros(shape[:2], dtype=torch.bool)
        for a, b in combinations(columns, 2):
            twice_TL |= a == b
        wrong_TL = (twice_TL | ~in_range_TLK.all(2)) & torch.tensor(self.moe_layers)
        if wrong_TL.any():
            token, layer = wrong_TL.nonzero()[0].tolist()
            found = experts_TLK[token, layer].tolist()
            raise ValueError(
                f"{where}: experts {found} of token {token} in layer {layer} are not {self.top_k} different"
                f" ones of 0 to {self.num_experts - 1}: {remedy}"
            )
        return experts_TLK.to(torch.int16)
