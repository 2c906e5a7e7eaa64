"""Submits a recipe: writes what the target needs into the run's folder, and starts the job."""

import shlex
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import OmegaConf

from launch.job_checks import LoadSettings, check_job
from launch.jobs import ENDED, State, SubmittedJob, find_job, remember
from launch.submission import DOCTOR, FOLDER, Submission, find_needs, make_submission
from launch.targets import TARGETS, load_launch
from mcore_rl.config.secrets import dump_config
from mcore_rl.planning.bundles import COMMANDS, RunSize
from mcore_rl.process.disk import write_whole
from mcore_rl.process.redaction import is_secret_name, redact

RECIPE = "recipe.yaml"
_ADDRESS = "cluster.address=auto"
"""Stands for the address that the job finds out."""
_POLL_S = 2.0


def submit(words: Sequence[str], load_settings: LoadSettings, dry_run: bool) -> None:
    """Submit what `words` say: a command (train if there is none), recipe=, launch=, overrides.

    `load_settings` reads a recipe and overrides. With `dry_run` everything is written
    and nothing submitted. Raises ValueError if the words are wrong, if the nodes lack something
    that the command reads, or if the recipe does not fit its GPUs.
    """
    command, launch, overrides, settings = split(words)
    options = load_launch(launch, overrides)
    config = load_settings([*settings, _ADDRESS], "submit")
    if command != DOCTOR and getattr(options, "kind", "job") == "job":
        check_job(config, command, [*settings, _ADDRESS], options, load_settings)
    size = RunSize.make(config, "train" if command == DOCTOR else command)
    needs = find_needs(size, config.rollout, config.cluster, config.plan, options)
    submission = make_submission(command, settings, Path(config.run.dir), needs, options)
    target = TARGETS[options.target]
    files = target.make_files(submission, options)
    for name, text in {**files, RECIPE: OmegaConf.to_yaml(dump_config(config))}.items():
        write_whole(submission.folder / name, text)
    print(_describe(submission, files))
    if dry_run:
        print(f"submit it with: {shlex.join(target.submit_command(submission))}")
        return
    job = SubmittedJob(
        options.target, target.submit(submission), submission.name, str(submission.folder)
    )
    remember(job)
    print(f"submitted as {options.target} job {job.id}")
    for verb in ("status", "logs -f", "cancel"):
        print(f"  mcore-rl {verb} {submission.folder.parent}")


def split(words: Sequence[str]) -> tuple[str, str, list[str], list[str]]:
    """(command, launch file, overrides of the launch file, settings of the recipe).

    Raises ValueError naming the word that is none of these.
    """
    commands = [word for word in words if not _is_setting(word)]
    known = [*COMMANDS, DOCTOR]
    if commands[1:] or (commands and commands[0] not in known):
        raise ValueError(
            f"{commands[-1]}: expected at most one command ({', '.join(known)}) and key=value"
        )
    launches = [w.partition("=")[2] for w in words if w.startswith("launch=")]
    if len(launches) != 1:
        raise ValueError(f"give one launch=<{'|'.join(TARGETS)} or file>, got {len(launches)}")
    overrides = [word for word in words if word.startswith("launch.")]
    settings = [w for w in words if _is_setting(w) and not w.startswith(("launch=", "launch."))]
    for word in settings:
        _refuse_secret(word)
    if given := [word for word in settings if word.startswith("cluster.address=")]:
        raise ValueError(f"{given[0]}: a submitted job starts its own Ray; leave it out")
    return (commands or ["train"])[0], launches[0], overrides, settings


def _is_setting(word: str) -> bool:
    """Return whether a word is key=value, or ~key, which takes an option of the recipe out."""
    return "=" in word or word.startswith("~")


def _refuse_secret(setting: str) -> None:
    """Raise ValueError if a setting, which the job's files would show, holds a secret."""
    name, _, value = setting.partition("=")
    is_named = is_secret_name(name.rpartition(".")[2]) and value and not value.startswith("${")
    if is_named or redact(setting) != setting:
        raise ValueError(
            f"{name}: its value is a secret, and the job's files would show it: give"
            f" {name}='${{oc.env:NAME}}' and set NAME in the job's environment"
        )


def _describe(submission: Submission, files: Iterable[str]) -> str:
    needs = submission.needs
    nodes = "1 node" if needs.nodes == 1 else f"{needs.nodes} nodes"
    parts = f"{nodes} of {needs.gpus_per_node} GPUs and {needs.cpus_per_node} CPUs"
    if needs.trainer_nodes:
        parts += f" ({needs.trainer_nodes} for the trainer, {needs.engine_nodes} for engines)"
    return (
        f"{submission.name}: {parts}; written to {submission.folder}: {', '.join(files)}, {RECIPE}"
    )


def show_status(run_dir: Path) -> State:
    """Print the state of the run's job, and return it."""
    job = find_job(run_dir, FOLDER)
    state = TARGETS[job.target].read_state(job)
    print(state.text)
    return state


def show_logs(run_dir: Path, follow: bool) -> None:
    """Print what the job printed; with `follow` until it ends."""
    job = find_job(run_dir, FOLDER)
    target = TARGETS[job.target]
    shown = subprocess.Popen(target.log_command(job, follow), stdin=subprocess.DEVNULL)
    try:
        while follow and shown.poll() is None and target.read_state(job).phase != ENDED:
            time.sleep(_POLL_S)
        if follow:
            time.sleep(_POLL_S)  # the last lines
            shown.terminate()
            with suppress(subprocess.TimeoutExpired):
                shown.wait(_POLL_S)
        else:
            shown.wait()  # as long as it prints
    finally:
        shown.kill()


def cancel(run_dir: Path) -> None:
    """Cancel the run's job. It saves before it ends if it has the time."""
    job = find_job(run_dir, FOLDER)
    TARGETS[job.target].cancel(job)
    print(f"canceled {job.target} job {job.id}")
