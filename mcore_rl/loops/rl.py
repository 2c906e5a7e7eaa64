"""The training loop: prompts -> rollout -> rewards -> advantages -> batch -> Megatron steps ->
weight sync.

Its roles are Protocols; the loop does not know whether Ray actors on many nodes or plain objects
play them.
"""

from functools import partial

from mcore_rl.algo.choice import needs_of
from mcore_rl.algo.diagnostics import check_drift
from mcore_rl.config import Config
from mcore_rl.data.summary import summarize_samples
from mcore_rl.loops.evaluation import Correctness, evaluate
from mcore_rl.loops.sampling import WAITING, sample_step, sync_weights
from mcore_rl.loops.saving import is_due, save_if_due
from mcore_rl.loops.training import StepOptions, prepare_batch, train_policy_and_critic
from mcore_rl.metrics import PhaseTimer
from mcore_rl.roles import Roles
from mcore_rl.types import WeightVersion


def train(config: Config, roles: Roles, start_step: int = 0) -> None:
    """Run steps start_step + 1 .. run.steps; the engines must already serve the weights of
    `start_step`.
    """
    options = StepOptions.of(config, needs_of(config.algorithm))
    if start_step == 0:
        run_evaluation(config, roles, step=0)
    for step in range(start_step + 1, config.run.steps + 1):
        timer = PhaseTimer(step)
        metrics = run_step(config, options, roles, timer)
        check_drift(config.drift, step, metrics)
        if is_due(step, config.eval.every_steps, config.run.steps):
            run_evaluation(config, roles, step)
        # Only after the step is logged: a resumed run drops all rows beyond its checkpoint.
        save = partial(save_checkpoint, roles, timer, step)
        save_if_due(step, config.checkpoint.every_steps, config.run.steps, save)


def run_step(
    config: Config, options: StepOptions, roles: Roles, timer: PhaseTimer
) -> dict[str, float]:
    """Sample, train and sync once; return metrics of samples and training.

    The stores forget the step's samples when this returns, as nothing refers to them any more.
    """
    step = timer.step
    samples, scores, sampling = sample_step(
        config.rollout, roles, timer, config.run.seed + step, options.needs.greedy_baseline
    )
    samples, scores, batch, estimated = prepare_batch(options, roles, timer, samples, scores)
    with timer("train"):
        trained = train_policy_and_critic(options, roles, batch, step)
    synced = sync_weights(roles, timer, WeightVersion(step), batch)
    metrics = summarize_samples(samples, scores, timer.seconds["rollout"]) | trained
    waited = timer.metrics(waiting=WAITING)
    roles.log.log(step, {**metrics, **sampling, **estimated, **synced, **waited})
    roles.log.log_samples(step, samples, scores)
    return metrics


def run_evaluation(config: Config, roles: Roles, step: int) -> None:
    """Log metrics and greedy samples of the held-out prompts, drawn from the weights of `step`."""
    correctness = Correctness.of(config.eval, config.reward)
    with PhaseTimer(step)("evaluation"):
        metrics, samples, scores = evaluate(
            roles.generator,
            roles.held_out,
            roles.reward,
            correctness,
            pass_k=config.eval.pass_k,
            seed=config.run.seed,
        )
    versions = {span.version for sample in samples for span in sample.versions}
    assert versions <= {step}, (
        f"evaluation of version {step} was drawn from weights {sorted(versions)}"
    )
    roles.log.log(step, metrics)
    roles.log.log_samples(step, samples, scores, split="eval")


def save_checkpoint(roles: Roles, timer: PhaseTimer, step: int) -> None:
    """Save critic and trainer, with the positions that a resumed run continues from."""
    with timer("checkpoint"):
        state = {
            "prompts": roles.prompts.state_dict(),
            "advantages": roles.advantages.state_dict(),
        }
        if roles.critic:
            roles.critic.save(step)
        roles.trainer.save(step, {"step": step, **state})
    roles.log.log(step, {"time/checkpoint": timer.seconds["checkpoint"]})
