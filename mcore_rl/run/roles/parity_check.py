"""Checks after each weight sync that trainer and engines give the same sequences equal log-probs.

The sequences are some of the step's own samples. The first sync of a run has no samples yet and
takes the run's prompts (`make_probe`).
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.batches.batch import select, split_by_lens
from mcore_rl.batches.stored_batch import select_stored, without_lost
from mcore_rl.config import ParityCheckConfig
from mcore_rl.data.images.batch import select_images
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.process.server_keys import ServerKeys, user_headers
from mcore_rl.rollout.scoring import score_sequences
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.run.roles.parity_tolerance import MIN_TOKENS, EngineDifference, ParityTolerance
from mcore_rl.types import (
    Images,
    LogprobOptions,
    Prompt,
    StoredBatch,
    TokenScores,
    TrainBatch,
    WeightVersion,
)

_log = logging.getLogger(__name__)
MAX_PROMPT_TOKENS = 256
"""Longer prompts are truncated: more tokens cost time and make the comparison no sharper."""
MOST_SEQUENCES = 64
"""No more sequences are scored only because the first ones are short."""


@dataclass(frozen=True)
class ParityReport:
    """The result of a check, by engine url: the difference from the trainer, or why it failed.

    limits   kind of difference -> (the usual value, the tolerance) at the time of the check
    """

    differences: dict[str, EngineDifference] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        differences = self.differences.values()
        if not differences:
            return {}
        metrics = {
            "sync/parity_diff": max(each.mean for each in differences),
            "sync/parity_typical": max(each.typical for each in differences),
            "sync/parity_overall": max(each.overall for each in differences),
        }
        return metrics | {f"sync/parity_{k}_limit": most for k, (_, most) in self.limits.items()}


@dataclass(frozen=True)
class ScoredProbe:
    """Token ids of each sequence and the trainer's log-probs of all its tokens but the first.

    images        of each sequence; None for a sequence without images
    adapter       that the trainer scored with, of several; empty: the only policy
    is_compared   bool: whether the log-prob of each token but the first is compared. Engines return
                  meaningless log-probs for placeholders, so with images only responses are compared
    """

    version: WeightVersion
    sequences: list[list[int]]
    trainer_logprobs: list[Tensor]
    images: Sequence[Images | None]
    is_compared: list[Tensor]
    adapter: str = ""


def make_probe(prompts: Iterable[Prompt], num_sequences: int) -> TrainBatch:
    """Return the first prompts as sequences to score, each cut to MAX_PROMPT_TOKENS tokens.

    These are `num_sequences` prompts, or up to MOST_SEQUENCES as long as they have fewer than
    MIN_TOKENS tokens to compare. Prompts of a single token are skipped, because the first token of
    a sequence has no log-prob. The batch is shorter, or empty, if there are not enough prompts.
    """
    sequences: list[Sequence[int]] = []
    num_compared = 0
    most = MOST_SEQUENCES if num_sequences else 0
    for prompt in prompts:
        is_enough = len(sequences) >= num_sequences and num_compared >= MIN_TOKENS
        if is_enough or len(sequences) >= max(num_sequences, most):
            break
        if len(prompt.token_ids) > 1:
            sequences.append(prompt.token_ids[:MAX_PROMPT_TOKENS])
            num_compared += len(sequences[-1]) - 1
    lens_N = tuple(len(token_ids) for token_ids in sequences)
    return TrainBatch(
        token_ids_T=torch.tensor([token for ids in sequences for token in ids], dtype=torch.int64),
        loss_mask_T=torch.zeros(sum(lens_N), dtype=torch.bool),
        lens_N=lens_N,
    )


class ProbeScorer(Protocol):
    """The part of a roles.TokenTrainer that the parity check needs."""

    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores[Tensor]: ...


class ParityCheck:
    """Compares the engines' log-probs of a few sequences with the trainer's."""

    def __init__(
        self,
        trainer: ProbeScorer,
        config: ParityCheckConfig,
        tolerance: ParityTolerance,
        timeout_s: float,
        ready: Callable[[], Awaitable[None]],
        keys: ServerKeys | None,
        fetch: Callable[[StoredBatch], TrainBatch],
        image_marks: Collection[int] = (),
    ) -> None:
        """`ready` is awaited before the engines score.

        keys          the engines' keys; None if the engines have none
        fetch         brings the tokens and images of samples from their stores
        image_marks   tokens by which engines find images in ids
        """
        self._image_marks = list(image_marks)
        self._fetch = fetch
        self._trainer = trainer
        self._config = config
        self._tolerance = tolerance
        self._timeout_s = timeout_s
        self._ready = ready
        self._headers = user_headers(keys)
        self._probe: ScoredProbe | None = None
        self._adapter = ""

    def choose_adapter(self, name: str) -> None:
        """Compare engines with the trainer by the adapter that it trains from now on."""
        self._adapter = name

    def score_samples(self, version: WeightVersion, batch: StoredBatch) -> None:
        """Score some sequences of `batch` on the trainer, whose weights are `version`.

        Call it before the weights are sent: engines with GPUs of their own still generate then.
        """
        self._probe = self._score_probe(version, self._choose_samples(batch))

    def score_sequences(self, version: WeightVersion, batch: TrainBatch) -> None:
        """Score some sequences of `batch`, which has its tokens, as `score_samples` does."""
        chosen = self._choose(len(batch.lens_N), lambda indices: select(batch, indices))
        self._probe = self._score_probe(version, chosen)

    async def check(self, urls: Sequence[str], verified: Collection[str] = ()) -> ParityReport:
        """Score the same sequences on the engines at `urls`, which should serve these weights.

        The tolerance is learned from the engines in `verified`, whose weights were read back. The
        trainer's log-probs stay right until its next optimizer step, so an engine that returns
        meanwhile is checked against them, too. The report is empty if there is nothing to score.
        """
        if self._probe is None:
            return ParityReport()
        await self._ready()
        answers = await self._score_on_engines(urls, self._probe)
        report = self._judge(self._probe, dict(zip(urls, answers, strict=True)))
        right = [url for url in verified if url in report.differences and url not in report.failed]
        self._tolerance.learn([report.differences[url] for url in right])
        return report

    def _score_probe(self, version: WeightVersion, probe: TrainBatch | None) -> ScoredProbe | None:
        if probe is None:
            return None
        options = LogprobOptions(temperature=1.0)
        logprobs_T = self._trainer.compute_logprobs(probe, options).logprobs_T
        images = select_images(probe.images, [[i] for i in range(len(probe.lens_N))])
        made = ScoredProbe(version, [], [], images, [], self._adapter)
        values = (probe.token_ids_T, logprobs_T, probe.loss_mask_T)
        parts = (split_by_lens(values_T, probe.lens_N) for values_T in values)
        for ids, logprobs, mask, own in zip(*parts, images, strict=True):
            stop = len(ids) if own is None else self._first_sampled_mark(ids, mask)
            compared = torch.ones(stop, dtype=torch.bool) if own is None else mask[:stop]
            made.sequences.append(ids[:stop].tolist())
            made.trainer_logprobs.append(logprobs[1:stop])
            made.is_compared.append(compared[1:])
        return made

    def _first_sampled_mark(self, ids_T: Tensor, is_sampled_T: Tensor) -> int:
        """Return the index of the first image mark that the policy sampled, or the length.

        An engine takes such a mark for part of an image, so it can score only the tokens before.
        """
        marks = torch.tensor(self._image_marks, dtype=ids_T.dtype)
        found = (torch.isin(ids_T, marks) & is_sampled_T).nonzero()
        return int(found[0]) if len(found) else len(ids_T)

    def _choose_samples(self, batch: StoredBatch) -> TrainBatch | None:
        """Return sequences of a batch that are not lost; None if there is none."""
        while True:
            try:
                return self._choose(len(batch.lens_N), partial(self._fetch_sequences, batch))
            except SamplesLostError as lost:
                left = without_lost(batch, lost)
                if left is None:
                    _log.warning("%s; no sequence is left to compare engines by", lost)
                    return None
                batch = left

    def _fetch_sequences(self, batch: StoredBatch, indices: Sequence[int]) -> TrainBatch:
        # Without the engine's experts and keys: the trainer chooses by itself, as the engines do.
        chosen = select_stored(batch, indices)
        return self._fetch(replace(chosen, routed_experts_TLK=None, indexer_topk_TLK=None))

    def _choose(
        self, num_sequences: int, read: Callable[[Sequence[int]], TrainBatch]
    ) -> TrainBatch | None:
        """Read parity_check.sequences of the sequences; return None if the batch has none.

        If these have fewer than MIN_TOKENS tokens to compare, more are read. The sequences are
        spread over the batch, because neighbors share a prompt.
        """
        most = min(MOST_SEQUENCES, num_sequences)
        num_chosen = min(self._config.sequences, num_sequences)
        while num_chosen:
            probe = read([i * num_sequences // num_chosen for i in range(num_chosen)])
            share = _count_compared(probe) / MIN_TOKENS
            if share >= 1 or num_chosen >= most:
                return probe
            needed = math.ceil(num_chosen / max(share, 1 / MIN_TOKENS))
            num_chosen = min(most, max(needed, num_chosen + 1))
        return None

    async def _score_on_engines(
        self, urls: Sequence[str], probe: ScoredProbe
    ) -> list[list[list[float]] | RolloutError]:
        """Return for each engine the log-probs of each sequence, or the engine's error."""
        # Images travel as bytes: the files with a node's patches may be gone by now.
        has_images = any(images is not None for images in probe.images)
        images = probe.images if has_images else ()
        how = self._timeout_s, self._headers, images, probe.adapter
        calls = (score_sequences(url, probe.sequences, *how) for url in urls)
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers = []
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RolloutError):
                raise result
            answers.append(result)
        return answers

    def _judge(
        self, probe: ScoredProbe, answers: dict[str, list[list[float]] | RolloutError]
    ) -> ParityReport:
        report = ParityReport(limits=self._tolerance.limits)
        for url, answer in answers.items():
            if isinstance(answer, RolloutError):
                report.failed[url] = f"weights {probe.version}: {answer}"
                continue
            difference = EngineDifference.measure(probe.trainer_logprobs, answer, probe.is_compared)
            report.differences[url] = difference
            fault = self._tolerance.find_fault(difference)
            if fault is not None:
                report.failed[url] = (
                    f"engine {url} claims weights {probe.version}, but its log-probs of"
                    f" {len(probe.sequences)} sequences ({difference.num_tokens} tokens) differ"
                    f" from the trainer's by {fault}"
                )
        return report


def _count_compared(probe: TrainBatch) -> int:
    """Return about how many log-probs are compared: with images, only those of responses."""
    if probe.images is not None:
        return int(probe.loss_mask_T.sum())
    return len(probe.token_ids_T) - len(probe.lens_N)
