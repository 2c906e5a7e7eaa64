"""Runs a model in training on one rank: takes optimizer steps, gives weights, saves checkpoints.

It is the common base of actor and critic, which differ in what they compute from the last stage's
output.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.data.images.places import ImageTokens
from mcore_rl.device import forget_peak
from mcore_rl.device.rank_clock import RankClock
from mcore_rl.train.checkpoint import Checkpointer, TrainState
from mcore_rl.train.export import export_hf
from mcore_rl.train.guarded_optimizer import GuardedOptimizer
from mcore_rl.train.logprobs import OutputRows, name_scored_rows
from mcore_rl.train.lora.adapter import DDP_OF_FACTORS, LoraAdapter, make_adapters
from mcore_rl.train.lora.frozen import ALONE, BaseSharing
from mcore_rl.train.lora.turns import Learner, make_turns
from mcore_rl.train.model import make_chunks
from mcore_rl.train.mtp.drafts import make_mtp_loss
from mcore_rl.train.offload import TRAINING, WEIGHTS, DeviceMemory
from mcore_rl.train.optimizer import (
    compute_learning_rate,
    make_optimizer,
    set_learning_rate,
    wrap_chunks,
)
from mcore_rl.train.packing import RankBatch, local_sources, local_tokens, make_rank_batch
from mcore_rl.train.recovery.rank_state import RankState
from mcore_rl.train.rounded_weights import RoundedWeights, make_rounded_weights
from mcore_rl.train.router import RoutingRecord, balance_losses, layers_of
from mcore_rl.train.routing import Routing, load_metrics
from mcore_rl.train.runtime import is_on_last_stage, rank_coordinate
from mcore_rl.train.schedule import OutputFn, Report, run_schedule
from mcore_rl.train.shared_attention import SharedAttention
from mcore_rl.train.sparse.attention import train_indexers
from mcore_rl.train.sparse.choices import KeyChoices
from mcore_rl.train.stats import peak_memory, reduce_sums
from mcore_rl.train.storage import Storage
from mcore_rl.train.transformer_config import make_transformer_config, token_multiple
from mcore_rl.train.vision.tower import train_only
from mcore_rl.train.weights import fill_weights, local_tensors, weight_layout
from mcore_rl.types import FailedSaves, StepStats, TrainBatch
from mcore_rl.weights.box import Shard
from mcore_rl.weights.hf.config import ModelFacts, moe_layers, without_trained_mtp
from mcore_rl.weights.lora.places import Content, Held
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from mcore_rl.weights.models.table import HfConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TrainedModel:
    """One rank's share of a model and its optimizer. Every method is a collective over all ranks.

    Ranks with the same data-parallel coordinate must pass the same micro-batches, and all
    coordinates equally many. With `parallel.vpp` their number must be a multiple of `parallel.pp`.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        seed: int,
        sharing: BaseSharing = ALONE,
    ) -> None:
        """Build the model in the layout of the process groups and fill it.

        sharing   of the weights below low-rank factors
        Raises what ModelFacts.read, make_transformer_config and fill_weights raise.
        """
        stored = ModelFacts.read(model.path)
        self.hf_config = self._make_config(stored, train)
        self._hf_path = stored.path
        self._optimizer_config = optimizer
        self._total_steps = total_steps
        self._dtype = model.dtype
        dtype = DTYPES[model.dtype]
        self._config = make_transformer_config(self.hf_config, parallel, dtype, train)
        chunks = make_chunks(self._config, self.hf_config, train.expert_gemm)
        fill_weights(chunks, model, stored, self.hf_config, seed)
        self._train = train
        self._routing = Routing(chunks, self._config)
        if train.freeze_router:
            self._routing.freeze()
        self._keys = KeyChoices.from_config(self._config, train.indexer_loss)
        train_indexers(chunks, are_trained=train.indexer_loss > 0)
        self._image_tokens: ImageTokens | None = None
        if family_of(self.hf_config).has_tower:
            self._image_tokens = ImageTokens.from_config(self.hf_config)
            train_only(chunks, train.vision)
        self._shared = SharedAttention(chunks) if train.share_prefixes else None
        self._output_rows = OutputRows(chunks)
        self._drafts = make_mtp_loss(chunks, self.hf_config, train.mtp_loss, self._output_rows)
        adapted = train.lora, model, stored, self.hf_config
        adapters = make_adapters(chunks, *adapted, seed, sharing)
        self.rank_clock = RankClock()
        self._turns = make_turns(chunks, adapters, self._config, self._make_learner)
        self._shards, _ = weight_layout(self.chunks, self.hf_config)
        self._memory = DeviceMemory(self._turns)
        self._state = RankState(self._turns, self._memory)
        state = TrainState(self._turns, parallel, self.hf_config)
        self._checkpointer = Checkpointer(state, self._memory.readable)

    @property
    def step(self) -> int:
        """Optimizer steps taken or skipped, of all adapters."""
        return self._turns.step

    @property
    def chunks(self) -> list[DistributedDataParallel]:
        """The model's chunks, whose DDP has the gradients of what is trained now."""
        return self._turns.chosen.chunks

    @property
    def optimizer(self) -> GuardedOptimizer:
        """The optimizer of what is trained now."""
        return self._turns.chosen.optimizer

    @property
    def _adapter(self) -> LoraAdapter | None:
        return self._turns.chosen.adapter

    def choose_adapter(self, name: str) -> None:
        """Compute with adapter `name` from now on, and train it; "": with the one so far.

        Raises ValueError if there is no such adapter.
        """
        if name:
            self._turns.choose(name)

    def _make_config(self, stored: ModelFacts, train: TrainConfig) -> HfConfig:
        """Return config.json of the model that is built from the one in the model directory."""
        return stored.config

    def _make_learner(
        self, chunks: Sequence[torch.nn.Module], adapter: LoraAdapter | None
    ) -> Learner:
        """Wrap the chunks for all weights, or for the adapter, whose factors they have.

        The clock of this rank's own work stops before gradients are reduced.
        """
        ddp = self._train.ddp
        optimizer = self._optimizer_config
        if adapter is None:
            wrapped = wrap_chunks(self._config, chunks, ddp, optimizer.name)
        else:
            of_factors = {**ddp, **DDP_OF_FACTORS}, optimizer.name, adapter.finalize_gradients
            wrapped = wrap_chunks(self._config, chunks, *of_factors)
        reduce = self.rank_clock.end_before(self._config.finalize_model_grads_func)
        made = make_optimizer(optimizer, DTYPES[self._dtype], wrapped)
        return Learner("" if adapter is None else adapter.name, adapter, wrapped, made, reduce)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the model, counted from 0, that this rank has a share of."""
        ranges = [layers_of(unwrap_model(chunk)) for chunk in self.chunks]
        return tuple(k for layers in ranges for k in range(layers.start, layers.stop))

    @property
    def reads_pixels(self) -> bool:
        """Return whether this rank runs a vision tower, which the first stage has."""
        return self._image_tokens is not None and ps.is_pipeline_first_stage(ignore_virtual=True)

    def select_routed_tokens(self, lens_N: tuple[int, ...]) -> Tensor:
        """Return which tokens of a micro-batch of these lengths this rank routes, int64, rising.

        Context and sequence parallelism divide them among ranks. Attention to chosen keys gathers
        what sequence parallelism divides: then they are all of a context-parallel rank. Where
        sequences share beginnings, the division depends on their tokens: these are all tokens.
        """
        if not lens_N or self._shared is not None:
            return torch.arange(sum(lens_N))
        sources_T = local_sources(lens_N, *self._rank_part())
        own_T = sources_T
        if self._keys is None:
            own_T = sources_T[self._routing.own_rows(len(sources_T))]
        return own_T[own_T >= 0].sort().values

    def select_seen_tokens(self, lens_N: tuple[int, ...]) -> Tensor:
        """Return which tokens of a micro-batch this rank computes or predicts, int64, rising.

        Context parallelism divides them; the positions of images depend on all of a sequence.
        """
        cp_rank, cp_size, *others = self._rank_part()
        if not lens_N or cp_size == 1 or self._image_tokens is not None:
            return torch.arange(sum(lens_N))
        ahead = 1 if self._drafts is None else self._drafts.reach
        return local_tokens(lens_N, cp_rank, cp_size, *others, ahead=ahead)

    def weight_layout(self) -> tuple[list[Shard], dict[str, Tensor]]:
        """Return (shards of HF tensors on this rank, the parameters that hold them)."""
        return self._shards, local_tensors(self.chunks)

    @cached_property
    def _rounded(self) -> RoundedWeights | None:
        return make_rounded_weights(self._train.fake_quantization, self._shards, self.hf_config)

    def round_weights(self) -> AbstractContextManager[None]:
        """Give weights the values of train.fake_quantization for a while, and then their own."""
        if self._rounded is None:
            return nullcontext()
        return self._rounded.swap_in(local_tensors(self.chunks))

    def select_served_layout(
        self, *, drafts: bool = False
    ) -> tuple[list[Shard], dict[str, Tensor]]:
        """Return the same of what engines hold: all but trained MTP layers, without `drafts`."""
        shards, tensors = self.weight_layout()
        if self._drafts is not None and not drafts:
            served = hf_tensor_shapes(without_trained_mtp(self.hf_config))
            shards = [shard for shard in shards if shard.box.name in served]
        return shards, tensors

    def adapter_layouts(self) -> dict[Content, Held]:
        """Return the same of low-rank factors and of the weights below them; {} without factors."""
        return {} if self._adapter is None else self._adapter.layouts()

    def list_adapter_factors(self) -> dict[str, Held]:
        """Return the same of the factors of several adapters, by name; {} of an only one."""
        return self._turns.list_factors()

    @property
    def frozen_path(self) -> str:
        """Where others can map the weights below low-rank factors; "": nowhere."""
        return "" if self._adapter is None else self._adapter.frozen.path

    def without_adapter(self) -> AbstractContextManager[None]:
        """Return a block within which the weights are those below low-rank factors, if any."""
        return nullcontext() if self._adapter is None else self._adapter.without()

    def hold(self, parts: Collection[str]) -> None:
        """Keep exactly these parts in device memory; see train/offload.py.

        Waits for a save in progress if that reads host memory that will be written to.
        """
        if self._memory.overwrites_host(parts):
            self._checkpointer.wait_written()
        self._memory.hold(parts)

    @property
    def held_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer that are in device memory now."""
        return self._memory.num_bytes

    def keep_files_with(self, storage: Storage) -> None:
        """Use `storage` for checkpoints and exports from now on."""
        self._checkpointer.storage = storage

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Start a checkpoint: weights, optimizer, step, generators and `extra`, alike on all ranks.

        Any parts may be in device memory. Returns once these are copied; the folder gets its name
        in `finish_save`, in the next save or in some later train_step.
        """
        self._checkpointer.save(Path(folder), extra)

    def outlive_failed_saves(self) -> None:
        """Have saves that cannot be written add to `take_failed_saves`, and raise no more."""
        self._checkpointer.failures = []

    def take_failed_saves(self) -> FailedSaves:
        """Return (folder, reason) of saves that failed since the last call; alike on all ranks."""
        failed = tuple(self._checkpointer.failures or ())
        if failed:
            self._checkpointer.failures = []
        return failed

    def close(self, timeout_s: float) -> None:
        """Give the model up, once this rank's part of a save is written; TimeoutError if late."""
        self._checkpointer.wait_written(timeout_s)
        self._turns.close()

    def finish_save(self, timeout_s: float = 600.0) -> None:
        """Wait for a save in progress, if there is one."""
        self._checkpointer.finish(timeout_s)

    def load(self, folder: Path, *, verify: bool = True) -> dict[str, Any]:
        """Continue from a checkpoint of the same model in any layout; return its `extra`."""
        extra = self._checkpointer.load(Path(folder), verify=verify)
        self._memory.find_storages()
        self._turns.merge()
        return extra

    @property
    def kept_state_bytes(self) -> int:
        """Bytes of one copy of this rank's state in kept memory."""
        return self._state.num_bytes

    def use_kept_memory(self, paths: Sequence[str]) -> None:
        """Keep copies of the state in this memory, which may hold those of an earlier process."""
        self._state.use(paths)

    @property
    def kept_steps(self) -> list[int]:
        """The steps whose states are whole in kept memory."""
        return self._state.kept_steps

    def keep_state(self, step: int) -> tuple[int, int]:
        """Copy the state to kept memory, as that after the loop's `step`.

        Returns (number of the copy, its bytes).
        """
        return self._state.keep(step)

    @property
    def kept_index(self) -> bytes:
        """Where which part of which state lies in each copy; see process/kept_copies.py."""
        return self._state.index

    def compose_state(self, step: int, paths: Mapping[str, str], like: str) -> int:
        """Make the copy of the state after the loop's `step` of those of ranks of another layout.

        paths, like   as RankState.compose takes them
        Returns the number of the copy. Not a collective.
        """
        return self._state.compose(step, paths, like)

    def restore_state(self, step: int) -> None:
        """Go back to the state after the loop's `step`; a save in progress is completed first."""
        self.finish_save()
        self.hold((WEIGHTS, TRAINING))
        self._state.restore(step)
        self._turns.merge()

    def export_hf(self, out_dir: Path) -> None:
        """Write a HuggingFace directory: the weights, with the original tokenizer and config.

        Any parts may be in device memory. Of several adapters each one's merged weights go to a
        folder of its name in `out_dir`.
        """
        chosen = self._turns.chosen.name
        if len(self._turns.learners) > 1:
            self.hold((WEIGHTS, TRAINING))
        for name in self._turns.learners:
            self.choose_adapter(name)
            self._export(Path(out_dir) / name)
        self.choose_adapter(chosen)

    def _export(self, out_dir: Path) -> None:
        shards, tensors = self.weight_layout()
        readable = {name: self._memory.readable(tensor) for name, tensor in tensors.items()}
        facts = self.hf_config, self._dtype, out_dir, self._hf_path
        export_hf(shards, readable, *facts, storage=self._checkpointer.storage)

    def _optimizer_step(
        self,
        batches: Sequence[RankBatch],
        output: OutputFn,
        num_tokens: int,
        *,
        replay: bool = False,
        replay_keys: bool | None = None,
    ) -> StepStats | None:
        """Take a step on the sum of the losses of `output`; return its stats on the owning rank.

        output       reports {"sums": token_sums(...), ...} of each micro-batch; its loss is scaled
                     by `num_tokens`, since megatron-core divides gradients by the step's tokens
        num_tokens   tokens of the whole step, over all data-parallel ranks
        replay, replay_keys   as Routing.begin and KeyChoices.begin take it
        """
        assert batches, "a step without micro-batches"
        forget_peak()
        self._checkpointer.maybe_finish()
        failed = self.take_failed_saves()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        rate = self._set_rate()
        if self._drafts is not None:
            self._drafts.begin(batches)
        reports, records = self._run(
            batches, output, forward_only=False, replay=replay, replay_keys=replay_keys
        )
        update = self.optimizer.update([report["sums"]["loss"] for report in reports])
        if update.is_taken and self._adapter is not None:
            self._adapter.merge()
        self._turns.chosen.step += 1
        router = self._balance(num_tokens, self._train.router_bias_rate if update.is_taken else 0.0)
        work = {**self._work(batches), **(self._keys.reduce(num_tokens) if self._keys else {})}
        work |= {**(self._drafts.end() if self._drafts else {}), **peak_memory()}
        if not is_on_last_stage():
            return None
        sums = [
            report["sums"] | self._sum_routing(report, batch, record)
            for report, batch, record in zip(reports, batches, records, strict=True)
        ]
        loss, metrics = reduce_sums(sums, num_tokens)
        if not rank_coordinate().owns_output:
            return None
        if update.has_bad_loss and math.isfinite(loss):
            loss = math.nan  # that of another rank
        of_step = {**metrics, **router, **work, **update.list_metrics(self._apart)}
        return StepStats(loss, update.grad_norm, rate, num_tokens, of_step, failed)

    def _set_rate(self) -> float:
        """Set the learning rate of the next step of what is trained now, and return it."""
        step = self._turns.chosen.step
        rate = compute_learning_rate(self._optimizer_config, step, self._total_steps)
        set_learning_rate(self.optimizer, rate)
        return rate

    @property
    def _apart(self) -> str:
        """Return what metrics call the parameters whose gradient has a norm of its own."""
        return "indexer" if self._drafts is None else "mtp"

    def _sum_routing(
        self, report: Report, batch: RankBatch, record: RoutingRecord
    ) -> dict[str, Tensor]:
        """Return sums like those of the report that are known once all layers have run."""
        return {}

    def _work(self, batches: Sequence[RankBatch]) -> dict[str, float]:
        """Return metrics of the step's operations that do not follow from lengths; collective."""
        return {}

    def _run(
        self,
        batches: Sequence[RankBatch],
        output: OutputFn,
        *,
        forward_only: bool,
        replay: bool = False,
        record: bool = False,
        replay_keys: bool | None = None,
    ) -> tuple[list[Report], list[RoutingRecord]]:
        """Return the last stage's reports, and the routers' record of each micro-batch."""
        if self._keys is not None:
            self._keys.begin(batches, replay=replay_keys)
        self._routing.begin(batches, forward_only=forward_only, replay=replay, record=record)
        self.rank_clock.begin("forward" if forward_only else "train")
        with self.round_weights():
            reports = run_schedule(
                self.chunks, batches, output, forward_only=forward_only, enter=self._enter
            )
        self.rank_clock.end()
        return reports, self._routing.take(batches)

    def _enter(self, batch: RankBatch, model: torch.nn.Module) -> RankBatch:
        """Bring to the device what a chunk needs of a micro-batch, and tell its routers."""
        chunk = unwrap_model(model)
        named = name_scored_rows(batch)
        placed = named.on_device(targets=chunk.post_process, images=chunk.pre_process)
        self._routing.enter(batch, placed, chunk)
        if self._shared is not None:
            self._shared.enter(placed)
        if self._keys is not None:
            placed = replace(placed, chunk_keys=self._keys.enter(batch, placed))
        return self._output_rows.enter(placed)

    def _rank_batches(
        self, microbatches: Sequence[TrainBatch], *, are_learned: bool = False
    ) -> list[RankBatch]:
        """Return this rank's parts; `are_learned`: with the targets of MTP layers, if any learn."""
        part = self._rank_part()
        share = self._shared is not None
        made = [
            make_rank_batch(batch, *part, self._image_tokens, share=share) for batch in microbatches
        ]
        if self._drafts is None or not are_learned:
            return made
        pairs = zip(microbatches, made, strict=True)
        return [self._drafts.name_targets(batch, own) for batch, own in pairs]

    def _rank_part(self) -> tuple[int, int, int, int]:
        """Return the arguments of make_rank_batch that say which part of a micro-batch is here."""
        tp_size = ps.get_tensor_model_parallel_world_size()
        cp_size = ps.get_context_parallel_world_size()
        return ps.get_context_parallel_rank(), cp_size, tp_size, token_multiple(self._config)

    def _balance(self, num_tokens: int, bias_rate: float) -> dict[str, float]:
        """Steer the experts' bias by the step's load; return metrics of load and balance losses."""
        layers = moe_layers(self.hf_config)
        if not any(layers):
            return {}
        load_LE, losses = self._routing.load.reduce(balance_losses(self._config))
        self._routing.move_bias(load_LE, bias_rate)
        means = {
            f"router/{name}": loss / (num_tokens * sum(layers)) for name, loss in losses.items()
        }
        return {**load_metrics(load_LE, layers), **means}
