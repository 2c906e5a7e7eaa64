"""Compiles C code of this package with the machine's compiler, once for each machine and user.

Takes the name of a source file here, returns the loaded library, or None without a compiler. The
libraries lie in mcore_rl/native of the user's cache folder, and outlive runs. They call the matrix
products of torch's library or of numpy's, whose addresses are found here.
"""

import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy
import torch

from mcore_rl.process.folders import make_own_folder

FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
    "-shared",
    "-fPIC",
)
"""Sums may be reordered, which vectorizes them. -ffast-math would also flush denormals of the whole
process to zero."""
DEFAULT_COMPILER = "cc"
_COMPILE_TIMEOUT_S = 300.0


_GCC = "Free Software Foundation"


def load(name: str) -> ctypes.CDLL | None:
    """Return the library of `name`.c of this folder, compiled if it is not in the cache.

    The compiler is $CC, or cc. Returns None if there is none; CC=none asks for that. Raises
    RuntimeError with the compiler's output if it fails, and with its name if it takes 300 s.
    """
    compiler = find_compiler()
    if compiler is None:
        return None
    source = Path(__file__).parent / f"{name}.c"
    version = _version(compiler)
    flags = (*FLAGS, *openmp_flags(version))
    target = library_dir() / f"{name}-{_fingerprint(source, [*compiler, *flags], version)}.so"
    if not target.exists():
        _compile([*compiler, *flags, str(source)], target)
    return ctypes.CDLL(str(target))


def find_compiler() -> list[str] | None:
    """Return the command of $CC, or of cc, or None if no such program is found."""
    command = shlex.split(os.environ.get("CC") or DEFAULT_COMPILER)
    program = shutil.which(command[0])
    return None if program is None else [program, *command[1:]]


def library_dir() -> Path:
    """Return mcore_rl/native in $XDG_CACHE_HOME or ~/.cache, or a new folder if others write there.

    A library that another user wrote would run with this user's rights.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return make_own_folder(Path(base) / "mcore_rl" / "native")


def _version(compiler: Sequence[str]) -> str:
    """Return what the compiler says of itself."""
    command = [*compiler, "--version"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
    )
    return done.stdout


def openmp_flags(version: str) -> tuple[str, ...]:
    """Return flags for loops on the threads of torch, none for compilers other than GCC.

    torch brings GCC's OpenMP library. With another one the threads of both would fight for the
    cores, and matrix products within a loop would start threads.
    """
    torch = importlib.util.find_spec("torch")
    if _GCC not in version or torch is None or torch.origin is None:
        return ()
    libraries = sorted((Path(torch.origin).parent / "lib").glob("libgomp*"))
    return ("-fopenmp", "-Wl,--as-needed", str(libraries[0])) if libraries else ()


def _fingerprint(source: Path, command: Sequence[str], version: str) -> str:
    """Return a digest of all that decides the machine code: -march=native means this processor."""
    sources = [file.read_bytes() for file in (*source.parent.glob("*.h"), source)]
    parts = [*sources, version.encode(), repr(command).encode(), _processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    features = sorted({line for line in lines if line.lower().startswith(("flags", "features"))})
    return "\n".join([platform.machine(), platform.processor(), *features]).encode()


def _compile(command: Sequence[str], target: Path) -> None:
    """Write the library; a process that compiles the same one meanwhile does no harm."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder, target.name)
        command = [*command, "-o", str(part), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"waited {_COMPILE_TIMEOUT_S:.0f} s for {shlex.join(command)}; CC=none does without"
            ) from error
        if done.returncode:
            raise RuntimeError(
                f"{shlex.join(command)} exited {done.returncode}; CC=none does without:\n"
                f"{done.stderr[-2000:]}"
            )
        part.replace(target)


@cache
def find_sgemm() -> ctypes.c_void_p | None:
    """Return the address of sgemm_, or None if torch does not export it."""
    return _find("sgemm_")


@cache
def find_set_threads() -> ctypes.c_void_p | None:
    """Return the address of a function that sets how many threads this thread's products start.

    It returns how many it was, where 0 stands for torch's number. None: torch's BLAS is not MKL.
    """
    return _find("MKL_Set_Num_Threads_Local")


@cache
def find_openblas() -> ctypes.c_void_p | None:
    """Return the address of sgemm_ in numpy's OpenBLAS, whose calls take one thread from now on.

    It is the faster library for large matrices where torch has MKL and the processor is not of
    MKL's maker. None: elsewhere, without a C compiler, or if numpy has another library.
    """
    adapter = None if find_set_threads() is None or _is_intel() else load("openblas")
    if adapter is None:
        return None
    folder = Path(numpy.__file__).parent.parent / "numpy.libs"
    for path in sorted(folder.glob("libscipy_openblas64_*")):
        library = ctypes.CDLL(str(path))
        try:
            library.scipy_openblas_set_num_threads64_(1)
            wide = ctypes.cast(library.scipy_sgemm_64_, ctypes.c_void_p)
        except AttributeError:
            continue
        adapter.take(wide)
        return ctypes.cast(adapter.sgemm, ctypes.c_void_p)
    return None


def _find(name: str) -> ctypes.c_void_p | None:
    folder = Path(torch.__file__).parent / "lib"
    for path in (folder / "libtorch_cpu.so", *sorted(folder.glob("libopenblas*"))):
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(getattr(library, name), ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None


def _is_intel() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text()
