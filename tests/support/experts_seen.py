"""What the experts of this rank really compute on: rows at their input, found again among routers' tokens."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from mcore_rl.train.actor import Actor

Row = tuple[int, bytes]
"""(layer from 0, a hidden state), which is a token's name here: no two of a test are alike."""


class Watch:
    """Notes the input of every router and of every expert; token ids must differ between all tokens."""

    def __init__(self, actor: Actor) -> None:
        self.clear()
        for chunk in actor.chunks:
            for module in chunk.modules():
                if isinstance(module, MoELayer):
                    module.router.register_forward_hook(self._routed)
                    module.experts.register_forward_pre_hook(self._computed(module))

    def clear(self) -> None:
        self._tokens: dict[Row, int] = {}
        self._experts: list[tuple[Row, int]] = []

    def take(self) -> tuple[dict[Row, int], list[tuple[Row, int]]]:
        """(token id of each row that a router here got, row and expert of each that an expert here got)."""
        taken = self._tokens, self._experts
        self.clear()
        return taken

    def _routed(self, router: Any, args: tuple[torch.Tensor, ...], _: Any) -> None:
        call, rows = router._call, args[0].detach().flatten(0, 1).clone()
        ids_T, real_T = call.batch.tokens_T[call.rows], call.batch.sources_T[call.rows] >= 0
        for row, token, real in zip(rows, ids_T.tolist(), real_T.tolist(), strict=True):
            if real:
                self._tokens[call.layer_number - 1, row.numpy().tobytes()] = token

    def _computed(self, layer: MoELayer) -> Any:
        def note(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            hidden, counts = args[0].detach().clone(), args[1].tolist()
            for expert, rows in zip(layer.local_expert_indices, hidden.split(counts), strict=True):
                for row in rows:
                    self._experts.append(((layer.layer_number - 1, row.numpy().tobytes()), expert))

        return note


def experts_by_token(
    seen: Iterable[tuple[dict[Row, int], list[tuple[Row, int]]]],
) -> dict[tuple[int, int], set[int]]:
    """(layer, token id) -> the experts that computed on it, from what all ranks saw."""
    per_rank = list(seen)
    tokens = {row: token for found, _ in per_rank for row, token in found.items()}
    experts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for _, computed in per_rank:
        for (layer, row), expert in computed:
            if (layer, row) in tokens:
                experts[layer, tokens[layer, row]].add(expert)
    return dict(experts)
