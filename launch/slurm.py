"""Turns a submission into an sbatch script, submits it, and asks SLURM about its job."""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.jobs import ENDED, RUNNING, WAITING, State, SubmittedJob, call
from launch.options import SlurmOptions
from launch.submission import Submission, make_agent_options
from launch.text import render
from mcore_rl.process.signals import EXIT_STATUS

SCRIPT = "job.sh"
_WAITING_STATES = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD")
_RUNNING_STATES = ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT")


def make_files(submission: Submission, options: SlurmOptions) -> dict[str, str]:
    """The sbatch script, by file name. Raises ValueError if options contradict one another."""
    _check(submission, options)
    needs = submission.needs
    first_nodes = needs.trainer_nodes if options.engine_partition else needs.nodes
    groups = [
        [*_job_options(submission, options), *_node_options(submission, options, first_nodes)]
    ]
    node_lists = ["$SLURM_JOB_NODELIST"]
    srun_options = ["--kill-on-bad-exit=1", "--ntasks-per-node=1"]
    if options.engine_partition:
        groups.append(_engine_options(submission, options))
        node_lists = [f"$SLURM_JOB_NODELIST_HET_GROUP_{group}" for group in (0, 1)]
        srun_options.insert(0, "--het-group=0,1")
    script = render(
        "slurm.sh.jinja",
        submission=submission,
        options=options,
        groups=groups,
        node_lists=node_lists,
        srun_options=srun_options + _pyxis(submission, options),
        wrapper=_apptainer(submission, options),
        python=shlex.quote(_python(options)),
        folder=str(submission.folder),
        agent_options=make_agent_options(submission, options),
        arguments=submission.arguments,
        run_dir=str(submission.run_dir),
        saved_status=EXIT_STATUS,
    )
    return {SCRIPT: script}


def submit_command(submission: Submission) -> list[str]:
    return ["sbatch", "--parsable", str(submission.folder / SCRIPT)]


def submit(submission: Submission) -> str:
    """Submit the script in the submission's folder; return the id of the job."""
    return call(submit_command(submission)).split(";")[0].strip()


def read_state(job: SubmittedJob) -> State:
    """The job's state as SLURM tells it; for one that waits also why, and which nodes are out."""
    shown = call(["scontrol", "show", "job", job.id, "--oneliner"], check=False).splitlines()
    if not shown:
        return State(ENDED, f"SLURM has forgotten job {job.id}; its log is in {job.folder}")
    return join_states([parse_job_state(line, _out_of_service()) for line in shown])


def join_states(states: Sequence[State]) -> State:
    """The state of a job array: it ended once all its jobs did, with the highest status."""
    text = "\n".join(state.text for state in states)
    for phase in (RUNNING, WAITING):
        if any(state.phase == phase for state in states):
            return State(phase, text)
    known = [state.exit_status for state in states if state.exit_status is not None]
    return State(ENDED, text, max(known, default=None))


def log_command(job: SubmittedJob, follow: bool) -> list[str]:
    """A command that prints the job's log; with `follow` it goes on."""
    logs = sorted(str(path) for path in Path(job.folder).glob(f"slurm_{job.id}*.log"))
    if not logs:
        raise ValueError(f"job {job.id} has not printed anything yet")
    return ["tail", "--lines=+1", *(["--follow=name"] if follow else []), *logs]


def cancel(job: SubmittedJob) -> None:
    call(["scancel", job.id])


def parse_job_state(job: str, out_of_service: Sequence[str]) -> State:
    """The state that a line of `scontrol show job` tells; nodes that are out concern who waits."""
    facts = dict(re.findall(r"(\w+)=(\S*)", job))
    state = facts.get("JobState", "")
    name = f"job {facts.get('JobId', '')}"
    if state in _WAITING_STATES:
        text = f"{name} waits ({facts.get('Reason', '')}, restart {facts.get('Restarts', '0')})"
        out = f"; out of service: {'; '.join(out_of_service)}" if out_of_service else ""
        return State(WAITING, text + out)
    if state in _RUNNING_STATES:
        text = f"{name} runs on {facts.get('NodeList', '')} for {facts.get('RunTime', '')}"
        return State(RUNNING, f"{text} of {facts.get('TimeLimit', '')}")
    code, _, signal = facts.get("ExitCode", "1:0").partition(":")
    status = int(code) or (128 + int(signal) if int(signal) else 0)
    return State(ENDED, f"{name} ended: {state}, status {status}", status)


def _out_of_service() -> list[str]:
    """The nodes that are down, drained or failing, with the reason that SLURM gives."""
    listed = call(["sinfo", "-h", "-N", "-t", "down,drain,fail", "-o", "%N %T: %E"], check=False)
    return sorted({line.strip() for line in listed.splitlines() if line.strip()})


def _check(submission: Submission, options: SlurmOptions) -> None:
    if options.engine_partition and not submission.needs.trainer_nodes:
        raise ValueError(
            f"launch.engine_partition={options.engine_partition} takes"
            " cluster.separate_nodes=true, so that engines have nodes of their own"
        )
    if options.seeds and any(s.startswith("run.seed=") for s in submission.settings):
        raise ValueError(f"launch.seeds={options.seeds} and run.seed are both given: take one")
    if options.seeds and options.engine_partition:
        raise ValueError(
            f"launch.seeds={options.seeds} with launch.engine_partition: SLURM has no arrays of"
            " heterogeneous jobs; submit a job for each seed"
        )


def _job_options(submission: Submission, options: SlurmOptions) -> Iterator[str]:
    """Options of the whole job."""
    log = "slurm_%A_%a.log" if options.seeds else "slurm_%j.log"
    yield f"--job-name={submission.name}"
    yield f"--output={submission.folder}/{log}"
    yield "--open-mode=append"
    yield f"--chdir={Path.cwd()}"
    yield f"--signal=B:USR1@{options.save_before_end_s}"
    yield "--requeue" if options.requeues else "--no-requeue"
    if options.seeds:
        yield f"--array={','.join(map(str, options.seeds))}"
    for name in ("account", "qos", "reservation"):
        if value := getattr(options, name):
            yield f"--{name}={value}"
    if options.time_limit:
        yield f"--time={options.time_limit}"


def _node_options(submission: Submission, options: SlurmOptions, nodes: int) -> Iterator[str]:
    """Options of a group of nodes."""
    needs = submission.needs
    yield f"--nodes={nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={needs.cpus_per_node}"
    yield f"--mem={options.memory_gib_per_node}G" if options.memory_gib_per_node else "--mem=0"
    if needs.gpus_per_node:
        yield f"--gpus-per-node={needs.gpus_per_node}"
    if options.exclusive:
        yield "--exclusive"
    if options.partition:
        yield f"--partition={options.partition}"
    if options.constraint:
        yield f"--constraint={options.constraint}"
    yield from options.sbatch


def _engine_options(submission: Submission, options: SlurmOptions) -> list[str]:
    """Options of the engines' nodes in a heterogeneous job."""
    own = {"--partition": options.engine_partition, "--constraint": options.engine_constraint}
    shared = _node_options(submission, options, submission.needs.engine_nodes)
    kept = [option for option in shared if option.partition("=")[0] not in own]
    return [*kept, *(f"{name}={value}" for name, value in own.items() if value)]


def _python(options: SlurmOptions) -> str:
    return options.python or (sys.executable if options.container == "none" else "python")


def _pyxis(submission: Submission, options: SlurmOptions) -> list[str]:
    if options.container != "pyxis":
        return []
    mounts = ",".join(_mounts(submission, options))
    image = shlex.quote(options.image)
    return [f"--container-image={image}", f"--container-mounts={shlex.quote(mounts)}"]


def _apptainer(submission: Submission, options: SlurmOptions) -> list[str]:
    if options.container != "apptainer":
        return []
    nv = ["--nv"] if submission.needs.gpus_per_node else []
    binds = [f"--bind={mount}" for mount in _mounts(submission, options)]
    return ["apptainer", "exec", *nv, *binds, options.image]


def _mounts(submission: Submission, options: SlurmOptions) -> list[str]:
    """The run's folder, at the same place in the container, and what the options name."""
    return [f"{submission.run_dir}:{submission.run_dir}", *options.mounts]
