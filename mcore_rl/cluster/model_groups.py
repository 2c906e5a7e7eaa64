"""Calls the ranks of policy and critic, one object per model.

A call passes one argument to each data-parallel coordinate, and returns the answers of the ranks
that own an output.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.batches.rank_seconds import join_rank_steps
from mcore_rl.cluster.model_group import ModelGroup
from mcore_rl.types import LogprobOptions, StepStats, TokenScores
from mcore_rl.weight_sync.wire import Link, Report
from mcore_rl.weights.lora.places import Content
from mcore_rl.workers.model_worker import CriticWorker, Share, TrainerWorker


class TrainerGroup(ModelGroup):
    """All ranks of the policy; implements RankCalls and weight_sync's TrainerRanks."""

    role = "trainer"
    sizes = "parallel"
    worker_cls = TrainerWorker
    _adapter = ""

    def choose_adapter(self, name: str) -> None:
        """Score with and train one of several adapters from now on."""
        self._adapter = name

    def compute_logprobs(
        self, per_dp: Sequence[Share], options: LogprobOptions
    ) -> list[list[TokenScores]]:
        return self._group.dispatch(
            "compute_logprobs",
            per_dp,
            deadline_s=self._answer_s,
            options=options,
            adapter=self._adapter,
        )

    def train_step(
        self, per_dp: Sequence[Share], *, temperature: float, num_tokens: int
    ) -> StepStats:
        steps = self._group.dispatch_to_all(
            "train_step",
            per_dp,
            deadline_s=self._answer_s,
            temperature=temperature,
            num_tokens=num_tokens,
            adapter=self._adapter,
        )
        return join_rank_steps(steps)

    def snapshot_reference(self) -> None:
        """Have each rank copy its weights as the reference; ranks that go on have theirs."""
        if not self.goes_on:
            self._call("snapshot_reference")

    async def describe(self, content: Content = "weights") -> Sequence[bytes]:
        return await self._call_async("describe", content)

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

    async def publish_sums(self, version: int, engines: Sequence[str]) -> object:
        return await self._call_async("publish_sums", version, engines)

    async def _call_async(self, method: str, *args: object) -> list[Any]:
        return await self._group.call_all_async(method, *args, deadline_s=self._answer_s)


class CriticGroup(ModelGroup):
    """All ranks of the critic; implements CriticCalls."""

    role = "critic"
    sizes = "critic.parallel"
    worker_cls = CriticWorker

    def compute_values(self, per_dp: Sequence[Share]) -> list[list[Any]]:
        return self._group.dispatch("compute_values", per_dp, deadline_s=self._answer_s)

    def train_step(self, per_dp: Sequence[Share], *, num_tokens: int) -> StepStats:
        steps = self._group.dispatch_to_all(
            "train_step", per_dp, deadline_s=self._answer_s, num_tokens=num_tokens
        )
        return join_rank_steps(steps)
