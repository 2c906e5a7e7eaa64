"""Patches are made once, shared by files of bounded size, and made again when they are gone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rl.data.images import shared_patches
from mcore_rl.data.images.encoded import BadImageError
from mcore_rl.data.images.shared_patches import SharedPatches, map_patches, roomy_folder
from mcore_rl.types import Patches, PromptImage
from tests.support.image_prompts import make_image, make_patches

NUM_BYTES = make_patches(make_image("a")).num_bytes


def test_patches_are_made_once_and_mapped(tmp_path: Path) -> None:
    shared = SharedPatches(make_patches, 10 * NUM_BYTES, str(tmp_path))
    image = make_image("a")
    placed = shared.place(image)
    assert shared.place(image) == placed
    assert shared.num_made == 1
    pixels_PD = map_patches(placed)
    wanted = make_patches(image)
    assert pixels_PD is not None and torch.equal(pixels_PD, wanted.pixels_PD)
    assert placed.grid == wanted.grid and placed.num_bytes == wanted.num_bytes
    assert torch.equal(shared.read(image).pixels_PD, wanted.pixels_PD)


def test_what_is_forgotten_stays_readable_where_it_is_mapped(tmp_path: Path) -> None:
    shared = SharedPatches(make_patches, 2 * NUM_BYTES, str(tmp_path))
    placed = [shared.place(make_image(name)) for name in "ab"]
    mapped = map_patches(placed[0])
    shared.place(make_image("c"))
    assert map_patches(placed[0]) is None
    assert len(list(tmp_path.rglob("*.patches"))) == 2
    assert mapped is not None and torch.equal(mapped, make_patches(make_image("a")).pixels_PD)
    assert shared.place(make_image("a")) == placed[0]
    assert shared.num_made == 4
    shared.close()
    assert list(tmp_path.rglob("*.patches")) == []


def test_a_writer_elsewhere_does_not_change_what_is_shared(tmp_path: Path) -> None:
    shared = SharedPatches(make_patches, 10 * NUM_BYTES, str(tmp_path))
    placed = shared.place(make_image("a"))
    pixels_PD = map_patches(placed)
    assert pixels_PD is not None
    pixels_PD.zero_()
    again = map_patches(placed)
    assert again is not None and torch.equal(again, make_patches(make_image("a")).pixels_PD)


def test_threads_that_ask_at_once_wait_for_the_first(tmp_path: Path) -> None:
    begun = threading.Event()
    may_end = threading.Event()
    made = []

    def make(image: PromptImage) -> Patches:
        begun.set()
        assert may_end.wait(30)
        made.append(image)
        return make_patches(image)

    shared = SharedPatches(make, 10 * NUM_BYTES, str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        places = [pool.submit(shared.place, make_image("a")) for _ in range(4)]
        assert begun.wait(30)
        may_end.set()
        assert len({place.result(30) for place in places}) == 1
    assert len(made) == 1


def test_a_thread_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_patches, "MAKE_TIMEOUT_S", 0.05)
    begun = threading.Event()
    may_end = threading.Event()

    def make(image: PromptImage) -> Patches:
        begun.set()
        assert may_end.wait(30)
        return make_patches(image)

    shared = SharedPatches(make, 10 * NUM_BYTES, str(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shared.place, make_image("a"))
        assert begun.wait(30)
        with pytest.raises(TimeoutError, match="another thread to make patches of image a"):
            shared.place(make_image("a"))
        may_end.set()
        assert first.result(30).shape == (8, 6)


def test_a_damaged_image_is_an_error_each_time(tmp_path: Path) -> None:
    def make(image: PromptImage) -> Patches:
        raise BadImageError(f"{image.where} is damaged")

    shared = SharedPatches(make, 10 * NUM_BYTES, str(tmp_path))
    for _ in range(2):
        with pytest.raises(BadImageError, match="image a is damaged"):
            shared.place(make_image("a"))


def test_an_image_that_never_fits_is_refused_by_its_option(tmp_path: Path) -> None:
    shared = SharedPatches(make_patches, NUM_BYTES - 1, str(tmp_path))
    with pytest.raises(ValueError, match=r"image a: its patches take 192 bytes.*cache_gib"):
        shared.place(make_image("a"))


def test_files_of_another_machine_or_size_are_not_mapped(tmp_path: Path) -> None:
    placed = SharedPatches(make_patches, 10 * NUM_BYTES, str(tmp_path)).place(make_image("a"))
    assert map_patches(replace(placed, path=str(tmp_path / "none"))) is None
    assert map_patches(replace(placed, shape=(1000, 6))) is None


def test_shared_memory_is_taken_only_if_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert roomy_folder(1) == "/dev/shm"
    assert roomy_folder(1 << 60) != "/dev/shm"
    monkeypatch.setattr(shared_patches, "SHARED_MEMORY", "/no/such/folder")
    assert Path(roomy_folder(1)).is_dir()
