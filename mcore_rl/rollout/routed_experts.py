"""Decodes and checks an engine's answer about the experts that its routers chose."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pybase64
import torch
from torch import Tensor

from mcore_rl.types import Array

_REMEDY = (
    "the engine serves another model than model.path says, or chose physical copies of experts"
    " (expert load balancing of engines must be off); drift.routed_experts=false does without,"
    " train.router_replay=engine cannot"
)


@dataclass(frozen=True)
class RoutedExpertsShape:
    """The shape that an answer must have.

    moe_layers   for each hidden layer of the model, whether it has experts; what engines report of
                 dense layers means nothing
    """

    moe_layers: tuple[bool, ...]
    top_k: int
    num_experts: int

    def decode(self, encoded: str | None, num_tokens: int, where: str) -> Tensor:
        """Return int16 [num_tokens, L, K], decoded from SGLang's base64 of int32.

        Raises ValueError naming `where`, token and layer if nothing was reported or no model with
        this shape can have chosen so.
        """
        if encoded is None:
            raise ValueError(f"{where}: the engine did not tell which experts it chose: {_REMEDY}")
        num_layers = len(self.moe_layers)
        flat = np.frombuffer(pybase64.b64decode(encoded), np.int32)
        if flat.size != num_tokens * num_layers * self.top_k:
            raise ValueError(
                f"{where}: the engine told of {flat.size} choices of experts, expected"
                f" {num_tokens} tokens * {num_layers} layers * {self.top_k} experts per token:"
                f" {_REMEDY}"
            )
        experts_TLK = flat.reshape(num_tokens, num_layers, self.top_k)
        self._check(experts_TLK, where)
        return torch.from_numpy(experts_TLK.astype(np.int16))

    def _check(self, experts_TLK: Array, where: str) -> None:
        """Raise ValueError unless each token went to distinct, existing experts in MoE layers."""
        wrong_TL = ((experts_TLK < 0) | (experts_TLK >= self.num_experts)).any(2)
        # Whole planes of small numbers are compared: pairs in rows of int32 take much longer.
        planes_KTL = np.ascontiguousarray(experts_TLK.astype(np.int16).transpose(2, 0, 1))
        for first_TL, second_TL in combinations(planes_KTL, 2):
            wrong_TL |= first_TL == second_TL
        wrong_TL &= np.array(self.moe_layers)
        if wrong_TL.any():
            token, layer = np.argwhere(wrong_TL)[0].tolist()
            experts = experts_TLK[token, layer].tolist()
            raise ValueError(
                f"{where}: experts {experts} of token {token} in layer {layer} are not"
                f" {self.top_k} different ones of 0 to {self.num_experts - 1}: {_REMEDY}"
            )
