"""Libraries in wheels lose the code of other GPUs, and nothing else."""

import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest

from mcore_rl.doctor.thin_wheels import main, thin_library

PTX, CUBIN = 1, 2
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def fat_binary(*codes: tuple[int, int, bytes]) -> bytes:
    """A fat binary of (kind, architecture, code)."""
    entries = b""
    for kind, arch, code in codes:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12)
        entries += (header + struct.pack("<I", arch)).ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def library(folder: Path, section: bytes) -> bytes:
    """A shared library with this section of fat binaries, and a function."""
    (folder / "section").write_bytes(section)
    source = folder / "library.c"
    source.write_text(
        'asm(".section .nv_fatbin,\\"a\\"\\n.balign 8\\n.incbin \\"section\\"\\n.previous");\n'
        "int answer(void) { return 42; }\n"
    )
    made = folder / "library.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True, cwd=folder)
    return made.read_bytes()


HOPPER = b"H" * 64
OTHERS = (CUBIN, 80, b"A" * 128), (CUBIN, 100, b"B" * 64), (PTX, 90, b"P" * 32)
KEPT = {
    "its own": ((*OTHERS, (CUBIN, 90, HOPPER)), HOPPER),
    "twice its own": (
        ((CUBIN, 90, b"1" * 32), *OTHERS, (CUBIN, 90, b"2" * 8)),
        b"1" * 32 + b"2" * 8,
    ),
    "to be translated": (OTHERS, b"P" * 32),
    "the newest to be translated": (((PTX, 75, b"7" * 8), (PTX, 80, b"8" * 8)), b"8" * 8),
    "nothing": (((CUBIN, 100, b"B" * 64), (PTX, 100, b"P" * 8)), b""),
}


@needs_compiler
@pytest.mark.parametrize("case", KEPT)
def test_what_the_gpu_runs_is_kept_and_the_rest_is_blank(case: str, tmp_path: Path) -> None:
    codes, kept = KEPT[case]
    before = library(tmp_path, fat_binary(*codes) + bytes(8) + fat_binary((CUBIN, 90, b"Z" * 8)))
    after = bytearray(before)
    num_blanked = thin_library(after, 90)
    assert num_blanked == sum(len(code) for _, _, code in codes) - len(kept)
    assert len(after) == len(before)
    changed = bytes(a for a, b in zip(before, after, strict=True) if a != b)
    assert len(changed) == num_blanked
    left = b"".join(code for _, _, code in codes if code in kept and code in bytes(after))
    assert left == kept
    assert b"Z" * 8 in after


def test_a_file_that_is_no_library_stays_as_it_is() -> None:
    for content in (b"", b"text", b"\x7fELF\x01 of 32 bits"):
        assert thin_library(bytearray(content), 90) == 0


@needs_compiler
def test_a_wheel_keeps_its_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = library(tmp_path, fat_binary((CUBIN, 80, bytes(range(256)) * 4000), (CUBIN, 90, HOPPER)))
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/lib.so.1", made)
        archive.writestr("some/__init__.py", "text = 'fatbin'\n")
    assert main(["--arch", "90", "--out", str(tmp_path / "thin"), str(wheel)]) == 0
    assert capsys.readouterr().out.startswith("some-1.0-py3-none-any.whl: 1.0 -> 0.0 MiB")
    with zipfile.ZipFile(tmp_path / "thin" / wheel.name) as archive:
        assert archive.read("some/__init__.py") == b"text = 'fatbin'\n"
        thinned = archive.read("some/lib.so.1")
    assert len(thinned) == len(made) and HOPPER in thinned
    assert bytes(range(256)) not in thinned


def test_what_is_no_wheel_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.whl").write_text("no archive")
    assert main(["--arch", "90", "--out", str(tmp_path / "o"), str(tmp_path / "some.whl")]) == 2
    assert "some.whl is not a wheel" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
