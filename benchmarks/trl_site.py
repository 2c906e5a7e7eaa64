"""Makes what TRL's side of gpu_grpo.py needs on a machine without a network, as one small file.

    python benchmarks/trl_site.py --out .trl_site.tar.xz [--python-version 3.12]
    there: mkdir /tmp/trl_site && tar xJf .trl_site.tar.xz -C /tmp/trl_site

The folder goes to `gpu_grpo.py --trl-site`. It has TRL and what TRL imports, in the versions of
requirements/, for x86-64 Linux and the given Python, which must bring torch, numpy, tokenizers,
safetensors and the small packages that transformers asks for. What no step loads is left out.
"""

import argparse
import fnmatch
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from quiet_command import ROOT
from rival_packages import pip_install

FROM_BENCH = ("trl", "accelerate", "datasets", "multiprocess", "pandas")
FROM_CPU = ("transformers", "huggingface_hub", "pyarrow", "dill", "xxhash", "fsspec")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LEFT_OUT = (
    "bin/*",
    "pandas/tests/*",
    "pyarrow/include/*",
    "pyarrow/tests/*",
    "pyarrow/src/*",
    "pyarrow/*.pyx",
    "pyarrow/*.pxi",
    "pyarrow/*.pxd",
    "pyarrow/*_flight*",
    "pyarrow/*_s3*",
    "pyarrow/libarrow_python.so.*.*",
    "*/__pycache__/*",
)
"""Patterns of paths in the site; "*" matches "/", too."""
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(".trl_site.tar.xz"))
    parser.add_argument("--python-version", default="3.12", help="of the other machine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trl_site_") as name:
        site = Path(name)
        install(site, args.python_version)
        kept = find_kept(site)
        unpacked = sum(path.stat().st_size for path in kept)
        with tarfile.open(args.out, "w:xz", preset=6) as archive:
            for path in kept:
                archive.add(path, path.relative_to(site))
    packed = args.out.stat().st_size
    print(f"{args.out}: {packed / MIB:.1f} MiB, unpacked {unpacked / MIB:.1f} MiB")


def install(site: Path, python_version: str) -> None:
    """Fill `site` from wheels for that Python; exit with pip's own message if one is missing."""
    bench, cpu = (ROOT / "requirements" / name for name in ("bench.txt", "cpu.txt"))
    wanted = [*find_pins(bench, FROM_BENCH), *find_pins(cpu, FROM_CPU)]
    options = ["--target", str(site), "--only-binary=:all:", "--python-version", python_version]
    options += ["--implementation", "cp"]
    options += [word for platform in PLATFORMS for word in ("--platform", platform)]
    try:
        pip_install(sys.executable, *options, *wanted)
    except subprocess.CalledProcessError:
        sys.exit(f"pip found no wheels for Python {python_version} of all of: {' '.join(wanted)}")


def find_pins(requirements: Path, names: Iterable[str]) -> list[str]:
    """Return the lines name==version of these packages; they must be there."""
    lines = {line.partition("==")[0]: line for line in requirements.read_text().splitlines()}
    return [lines[name] for name in names]


def find_kept(site: Path) -> list[Path]:
    files = sorted(path for path in site.rglob("*") if path.is_file())
    return [path for path in files if not is_left_out(str(path.relative_to(site)))]


def is_left_out(path: str) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in LEFT_OUT)


if __name__ == "__main__":
    main()
