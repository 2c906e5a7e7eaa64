"""The policy's ranks, with a train.actor.Actor and a weight sender in each.

They take micro-batches and return log-probs and step stats. Once linked to the engines, they send
them their weights.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mcore_rl.cluster.model_group import ModelGroup, ModelWorker
from mcore_rl.stream.wire import Link, Report
from mcore_rl.types import LogprobOptions, StepStats, TokenScores, TrainBatch


class TrainerWorker(ModelWorker):
    """One rank of the policy; `spec.loss` is a TokenLoss. Ranks that own no output return None."""

    _sender: Any = None

    def _model_cls(self) -> Any:
        from mcore_rl.train.actor import Actor

        return Actor

    def compute_logprobs(
        self, microbatches: Sequence[TrainBatch], options: LogprobOptions
    ) -> list[TokenScores] | None:
        return self._model.compute_logprobs(microbatches, options)

    def train_step(
        self, microbatches: Sequence[TrainBatch], *, temperature: float, num_tokens: int
    ) -> StepStats | None:
        with self._captured():
            return self._model.train_step(
                microbatches, self._loss, temperature=temperature, num_tokens=num_tokens
            )

    def _captured(self) -> AbstractContextManager[None]:
        """Return a block around the next optimizer step that captures it, if that was asked for."""
        step = self._model.step + 1
        if step not in self._profile.steps or self._rank not in self._profile.ranks:
            return nullcontext()
        from mcore_rl.device.profiler import nsys_range, torch_trace

        if self._profile.tool == "nsys":
            return nsys_range()
        return torch_trace(self._profile_dir / f"trainer_rank{self._rank}_step{step}.json.gz")

    def snapshot_reference(self) -> None:
        self._model.snapshot_reference()

    def connect(self, link: Link) -> Report:
        """Join the link to an engine; the sender is made with the first one."""
        if self._sender is None:
            from mcore_rl.stream.sender import WeightSender

            shards, tensors = self._model.weight_layout()
            self._sender = WeightSender(shards, tensors, self._rank)
        return self._sender.connect(link)

    def send(self, version: int, engines: Sequence[str], timeout_s: float) -> dict[str, Report]:
        return self._sender.send(version, engines, timeout_s)


class TrainerGroup(ModelGroup):
    """All ranks of the policy; plays players.trainer.RankCalls and stream's TrainerRanks."""

    role = "trainer"
    worker_cls = TrainerWorker

    def compute_logprobs(
        self, per_dp: Sequence[Sequence[TrainBatch]], options: LogprobOptions
    ) -> list[list[TokenScores]]:
        return self._group.dispatch(
            "compute_logprobs", per_dp, deadline_s=self._call_timeout_s, options=options
        )

    def train_step(
        self, per_dp: Sequence[Sequence[TrainBatch]], *, temperature: float, num_tokens: int
    ) -> StepStats:
        stats = self._group.dispatch(
            "train_step",
            per_dp,
            deadline_s=self._call_timeout_s,
            temperature=temperature,
            num_tokens=num_tokens,
        )
        return stats[0]

    def snapshot_reference(self) -> None:
        self._call("snapshot_reference")

    async def connect(self, link: Link) -> Sequence[Report]:
        return await self._group.call_all_async("connect", link, deadline_s=self._call_timeout_s)

    async def send(
        self, version: int, engines: Sequence[str], timeout_s: float
    ) -> Sequence[Mapping[str, Report]]:
        return await self._group.call_all_async(
            "send", version, engines, timeout_s, deadline_s=self._call_timeout_s
        )
