"""A folder gets its name only once it holds what was expected of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_tools.assembly import whole
from checkpoint_tools.hf import open_hf
from checkpoint_tools.output import OutputFile, Task
from checkpoint_tools.produce import ConversionReport, produce
from checkpoint_tools.safetensors_file import make_header
from checkpoint_tools.staging import PARTIAL
from mcore_rl.weights.hf.checksums import MANIFEST, read_manifest
from tests.support.small_hf import ONE_WORKER, read_all, write_hf

WEIGHTS = {"a": torch.arange(6, dtype=torch.float32), "b": torch.ones(2, 3)}
EXPECTED = {"a": ("float32", (6,)), "b": ("float32", (2, 3))}


def nothing(folder: Path) -> None:
    """Write no small files."""


def copy(
    source: Path,
    out: Path,
    describe: Callable[[Path], None] = nothing,
    expected: dict[str, tuple[str, tuple[int, ...]]] = EXPECTED,
) -> ConversionReport:
    checkpoint = open_hf(source)
    header, starts, num_bytes = make_header(EXPECTED)
    tasks = [Task("m.safetensors", starts[n], whole(checkpoint.tensors[n].chunks[0])) for n in "ab"]
    file = OutputFile("m.safetensors", num_bytes, header, tuple(tasks))
    return produce(out, [checkpoint], [file], ONE_WORKER, describe, open_hf, expected)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "source", WEIGHTS)


def test_the_folder_has_the_tensors_small_files_and_checksums(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def describe(folder: Path) -> None:
        (folder / "note.txt").write_text("note")

    report = copy(source, out, describe)
    assert (report.num_tensors, report.reused_bytes) == (2, 0)
    assert report.num_bytes == (out / "m.safetensors").stat().st_size
    assert {path.name for path in out.iterdir()} == {"m.safetensors", "note.txt", MANIFEST}
    sums = read_manifest(out)
    assert sums is not None and sums.keys() == {"m.safetensors", "note.txt"}
    copied = read_all(out)
    assert all(torch.equal(copied[name], tensor) for name, tensor in WEIGHTS.items())
    assert f"{out}: 2 tensors" in str(report)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (EXPECTED | {"a": ("float32", (7,))}, r"'a' is \('float32', \(6,\)\), should be .*7"),
        (EXPECTED | {"c": ("float32", (1,))}, "'c' is None, should be"),
        ({"a": EXPECTED["a"]}, r"'b' is .*, should be None"),
    ],
)
def test_a_folder_that_is_not_what_was_expected_gets_no_name(
    source: Path, tmp_path: Path, expected: dict[str, tuple[str, tuple[int, ...]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        copy(source, tmp_path / "out", expected=expected)
    assert not (tmp_path / "out").exists()


def test_a_run_that_failed_at_the_end_is_continued(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fail(folder: Path) -> None:
        raise ValueError("the description is wrong")

    with pytest.raises(ValueError, match="the description is wrong"):
        copy(source, out, fail)
    assert (tmp_path / f"out{PARTIAL}").is_dir() and not out.exists()
    report = copy(source, out)
    assert report.reused_bytes == sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert "kept from an earlier run" in str(report)
    assert not (tmp_path / f"out{PARTIAL}").exists()
