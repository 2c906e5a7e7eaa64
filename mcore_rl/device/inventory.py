"""Lists the GPUs of this machine, their driver and their links, as nvidia-smi shows them.

No CUDA context is made: a machine whose driver does not fit torch can still be described.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

QUERY = ("index", "name", "memory.total", "memory.used", "driver_version")
DEADLINE_S = 15.0
"""nvidia-smi answers in about a second; with a GPU that fell off the bus it never does."""
_CUDA_OF_DRIVER = re.compile(r"CUDA (?:\w+ )?Version\s*:\s*(\d+\.\d+)")
_ROW = re.compile(r"GPU\d+ (X|NV\d+|PIX|PXB|PHB|NODE|SYS)")


class NoAnswerError(RuntimeError):
    """nvidia-smi is there, but does not say what was asked; the message has its words."""


@dataclass(frozen=True)
class Gpu:
    """A row of nvidia-smi; memory in MiB."""

    index: int
    name: str
    memory_mib: int
    used_mib: int
    driver: str


def has_driver() -> bool:
    """Return whether NVIDIA's driver is loaded here, or at least its tool is installed."""
    return bool(shutil.which("nvidia-smi")) or Path("/proc/driver/nvidia/version").exists()


def list_gpus() -> list[Gpu]:
    """Return all GPUs of this machine. Raises NoAnswerError if nvidia-smi does not list them."""
    lines = _ask(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits").splitlines()
    rows = [[field.strip() for field in line.split(",")] for line in lines if line.strip()]
    for row in rows:
        if len(row) != len(QUERY) or not all(row[column].isdigit() for column in (0, 2, 3)):
            raise NoAnswerError(f"nvidia-smi says {', '.join(row)!r} for {','.join(QUERY)}")
    return [Gpu(int(row[0]), row[1], int(row[2]), int(row[3]), row[4]) for row in rows]


def cuda_of_driver() -> str:
    """Return the newest CUDA version that the driver runs ("13.0"), or "" if it does not say."""
    found = _CUDA_OF_DRIVER.search(_ask())
    return found[1] if found else ""


def cuda_of_torch() -> str:
    """Return the CUDA version that torch was built for ("13.0"), or "" if it is a CPU build."""
    return torch.version.cuda or ""


def num_usable_gpus() -> int:
    """Return how many GPUs torch can use here, which CUDA_VISIBLE_DEVICES may make fewer."""
    return torch.cuda.device_count()


def nccl_version() -> str:
    """Return the version of the NCCL that torch was built with, or "" if it is a CPU build."""
    if not cuda_of_torch():
        return ""
    cuda: Any = torch.cuda  # the stubs lack its submodules
    return ".".join(map(str, cuda.nccl.version()))


def find_loaded_nccl() -> list[str]:
    """Return the files of NCCL in this process; torch of a CUDA build loads one when imported."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if "/libnccl.so" in line})


def find_two_nccls(
    names: Mapping[str, str], loaded: Sequence[str], major: str
) -> tuple[str, str] | None:
    """Return what is wrong and its remedy if torch loads one NCCL and DeepEP wants another.

    names    normalized package name -> version
    loaded   files of NCCL that torch loaded
    major    major version of the CUDA that torch was built for ("13")
    """
    packages = {name: names[name] for name in sorted(names) if name.startswith("nvidia-nccl-cu")}
    named = [f"{name} {version}" for name, version in packages.items()]
    if len(packages) > 1:
        wanted = f"nvidia-nccl-cu{major}"
        others = " ".join(name for name in packages if name != wanted)
        pin = f"{wanted}=={packages[wanted]}" if wanted in packages else wanted
        text = f"two NCCLs, {' x '.join(named)}: the one installed last replaced the other's files"
        remedy = f"pip uninstall --yes {others} && pip install --force-reinstall --no-deps {pin}"
        return text, remedy
    outside = [file for file in loaded if "/nvidia/nccl/" not in file]
    if packages and outside:
        text = f"two NCCLs: torch loads {outside[0]}, not that of {named[0]}, and DeepEP refuses it"
        return text, "take its folder out of LD_LIBRARY_PATH, and the file out of LD_PRELOAD"
    return None


def core_package_cuda(names: Mapping[str, str]) -> str:
    """Return the CUDA major version ("13") of the Transformer Engine in `names`, or "" for none.

    `names` is normalized package name -> version; the kernels lie in a package named after CUDA.
    """
    found = [name.removeprefix("transformer-engine-cu") for name in names]
    return next((major for major in found if major.isdigit()), "")


def gpu_links() -> dict[tuple[int, int], str]:
    """Return (GPU, GPU) -> how they are linked, in the words of `nvidia-smi topo -m`.

    "NV18" are 18 NVLinks; PIX, PXB, PHB, NODE and SYS are ways over PCIe, the nearest first.
    """
    lines = [
        re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in _ask("topo", "-m").splitlines()
    ]
    # The heading begins with GPU0, too; a row's second word is a link, or X for itself.
    rows = [words for words in lines if len(words) > 1 and _ROW.fullmatch(" ".join(words[:2]))]
    return {
        (row, column): words[1 + column]
        for row, words in enumerate(rows)
        for column in range(row + 1, len(rows))  # further columns are network adapters
    }


def _ask(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{' '.join(command)} did not answer in {DEADLINE_S:g} s") from None
    except OSError as error:
        raise NoAnswerError(f"{' '.join(command)}: {error.strerror}") from None
    if done.returncode:
        words = " ".join((done.stdout + done.stderr).split())
        raise NoAnswerError(f"{' '.join(command)} says {words[-300:]!r}")
    return done.stdout
