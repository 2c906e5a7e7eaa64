"""Writes docs/versions.md: what is pinned, the newest that the registry knows, and what binds it.

    python -m tests.support.versions_page     (make versions)

The registry is asked for Python 3.12. A test compares the page's pins with requirements/*.txt; only
this module can tell the newest.
"""

import datetime
import re
import subprocess
import sys
from dataclasses import dataclass

from tests.support.policy import ROOT, read

PAGE = ROOT / "docs" / "versions.md"
HEAD = """# Versions

`requirements/cpu.txt` and `requirements/gpu.txt` lock every package. This page lists those that the
others hang on: the pin without CUDA, the pin on a GPU node, the newest release on {day}, what keeps
the pin where it is, and what a newer one would bring. `make versions` writes the page, and `make
newest` runs the tests with the newest releases.

| package | without CUDA | on a GPU node | newest | what binds it | what an upgrade brings |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """A package, what keeps its pin, and what a newer release would bring."""

    name: str
    bound: str
    brings: str


NEWEST = "it is the newest; its names are replaced (docs/patches.md), so it is exact"
ROWS = (
    Row(
        "megatron-core",
        NEWEST,
        "each release has more model families and renames what patches name",
    ),
    Row(
        "emerging-optimizers",
        "exact: before 1.0, and a subclass of its Muon is here",
        "other optimizers of matrices",
    ),
    Row("sglang", NEWEST, "models and kernels of the month"),
    Row(
        "torch",
        "SGLang's kernels are built for 2.14.1; the CPU build here is 2.13.0",
        "grouped GEMM, symmetric memory",
    ),
    Row("transformers", "SGLang asks for it exactly", "models that SGLang does not serve yet"),
    Row("tokenizers", "exact: one release tokenizes like another only if a test says so", "speed"),
    Row(
        "transformer-engine",
        "its PyTorch half is compiled for torch 2.14.1",
        "kernels for newer GPUs",
    ),
    Row("ray", "exact: its private session files are read", "fixes of its dashboard and agents"),
    Row("sglang-kernel", "SGLang asks for it exactly", "comes with SGLang"),
    Row("flashinfer-python", "SGLang asks for it exactly", "comes with SGLang"),
    Row(
        "sgl-deep-ep",
        "SGLang asks for it exactly; megatron-core takes it through an adapter",
        "comes with SGLang",
    ),
    Row("triton", "torch asks for it exactly", "comes with torch"),
    Row(
        "nvidia-cudnn-cu13",
        "torch asks for it exactly",
        "attention kernels; Transformer Engine needs 9.18 for sinks",
    ),
    Row("nvidia-nccl-cu13", "torch asks for it exactly", "comes with torch"),
    Row("numpy", "numba and SGLang's packages", "nothing that is missed"),
    Row(
        "safetensors",
        "a range; the file format is read and written here as well",
        "nothing that is missed",
    ),
)


def read_pin(file: str, name: str) -> str:
    """Return the version that a lock names, "-" if it lacks the package."""
    found = re.search(rf"^{re.escape(name)}==(\S+)", read(f"requirements/{file}"), re.MULTILINE)
    return found[1] if found else "-"


def find_newest(name: str) -> str:
    """Ask the package index. Raises RuntimeError if it does not answer."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "index",
        "versions",
        name,
    ]
    command += ["--python-version", "3.12", "--only-binary=:all:"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.match(rf"{re.escape(name)} \((\S+)\)", done.stdout)
    if not found:
        raise RuntimeError(f"no answer about {name}: {done.stderr[-500:]}")
    return found[1]


def format_row(row: Row, newest: str) -> str:
    pins = read_pin("cpu.txt", row.name), read_pin("gpu.txt", row.name)
    return f"| {row.name} | {pins[0]} | {pins[1]} | {newest} | {row.bound} | {row.brings} |\n"


def write_page() -> None:
    rows = [format_row(row, find_newest(row.name)) for row in ROWS]
    PAGE.write_text(HEAD.format(day=datetime.date.today()) + "".join(rows))


if __name__ == "__main__":
    write_page()
