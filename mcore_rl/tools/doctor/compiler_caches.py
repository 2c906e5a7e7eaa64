"""Names one folder for all that compilers of GPU kernels keep, so that it can be carried.

The first run on a machine compiles for minutes; with the folder of an earlier one it does not.
"""

from collections.abc import MutableMapping
from pathlib import Path

CACHES = Path("runs/doctor_caches")
_VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "SGLANG_CACHE_DIR": "sglang",
    "CUDA_CACHE_PATH": "driver",
}
"""Variable -> folder below the one that is named; the last is of the driver, which compiles PTX."""


def keep_compiled(folder: Path, environ: MutableMapping[str, str]) -> None:
    """Set the variables that compilers read; those that are set already stay."""
    for variable, name in _VARIABLES.items():
        environ.setdefault(variable, str(folder.resolve() / name))
