"""Starts a training run: its processes, and the checkpoint to continue from.

Processes that share GPUs start one after the other. The checkpoint is the newest whose files are
all there, or with newest_whole the newest intact one.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.algo.policy_loss import TokenLoss, make_value_loss
from mcore_rl.cluster.colocated_engines import ColocatedEngines
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.model_group import ModelGroup
from mcore_rl.cluster.model_groups import CriticGroup, TrainerGroup
from mcore_rl.cluster.run import RunProcesses
from mcore_rl.config import Config
from mcore_rl.device.environment import can_release_graphs
from mcore_rl.logs.progress import tell_stage
from mcore_rl.logs.run_folder import DAMAGED, RunFolder
from mcore_rl.loops.rl import make_step_options
from mcore_rl.process.file_list import MANIFEST, find_fault
from mcore_rl.run.roles.colocation import CRITIC, TRAINER, EngineMemory, SharedGpus
from mcore_rl.weights.hf.checksums import ByteSpan, read_manifest
from mcore_rl.weights.megatron_files.integrity import find_damage

NEWEST_WHOLE = "newest_whole"
MAX_THREADS = 8
SHARE_BYTES = 64 << 20
"""Bytes of a file that a thread reads in one go."""


@dataclass(frozen=True)
class Started:
    """The groups of a training run, all built except engines with GPUs of their own.

    `engines.wait_built` waits for such engines.
    """

    trainer: TrainerGroup
    critic: CriticGroup | None
    engines: EngineGroup
    gpus: SharedGpus


def start_training(config: Config, processes: RunProcesses, loss: TokenLoss) -> Started:
    """Start all groups of a training run.

    Groups with GPUs of their own start at the same time. Groups that share GPUs start one after the
    other, and each gives up its memory before the next starts.
    """
    _, options = make_step_options(config)
    num_steps, num_critic_steps = options.count_optimizer_steps(config.run.steps)
    num_steps //= len(config.train.lora.list_adapters())  # of each, as they take turns
    timeout_s = config.run.call_timeout_s
    watched = processes.run_watched

    engines = processes.start_engines()
    keys = processes.keys
    colocated = EngineMemory((), timeout_s, keys)
    if config.cluster.colocated:
        with tell_stage("start-up: engines", is_told=True):
            built = engines.wait_built()
        urls = [engine.url for engine in built]
        with_graphs = can_release_graphs(os.environ)
        returning = engines if isinstance(engines, ColocatedEngines) else None
        colocated = EngineMemory(urls, timeout_s, keys, with_graphs=with_graphs, engines=returning)
        watched(colocated.for_training())
    gpus = SharedGpus(colocated, watched)
    for role in processes.served_engines.colocated:
        with tell_stage(f"start-up: {role}", is_told=True):
            urls = processes.start_colocated_served(role)
        gpus.add_colocated(role, EngineMemory(urls, timeout_s, keys))

    trainer = processes.start_trainer(config.train.optimizer, num_steps, loss)
    critic = None
    if not config.critic.colocated:
        critic = processes.start_critic(num_critic_steps, make_value_loss(config.critic))
    wait_built(trainer)
    if config.cluster.offload:
        gpus.add(TRAINER, trainer)
    if config.critic.colocated:
        critic = processes.start_critic(num_critic_steps, make_value_loss(config.critic))
    if critic is not None:
        wait_built(critic)
        if config.cluster.offload and config.critic.colocated:
            gpus.add(CRITIC, critic)
    return Started(trainer, critic, engines, gpus)


def wait_built(group: ModelGroup) -> None:
    """Wait until all ranks have built the model; the console tells how long that took."""
    with tell_stage(f"start-up: {group.role}", is_told=True):
        group.wait_built()


def choose_checkpoint(folder: RunFolder, newest: Path | None, how: bool | str) -> Path | None:
    """Return the newest checkpoint whose files are all there, of the sizes in its list.

    With NEWEST_WHOLE, checkpoints are read as well, until one agrees with its checksums. Damaged
    checkpoints are renamed, their damage is printed, and they count no longer. If none is whole,
    `newest` is returned, which the ranks refuse by name; with NEWEST_WHOLE, ValueError is raised
    with the damage of each checkpoint.
    """
    if newest is None or not how:
        return newest
    find = find_damaged_file if how == NEWEST_WHOLE else find_fault
    damaged: dict[int, str] = {}
    for step in reversed(folder.complete_steps()):
        faults = filter(None, map(find, folder.list_parts(step)))
        damaged[step] = next(faults, "")
        if not damaged[step]:
            return _move_newer(folder, damaged)
    if how != NEWEST_WHOLE:
        return newest
    raise ValueError(
        f"run.resume={NEWEST_WHOLE}: no checkpoint in {folder.checkpoints} is whole:"
        f" {'; '.join(damaged.values())}. run.resume=false moves them aside and starts over"
    )


def find_damaged_file(folder: Path) -> str:
    """Return the damage of a checkpoint's folder and the damaged file; "" if the folder is whole.

    Every byte is read once, by up to MAX_THREADS threads of 4 MiB each. A checkpoint without
    checksums cannot prove that it is whole.
    """
    fault = find_fault(folder)
    if fault:
        return fault
    try:
        sums = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if sums is None:
        return f"{folder} has no {MANIFEST}, so nothing proves that it is whole"
    shares = [(name, share) for name, entry in sums.items() for share in _shares(entry.spans)]
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda share: find_damage(folder, *share), shares)
        for (name, _), span in zip(shares, found, strict=True):
            if span is not None:
                where = f"bytes {span.start} to {span.stop}"
                return f"{folder / name}: {where} do not agree with {MANIFEST}"
    return ""


def _shares(spans: tuple[ByteSpan, ...]) -> Iterator[list[ByteSpan]]:
    """Yield the spans of a file in shares of about SHARE_BYTES."""
    share: list[ByteSpan] = []
    for span in spans:
        share.append(span)
        if span.stop - share[0].start >= SHARE_BYTES:
            yield share
            share = []
    if share:
        yield share


def _move_newer(folder: RunFolder, damaged: dict[int, str]) -> Path:
    """Move all checkpoints but the last of `damaged` aside, print why, and return the last."""
    *newer, whole = damaged
    for step in newer:
        folder.move_damaged(step)
        print(
            f"{damaged[step]}: the checkpoint of step {step} is damaged and now ends in {DAMAGED};"
            f" the run continues from step {whole}"
        )
    return folder.checkpoint(whole)
