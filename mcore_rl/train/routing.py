"""Tells routers which experts to replay in a pass, and records which experts they took.

    Actor -> begin(batches)             opens a pass
    schedule -> enter(batch, chunk)     names the micro-batch that a chunk of layers runs on next
    router -> start_call, end_call      gets the experts to replay, reports where tokens went
    Actor -> take(batches)              closes the pass, returns a record per micro-batch

A flip is a layer in which the router sends a token to other experts than the batch names. The
tokens that each expert got in an optimizer step are added up, and become metrics of its load.

The experts of a step's tokens may take gigabytes. They stay in host memory; only the experts of
the current micro-batches, of this rank's tokens and of the chunk's layers are on the device.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mcore_rl.device import device, on_device, synchronize
from mcore_rl.train.packing import RankBatch
from mcore_rl.train.router import (
    ChunkRun,
    RouterCall,
    RoutingRecord,
    TokenWeightedRouter,
    layers_of,
)


class StepLoad:
    """Sums the load over micro-batches; every token of a layer is counted on exactly one rank."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._shape = (num_layers, num_experts)
        self.clear()

    def clear(self) -> None:
        self._load_LE = torch.zeros(self._shape, dtype=torch.int64, device=device())
        self._losses: dict[str, Tensor] = {}

    def count(self, layer_number: int, routing_map_TE: Tensor, padding_T: Tensor | None) -> None:
        """Count tokens that layer `layer_number`, from 1, sends to the experts marked True."""
        if padding_T is not None:
            routing_map_TE = routing_map_TE & ~padding_T[:, None]
        self._load_LE[layer_number - 1] += routing_map_TE.sum(0)

    def add_loss(self, name: str, layer_number: int, loss: Tensor) -> None:
        """Add this rank's part of the balance loss `name`."""
        if name not in self._losses:
            self._losses[name] = torch.zeros(self._shape[0], dtype=torch.float64, device=device())
        self._losses[name][layer_number - 1] += loss

    def reduce(self, loss_names: Sequence[str]) -> tuple[Tensor, dict[str, float]]:
        """Return (load_LE, sums of each balance loss over layers and tokens) of the whole step.

        load_LE is float64, tokens per layer and expert. It is a collective over all ranks, which
        hold different layers (PP) or different tokens (TP, CP, DP).
        """
        zeros = torch.zeros(self._shape[0], dtype=torch.float64, device=device())
        parts = [
            self._load_LE.double(),
            *(self._losses.get(name, zeros)[:, None] for name in loss_names),
        ]
        whole = torch.cat(parts, dim=1)
        dist.all_reduce(whole)
        load_LE, *losses = whole.split([self._shape[1], *[1] * len(loss_names)], dim=1)
        return load_LE, {
            name: loss.sum().item() for name, loss in zip(loss_names, losses, strict=True)
        }


def load_metrics(load_LE: Tensor, moe_layers: Sequence[int]) -> Mapping[str, float]:
    """Return metrics of how evenly the experts are loaded, per MoE layer and as their mean.

    moe_layers      1 for each layer with experts, 0 for each dense one
    max_violation   load of the busiest expert / mean load, minus 1; 0 is perfect
                    (arXiv:2408.15664, equation 4); `max_violation_max` is the worst layer's
    idle_share      share of experts without a token
    load_entropy    entropy of the load / log(number of experts); 1 is perfect
    """
    layers = [i for i, has_experts in enumerate(moe_layers) if has_experts]
    load_LE = load_LE[layers].cpu()
    share_LE = load_LE / load_LE.sum(1, keepdim=True).clamp(min=1)
    num_experts = load_LE.shape[1]
    values = {
        "max_violation": share_LE.amax(1) * num_experts - 1,
        "idle_share": (load_LE == 0).double().mean(1),
        "load_entropy": torch.special.entr(share_LE).sum(1) / math.log(num_experts),
    }
    metrics = {f"router/{name}": value_L.mean().item() for name, value_L in values.items()}
    metrics["router/max_violation_max"] = values["max_violation"].max().item()
    for name, value_L in values.items():
        rows = zip(layers, value_L.tolist(), strict=True)
        metrics |= {f"router/layer_{layer:02d}/{name}": value for layer, value in rows}
    return metrics


class Routing:
    """Tells every run of a router its micro-batch, and records what the router did."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
        """Attach to the routers of this rank's chunks."""
        self._shape = (config.num_layers, config.moe_router_topk)
        self._recomputes_routers = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        )
        self.load = StepLoad(config.num_layers, config.num_moe_experts or 0)
        self._has_experts = bool(config.num_moe_experts)
        self._sequence_parallel = config.sequence_parallel
        self._run: ChunkRun | None = None
        self._forward_only = False
        self._replays = False
        self._records_experts = False
        self._records: dict[int, RoutingRecord] = {}
        self._to_recompute: dict[int, deque[ChunkRun]] = {}
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
        self._run = None
        self._forward_only = forward_only
        self._replays = replay
        self._to_recompute = {}
        if not forward_only:
            self.load.clear()
        self._records_experts = record
        self._records = {id(batch): self._make_record(batch) for batch in batches}

    def enter(self, batch: RankBatch, placed: RankBatch, chunk: torch.nn.Module) -> None:
        """Name the micro-batch that the routers of `chunk` run on from now on.

        batch    the micro-batch that `begin` was given
        placed   what is on the device of it
        """
        self._keep_taken()
        if not self._has_experts:
            return
        layers = layers_of(chunk)
        rows = self.own_rows(len(batch.tokens_T))
        given_tlK = batch.experts(rows, layers)
        taken_tlK = None
        if self._records_experts:
            shape = (rows.stop - rows.start, layers.stop - layers.start, self._shape[1])
            taken_tlK = torch.zeros(shape, dtype=torch.int16, device=device())
        given_tlK = None if given_tlK is None else on_device(given_tlK)
        record = self._records[id(batch)]
        self._run = ChunkRun(placed, record, layers, rows, given_tlK, taken_tlK)

    def start_call(self, layer_number: int, num_rows: int) -> RouterCall:
        """Describe the run of router `layer_number`, from 1, on `num_rows` tokens of this rank."""
        run, recomputes = self._run_of(layer_number)
        assert num_rows == run.rows.stop - run.rows.start, (num_rows, run.rows, layer_number)
        given_TK = run.get_given(layer_number)
        return RouterCall(layer_number, run, given_TK, self._replays, recomputes)

    def end_call(
        self, call: RouterCall, own_TK: Tensor, taken_TK: Tensor, routing_map_TE: Tensor
    ) -> None:
        """Record that a router chose `own_TK` but sent its tokens to `taken_TK`.

        routing_map_TE is True for the experts of each token.
        """
        if call.recomputes:
            return
        run = call.run
        if not self._forward_only:
            padding_T = run.batch.padding_T
            padding_T = None if padding_T is None else padding_T[run.rows]
            self.load.count(call.layer_number, routing_map_TE, padding_T)
        record = run.record
        if record.flips_T is not None:
            assert call.given_TK is not None and record.replaced_T is not None
            known_T = (call.given_TK >= 0).all(1)
            kept_T = _went_to(routing_map_TE, call.given_TK.clamp(min=0))
            record.flips_T[run.rows] += known_T & ~kept_T
            record.replaced_T[run.rows] += ~_went_to(routing_map_TE, own_TK)
        run.take(call.layer_number, taken_TK)

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
        self._keep_taken()
        if self._records_experts:
            synchronize()  # they are on their way to host memory
        records = [self._records[id(batch)] for batch in batches]
        for batch, record in zip(batches, records, strict=True):
            if record.flips_T is not None and record.replaced_T is not None:
                record.flips_T, record.replaced_T = _sum(
                    torch.stack([record.flips_T, record.replaced_T])
                )
            if self._records_experts:
                shape = (len(batch.tokens_T), *self._shape)
                record.experts_TLK = _sum_experts(record.own_experts(shape))
        self._records = {}
        return records

    def _keep_taken(self) -> None:
        """Keep what was recorded of the micro-batch that went through a chunk last."""
        if self._run is not None:
            self._run.keep_taken()
            self._run = None

    def own_rows(self, num_tokens: int) -> slice:
        """Return this rank's tokens of a micro-batch: sequence parallelism splits them."""
        if not self._sequence_parallel:
            return slice(0, num_tokens)
        share = num_tokens // ps.get_tensor_model_parallel_world_size()
        first = ps.get_tensor_model_parallel_rank() * share
        return slice(first, first + share)

    def _run_of(self, layer_number: int) -> tuple[ChunkRun, bool]:
        """Return (the micro-batch that the router runs on, whether this is a recomputation).

        Recomputing layers, or their experts, runs a router without gradients in the forward pass
        and again, with gradients, in the backward pass. Micro-batches are recomputed in the order
        of their forward passes, but by then the schedule may have entered later ones; hence a queue
        per layer.
        """
        if self._recomputes_routers and not self._forward_only:
            waiting = self._to_recompute.setdefault(layer_number, deque())
            if torch.is_grad_enabled():
                return waiting.popleft(), True
            assert self._run is not None
            waiting.append(self._run)
        assert self._run is not None, "a router runs outside a pass"
        return self._run, False

    def _make_record(self, batch: RankBatch) -> RoutingRecord:
        made = RoutingRecord()
        if batch.named is not None:
            num_layers, topk = self._shape
            if batch.named.layers:
                num_layers = len(batch.named.layers)
            _check_shape(batch.named.choices_MLK, (num_layers, topk))
            made.flips_T = torch.zeros(len(batch.tokens_T), dtype=torch.int32, device=device())
            made.replaced_T = torch.zeros_like(made.flips_T)
        return made


def _check_shape(given_MLK: Tensor, expected: tuple[int, int]) -> None:
    num_layers, topk = given_MLK.shape[1:]
    if (num_layers, topk) != expected:
        raise ValueError(
            f"routed experts of {num_layers} layers and {topk} experts per token, but the model has"
            f" {expected[0]} and {expected[1]}: the samples come from another model"
        )


def _went_to(routing_map_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return bool [T], True where a token went to all of these experts."""
    return routing_map_TE.gather(1, experts_TK).bool().all(1)


def _sum_experts(experts_TLK: Tensor) -> Tensor:
    """Return what all tensor- and pipeline-parallel ranks recorded; zeros elsewhere."""
    return _sum(experts_TLK.to(device(), torch.int32)).to("cpu", torch.int16)


def _sum(value: Tensor) -> Tensor:
    """Sum `value` in place over the tensor- and pipeline-parallel ranks."""
    for group in (ps.get_tensor_model_parallel_group(), ps.get_pipeline_model_parallel_group()):
        if group.size() > 1:
            dist.all_reduce(value, group=group)
    return value
