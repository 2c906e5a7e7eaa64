"""Brings a node of a job into its Ray, runs the command on the first one, and ends with it.

node 0                                 other nodes
Ray's head --> head.json ------------> Ray joins
waits until all have joined
the command --> done.json -----------> Ray ends
Ray ends once the others have left

A node that loses its Ray says so and waits for the end of the command, which may go on without the
node. Signals by which a scheduler asks the job to stop are passed to the command.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from mcore_rl.cluster.environment import set_defaults, set_for_node
from mcore_rl.cluster.node_agent.job import FAILED, LEFT, STARTED, Job, Note, Rendezvous
from mcore_rl.cluster.node_agent.ray_node import (
    JoinedNodes,
    RayNode,
    RayProcesses,
    find_interface,
    find_own_address,
)
from mcore_rl.cluster.process_tags import OPEN, make_ray_temp_dir, tag_processes
from mcore_rl.planning.bundles import ENGINE_NODE, TRAINER_NODE
from mcore_rl.process.process_state import wait_killed
from mcore_rl.process.safe_path import safe_module
from mcore_rl.process.signals import EXIT_STATUS, SIGNAL
from mcore_rl.process.variables import restore_variables

POLL_S = 0.5
FAREWELL_S = 20.0
"""How long node 0 waits for other nodes to leave, and for a command that lost Ray's head to end."""
HEAD_SILENCE_S = 30.0
"""How long Ray's head may be silent before a node that lost its own Ray gives the job up."""


class RunCommand:
    """`mcore-rl <arguments>` as a process in a session of its own."""

    def __init__(self, arguments: Sequence[str]) -> None:
        # A signal that comes before the command handles it stays pending and does not end it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
        try:
            self._process = subprocess.Popen(
                [*safe_module("mcore_rl.cli"), *arguments],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ask_to_save(self) -> None:
        self._process.send_signal(SIGNAL)

    def end(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        wait_killed(self._process, "the node's command")

    def status(self) -> int | None:
        """Return the exit status as a shell gives it, or None while the command runs."""
        status = self._process.poll()
        return 128 - status if status is not None and status < 0 else status


class StopSignals:
    """Counts SIGUSR1, SIGTERM and SIGINT. Only for the main thread.

    The first signal asks the run to save and end, the second to end at once.
    """

    def __init__(self) -> None:
        self.count = 0
        for signum in (SIGNAL, signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1


class NodesMissingError(RuntimeError):
    """Nodes of the job did not join; the message names them."""


def run_node(job: Job) -> int:
    """Run this node's part of the job; return its exit status.

    On node 0 it is the command's exit status: 75 if the run saved and stopped on request. On other
    nodes it is 0 once the command has ended, with whatever status. It is 1, with a message on
    stderr, if nodes are missing or Ray's head is lost. On return, all processes that this process
    started are gone. Raises ValueError if this node has no address, or cannot write to the job's
    folder.
    """
    stops = StopSignals()
    rendezvous = Rendezvous(job.folder)
    rendezvous.open()
    rendezvous.note(job.rank, Note(STARTED))
    try:
        facts = _find_facts(job)
    except ValueError as error:
        rendezvous.note(job.rank, Note(FAILED, str(error)))
        raise
    _set_environment(rendezvous, facts.address, job)
    with restore_variables(), make_ray_temp_dir() as temp_dir, tag_processes(str(temp_dir)):
        try:
            if job.rank == 0:
                return _lead(job, facts, rendezvous, stops, temp_dir)
            return _follow(job, facts, rendezvous, stops, temp_dir)
        except NodesMissingError as error:
            rendezvous.note(job.rank, Note(FAILED, str(error)))
            print(f"mcore-rl: {error}", file=sys.stderr)
            return 1


def _find_facts(job: Job) -> RayNode:
    peer = job.addresses[1 if job.rank == 0 else 0] if job.num_nodes > 1 else None
    kind = TRAINER_NODE if job.rank < job.trainer_nodes else ENGINE_NODE
    return RayNode(
        name=job.name,
        order=job.order,
        address=find_own_address(job.interface, job.addresses[job.rank], peer),
        num_cpus=job.num_cpus,
        num_gpus=job.num_gpus,
        object_store_mib=job.object_store_mib,
        resources={kind: 1.0} if job.trainer_nodes else {},
    )


def _set_environment(rendezvous: Rendezvous, address: str, job: Job) -> None:
    """Set the variables that Ray's processes and their children inherit, before Ray is imported."""
    set_defaults(several_hosts=job.num_nodes > 1)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(rendezvous.token)
    os.environ.pop("RAY_ADDRESS", None)
    if job.num_nodes > 1 and (interface := find_interface(address)):
        set_for_node({f"{library}_SOCKET_IFNAME": interface for library in ("NCCL", "GLOO")})


def _lead(
    job: Job, facts: RayNode, rendezvous: Rendezvous, stops: StopSignals, temp_dir: Path
) -> int:
    rendezvous.make_token()
    ray = RayProcesses(facts, None, temp_dir / OPEN, job.folder / f"ray_{job.name}.log")
    status = 1
    try:
        rendezvous.publish(ray.head_address)
        if not _wait_for_nodes(job, rendezvous, ray, stops):
            status = EXIT_STATUS
        else:
            status = _run_command(job, rendezvous, ray, stops)
    finally:
        rendezvous.finish(status)
        if status not in (0, EXIT_STATUS):
            ray.keep_logs()
        _wait_for_farewells(job, rendezvous)
        ray.stop()
    rendezvous.note(job.rank, Note(LEFT))
    return status


def _wait_for_nodes(
    job: Job, rendezvous: Rendezvous, ray: RayProcesses, stops: StopSignals
) -> bool:
    """Wait until all nodes have joined Ray; return False if the job is asked to stop before.

    Raises NodesMissingError after the timeout, with the missing nodes and their last notes.
    """
    until = time.monotonic() + job.timeout_s
    joined = JoinedNodes(ray.head_address, job.num_nodes, job.folder)
    try:
        while len(names := joined.names()) < job.num_nodes:
            if stops.count or rendezvous.is_asked_to_stop():
                return False
            _check_ray(job.name, ray)
            for rank in range(1, job.num_nodes):
                if (note := rendezvous.note_of(rank)) and note.phase == FAILED:
                    raise NodesMissingError(f"node {job.names[rank]}: {note.text}")
            if time.monotonic() > until:
                raise NodesMissingError(_describe_missing(job, rendezvous, names))
            time.sleep(POLL_S)
    finally:
        joined.end()
    return True


def _describe_missing(job: Job, rendezvous: Rendezvous, joined: Sequence[str]) -> str:
    lines = [f"after {job.timeout_s:g} s {len(joined)} of {job.num_nodes} nodes are in Ray."]
    for rank, name in enumerate(job.names):
        if name in joined:
            continue
        if rendezvous.note_of(rank) is None:
            lines.append(
                f"Node {name} has not started: it wrote nothing to {job.folder}. Is the node up,"
                " and does it see this folder?"
            )
        else:
            lines.append(
                f"Node {name} has started, but did not join: {job.folder}/ray_{name}.log says why"
            )
    return " ".join(lines)


def _run_command(job: Job, rendezvous: Rendezvous, ray: RayProcesses, stops: StopSignals) -> int:
    """Run the job's command to its end and return its exit status.

    The command decides whether to go on without a lost node. If this node's Ray ends, which has the
    head, the command has FAREWELL_S to end by itself.
    """
    joining = [f"cluster.address={ray.head_address}", f"cluster.num_nodes={job.num_nodes}"]
    command = RunCommand([*job.command, *joining])
    handled = 0
    named: set[int] = set()
    lost_at: float | None = None
    while (status := command.status()) is None:
        asked = stops.count + rendezvous.is_asked_to_stop()
        if asked > handled:
            (command.end if handled else command.ask_to_save)()
            handled = asked
        _name_lost_nodes(job, rendezvous, named)
        if lost_at is None and (ray_status := ray.exit_status()) is not None:
            lost_at = time.monotonic()
            print(f"mcore-rl: {_describe_end(job.name, ray_status, ray)}", file=sys.stderr)
        if lost_at is not None and time.monotonic() - lost_at > FAREWELL_S:
            command.kill()
            return 1
        time.sleep(POLL_S)
    _name_lost_nodes(job, rendezvous, named)
    return status


def _name_lost_nodes(job: Job, rendezvous: Rendezvous, named: set[int]) -> None:
    """Print which other nodes lost their Ray, and why; add these nodes to `named`."""
    for rank in set(range(1, job.num_nodes)) - named:
        note = rendezvous.note_of(rank)
        if note and note.phase in (FAILED, LEFT):
            named.add(rank)
            reason = note.text or "it was asked to leave"
            print(f"mcore-rl: node {job.names[rank]}: {reason}", file=sys.stderr)


def _wait_for_farewells(job: Job, rendezvous: Rendezvous) -> None:
    """Wait until the other nodes have left, as a scheduler may end all tasks with the first."""

    def all_left() -> bool:
        notes = [rendezvous.note_of(rank) for rank in range(1, job.num_nodes)]
        return all(note is None or note.phase != STARTED for note in notes)

    _poll(all_left, FAREWELL_S)


def _follow(
    job: Job, facts: RayNode, rendezvous: Rendezvous, stops: StopSignals, temp_dir: Path
) -> int:
    head = job.names[0]
    _poll(
        lambda: rendezvous.head_address() is not None or rendezvous.status() is not None,
        job.timeout_s,
        give_up=lambda: stops.count > 1,
    )
    if rendezvous.status() is not None:
        return 0
    address = rendezvous.head_address()
    if address is None:
        raise NodesMissingError(
            f"node {job.name} waited {job.timeout_s:g} s for node {head} to start Ray: it wrote"
            f" nothing to {job.folder}. Is the node up, and is the folder shared?"
        )
    ray = RayProcesses(facts, address, temp_dir / OPEN, job.folder / f"ray_{job.name}.log")
    ray_status: int | None = None
    try:
        while rendezvous.status() is None and stops.count < 2:
            if (ray_status := ray.exit_status()) is not None:
                rendezvous.note(job.rank, Note(FAILED, _describe_end(job.name, ray_status, ray)))
                ray.keep_logs()
                break
            time.sleep(POLL_S)
    finally:
        ray.stop()
    if ray_status is not None:
        return _wait_without_ray(rendezvous, address, stops)
    rendezvous.note(job.rank, Note(LEFT))
    return 0 if rendezvous.status() is not None else 128 + signal.SIGTERM


def _wait_without_ray(rendezvous: Rendezvous, address: str, stops: StopSignals) -> int:
    """Wait for the end of a command that may go on without this node.

    A scheduler would end the whole job if this node ended before.
    """
    heard_at = time.monotonic()

    def is_head_silent() -> bool:
        nonlocal heard_at
        if _can_connect(address):
            heard_at = time.monotonic()
        return time.monotonic() - heard_at > HEAD_SILENCE_S

    while rendezvous.status() is None and not stops.count and not is_head_silent():
        time.sleep(POLL_S)
    return 0 if rendezvous.status() is not None else 1


def _can_connect(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=POLL_S).close()
    except OSError:
        return False
    return True


def _check_ray(name: str, ray: RayProcesses) -> None:
    if (status := ray.exit_status()) is not None:
        raise NodesMissingError(_describe_end(name, status, ray))


def _describe_end(name: str, status: int, ray: RayProcesses) -> str:
    return f"Ray ended on node {name} with status {status}: {ray.log_path}"


def _poll(
    is_done: Callable[[], bool], timeout_s: float, give_up: Callable[[], bool] = lambda: False
) -> None:
    """Wait until `is_done` or `give_up` returns True, or until the timeout."""
    until = time.monotonic() + timeout_s
    while not is_done() and not give_up() and time.monotonic() < until:
        time.sleep(POLL_S)
