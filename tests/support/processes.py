"""Trainer and engine ranks as processes, linked as in a run, without SGLang; one may be killed."""

import multiprocessing as mp
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from mcore_rl.device import device, set_local_device
from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.slices.box import Shard
from mcore_rl.slices.layouts.engine_trace import trace_load_weights
from mcore_rl.stream.link_end import LinkEnd
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.receiver import WeightReceiver
from mcore_rl.stream.routes.choice import (
    MakeTransport,
    make_gloo_transport,
    make_gpu_pair_transport,
    make_routed_transport,
)
from mcore_rl.stream.routes.transport import Transport
from mcore_rl.stream.sender import WeightSender
from mcore_rl.stream.wire import Action, Command, Link, Report, StageRequest
from tests.support.sync_layouts import FusedEngine, make_tensors

ACTIONS: tuple[Action, ...] = ("connect", "receive", "swap")
Cut = Callable[[Mapping[str, Tensor], int, int, str], tuple[list[Shard], dict[str, Tensor]]]


@dataclass(frozen=True)
class Fault:
    """A fault on sender `rank` of a link, when it starts its message number `message`."""

    rank: int
    message: int
    kind: str
    """"corrupt": a byte changes in transit; "kill", "stop": the process gets SIGKILL, SIGSTOP."""


class FaultyTransport:
    """A rank's real transport, to which a fault happens."""

    def __init__(self, transport: Transport, fault: Fault) -> None:
        self._transport = transport
        self._fault = fault
        self._num_sent = 0

    def memory(self, peer: int) -> Tensor | None:
        return self._transport.memory(peer)

    def device(self, peer: int) -> torch.device:
        return self._transport.device(peer)

    def send(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        if self._num_sent == self._fault.message:
            if self._fault.kind == "corrupt":
                tensor_u8[-3] ^= 1
            else:
                os.kill(
                    os.getpid(), signal.SIGKILL if self._fault.kind == "kill" else signal.SIGSTOP
                )
        self._num_sent += 1
        self._transport.send(tensor_u8, peer, what)

    def recv(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._transport.recv(tensor_u8, peer, what)

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        self._transport.run(deadline_s, failure, pending)

    def close(self) -> None:
        self._transport.close()


@dataclass(frozen=True)
class Scene:
    """`cut` deals HF tensors to the senders; receivers are FusedEngine ranks of `dtype`."""

    cut: Cut
    num_senders: int
    num_receivers: int
    dtype: str = "float32"
    bucket_bytes: int = 700
    timeout_s: float = 30.0
    num_syncs: int = 2
    fault: Fault | None = None
    absent_sender: int | None = None
    """This trainer rank never connects."""
    staged: bool = False
    between_machines: bool = False
    """Bytes take the route they take between machines."""
    on_gpu: tuple[bool, bool] = (False, False)
    """Whether the tensors of senders and of receivers lie on GPUs; ranks take one each, in turns.
    """

    @property
    def make_transport(self) -> MakeTransport:
        if not self.between_machines:
            return make_routed_transport
        return make_gpu_pair_transport if all(self.on_gpu) else make_gloo_transport


def make_link(scene: Scene, store_port: int) -> Link:
    return Link(
        engine="engine-0",
        store_host="127.0.0.1",
        store_port=store_port,
        num_senders=scene.num_senders,
        num_receivers=scene.num_receivers,
        bucket_bytes=scene.bucket_bytes,
        timeout_s=scene.timeout_s,
        staged=scene.staged,
    )


def run_scene(scene: Scene) -> tuple[list[Any], list[Any], int]:
    """Connect once and sync `num_syncs` versions.

    Returns each sender's reports (None if it died), each receiver's reports and final parameters,
    and the number of keys left in the store.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.support.processes"])
    store = LinkStore.serve("127.0.0.1", scene.timeout_s)
    link = make_link(scene, store.port)
    pipes = []
    processes = []
    num_ranks = scene.num_senders + scene.num_receivers
    started = context.Barrier(num_ranks)
    for rank in range(num_ranks):
        own_end, child_end = context.Pipe(duplex=False)
        processes.append(
            context.Process(
                target=_rank_main, args=(child_end, started, scene, link, rank), daemon=True
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
        process.join()
    assert len(answers) == len(pipes), f"only ranks {sorted(answers)} answered"
    results = [answers[rank] for rank in range(len(pipes))]
    for rank in range(scene.num_receivers):
        for action in ACTIONS:
            store.take_report(action, scene.num_senders + rank)
    return results[: scene.num_senders], results[scene.num_senders :], store.num_keys


def expected_parameters(scene: Scene, receiver: int, version: int) -> dict[str, Tensor]:
    """The parameters that the engine's own loader makes of the full tensors of `version`."""
    engine = FusedEngine(receiver, scene.num_receivers, getattr(torch, scene.dtype))
    engine.load_weights(make_tensors(seed=version).items())
    return dict(engine.named_parameters())


def _rank_main(pipe: Any, started: Any, scene: Scene, link: Link, rank: int) -> None:
    torch.set_num_threads(1)
    _trace_once()
    started.wait(60)  # scenes measure how late a fault is noticed, not how late processes start
    is_sender = rank < scene.num_senders
    if any(scene.on_gpu):
        set_local_device(rank)
    answer = (
        _send(scene, link, rank) if is_sender else _receive(scene, link, rank - scene.num_senders)
    )
    pipe.send_bytes(pickle.dumps(answer))  # plain pickle: tensors by value, not by shared memory
    pipe.close()


def _trace_once() -> None:
    """Trace a loader: the first trace of a process imports torch modules for seconds."""
    engine = FusedEngine(0, 1, torch.float32)
    typed = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in make_tensors().items()}
    trace_load_weights(engine.load_weights, typed, dict(engine.named_parameters()))


def _send(scene: Scene, link: Link, rank: int) -> list[Report]:
    if rank == scene.absent_sender:
        return []

    def make_transport(
        end: LinkEnd, shared_words: Mapping[int, int], stream: DeviceStream
    ) -> Transport:
        transport = scene.make_transport(end, shared_words, stream)
        if scene.fault is None or scene.fault.rank != rank:
            return transport
        return FaultyTransport(transport, scene.fault)

    shards, tensors = scene.cut(make_tensors(seed=0), rank, scene.num_senders, "float32")
    if scene.on_gpu[0]:
        tensors = {name: tensor.to(device()) for name, tensor in tensors.items()}
    sender = WeightSender(shards, tensors, rank, make_transport)
    reports = [sender.connect(link)]
    for version in range(scene.num_syncs):
        if reports[-1].error is not None:
            break
        newer = scene.cut(make_tensors(seed=version), rank, scene.num_senders, "float32")[1]
        for name, tensor in tensors.items():
            tensor.copy_(newer[name])
        reports.append(sender.send(version, ["engine-0"], scene.timeout_s)["engine-0"])
    return reports


def _receive(scene: Scene, link: Link, receiver: int) -> tuple[list[Report], dict[str, Tensor]]:
    engine = FusedEngine(receiver, scene.num_receivers, getattr(torch, scene.dtype))
    engine.load_weights(make_tensors(seed=99).items())
    if scene.on_gpu[1]:
        engine.to(device())
    tensors = dict(engine.named_parameters())
    weights = WeightReceiver(scene.make_transport)

    def handle(action: Action, version: int | None = None) -> Report:
        return weights.handle(
            Command(link, action, version), receiver, engine.load_weights, tensors
        )

    reports = [handle("connect")]
    for version in range(scene.num_syncs):
        if not scene.staged or reports[0].error is not None:
            reports.append(handle("receive", version))
            continue
        reports.append(_stage(link, scene.num_senders + receiver, version))
        if reports[-1].error is None:
            reports[-1] = replace(reports[-1], error=handle("swap", version).error)
            LinkStore.open(link).tcp_store.add("swapped", 1)
    return reports, {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _stage(link: Link, rank: int, version: int) -> Report:
    """Request a version as the controller does, once all ranks have swapped in the one before it.

    Returns the report of this rank.
    """
    store = LinkStore.open(link)
    give_up_s = time.monotonic() + 2 * link.timeout_s
    while (
        store.tcp_store.add("swapped", 0) < version * link.num_receivers
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
