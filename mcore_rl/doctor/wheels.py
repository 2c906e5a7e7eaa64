"""Makes the packages in a folder of wheels importable in this process and its children."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def wheels_installed(folder: Path | None) -> Iterator[None]:
    """Unpack the wheels into a temporary folder that is searched first; no network is used.

    The environment itself is left as it is. Raises ValueError naming the folder if there is no
    wheel in it, or if pip cannot install one.
    """
    if folder is None:
        yield
        return
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ValueError(f"--wheels={folder}: there is no .whl file")
    with tempfile.TemporaryDirectory(prefix="doctor_wheels_") as target:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        done = subprocess.run(
            [*pip, "--target", target, *map(str, wheels)], capture_output=True, text=True
        )
        if done.returncode:
            raise ValueError(f"--wheels={folder}: pip says {done.stderr.strip()[-500:]}")
        sys.path.insert(0, target)
        try:
            yield
        finally:
            sys.path.remove(target)
