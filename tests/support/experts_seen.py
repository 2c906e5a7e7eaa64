"""Records which tokens the experts of this rank really compute on.

Rows at an expert's input are matched with rows at the routers' inputs, whose tokens are known.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from mcore_rl.train.actor import Actor

Row = tuple[int, bytes]
"""(layer from 0, bytes of a hidden state). It identifies a token: no two in a test are equal."""


class Watch:
    """Records the input of every router and every expert; all token ids must differ."""

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
        """Return (token id by row at a router's input, (row, expert) of each expert's input)."""
        taken = self._tokens, self._experts
        self.clear()
        return taken

    def _routed(self, router: Any, args: tuple[torch.Tensor, ...], _: Any) -> None:
        call, rows = router._call, args[0].detach().flatten(0, 1).clone()
        batch, own = call.run.batch, call.run.rows
        ids_T, real_T = batch.tokens_T[own], batch.sources_T[own] >= 0
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
    """Return (layer, token id) -> the experts that computed on it, from all ranks' records."""
    per_rank = list(seen)
    tokens: dict[Row, int] = {}
    for routed, _ in per_rank:
        tokens |= routed
    experts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for _, computed in per_rank:
        for (layer, row), expert in computed:
            if (layer, row) in tokens:
                experts[layer, tokens[layer, row]].add(expert)
    return dict(experts)
