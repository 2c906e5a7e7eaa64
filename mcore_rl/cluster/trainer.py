"""The policy's ranks, with a train.actor.Actor and a weight sender in each.

They take micro-batches and return log-probs and step stats. Once linked to the engines, they send
them their weights.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from mcore_rl.cluster.model_group import ModelGroup, ModelWorker, Share
from mcore_rl.types import LogprobOptions, StepStats, StoredBatch, StoredColumn, TokenScores
from mcore_rl.weight_sync.wire import Link, Report


class TrainerWorker(ModelWorker):
    """One rank of the policy; `spec.loss` is a TokenLoss. Ranks that own no output return None."""

    _sender: Any = None

    def _model_cls(self) -> Any:
        from mcore_rl.train.actor import Actor

        return Actor

    def compute_logprobs(self, share: Share, options: LogprobOptions) -> list[TokenScores] | None:
        """For a StoredBatch the scores go to its stores; their columns are returned."""
        scores = self._model.compute_logprobs(self._with_tokens(share), options)
        if scores is None or not isinstance(share, StoredBatch):
            return scores
        columns = columns_of_scores(scores, options)
        self._keep(share, columns)
        return [scores_in(columns)]

    def train_step(self, share: Share, *, temperature: float, num_tokens: int) -> StepStats | None:
        with_tokens = self._with_tokens(share)
        with self._captured():
            return self._model.train_step(
                with_tokens, self._loss, temperature=temperature, num_tokens=num_tokens
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

    def describe(self) -> bytes:
        """Return the facts that engines need of this rank; the first call makes its sender."""
        if self._sender is None:
            from mcore_rl.weight_sync.sender import WeightSender

            shards, tensors = self._model.weight_layout()
            self._sender = WeightSender(shards, tensors, self._rank)
        return self._sender.describe()

    def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> list[bytes]:
        return self._sender.plan_links(offers)

    def open_links(self, verdicts: Sequence[tuple[str, str]]) -> list[str | Report]:
        return self._sender.open_links(verdicts)

    def send(self, version: int, engines: Sequence[str], timeout_s: float) -> dict[str, Report]:
        return self._sender.send(version, engines, timeout_s)


def columns_of_scores(
    scores: Sequence[TokenScores], options: LogprobOptions
) -> dict[str, list[Tensor]]:
    """Return the values of each micro-batch by the column that keeps them.

    Of a reference, only log-probs are kept: what its routers chose says nothing about the policy.
    """
    if options.reference:
        return {"ref_logprobs": [score.logprobs_T for score in scores]}
    columns = {
        "old_logprobs": [score.logprobs_T for score in scores],
        "router_flips": [score.router_flips_T for score in scores],
        "sum_squares": [score.sum_squares_T for score in scores],
        "routed_experts": [score.routed_experts_TLK for score in scores],
    }
    return {name: values for name, values in columns.items() if values[0] is not None}


def scores_in(columns: Collection[str]) -> TokenScores:
    """Return the scores as references to their columns."""

    def column(name: str) -> StoredColumn | None:
        return StoredColumn(name) if name in columns else None

    return TokenScores(
        column("ref_logprobs") or column("old_logprobs"),
        router_flips_T=column("router_flips"),
        sum_squares_T=column("sum_squares"),
        routed_experts_TLK=column("routed_experts"),
    )


class TrainerGroup(ModelGroup):
    """All ranks of the policy; plays players.trainer.RankCalls and stream's TrainerRanks."""

    role = "trainer"
    worker_cls = TrainerWorker

    def compute_logprobs(
        self, per_dp: Sequence[Share], options: LogprobOptions
    ) -> list[list[TokenScores]]:
        return self._group.dispatch(
            "compute_logprobs", per_dp, deadline_s=self._answer_s, options=options
        )

    def train_step(
        self, per_dp: Sequence[Share], *, temperature: float, num_tokens: int
    ) -> StepStats:
        stats = self._group.dispatch(
            "train_step",
            per_dp,
            deadline_s=self._answer_s,
            temperature=temperature,
            num_tokens=num_tokens,
        )
        return stats[0]

    def snapshot_reference(self) -> None:
        self._call("snapshot_reference")

    async def describe(self) -> Sequence[bytes]:
        return await self._call_async("describe")

    async def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> Sequence[Sequence[bytes]]:
        return await self._call_async("plan_links", offers)

    async def open_links(
        self, verdicts: Sequence[tuple[str, str]]
    ) -> Sequence[Sequence[str | Report]]:
        return await self._call_async("open_links", verdicts)

    async def send(
        self, version: int, engines: Sequence[str], timeout_s: float
    ) -> Sequence[Mapping[str, Report]]:
        return await self._call_async("send", version, engines, timeout_s)

    async def _call_async(self, method: str, *args: object) -> list[Any]:
        return await self._group.call_all_async(method, *args, deadline_s=self._answer_s)
