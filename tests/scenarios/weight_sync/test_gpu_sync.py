"""Syncs between ranks whose tensors lie on GPUs: by shared GPU memory, NCCL, or the host.

`mcore-rl doctor --gpu` checks syncs within one GPU; what takes more GPUs or the host is here.
"""

import multiprocessing as mp
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed

from mcore_rl.device import device, has_cuda, set_local_device
from mcore_rl.device.probes import GraphedReductions
from mcore_rl.device.threads import start_thread
from mcore_rl.tools.doctor import sync_checks
from mcore_rl.tools.doctor.check import Figures
from mcore_rl.tools.doctor.sync_ranks import run_scene
from mcore_rl.tools.doctor.toy_engine import Fault, Scene, SceneOutcome, column_cut, row_cut
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.transports.gpu_pairs import GpuPairTransport
from mcore_rl.weight_sync.wire import Link
from tests.support.link_ends import make_link

PrefixStore: Any = distributed.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

TWO_GPUS = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="NCCL takes a GPU per rank"
)
THREE_GPUS = pytest.mark.skipif(
    torch.accelerator.device_count() < 3, reason="NCCL takes a GPU per rank"
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gloo,
    pytest.mark.skipif(not has_cuda(), reason="needs a GPU"),
]

GPU_MEMORY = Scene(row_cut, 1, 1, timeout_s=120, on_gpu=(True, True))
HOST = Scene(column_cut, 2, 2, timeout_s=120)
NCCL = replace(GPU_MEMORY, between_machines=True)
SCENES = [
    pytest.param(replace(GPU_MEMORY, bucket_bytes=1 << 20), id="large buckets"),
    pytest.param(replace(HOST, on_gpu=(True, False)), id="to the host"),
    pytest.param(replace(HOST, on_gpu=(False, True)), id="from the host"),
    pytest.param(
        replace(HOST, on_gpu=(True, False), num_senders=1, between_machines=True),
        id="to another host",
    ),
    pytest.param(NCCL, id="NCCL", marks=TWO_GPUS),
    pytest.param(replace(NCCL, num_senders=2, staged=True), id="NCCL, staged", marks=THREE_GPUS),
]


@pytest.mark.parametrize(
    "check",
    [
        sync_checks.check_in_place,
        sync_checks.check_after_release,
        sync_checks.check_cast_while_packed,
        sync_checks.check_staged,
        sync_checks.check_corrupt_byte,
        sync_checks.check_killed_sender,
        sync_checks.check_stopped_sender,
        sync_checks.check_kernels,
    ],
)
def test_the_doctors_checks_pass(check: Callable[[], Figures]) -> None:
    check()


@pytest.mark.parametrize("scene", SCENES)
def test_every_parameter_is_bit_for_bit_what_the_engines_own_loader_puts_there(
    scene: Scene,
) -> None:
    outcome = run_scene(scene)
    assert [report.error for report in outcome.reports] == [None] * len(outcome.reports)
    assert [received.differing for received in outcome.receivers] == [[]] * scene.num_receivers


@TWO_GPUS
def test_a_byte_changed_between_machines_is_refused_by_name() -> None:
    error = run_faulty("corrupt", timeout_s=60).receivers[0].reports[1].error
    assert error is not None and "has checksum" in error and "trainer rank 0" in error


@TWO_GPUS
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_sender_on_another_machine_that_dies_or_hangs_is_named_by_the_deadline(kind: str) -> None:
    outcome = run_faulty(kind, timeout_s=30)
    report = outcome.receivers[0].reports[1]
    assert outcome.senders == [None]
    assert report.error is not None and "from trainer rank 0" in report.error
    assert report.seconds < 40


def run_faulty(kind: str, timeout_s: float) -> SceneOutcome:
    fault = Fault(rank=0, message=2, kind=kind)
    return run_scene(replace(NCCL, num_syncs=1, timeout_s=timeout_s, fault=fault))


@TWO_GPUS
def test_a_pair_carries_buckets_while_all_reduces_run_in_graphs() -> None:
    """NCCL lets communicators of one GPU wait for one another unless all of them fit at once."""
    context = mp.get_context("spawn")
    _store, link = make_link(timeout_s=120.0)
    answers = context.Queue()
    ranks = [
        context.Process(target=move_beside_graphs, args=(link, rank, answers), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    assert sorted(answers.get(timeout=180) for _ in ranks) == [0, 1]


def move_beside_graphs(link: Link, rank: int, answers: Any) -> None:
    """Send or receive buckets in a thread, and reduce meanwhile; answer with the rank."""
    set_local_device(rank)
    end = LinkEnd.open(link, rank, device())
    store = PrefixStore("decoding", LinkStore.open(link).make_torch_store())
    reductions = GraphedReductions(store, rank, 2)
    moved: Future[None] = Future()
    start_thread(end.device, move_buckets, (end, moved))
    reductions.replay(times=5000)
    moved.result(120)
    answers.put(rank)


def move_buckets(end: LinkEnd, moved: "Future[None]") -> None:
    try:
        transport = GpuPairTransport(end, [1 - end.rank])
        for number in range(100):
            bucket_u8 = torch.full((1 << 24,), number, dtype=torch.uint8, device=end.device)
            if not end.is_sender:
                bucket_u8.zero_()
            verb = transport.send if end.is_sender else transport.recv
            verb(bucket_u8, 1 - end.rank, f"bucket {number}")
            transport.run(time.monotonic() + 60, lambda: None)
            assert (bucket_u8 == number).all(), f"bucket {number} has other bytes"
        moved.set_result(None)
    except Exception as error:
        moved.set_exception(error)
