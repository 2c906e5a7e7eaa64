"""Holds one rank's share of a model in training: the policy or the critic.

StoredBatch --read what this rank needs--> micro-batches --Megatron--> log-probs, values, step stats

Log-probs and values go to the stores of the samples. A rank of the policy that is linked to the
engines sends them its weights. Only this process imports Megatron, not the controller.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_rl.batches.assembly import name_columns, refer_to_columns
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, ProfileConfig, TrainConfig
from mcore_rl.device import device_name, exact_pinning, leave_compiler_out, peak_flops
from mcore_rl.process.gc_pause import without_collector
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.train.storage import Storage
from mcore_rl.types import (
    FailedSaves,
    LogprobOptions,
    RankStep,
    StepStats,
    StoredBatch,
    StoredColumn,
    TokenScores,
    TrainBatch,
)
from mcore_rl.weight_sync.wire import Link, Report
from mcore_rl.weights.hf.low_precision import Quantization
from mcore_rl.weights.lora.places import Content
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.workers.stores import SampleStores

VALUES = StoredColumn("values")
Share = Sequence[TrainBatch] | StoredBatch
"""The micro-batches of a data-parallel coordinate, or references to them in parts."""


@dataclass(frozen=True)
class ModelSpec:
    """The model that every rank builds its share of; `loss` must be picklable.

    profile, profile_dir   the steps and ranks to capture, and the folder of the captures
    outlives_failed_saves  checkpoint.on_error=continue
    quantization           rollout.quantization: what engines get is made of the weights; "none":
                           they get the weights, or what train.fake_quantization rounded them to
    lends_frozen           weights below low-rank factors lie where a critic can map them
    frozen_paths           where those of the policy's ranks lie, by rank; (): nowhere
    serves_drafts          engines hold trained MTP layers, too: rollout.speculate=mtp
    """

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    total_steps: int
    seed: int
    loss: Any
    collective_timeout_s: float
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    profile_dir: str = ""
    outlives_failed_saves: bool = False
    quantization: Quantization = "none"
    lends_frozen: bool = False
    frozen_paths: tuple[str, ...] = ()
    serves_drafts: bool = False


class ModelWorker:
    """One rank of a model in training; the policy and the critic are subclasses."""

    _stores: SampleStores | None = None

    def __init__(
        self,
        spec: ModelSpec,
        rank: int,
        master_addr: str,
        master_port: int,
        gpu_ids: Sequence[str] = (),
        storage: Storage | None = None,
    ) -> None:
        """Join the process groups and build this rank's share of the model.

        gpu_ids   the rank's GPU among those of its machine; empty on a CPU
        storage   how to reach the run folder; None if this node sees it
        """
        os.environ.update(exact_pinning(os.environ))
        leave_compiler_out()
        with without_collector():
            from mcore_rl.train.lora.frozen import BaseSharing
            from mcore_rl.train.runtime import init_distributed

            model_cls = self._model_cls()
        world_size = spec.parallel.world_size
        self._coordinate = init_distributed(
            rank,
            world_size,
            master_addr,
            master_port,
            spec.parallel,
            spec.seed,
            spec.collective_timeout_s,
            gpu_ids,
        )
        self._rank = rank
        self._loss = spec.loss
        self._quantization: Quantization = spec.quantization
        self._serves_drafts = spec.serves_drafts
        self._profile = spec.profile
        self._profile_dir = Path(spec.profile_dir)
        borrowed = spec.frozen_paths[rank] if spec.frozen_paths else ""
        sharing = BaseSharing(spec.lends_frozen, borrowed)
        parts = spec.model, spec.parallel, spec.train, spec.optimizer
        self._model = model_cls(*parts, spec.total_steps, spec.seed, sharing)
        if storage is not None:
            self._model.keep_files_with(storage)
        if spec.outlives_failed_saves:
            self._model.outlive_failed_saves()

    def _model_cls(self) -> Any:
        """Return the subclass of TrainedModel that each rank has a share of."""
        raise NotImplementedError

    def close(self, timeout_s: float) -> None:
        """End what this rank has under way beside its calls, so that the process may go on.

        Raises TimeoutError if a checkpoint is still being written after `timeout_s`.
        """
        from mcore_rl.train.runtime import leave_groups

        self._model.close(timeout_s)
        leave_groups()

    def connect_stores(self, stores: SampleStores) -> None:
        self._stores = stores

    def _fetch_tokens(self, share: Share) -> Sequence[TrainBatch]:
        """Return micro-batches with the tokens, images and experts that this rank reads.

        Raises SamplesLostError on all ranks if any of them finds samples lost; no rank has begun
        then.
        """
        from mcore_rl.train.runtime import is_true_anywhere

        if not isinstance(share, StoredBatch):
            return share
        assert self._stores is not None, "connect_stores comes first"
        lost = None
        parts: list[TrainBatch] = []
        try:
            model = self._model
            parts = self._stores.assemble_parts(
                share, model.layers, model.select_routed_tokens, model.select_seen_tokens
            )
            if share.nums_images_N is not None:
                parts = self._stores.with_images(parts, share, with_pixels=self._model.reads_pixels)
        except SamplesLostError as error:
            lost = error
        if is_true_anywhere(lost is not None):
            raise lost or SamplesLostError("", [])
        return parts

    def _keep(self, share: StoredBatch, columns: Mapping[str, Sequence[Tensor]]) -> None:
        """Write values, one tensor per micro-batch, to the stores of the samples."""
        assert self._stores is not None, "connect_stores comes first"
        self._stores.scatter_parts(share, columns)

    def _answer_step(self, stats: StepStats | None) -> RankStep:
        return RankStep(stats, self._model.rank_clock.take(), self._coordinate.pp)

    def find_frozen_path(self) -> str:
        return self._model.frozen_path

    def peak_flops(self) -> float | None:
        return peak_flops()

    def device_name(self) -> str:
        return device_name()

    def coordinate(self) -> Any:
        return self._coordinate

    def hold(self, parts: Collection[str]) -> None:
        self._model.hold(parts)

    def save(self, folder: str, extra: dict[str, Any]) -> FailedSaves:
        """Start a save; return the saves that failed, as StepStats.failed_saves."""
        self._model.save(Path(folder), extra)
        return self._model.take_failed_saves()

    def finish_save(self, timeout_s: float) -> FailedSaves:
        """Complete a save, if one is under way; return those that failed."""
        self._model.finish_save(timeout_s)
        return self._model.take_failed_saves()

    def load(self, folder: str, verify: bool) -> dict[str, Any]:
        return self._model.load(Path(folder), verify=verify)

    def export_hf(self, folder: str) -> None:
        self._model.export_hf(Path(folder))

    def count_kept_bytes(self) -> int:
        return self._model.kept_state_bytes

    def use_kept_memory(self, paths: Sequence[str]) -> None:
        self._model.use_kept_memory(paths)

    def find_kept_steps(self) -> list[int]:
        return self._model.kept_steps

    def keep_state(self, step: int) -> tuple[int, int]:
        return self._model.keep_state(step)

    def read_kept_index(self) -> bytes:
        return self._model.kept_index

    def compose_state(self, step: int, paths: Mapping[str, str], like: str) -> int:
        return self._model.compose_state(step, paths, like)

    def restore_state(self, step: int) -> None:
        self._model.restore_state(step)


class TrainerWorker(ModelWorker):
    """One rank of the policy; `spec.loss` is a TokenLoss. Ranks that own no output return None."""

    _sender: Any = None
    _packed: Any = None
    """Words and scales of routed experts, where engines serve INT4."""

    def _model_cls(self) -> Any:
        from mcore_rl.train.actor import Actor

        return Actor

    def close(self, timeout_s: float) -> None:
        """End the same, and the links to engines."""
        if self._sender is not None:
            self._sender.close()
        super().close(timeout_s)

    def compute_logprobs(
        self, share: Share, options: LogprobOptions, adapter: str = ""
    ) -> list[TokenScores] | None:
        """Return the scores; for a StoredBatch, store them and return their columns.

        adapter   that scores, of several; "": the one so far
        """
        self._model.choose_adapter(adapter)
        scores = self._model.compute_logprobs(self._fetch_tokens(share), options)
        if scores is None or not isinstance(share, StoredBatch):
            return scores
        columns = name_columns(scores, options)
        self._keep(share, columns)
        return [refer_to_columns(columns)]

    def train_step(
        self, share: Share, *, temperature: float, num_tokens: int, adapter: str = ""
    ) -> RankStep:
        self._model.choose_adapter(adapter)
        with_tokens = self._fetch_tokens(share)
        with self._capture_step():
            stats = self._model.train_step(
                with_tokens, self._loss, temperature=temperature, num_tokens=num_tokens
            )
        return self._answer_step(stats)

    def _capture_step(self) -> AbstractContextManager[None]:
        """Return a context for the next optimizer step, which profiles a step that was chosen."""
        step = self._model.step + 1
        if step not in self._profile.steps or self._rank not in self._profile.ranks:
            return nullcontext()
        from mcore_rl.device.profiler import nsys_range, torch_trace

        if self._profile.tool == "nsys":
            return nsys_range()
        return torch_trace(self._profile_dir / f"trainer_rank{self._rank}_step{step}.json.gz")

    def snapshot_reference(self) -> None:
        self._model.snapshot_reference()

    def describe(self, content: Content = "weights") -> bytes:
        """Return the facts that engines need of this rank; the first call makes its sender."""
        if self._sender is None:
            from mcore_rl.weight_sync.packed_experts import PackedExperts
            from mcore_rl.weight_sync.sender import WeightSender

            shards, tensors = self._model.select_served_layout(drafts=self._serves_drafts)
            if self._quantization == "int4":
                shapes = hf_tensor_shapes(self._model.hf_config)
                self._packed = PackedExperts(shards, tensors, shapes, self._rank)
                shards, tensors = self._packed.shards, self._packed.tensors
            self._sender = WeightSender(
                shards,
                tensors,
                self._rank,
                adapter=self._model.adapter_layouts(),
                unadapted=self._model.without_adapter,
                adapters=self._model.list_adapter_factors(),
            )
        return self._sender.describe(content)

    def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> list[bytes]:
        return self._sender.plan_links(offers)

    def open_links(self, verdicts: Sequence[tuple[str, str]]) -> list[str | Report]:
        return self._sender.open_links(verdicts)

    def send(self, version: int, engines: Sequence[str], timeout_s: float) -> dict[str, Report]:
        with self._swap_in_sent_weights():
            return self._sender.send(version, engines, timeout_s)

    def publish_sums(self, version: int, engines: Sequence[str]) -> None:
        with self._swap_in_sent_weights():
            self._sender.publish_sums(version, engines)

    def _swap_in_sent_weights(self) -> AbstractContextManager[None]:
        """Return a context in which what is sent is what engines get."""
        if self._packed is not None:
            return self._packed.swap_in()
        return self._model.round_weights() if self._quantization == "none" else nullcontext()


class CriticWorker(ModelWorker):
    """One rank of the critic; `spec.loss` is a ValueLoss. Ranks that own no output return None."""

    def _model_cls(self) -> Any:
        from mcore_rl.train.critic import CriticModel

        return CriticModel

    def compute_values(self, share: Share) -> list[Any] | None:
        """Return the values; for a StoredBatch, store them and return their column."""
        values = self._model.compute_values(self._fetch_tokens(share))
        if values is None or not isinstance(share, StoredBatch):
            return values
        self._keep(share, {VALUES.name: values})
        return [VALUES]

    def train_step(self, share: Share, *, num_tokens: int) -> RankStep:
        with_tokens = self._fetch_tokens(share)
        stats = self._model.train_step(with_tokens, self._loss, num_tokens=num_tokens)
        return self._answer_step(stats)
