"""The supervised fine-tuning loop: conversations -> packed batch -> Megatron step."""

from functools import partial

from mcore_rl.batches.summary import summarize_steps
from mcore_rl.config import CheckpointConfig, SftConfig
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.roles import NO_RECOVERY, BatchStream, Log, Recovery, TokenTrainer
from mcore_rl.loops.saving import save_if_due, save_timed
from mcore_rl.types import StepStats, TrainBatch


def fine_tune(
    sft: SftConfig,
    checkpoint: CheckpointConfig,
    batches: BatchStream,
    trainer: TokenTrainer,
    log: Log,
    start_step: int = 0,
    recovery: Recovery = NO_RECOVERY,
) -> None:
    """Run steps start_step + 1 .. sft.steps of sft.batch_size sequences each."""
    for step in range(start_step + 1, sft.steps + 1):
        timer = PhaseTimer(step)
        batch = batches.next_batch(sft.batch_size)

        def train_on(batch: TrainBatch = batch, timer: PhaseTimer = timer) -> StepStats:
            with timer("train"):
                return trainer.train_step(batch)

        stats, recoverable = recovery.train(step, train_on)
        speed = {"train/tokens_per_second": stats.num_tokens / timer.seconds["train"]}
        log.log(step, {**summarize_steps([stats]), **speed, **recoverable, **timer.metrics()})
        state = {"step": step, "prompts": batches.state_dict()}
        if step < sft.steps:
            recovery.note_done(step, state)
        save = partial(recovery.save, step, partial(trainer.save, step, state))
        save = partial(save_timed, log, timer, save)
        save_if_due(step, checkpoint.every_steps, sft.steps, save)
