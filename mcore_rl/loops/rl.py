"""The training loop: prompts -> rollout -> rewards -> batch -> log-probs -> advantages -> Megatron
steps -> weight sync.

Its roles are Protocols; the loop does not know whether Ray actors on many nodes or plain objects
implement them.
"""

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

from mcore_rl.algo.diagnostics import check_drift
from mcore_rl.batches.stored_batch import make_stored_batch
from mcore_rl.batches.summary import summarize_samples
from mcore_rl.config import Config
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.evaluation import evaluate
from mcore_rl.loops.outcomes import Rollout, add_advantages, leave_out_lost, with_outcome
from mcore_rl.loops.roles import Roles, State
from mcore_rl.loops.sampling import (
    WAITING,
    SamplingOptions,
    draw_again,
    draw_rollout,
    sync_weights,
)
from mcore_rl.loops.saving import (
    Save,
    is_due,
    save_if_due,
    save_if_overdue,
    save_timed,
)
from mcore_rl.loops.training import (
    StepOptions,
    add_logprobs_and_values,
    ask_teacher,
    mask_overlong,
    train_policy_and_critic,
)
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.process.signals import allow_interruption
from mcore_rl.types import StoredBatch, WeightVersion

_log = logging.getLogger(__name__)


def train(config: Config, roles: Roles, start_step: int = 0) -> None:
    """Run steps start_step + 1 .. run.steps; the engines must already serve the weights of
    `start_step`.
    """
    drawing, options = make_step_options(config)
    last_step = config.run.steps
    if start_step == 0:
        run_evaluation(config, roles, step=0)
    unsaved: Save | None = None
    for step in range(start_step + 1, last_step + 1):
        timer = PhaseTimer(step)
        with save_if_overdue(step - 1, last_step, unsaved):
            metrics = run_step(drawing, options, roles, timer, config.run.seed + step)
        check_drift(config.drift, config.engine_precision, step, metrics)
        positions = take_positions(roles)
        save = partial(save_checkpoint, roles, timer, step, positions)
        if is_due(step, config.eval.every_steps, last_step):
            with save_if_overdue(step, last_step, save), allow_interruption():
                run_evaluation(config, roles, step)
        # Only after the step is logged: a resumed run drops all rows beyond its checkpoint.
        if step < last_step:
            roles.recovery.note_done(step, positions)
        is_saved = save_if_due(step, config.checkpoint.every_steps, last_step, save)
        unsaved = None if is_saved else save


def make_step_options(config: Config) -> tuple[SamplingOptions, StepOptions]:
    """Return how `run_step` samples, and how it trains.

    Raises ValueError naming the option if the recipe's algorithm is unknown.
    """
    algorithm, rollout = config.algorithm, config.rollout
    return (
        SamplingOptions.make(rollout, config.reward, algorithm),
        StepOptions(algorithm, config.train, config.critic, rollout.max_response_len),
    )


def run_step(
    drawing: SamplingOptions, options: StepOptions, roles: Roles, timer: PhaseTimer, seed: int
) -> dict[str, float]:
    """Sample, train and sync once; return metrics of samples and training.

    Samples without an outcome are logged, and not trained on. The stores forget the step's samples
    when this returns, as nothing refers to them any more.
    """
    step = timer.step
    with allow_interruption():
        drawn = draw_rollout(drawing, roles, timer, seed)

    wanted = with_outcome(drawn)
    passes: list[_Pass] = []

    def train_on() -> None:
        passes.append(_train_on(wanted, options, roles, timer))

    while True:
        try:
            _, recoverable = roles.recovery.train(step, train_on)
            break
        except SamplesLostError as error:
            if not roles.recovery.take_back():
                raise
            _log.warning("step %d is done again with new samples: %s", step, error)
            with allow_interruption():
                drawn = draw_again(drawing, roles, timer, drawn, seed)
            wanted = with_outcome(drawn)
    synced = sync_weights(roles, timer, WeightVersion(step), lambda: passes[-1].batch)
    last = passes[-1]  # a step is trained again if its state is lost in the sync
    kept, batch, trained = last.kept, last.batch, last.metrics
    seconds = timer.seconds["rollout"]
    sampled = summarize_samples(kept.samples, kept.scores, seconds, drawing.role_part)
    lost = {"batch/lost": float(len(wanted.samples) - len(kept.samples))}
    of_stages = {**sampled, **trained, **drawn.metrics, **lost, **synced, **recoverable}
    roles.log.log(step, {**of_stages, **timer.metrics(waiting=WAITING)})
    roles.log.log_samples(step, drawn.samples, add_advantages(drawn, kept, batch))
    roles.ledger.note_step(step, drawn.samples, drawn.scores, kept.samples)
    return sampled | trained


@dataclass(frozen=True)
class _Pass:
    """The training of a step: the samples that were left, their batch, and metrics."""

    kept: Rollout
    batch: StoredBatch
    metrics: dict[str, float]


def _train_on(wanted: Rollout, options: StepOptions, roles: Roles, timer: PhaseTimer) -> _Pass:
    """Train on these samples, without those that are lost meanwhile."""
    step = timer.step

    def prepare(rollout: Rollout) -> tuple[StoredBatch, Mapping[str, float]]:
        """Return the batch to train on, and metrics; called again if samples are lost meanwhile."""
        ask_teacher(roles, timer, rollout.samples)
        with timer("logprobs"):
            batch = make_stored_batch(rollout.samples, WeightVersion(step - 1))
            batch = add_logprobs_and_values(options, roles, batch)
            batch, estimated = roles.advantages(rollout.scores, rollout.samples, batch)
        batch = mask_overlong(options, batch, rollout.samples)
        return batch, estimated

    kept, (batch, estimated) = leave_out_lost(prepare, wanted)
    with timer("train"):
        trained = train_policy_and_critic(options, roles, batch, step)
    return _Pass(kept, batch, {**trained, **estimated})


def run_evaluation(config: Config, roles: Roles, step: int) -> None:
    """Log metrics and greedy samples of the held-out prompts, drawn from the weights of `step`."""
    with PhaseTimer(step)("evaluation"):
        metrics, greedy = evaluate(
            roles.generator,
            roles.held_out,
            roles.reward,
            config.eval,
            config.reward,
            seed=config.run.seed,
        )
    versions = {span.version for sample in greedy.samples for span in sample.versions}
    assert versions <= {step}, (
        f"evaluation of version {step} was drawn from weights {sorted(versions)}"
    )
    roles.log.log(step, metrics)
    roles.log.log_samples(step, greedy.samples, greedy.scores, split="eval")


def take_positions(roles: Roles) -> State:
    """Return the positions that a run which is resumed after this step continues from."""
    prompts, advantages = roles.prompts.state_dict(), roles.advantages.state_dict()
    return deepcopy({"prompts": prompts, "advantages": advantages})


def save_checkpoint(
    roles: Roles, timer: PhaseTimer, step: int, positions: State | None = None
) -> None:
    """Save critic and trainer after `step`, with the positions that the loop had then.

    Samples that were finished in the background and not trained are kept, too.

    positions   as take_positions returned them; None: those of now
    """
    state = positions or take_positions(roles)

    def save() -> None:
        if roles.critic:
            roles.critic.save(step)
        roles.trainer.save(step, {"step": step, **state})

    def keep_and_save() -> None:
        if roles.background is not None:
            roles.background.keep(step)
        roles.recovery.save(step, save)

    save_timed(roles.log, timer, keep_and_save)
