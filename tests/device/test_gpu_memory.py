"""Devices of tensors, ordered work on a device, and GPU memory shared by two processes."""

import multiprocessing as mp
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mcore_rl.device import has_cuda
from mcore_rl.device.gpu_memory import (
    DeviceStream,
    LentMemory,
    common_device,
    export_memory,
    gpu_id,
    keep_segments_fixed,
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


def test_memory_is_lent_again_once_it_was_given_back() -> None:
    lent = LentMemory()
    first_W = lent.take(8, HOST)
    second_W = lent.take(8, HOST)
    address = first_W.data_ptr()
    assert second_W.data_ptr() != address
    first_W.fill_(7)
    lent.give_back(first_W)
    shorter_W = lent.take(5, HOST)
    assert shorter_W.data_ptr() == address and shorter_W.tolist() == [0] * 5
    lent.give_back(shorter_W)
    assert lent.take(8, HOST).data_ptr() == address, "its whole length was given back"


def test_the_smallest_memory_that_fits_is_lent_and_what_is_too_small_makes_room() -> None:
    lent = LentMemory()
    taken = [lent.take(num_words, HOST) for num_words in (4, 16, 8)]
    sizes = {words_W.data_ptr(): len(words_W) for words_W in taken}
    for words_W in taken:
        lent.give_back(words_W)
    held = [lent.take(num_words, HOST) for num_words in (6, 20)]
    assert sizes[held[0].data_ptr()] == 8
    left = [sizes[lent.take(1, HOST).data_ptr()]]
    assert left == [4], "the memory of 16 words made room for 20"


@pytest.fixture
def allocator_settings() -> Iterator[Any]:
    """torch's function that returns its allocator's settings, which are restored after the test."""
    core: Any = torch._C
    before = core._accelerator_getAllocatorSettings()
    yield core._accelerator_getAllocatorSettings
    core._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize(
    ("before", "within"),
    [
        (
            "expandable_segments:True,max_split_size_mb:64",
            "max_split_size_mb:64,expandable_segments:False",
        ),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_what_others_open_lies_in_segments_that_do_not_grow(
    allocator_settings: Any, before: str, within: str
) -> None:
    core: Any = torch._C
    core._accelerator_setAllocatorSettings(before)
    with keep_segments_fixed():
        assert allocator_settings() == within
    assert allocator_settings() == before


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
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_another_process_reads_and_writes_exported_memory(
    settings: str, allocator_settings: Any
) -> None:
    core: Any = torch._C
    core._accelerator_setAllocatorSettings(settings)
    context = mp.get_context("spawn")
    words_W = LentMemory().take(1 << 20, torch.device("cuda", 0))
    words_W.copy_(torch.arange(1 << 20))
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
    words_W = open_memory(pipe.recv_bytes(), torch.device("cuda", 0))[: 1 << 20]
    words_W += 1
    torch.cuda.synchronize()
    pipe.send(len(words_W))
