"""Logged samples name small copies of their images, which the report shows."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from mcore_rl.logs.logger import SIDE, Thumbnails
from mcore_rl.logs.rows import read_rows
from mcore_rl.logs.run_report import make_report
from mcore_rl.types import EpisodeRecord, PromptImage
from mcore_rl.types.scores import Scores
from tests.support.odd_images import encode, noise
from tests.support.samples import HeldSampleLog, make_sample


def prompt_image(width: int, height: int, mode: str = "RGB") -> PromptImage:
    data = encode(noise(width, height, mode))
    return PromptImage(f"{width}x{height}{mode}".ljust(64, "0"), data, 1, 1, "row 0")


@pytest.mark.parametrize("mode", ["RGB", "P", "LA", "CMYK"])
def test_an_image_is_written_once_and_small(tmp_path: Path, mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    image = replace(prompt_image(600, 300), data=encode(noise(600, 300, mode), kind))
    thumbnails = Thumbnails(tmp_path)
    path = tmp_path / thumbnails.save(image)
    with Image.open(path) as written:
        assert written.size == (SIDE, SIDE // 2)
    path.write_bytes(b"as it was")
    assert tmp_path / thumbnails.save(image) == path
    assert path.read_bytes() == b"as it was"


def test_images_of_later_turns_are_named_each_once(tmp_path: Path) -> None:
    sample = make_sample(0, "1")
    asked, piece = prompt_image(8, 8), prompt_image(16, 8)
    episode = EpisodeRecord((), (), "done", 1.0, images=(asked, piece))
    seen = replace(sample, prompt=replace(sample.prompt, images=(asked,)), episode=episode)
    with HeldSampleLog(tmp_path, console=False) as log:
        log.log_held(1, [seen], Scores([1.0]))
    [row] = read_rows(tmp_path / "samples.jsonl")
    assert row["images"] == [f"images/{image.digest[:16]}.png" for image in (asked, piece)]
    assert all((tmp_path / path).is_file() for path in row["images"])


def test_samples_and_report_name_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = make_sample(0, "1")
    images = (prompt_image(8, 8), prompt_image(16, 8))
    with_images = replace(sample, prompt=replace(sample.prompt, images=images))
    with HeldSampleLog(tmp_path, console=False) as log:
        log.log(1, {"reward/mean": 1.0, "rollout/samples": 2.0, "time/step": 1.0})
        log.log_held(1, [with_images, make_sample(1, "2")], Scores([1.0, 1.0]))
    first, second = read_rows(tmp_path / "samples.jsonl")
    assert [(tmp_path / path).is_file() for path in first["images"]] == [True, True]
    assert "images" not in second
    make_report(tmp_path)
    printed = capsys.readouterr().out
    assert all(path in printed for path in first["images"])
