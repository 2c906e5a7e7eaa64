"""One pass over micro-batches as their routers see it: experts to replay in, experts taken and flips out."""

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
    """What the routers did with the local tokens of one micro-batch, over all layers.

    flips_T      int32, layers in which the token went to other experts than the batch names
    replaced_T   int32, layers in which the experts that the batch names took the place of the router's choice
    experts_TLK  int16, where the token went, plus 1; 0 in dense layers and on padding
    """

    flips_T: Tensor | None = None
    replaced_T: Tensor | None = None
    experts_TLK: Tensor | None = None


class Routing:
    """Hands every call of a router its micro-batch, and keeps what came of it."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
        """Watch the routers of this rank's chunks."""
        self._shape = (config.num_layers, config.moe_router_topk)
        self._full_recompute = config.recompute_granularity == "full"
        self.load = StepLoad(config.num_layers, config.num_moe_experts or 0)
        self._batch: RankBatch | None = None
        self._forward_only, self._replays = False, False
        self._records: dict[int, RoutingRecord] = {}
        self._to_recompute: dict[int, deque[RankBatch]] = {}
        modules = (module for chunk in chunks for module in chunk.modules())
        self._routers = [module for module in modules if isinstance(module, TokenWeightedRouter)]
        for router in self._routers:
            router.routing_pass = self

    def freeze(self) -> None:
        """Routers keep their weights; to be called before there are gradient buffers and an optimizer."""
        for router in self._routers:
            router.weight.requires_grad_(False)

    @torch.no_grad()
    def move_bias(self, load_LE: Tensor, rate: float) -> None:
        """Experts with less than the mean load of their layer become likelier by `rate`, others less likely:
        arXiv:2408.15664, algorithm 1. In place, on every rank alike; `load_LE` is of all ranks.
        """
        for router in self._routers if rate else ():
            load_E = load_LE[(router.layer_number or 0) - 1]
            assert router.expert_bias is not None, "check_routing lets no such model pass"
            router.expert_bias += rate * torch.sign(load_E.mean() - load_E).to(router.expert_bias)

    def begin(
        self,
        batches: Sequence[RankBatch],
        *,
        forward_only: bool,
        replay: bool = False,
        record: bool = False,
    ) -> None:
        """A pass over these micro-batches; `replay`: send tokens where `routed_experts_TLK` says."""
        self._batch, self._forward_only, self._replays = None, forward_only, replay
        self._to_recompute = {}
        if not forward_only:
            self.load.clear()
        self._records = {id(batch): self._make_record(batch, record) for batch in batches}

    def enter(self, batch: RankBatch) -> None:
        """The routers run on `batch` from now on."""
        self._batch = batch

    def start_call(self, layer_number: int, num_rows: int) -> RouterCall:
        """Router `layer_number`, counted from 1, is about to run on this rank's `num_rows` tokens."""
        batch, again = self._batch_of(layer_number)
        assert num_rows in (len(batch.tokens_T), len(batch.tokens_T) // _tp_size()), (
            num_rows,
            layer_number,
        )
        first = (
            ps.get_tensor_model_parallel_rank() * num_rows if num_rows < len(batch.tokens_T) else 0
        )
        rows = slice(first, first + num_rows)
        given_TK = None
        if batch.routed_experts_TLK is not None:
            given_TK = batch.routed_experts_TLK[rows, layer_number - 1].long()
        return RouterCall(layer_number, rows, batch, given_TK, replays=self._replays, again=again)

    def end_call(
        self, call: RouterCall, own_TK: Tensor, taken_TK: Tensor, routing_map_TE: Tensor
    ) -> None:
        """The router would have chosen `own_TK` and took `taken_TK`; tokens go where the map is True."""
        if call.again:
            return
        if not self._forward_only:
            padding_T = call.batch.padding_T
            padding_T = None if padding_T is None else padding_T[call.rows]
            self.load.count(call.layer_number, routing_map_TE, padding_T)
        record = self._records[id(call.batch)]
        if record.flips_T is not None:
            assert call.given_TK is not None and record.replaced_T is not None
            known_T = (call.given_TK >= 0).all(1)
            record.flips_T[call.rows] += known_T & ~_went_to(
                routing_map_TE, call.given_TK.clamp(min=0)
            )
            record.replaced_T[call.rows] += ~_went_to(routing_map_TE, own_TK)
        if record.experts_TLK is not None:
            record.experts_TLK[call.rows, call.layer_number - 1] = (taken_TK + 1).to(torch.int16)

    def add_loss(self, name: str, layer_number: int, loss: Tensor) -> None:
        """This rank's part of a balance loss, times the tokens that it is the mean of."""
        self.load.add_loss(name, layer_number, loss)

    def take(self, batches: Sequence[RankBatch]) -> list[RoutingRecord]:
        """Of each micro-batch's local tokens, over all layers. Collective over the tensor- and
        pipeline-parallel ranks, which hold other tokens and other layers.
        """
        left = {layer: len(waiting) for layer, waiting in self._to_recompute.items() if waiting}
        assert not left, f"layer: micro-batches that were never recomputed {left}"
        records = [self._records[id(batch)] for batch in batches]
        for record in records:
            if record.flips_T is not None and record.replaced_T is not None:
                record.flips_T, record.replaced_T = _sum(
                    torch.stack([record.flips_T, record.replaced_T])
                )
            if record.experts_TLK is not None:
                record.experts_TLK = _sum(record.experts_TLK.int()).to("cpu", torch.int16)
        self._records, self._batch = {}, None
        return records

    def _batch_of(self, layer_number: int) -> tuple[RankBatch, bool]:
        """(the micro-batch that the router runs on, whether it has run on it before).

        Full activation recompute runs a layer without gradients first, and again in the backward pass: in the
        same order, but when later micro-batches have been entered.
        """
        if self._full_recompute and not self._forward_only:
            waiting = self._to_recompute.setdefault(layer_number, deque())
            if torch.is_grad_enabled():
                return waiting.popleft(), True
            assert self._batch is not None
            waiting.append(self._batch)
        assert self._batch is not None, "a router runs outside of a pass"
        return self._batch, False

    def _make_record(self, batch: RankBatch, record: bool) -> RoutingRecord:
        given, num_tokens, device = (
            batch.routed_experts_TLK,
            len(batch.tokens_T),
            batch.tokens_T.device,
        )
        found = RoutingRecord()
        if given is not None:
            if given.shape[1:] != self._shape:
                raise ValueError(
                    f"routed experts of {given.shape[1]} layers and {given.shape[2]} experts per token, but"
                    f" the model has {self._shape[0]} and {self._shape[1]}: the samples are another model's"
                )
            found.flips_T = torch.zeros(num_tokens, dtype=torch.int32, device=device)
            found.replaced_T = torch.zeros_like(found.flips_T)
        if record:
            found.experts_TLK = torch.zeros(
                num_tokens, *self._shape, dtype=torch.int16, device=device
            )
        return found


def _went_to(routing_map_TE: Tensor, experts_TK: Tensor) -> Tensor:
    return routing_map_TE.gather(1, experts_TK).bool().all(1)


def _tp_size() -> int:
    return ps.get_tensor_model_parallel_world_size()


def _sum(value: Tensor) -> Tensor:
    for group in (ps.get_tensor_model_parallel_group(), ps.get_pipeline_model_parallel_group()):
        if group.size() > 1:
            dist.all_reduce(value, group=group)
    return value
