"""The training loop: prompts -> rollout -> rewards -> advantages -> train batch -> Megatron steps -> weight sync.

Its roles are Protocols; who plays them (Ray actors on many nodes, or plain objects) is not seen from here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from mcore_rl.config import Config
from mcore_rl.data.batch import make_train_batch, plan_mini_batches, select
from mcore_rl.data.summary import summarize_samples, summarize_steps
from mcore_rl.evaluation import Generator, Reward, evaluate
from mcore_rl.metrics import PhaseTimer
from mcore_rl.types import Prompt, Sample, StepStats, TrainBatch, WeightVersion


class PromptStream(Protocol):
    def next_prompts(self, num_prompts: int) -> list[Prompt]: ...

    def state_dict(self) -> dict[str, Any]: ...


class Trainer(Protocol):
    def compute_logprobs(self, batch: TrainBatch, *, reference: bool = False) -> Tensor:
        """Token-aligned log-probs, shape [T]."""
        ...

    def train_step(self, batch: TrainBatch) -> StepStats: ...

    def save(self, step: int, state: Mapping[str, Any]) -> None: ...


class WeightSync(Protocol):
    def sync(self, version: WeightVersion) -> Mapping[str, float]:
        """Bring every engine to `version`; returns what was measured."""
        ...


class Log(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[Sample], rewards_N: Sequence[float]) -> None: ...


@dataclass(frozen=True)
class Roles:
    prompts: PromptStream
    held_out: Sequence[Prompt]
    generator: Generator
    reward: Reward
    advantages: Callable[[Sequence[float], Sequence[Sample]], Tensor]
    trainer: Trainer
    weights: WeightSync
    log: Log


def train(config: Config, roles: Roles, start_step: int = 0) -> None:
    """Run steps start_step + 1 .. run.steps; the engines must already serve the weights of `start_step`."""
    if start_step == 0:
        run_evaluation(config, roles, step=0)
    for step in range(start_step + 1, config.run.steps + 1):
        timer = PhaseTimer()
        with timer("rollout"):
            prompts = roles.prompts.next_prompts(config.rollout.prompts_per_step)
            samples = roles.generator.generate(
                prompts, config.rollout.samples_per_prompt, greedy=False, seed=config.run.seed + step
            )
        with timer("reward"):
            rewards_N = roles.reward(samples)
        with timer("logprobs"):
            batch = make_train_batch(samples, roles.advantages(rewards_N, samples))
            batch = add_logprobs(config, roles.trainer, batch)
        with timer("train"):
            mini_batches = plan_mini_batches(batch, config.train, config.algorithm.aggregation, seed=step)
            stats = [roles.trainer.train_step(mini_batch) for mini_batch in mini_batches]
        with timer("refit"):
            refit = roles.weights.sync(WeightVersion(step * len(mini_batches)))
        with timer("checkpoint"):
            if is_due(step, config.checkpoint.every_steps, config.run.steps):
                roles.trainer.save(step, {"step": step, "prompts": roles.prompts.state_dict()})
        metrics = summarize_samples(samples, rewards_N, timer.seconds["rollout"]) | summarize_steps(stats)
        roles.log.log(step, {**metrics, **refit, **timer.metrics()})
        roles.log.log_samples(step, samples, rewards_N)
        if is_due(step, config.eval.every_steps, config.run.steps):
            run_evaluation(config, roles, step)


def add_logprobs(config: Config, trainer: Trainer, batch: TrainBatch) -> TrainBatch:
    """Old log-probs where the batch is used more than once (else the step's own are the old ones), reference ones for KL."""
    if config.train.epochs * config.train.mini_batches > 1:
        batch = replace(batch, old_logprobs_T=trainer.compute_logprobs(batch))
    if config.algorithm.kl.coef:
        batch = replace(batch, ref_logprobs_T=trainer.compute_logprobs(batch, reference=True))
    return batch


def run_evaluation(config: Config, roles: Roles, step: int) -> None:
    metrics, samples, rewards_N = evaluate(
        roles.generator, roles.held_out, roles.reward, config.eval, seed=config.run.seed
    )
    roles.log.log(step, metrics)
    roles.log.log_samples(step, samples, rewards_N)


def is_due(step: int, every_steps: int, last_step: int) -> bool:
    """True at every multiple of `every_steps` (0: never) and at the last step."""
    return step == last_step or (every_steps > 0 and step % every_steps == 0)
