"""A policy small enough to test a whole loop: a table of logits of the next token by the last.

It is trainer, engine and weight sync in one process, with the product's own losses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.loops.roles import Reward
from mcore_rl.types import (
    LogprobOptions,
    Prompt,
    Sample,
    StepStats,
    StoredBatch,
    StoredSample,
    TokenScores,
    TrainBatch,
    VersionSpan,
    WeightVersion,
)
from mcore_rl.types.scores import Scores

VOCABULARY = 5
RESPONSE_LEN = 3
LOGPROBS = LogprobOptions()


def make_prompts(number: int) -> list[Prompt]:
    """Each ends in another token; the right response repeats it."""
    return [
        Prompt(
            i, (0, i % VOCABULARY), ({"role": "user", "content": str(i)},), "unit", i % VOCABULARY
        )
        for i in range(number)
    ]


def repeats_the_prompt(samples: Sequence[Sample]) -> Scores:
    """The share of response tokens that repeat the prompt's last token; a part `all` if all do."""
    shares = [
        sum(token == sample.prompt.ground_truth for token in sample.response_ids) / RESPONSE_LEN
        for sample in samples
    ]
    return Scores(shares, {"all": [float(share == 1) for share in shares]})


@dataclass
class TablePolicy:
    """Implements roles.TokenTrainer, roles.Generator and roles.WeightSync."""

    loss: Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
    learning_rate: float = 2.0
    weights: Tensor = field(default_factory=lambda: torch.zeros(VOCABULARY, VOCABULARY))
    calls: list[str] = field(default_factory=list)
    saved: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    batches: list[TrainBatch] = field(default_factory=list)
    for_eval: list[bool] = field(default_factory=list)
    """The argument of each call of `generate`."""
    stores: LocalStores = field(default_factory=LocalStores)

    def __post_init__(self) -> None:
        self.reference = self.weights.clone()
        self.served = self.weights.clone()
        self.version = WeightVersion(0)

    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LOGPROBS
    ) -> TokenScores[Tensor]:
        self.calls.append("reference" if options.reference else "logprobs")
        weights = self.reference if options.reference else self.weights
        with torch.no_grad():
            logprobs_TV = self._logprobs(weights, batch)
        squares_T = logprobs_TV.exp().square().sum(-1) if options.sum_squares else None
        return TokenScores(_of_tokens(logprobs_TV, batch), sum_squares_T=squares_T)

    def train_step(self, batch: TrainBatch) -> StepStats:
        self.calls.append("train")
        self.batches.append(batch)
        assert batch.loss_weights_T is not None
        leaf = self.weights.clone().requires_grad_()
        logprobs_TV = self._logprobs(leaf, batch)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        loss_T, metrics = self.loss(_of_tokens(logprobs_TV, batch), entropy_T, batch)
        loss = (batch.loss_weights_T * loss_T).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        self.weights = self.weights - self.learning_rate * gradient
        means = {
            name: float(value_T[batch.loss_mask_T].mean()) for name, value_T in metrics.items()
        }
        return StepStats(
            loss=loss.item(),
            grad_norm=float(gradient.norm()),
            learning_rate=self.learning_rate,
            num_tokens=sum(batch.lens_N),
            metrics=means,
        )

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        self.calls.append("save")
        self.saved[step] = dict(state)

    def sync(self, version: WeightVersion, probe: StoredBatch) -> Mapping[str, float]:
        self.calls.append("sync")
        self.served = self.weights.clone()
        self.version = version
        return {"sync/version": float(version)}

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        *,
        greedy: bool,
        seed: int,
        for_eval: bool = False,
    ) -> list[StoredSample]:
        self.calls.append("greedy" if greedy else "sample")
        self.for_eval.append(for_eval)
        generator = torch.Generator().manual_seed(seed)
        return self.stores.keep(
            self._sample(prompt, i, greedy, generator)
            for prompt in prompts
            for i in range(num_samples)
        )

    def reward_by(self, function: Callable[[Sequence[Sample]], Scores]) -> Reward:
        """Return the reward that a function gives whole samples."""
        return lambda samples: function(self.stores.samples(samples))

    def note_lost(self, num_samples: int) -> None:
        raise AssertionError("samples of this process cannot be lost")

    def take_num_lost(self) -> int:
        return 0

    def measure_engines(self) -> dict[str, float]:
        return {}

    def _sample(
        self, prompt: Prompt, index: int, greedy: bool, generator: torch.Generator
    ) -> Sample:
        token = prompt.token_ids[-1]
        ids: list[int] = []
        logprobs: list[float] = []
        for _ in range(RESPONSE_LEN):
            logprobs_V = self.served[token].log_softmax(-1)
            if greedy:
                token = int(logprobs_V.argmax())
            else:
                token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(logprobs_V[token]))
        spans = (VersionSpan(0, RESPONSE_LEN, self.version),)
        text = " ".join(map(str, ids))
        return Sample(prompt, index, tuple(ids), tuple(logprobs), "stop", spans, text)

    def _logprobs(self, weights: Tensor, batch: TrainBatch) -> Tensor:
        """[T, V], of each token given the one before it; a sequence's first counts nowhere."""
        before_T = batch.token_ids_T.roll(1)
        return weights[before_T].log_softmax(-1)


def _of_tokens(logprobs_TV: Tensor, batch: TrainBatch) -> Tensor:
    return logprobs_TV.gather(1, batch.token_ids_T[:, None])[:, 0]


@dataclass
class MemoryLog:
    """Implements roles.Log."""

    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    samples: list[tuple[int, str, int]] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def log_samples(
        self, step: int, samples: Sequence[StoredSample], scores: Scores, split: str = "train"
    ) -> None:
        assert len(samples) == len(scores.rewards_N)
        self.samples.append((step, split, len(samples)))

    def values(self, name: str) -> dict[int, float]:
        """The values of a metric by step."""
        return {step: metrics[name] for step, metrics in self.rows if name in metrics}
