"""The supervised fine-tuning loop: conversations -> packed batch -> Megatron step."""

from functools import partial

from mcore_rl.batches.summary import summarize_steps
from mcore_rl.config import CheckpointConfig, SftConfig
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.roles import BatchStream, Log, TokenTrainer
from mcore_rl.loops.saving import save_if_due


def fine_tune(
    sft: SftConfig,
    checkpoint: CheckpointConfig,
    batches: BatchStream,
    trainer: TokenTrainer,
    log: Log,
    start_step: int = 0,
) -> None:
    """Run steps start_step + 1 .. sft.steps of sft.batch_size sequences each."""
    for step in range(start_step + 1, sft.steps + 1):
        timer = PhaseTimer(step)
        with timer("train"):
            stats = trainer.train_step(batches.next_batch(sft.batch_size))
        speed = {"train/tokens_per_second": stats.num_tokens / timer.seconds["train"]}
        log.log(step, {**summarize_steps([stats]), **speed, **timer.metrics()})
        save = partial(trainer.save, step, {"step": step, "prompts": batches.state_dict()})
        save_if_due(step, checkpoint.every_steps, sft.steps, save)
