"""The MoE router of training: megatron-core's, with layout-independent balance losses and replay.

Replay sends a token to experts that its batch names (`RouterCall.given_TK`) instead of those with
the best scores. The batch may name the engine's experts, or those of the trainer's own earlier
pass. A `ChunkRun` holds what routers read and record while a micro-batch runs through a chunk.

    logits -> scores -> ExpertChoice -> experts, gating weights -> balance loss
                            ^   given_TK (replay), or the top K scores

Axes: T tokens of the micro-batch on a context-parallel rank, t those of them that this rank routes
(sequence parallelism splits them), L layers of the model, l layers of the chunk, K experts a token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.device import to_host
from mcore_rl.train.packing import RankBatch


@dataclass
class RoutingRecord:
    """The routers' decisions on the local tokens of one micro-batch, over all layers.

    flips_T       int32, layers in which the token went to other experts than the batch names
    replaced_T    int32, layers in which a replay changed the router's own choice
    experts_TLK   int16, number of the expert the token went to, plus 1; 0 in dense layers, without
                  meaning on padding; in host memory
    parts         (tokens, layers, their experts as above) of this rank's chunks, in host memory
    """

    flips_T: Tensor | None = None
    replaced_T: Tensor | None = None
    experts_TLK: Tensor | None = None
    parts: list[tuple[slice, slice, Tensor]] = field(default_factory=list)

    def own_experts(self, shape: tuple[int, int, int]) -> Tensor:
        """Return what this rank recorded, int16 of `shape` [T, L, K]; 0 where others did."""
        experts_TLK = torch.zeros(shape, dtype=torch.int16)
        for rows, layers, taken_tlK in self.parts:
            experts_TLK[rows, layers] = taken_tlK
        return experts_TLK


@dataclass(frozen=True)
class ChunkRun:
    """A micro-batch on its way through one chunk.

    batch       the micro-batch, on the device
    layers      the chunk's layers
    rows        the tokens that this rank routes
    given_tlK   int16, the experts that the batch names, on the device; None if it names none
    taken_tlK   int16, the experts that tokens were sent to, plus 1; None if they are not recorded
    """

    batch: RankBatch
    record: RoutingRecord
    layers: slice
    rows: slice
    given_tlK: Tensor | None
    taken_tlK: Tensor | None

    def get_given(self, layer_number: int) -> Tensor | None:
        """Return the experts that the batch names in a layer, counted from 1, int64 [t, K]."""
        if self.given_tlK is None:
            return None
        return self.given_tlK[:, layer_number - 1 - self.layers.start].long()

    def take(self, layer_number: int, taken_TK: Tensor) -> None:
        """Note the experts that a layer, counted from 1, sent its tokens to."""
        if self.taken_tlK is not None:
            layer = layer_number - 1 - self.layers.start
            self.taken_tlK[:, layer] = (taken_TK + 1).to(torch.int16)

    def keep_taken(self) -> None:
        """Bring the noted experts to host memory, where they are once the device is done."""
        if self.taken_tlK is not None:
            self.record.parts.append((self.rows, self.layers, to_host(self.taken_tlK)))


def layers_of(chunk: torch.nn.Module) -> slice:
    """Return the range of layers of a GPTModel, counted from 0 over the whole model."""
    layers: Any = chunk.get_submodule("decoder.layers")
    numbers = [layer.layer_number for layer in layers]
    return slice(numbers[0] - 1, numbers[-1])


AUX_LOSS, SEQUENCE_AUX_LOSS = "aux_loss", "seq_aux_loss"
"""megatron-core's names of the balance losses over a micro-batch and over each sequence."""


def balance_losses(config: TransformerConfig) -> list[str]:
    """Return the names of the balance losses with a coefficient other than 0."""
    names = config.moe_router_load_balancing_type
    coefs = config.moe_aux_loss_coeff
    assert isinstance(names, list) and isinstance(coefs, list), (names, coefs)
    return [name for name, coef in zip(names, coefs, strict=True) if coef]


@dataclass(frozen=True)
class RouterCall:
    """One run of one router.

    layer_number   counted from 1
    run            the micro-batch and this rank's tokens of it
    given_TK       int64, experts that the batch names for these tokens, -1 where it names none,
                   None if it has no experts at all; also used to count flips without a replay
    replays        whether tokens are sent to `given_TK`
    recomputes     whether this repeats an earlier run for the backward pass; it is not counted
    """

    layer_number: int
    run: ChunkRun
    given_TK: Tensor | None
    replays: bool
    recomputes: bool


class RoutingPass(Protocol):
    """The calls that a router makes before and after each run; see Routing in train/routing.py."""

    def start_call(self, layer_number: int, num_rows: int) -> RouterCall: ...

    def end_call(
        self, call: RouterCall, own_TK: Tensor, taken_TK: Tensor, routing_map_TE: Tensor
    ) -> None: ...

    def add_loss(self, name: str, layer_number: int, loss: Tensor) -> None: ...


class ExpertChoice:
    """Chooses each token's experts: those given, otherwise those with the best scores.

    megatron-core calls `get_replay_topk` and computes the gating weights of the chosen experts from
    its own scores, so they have the model's form and a gradient. This class stands in for
    megatron-core's RouterReplay, which needs given experts for every token, and which assumes that
    micro-batches arrive in a fixed order; `Routing` knows which micro-batch a router runs on.

    given_TK   input: experts to replay, -1 for tokens without; None to replay nothing
    own_TK     output: experts with the best scores
    taken_TK   output: experts the tokens are sent to
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
        """Return (scores, numbers) of each token's experts to topk_routing_with_score_function."""
        scores_TK, self.own_TK = compute_topk(scores_TE, topk, num_groups, group_topk)
        self.taken_TK = self.own_TK
        if self.given_TK is None:
            return scores_TK, self.own_TK
        known_T1 = (self.given_TK >= 0).all(1, keepdim=True)
        self.taken_TK = torch.where(known_T1, self.given_TK, self.own_TK)
        return scores_TE.gather(1, self.taken_TK), self.taken_TK


class SteadyRouter(TopKRouter):
    """A router whose bias stays as it is, in float32, while the layer runs."""

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Do nothing: Routing.move_bias steers the bias by the load of the whole step.

        megatron-core 0.19.2 counts tokens per expert here. It fails with a padding mask and counts
        recomputations twice.
        """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SteadyRouter":
        """Cast or move the module, but keep the bias in float32, where small differences decide."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.weight.device)
        return self


class TokenWeightedRouter(SteadyRouter):
    """A router whose balance loss is the same in every layout.

    The loss of an optimizer step is the token-weighted mean over its micro-batches (aux_loss) or
    its sequences (seq_aux_loss). With calculate_per_token_loss, gradients are divided by the tokens
    of the step. megatron-core 0.19.2 multiplies each rank's share of the loss by TP * CP and by
    that rank's tokens, which is uneven if some ranks have padding. Its sequence loss takes a packed
    micro-batch for one sequence.
    """

    routing_pass: RoutingPass
    _call: RouterCall

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert not self.config.moe_router_fusion, "a fused router cannot replay experts"
        self.router_replay = ExpertChoice()  # type: ignore[assignment]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (gating weights, routing map), both [T, E]."""
        assert self.layer_number is not None
        choice: Any = self.router_replay
        call = self._call = self.routing_pass.start_call(
            self.layer_number, logits.shape[:-1].numel()
        )
        choice.given_TK = call.given_TK if call.replays else None
        probs_TE, routing_map_TE = super().routing(logits, padding_mask=padding_mask)
        self.routing_pass.end_call(call, choice.own_TK, choice.taken_TK, routing_map_TE)
        return probs_TE, routing_map_TE

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        one_group_T = torch.zeros_like(self._call.run.batch.sequences_T)
        return self._with_balance_loss(
            AUX_LOSS, probs, scores_for_aux_loss, routing_map, one_group_T
        )

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        sequences_T = self._call.run.batch.sequences_T
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
        """Return `probs_TE` with the loss attached: coef * sum of (group's tokens * group's loss).

        scores_TE, routing_map_TE   0 on padding
        groups_T                    group of each local token of the micro-batch: 0, or its sequence

        A group's loss is E * sum over experts of (share of choices * mean score); it is 1 for an
        even load. Source: Switch Transformer, arXiv:2101.03961, equations 4 to 6; per sequence
        DeepSeek-V3, arXiv:2412.19437, equations 17 to 20.
        """
        coef = self.get_aux_loss_coeff(name)
        if coef == 0:
            return probs_TE
        call = self._call
        num_groups = len(call.run.batch.cu_seqlens_N1) - 1
        group_T = groups_T[call.run.rows]
        chosen_GE = scores_TE.new_zeros(num_groups, scores_TE.shape[1], dtype=torch.float32)
        chosen_GE.index_add_(0, group_T, routing_map_TE.float())
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(chosen_GE, group=self.tp_cp_group)
        num_choices_G1 = chosen_GE.sum(1, keepdim=True).clamp(min=1)
        factor_GE = chosen_GE * (chosen_GE.shape[1] / num_choices_G1)
        loss = (scores_TE * factor_GE[group_T]).sum()
        self.routing_pass.add_loss(name, call.layer_number, loss.detach())
        return MoEAuxLossAutoScaler.apply(probs_TE, coef * loss)  # type: ignore[return-value]
