"""Devices of tensors, ordered work on a device, and GPU memory shared by two processes."""

import multiprocessing as mp
from typing import Any

import pytest
import torch

from mcore_rl.device import has_cuda
from mcore_rl.device.gpu_memory import (
    DeviceStream,
    common_device,
    export_memory,
    gpu_id,
    open_memory,
    readable_gpus,
)

HOST = torch.device("cpu")


@pytest.mark.parametrize(
    ("places", "expected"),
    [((), "cpu"), (("cpu", "cpu"), "cpu"), (("meta", "meta"), "meta"), (("meta", "cpu"), "cpu")],
)
def test_tensors_that_lie_in_several_places_go_by_the_host(
    places: tuple[str, ...], expected: str
) -> None:
    tensors = [torch.empty(2, device=place) for place in places]
    assert common_device(tensors) == torch.device(expected)


def test_the_host_is_no_gpu_and_has_nothing_to_wait_for() -> None:
    assert gpu_id(HOST) == ""
    assert readable_gpus(HOST) == ()
    stream = DeviceStream(HOST)
    with stream.running():
        doubled = torch.arange(3) * 2
    stream.synchronize()
    assert doubled.tolist() == [0, 2, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_a_stream_begins_after_the_work_before_it_and_is_done_when_it_ends() -> None:
    gpu = torch.device("cuda", 0)
    assert gpu_id(gpu) in readable_gpus(gpu)
    stream = DeviceStream(gpu)
    values = torch.zeros(1 << 26, device=gpu)
    for _ in range(20):
        values += 1
    with stream.running():
        copied = values.clone()
    assert torch.cuda.current_stream(gpu).query()
    assert copied.min().item() == 20


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_another_process_reads_and_writes_exported_memory() -> None:
    context = mp.get_context("spawn")
    words_W = torch.arange(1 << 20, device="cuda")
    torch.cuda.synchronize()
    ours, theirs = context.Pipe()
    process = context.Process(target=_add_one, args=(theirs,), daemon=True)
    process.start()
    ours.send_bytes(export_memory(words_W))
    assert ours.poll(120) and ours.recv() == (1 << 20)
    process.join(60)
    assert process.exitcode == 0
    assert torch.equal(words_W.cpu(), torch.arange(1 << 20) + 1)


def _add_one(pipe: Any) -> None:
    words_W = open_memory(pipe.recv_bytes(), torch.device("cuda", 0))
    words_W += 1
    torch.cuda.synchronize()
    pipe.send(len(words_W))
