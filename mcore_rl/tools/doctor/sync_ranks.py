"""Runs the ranks of a scene as processes, linked as in a run, and returns their reports.

A process is a trainer rank that sends, or an engine rank that receives.
"""

import multiprocessing as mp
import os
import pickle
import signal
import time
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from mcore_rl.device import device, set_local_device
from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.process.process_state import wait_killed
from mcore_rl.tools.doctor.toy_engine import (
    Fault,
    FusedEngine,
    Received,
    Scene,
    SceneOutcome,
    make_tensors,
)
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.receiver import WeightReceiver
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weight_sync.transports.select import RoutedTransport
from mcore_rl.weight_sync.transports.transport import Transport
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Action, Command, Link, Report, StageRequest
from mcore_rl.weights.box import Shard
from mcore_rl.weights.layouts.engine_trace import trace_load_weights


class FaultyTransport(RoutedTransport):
    """A rank's real transport, to which a fault happens."""

    def __init__(self, transport: Transport, plan: RankPlan, fault: Fault) -> None:
        super().__init__([transport], dict.fromkeys((own.peer for own in plan.buckets), transport))
        self._fault = fault
        self._num_sent = 0

    def send(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        if self._num_sent == self._fault.message:
            if self._fault.kind == "corrupt":
                tensor_u8[-3] ^= 1
            else:
                os.kill(
                    os.getpid(), signal.SIGKILL if self._fault.kind == "kill" else signal.SIGSTOP
                )
        self._num_sent += 1
        super().send(tensor_u8, peer, what, number)


def run_rank(pipe: Any, started: Any, scene: Scene, link: Link, rank: int) -> None:
    torch.set_num_threads(1)
    _trace_once()
    started.wait(60)  # scenes measure how late a fault is noticed, not how late processes start
    is_sender = rank < scene.num_senders
    if any(scene.on_gpu):
        set_local_device(rank)
    answer = (
        _send(scene, link, rank) if is_sender else _receive(scene, link, rank - scene.num_senders)
    )
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()


def _trace_once() -> None:
    """Trace a loader: the first trace of a process imports torch modules for seconds."""
    engine = FusedEngine(0, 1, torch.float32)
    typed = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in make_tensors().items()}
    trace_load_weights(engine.load_weights, typed, dict(engine.named_parameters()))


def _send(scene: Scene, link: Link, rank: int) -> list[Report]:
    if rank == scene.absent_sender:
        return []

    def make_transport(end: LinkEnd, plan: RankPlan, stream: DeviceStream) -> Transport:
        transport = scene.make_transport(end, plan, stream)
        if scene.pull and all(scene.on_gpu):
            _expect_pulled(transport)
        if scene.fault is None or scene.fault.rank != rank:
            return transport
        return FaultyTransport(transport, plan, scene.fault)

    shards, tensors = _cut_version(scene, 0, rank)
    sender = WeightSender(shards, tensors, rank, make_transport)
    reports = [sender.connect(link)]
    for version in range(scene.num_syncs):
        if reports[-1].error is not None:
            break
        _, newer = _cut_version(scene, version, rank)
        for name, tensor in tensors.items():
            tensor.copy_(newer[name])
        del newer
        reports.append(sender.send(version, ["engine-0"], scene.timeout_s)["engine-0"])
    return reports


def _expect_pulled(transport: Transport) -> None:
    """Raise TransferError if slices take another route than the one that is to be checked."""
    if not isinstance(transport, RoutedTransport) or "PullTransport" not in transport.kinds:
        raise TransferError("this rank's memory cannot be read by the engine's process")


def _cut_version(scene: Scene, version: int, rank: int) -> tuple[list[Shard], dict[str, Tensor]]:
    """A trainer rank's shards and tensors of a version."""
    full = _full_tensors(scene, version)
    shards, tensors = scene.cut(full, rank, scene.num_senders, scene.sender_dtype)
    place = device() if scene.on_gpu[0] else "cpu"
    return shards, {name: tensor.to(place) for name, tensor in tensors.items()}


def _full_tensors(scene: Scene, version: int) -> dict[str, Tensor]:
    """The HF tensors of a version, in the trainer's dtype; equal in every process."""
    place = device() if any(scene.on_gpu) else "cpu"
    return make_tensors(version, scene.sizes, getattr(torch, scene.sender_dtype), place)


def _load_engine(scene: Scene, receiver: int, version: int) -> FusedEngine:
    """An engine rank with the parameters that its own loader makes of a version."""
    place = device() if scene.on_gpu[1] else "cpu"
    dtype = getattr(torch, scene.dtype)
    engine = FusedEngine(receiver, scene.num_receivers, dtype, scene.sizes, place)
    engine.load_weights(_full_tensors(scene, version).items())
    return engine


def _receive(scene: Scene, link: Link, receiver: int) -> Received:
    engine = _load_engine(scene, receiver, version=99)
    tensors = dict(engine.named_parameters())
    weights = WeightReceiver(scene.make_transport)

    def handle(action: Action, version: int | None = None) -> Report:
        return weights.handle(
            Command(link, action, version), receiver, engine.load_weights, tensors
        )

    reports = [handle("connect")]
    swap_seconds = []
    for version in range(scene.num_syncs):
        if scene.releases_memory:
            for tensor in tensors.values():
                tensor.data.view(torch.uint8).fill_(0x5A)
        if not scene.staged or reports[0].error is not None:
            reports.append(handle("receive", version))
            continue
        reports.append(_stage(link, scene.num_senders + receiver, version))
        if reports[-1].error is None:
            began_s = time.monotonic()
            reports[-1] = replace(reports[-1], error=handle("swap", version).error)
            swap_seconds.append(time.monotonic() - began_s)
            LinkStore.open(link).client.add("swapped", 1)
    expected = _load_engine(scene, receiver, scene.num_syncs - 1).named_parameters()
    differing = [name for name, tensor in expected if not torch.equal(tensor, tensors[name])]
    return Received(reports, differing, swap_seconds)


def _stage(link: Link, rank: int, version: int) -> Report:
    """Request a version as the controller does, once all ranks have swapped in the one before it.

    Returns the report of this rank.
    """
    store = LinkStore.open(link)
    give_up_s = time.monotonic() + 2 * link.timeout_s
    while (
        store.client.add("swapped", 0) < version * link.num_receivers
        and time.monotonic() < give_up_s
    ):
        time.sleep(0.005)
    store.put_stage_request(version, StageRequest(version))
    while time.monotonic() < give_up_s:
        report = store.take_report("receive", rank)
        if report is not None:
            return report
        time.sleep(0.005)
    raise AssertionError(f"{link.names[rank]} did not report on version {version}")


ACTIONS: tuple[Action, ...] = ("connect", "receive", "swap")


def make_link(scene: Scene, store: LinkStore) -> Link:
    return Link(
        engine="engine-0",
        store_host="127.0.0.1",
        store_port=store.port,
        store_key=store.key,
        num_senders=scene.num_senders,
        num_receivers=scene.num_receivers,
        bucket_bytes=scene.bucket_bytes,
        timeout_s=scene.timeout_s,
        staged=scene.staged,
        pull=scene.pull,
    )


def run_scene(scene: Scene) -> SceneOutcome:
    """Connect once and sync `num_syncs` versions. Raises RuntimeError if ranks do not answer."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "mcore_rl.tools.doctor.sync_ranks"])
    store = LinkStore.serve("127.0.0.1", scene.timeout_s)
    link = make_link(scene, store)
    store.keep(link)
    pipes = []
    processes = []
    num_ranks = scene.num_senders + scene.num_receivers
    started = context.Barrier(num_ranks)
    for rank in range(num_ranks):
        own_end, child_end = context.Pipe(duplex=False)
        processes.append(
            context.Process(
                target=run_rank, args=(child_end, started, scene, link, rank), daemon=True
            )
        )
        processes[-1].start()
        child_end.close()
        pipes.append(own_end)
    answers: dict[int, Any] = {}
    give_up_s = time.monotonic() + 2 * scene.timeout_s + 20
    while len(answers) < len(pipes) and time.monotonic() < give_up_s:
        waiting: list[Any] = [p for r, p in enumerate(pipes) if r not in answers]
        for pipe in wait(waiting, timeout=1):
            try:
                answers[pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                answers[pipes.index(pipe)] = None
        if scene.fault is not None and len(answers) == len(pipes) - 1:
            answers.setdefault(scene.fault.rank, None)
    for process in processes:
        process.kill()
        wait_killed(process, "a rank of the check")
    if len(answers) < len(pipes):
        raise RuntimeError(f"only ranks {sorted(answers)} answered")
    results = [answers[rank] for rank in range(len(pipes))]
    for rank in range(scene.num_receivers):
        for action in ACTIONS:
            store.take_report(action, scene.num_senders + rank)
    return SceneOutcome(results[: scene.num_senders], results[scene.num_senders :], store.num_keys)
