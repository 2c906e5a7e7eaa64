"""Tells routers which experts to replay in a pass, and records which experts they took.

    Actor -> begin(batches)             opens a pass
    schedule -> enter(batch)            names the micro-batch that a chunk of layers runs on next
    router -> start_call, end_call      gets the experts to replay, reports where tokens went
    Actor -> take(batches)              closes the pass, returns a record per micro-batch

A flip is a layer in which the router sends a token to other experts than the batch names.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mcore_rl.train.expert_load import StepLoad
from mcore_rl.train.packing import RankBatch
from mcore_rl.train.router import RouterCall, TokenWeightedRouter


@dataclass
class RoutingRecord:
    """The routers' decisions on the local tokens of one micro-batch, over all layers.

    flips_T       int32, layers in which the token went to other experts than the batch names
    replaced_T    int32, layers in which a replay changed the router's own choice
    experts_TLK   int16, number of the expert the token went to, plus 1; 0 in dense layers, without
                  meaning on padding
    """

    flips_T: Tensor | None = None
    replaced_T: Tensor | None = None
    experts_TLK: Tensor | None = None


class Routing:
    """Tells every run of a router its micro-batch, and records what the router did."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
        """Attach to the routers of this rank's chunks."""
        self._shape = (config.num_layers, config.moe_router_topk)
        self._full_recompute = config.recompute_granularity == "full"
        self.load = StepLoad(config.num_layers, config.num_moe_experts or 0)
        self._batch: RankBatch | None = None
        self._forward_only = False
        self._replays = False
        self._records: dict[int, RoutingRecord] = {}
        self._to_recompute: dict[int, deque[RankBatch]] = {}
        self._routers = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, TokenWeightedRouter)
        ]
        for router in self._routers:
            router.routing_pass = self

    def freeze(self) -> None:
        """Stop training the routers' weights; call it before DDP and the optimizer are made."""
        for router in self._routers:
            router.weight.requires_grad_(False)

    @torch.no_grad()
    def move_bias(self, load_LE: Tensor, rate: float) -> None:
        """Raise the bias of experts below their layer's mean load by `rate`, lower the others'.

        Source: arXiv:2408.15664, algorithm 1. `load_LE` is the load over all ranks, so every rank
        makes the same change. The bias changes in place.
        """
        for router in self._routers if rate else ():
            load_E = load_LE[(router.layer_number or 0) - 1]
            assert router.expert_bias is not None, (
                "check_routing rejects models without an expert bias"
            )
            router.expert_bias += rate * torch.sign(load_E.mean() - load_E).to(router.expert_bias)

    def begin(
        self,
        batches: Sequence[RankBatch],
        *,
        forward_only: bool,
        replay: bool = False,
        record: bool = False,
    ) -> None:
        """Open a pass over these micro-batches.

        replay   send tokens to the experts in `routed_experts_TLK`
        record   record the experts that tokens are sent to

        Raises ValueError if the batches name experts of a model of another shape.
        """
        self._batch = None
        self._forward_only = forward_only
        self._replays = replay
        self._to_recompute = {}
        if not forward_only:
            self.load.clear()
        self._records = {id(batch): self._make_record(batch, record) for batch in batches}

    def enter(self, batch: RankBatch) -> None:
        """Name the micro-batch that the routers run on from now on."""
        self._batch = batch

    def start_call(self, layer_number: int, num_rows: int) -> RouterCall:
        """Describe the run of router `layer_number`, from 1, on `num_rows` tokens of this rank."""
        batch, recomputes = self._batch_of(layer_number)
        num_tokens = len(batch.tokens_T)
        assert num_rows in (num_tokens, num_tokens // _tp_size()), (num_rows, layer_number)
        first = 0
        if num_rows < num_tokens:  # sequence parallelism: tensor-parallel ranks split the tokens
            first = ps.get_tensor_model_parallel_rank() * num_rows
        rows = slice(first, first + num_rows)
        given_TK = None
        if batch.routed_experts_TLK is not None:
            given_TK = batch.routed_experts_TLK[rows, layer_number - 1].long()
        return RouterCall(layer_number, rows, batch, given_TK, self._replays, recomputes)

    def end_call(
        self, call: RouterCall, own_TK: Tensor, taken_TK: Tensor, routing_map_TE: Tensor
    ) -> None:
        """Record that a router chose `own_TK` but sent its tokens to `taken_TK`.

        routing_map_TE is True for the experts of each token.
        """
        if call.recomputes:
            return
        if not self._forward_only:
            padding_T = call.batch.padding_T
            padding_T = None if padding_T is None else padding_T[call.rows]
            self.load.count(call.layer_number, routing_map_TE, padding_T)
        record = self._records[id(call.batch)]
        if record.flips_T is not None:
            assert call.given_TK is not None and record.replaced_T is not None
            known_T = (call.given_TK >= 0).all(1)
            kept_T = _went_to(routing_map_TE, call.given_TK.clamp(min=0))
            record.flips_T[call.rows] += known_T & ~kept_T
            record.replaced_T[call.rows] += ~_went_to(routing_map_TE, own_TK)
        if record.experts_TLK is not None:
            record.experts_TLK[call.rows, call.layer_number - 1] = (taken_TK + 1).to(torch.int16)

    def add_loss(self, name: str, layer_number: int, loss: Tensor) -> None:
        """Add this rank's part of a balance loss, already multiplied by the tokens it averages."""
        self.load.add_loss(name, layer_number, loss)

    def take(self, batches: Sequence[RankBatch]) -> list[RoutingRecord]:
        """Close the pass and return a record of each micro-batch's local tokens, over all layers.

        It is a collective over the tensor- and pipeline-parallel ranks, which hold other tokens and
        other layers.
        """
        left = {layer: len(waiting) for layer, waiting in self._to_recompute.items() if waiting}
        assert not left, f"micro-batches never recomputed, by layer: {left}"
        records = [self._records[id(batch)] for batch in batches]
        for record in records:
            if record.flips_T is not None and record.replaced_T is not None:
                record.flips_T, record.replaced_T = _sum(
                    torch.stack([record.flips_T, record.replaced_T])
                )
            if record.experts_TLK is not None:
                record.experts_TLK = _sum(record.experts_TLK.int()).to("cpu", torch.int16)
        self._records = {}
        self._batch = None
        return records

    def _batch_of(self, layer_number: int) -> tuple[RankBatch, bool]:
        """Return (the micro-batch that the router runs on, whether this is a recomputation).

        Full activation recompute runs a layer without gradients in the forward pass and again, with
        gradients, in the backward pass. Micro-batches are recomputed in the order of their forward
        passes, but by then the schedule may have entered later ones; hence a queue per layer.
        """
        if self._full_recompute and not self._forward_only:
            waiting = self._to_recompute.setdefault(layer_number, deque())
            if torch.is_grad_enabled():
                return waiting.popleft(), True
            assert self._batch is not None
            waiting.append(self._batch)
        assert self._batch is not None, "a router runs outside a pass"
        return self._batch, False

    def _make_record(self, batch: RankBatch, record: bool) -> RoutingRecord:
        given_TLK = batch.routed_experts_TLK
        num_tokens = len(batch.tokens_T)
        device = batch.tokens_T.device
        made = RoutingRecord()
        if given_TLK is not None:
            _check_shape(given_TLK, self._shape)
            made.flips_T = torch.zeros(num_tokens, dtype=torch.int32, device=device)
            made.replaced_T = torch.zeros_like(made.flips_T)
        if record:
            shape = (num_tokens, *self._shape)
            made.experts_TLK = torch.zeros(shape, dtype=torch.int16, device=device)
        return made


def _check_shape(given_TLK: Tensor, expected: tuple[int, int]) -> None:
    num_layers, topk = given_TLK.shape[1:]
    if (num_layers, topk) != expected:
        raise ValueError(
            f"routed experts of {num_layers} layers and {topk} experts per token, but the model has"
            f" {expected[0]} and {expected[1]}: the samples come from another model"
        )


def _went_to(routing_map_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return bool [T], True where a token went to all of these experts."""
    return routing_map_TE.gather(1, experts_TK).bool().all(1)


def _tp_size() -> int:
    return ps.get_tensor_model_parallel_world_size()


def _sum(value: Tensor) -> Tensor:
    """Sum `value` in place over the tensor- and pipeline-parallel ranks."""
    for group in (ps.get_tensor_model_parallel_group(), ps.get_pipeline_model_parallel_group()):
        if group.size() > 1:
            dist.all_reduce(value, group=group)
    return value
