"""Compares the installed packages with the versions that work together.

pins of this package (its metadata, or pyproject.toml of a checkout)   x  what is installed
what SGLang, megatron-core and others ask for in their own metadata    x  what is installed
"""

import importlib.metadata as metadata
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mcore_rl
from mcore_rl import __version__
from mcore_rl.process.versions import CORE, find_versions
from mcore_rl.tools.doctor.machine.finding import Finding, fail, ok, warn
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

PACKAGE = "mcore_rl"
_HIDDEN = (
    "; pip of Python 3.11 shows megatron-core up to 0.16.1 alone, as later ones declare Python"
    " 3.12: take Python 3.12, or add --no-deps --ignore-requires-python, which builds its source"
)
PROJECT = Path(mcore_rl.__file__).resolve().parents[1] / "pyproject.toml"
PYTHON = ">=3.11,<3.14"
"""For a copy of the package without metadata; else its own Requires-Python counts."""


def check_python(needs: MachineNeeds) -> list[Finding]:
    """Whether this Python is one that the pinned wheels exist for."""
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = _read_wanted_python()
    if Requirement(f"python{wanted}").specifier.contains(version):
        return [ok("python", version)]
    remedy = f"make the environment with a Python {wanted}: make venv PYTHON=python3.12"
    return [fail("python", f"{version}, but {PACKAGE} runs with {wanted}", remedy)]


def check_packages(needs: MachineNeeds) -> list[Finding]:
    """Whether every pinned package is there in its version, and the core ones fit one another."""
    from mcore_rl.device.inventory import has_driver

    return compare_packages("gpu" if has_driver() else "cpu")


def compare_packages(extra: str) -> list[Finding]:
    """Return one failure for each pair that does not fit, or one line with the core versions.

    extra   "gpu" or "cpu": which of the package's extras this machine should have
    """
    pins = _read_pins(extra)
    versions = find_versions([*pins, *CORE])
    wrong = [
        *_compare_with_pins(pins, versions, extra),
        *_compare_with_each_other(pins, versions, extra),
    ]
    if wrong:
        return wrong
    core = {name: versions[name] for name in CORE if name in versions}
    return [ok("packages", ", ".join(f"{name} {version}" for name, version in core.items()))]


def _compare_with_pins(
    pins: Mapping[str, Requirement], versions: Mapping[str, str], extra: str
) -> Iterator[Finding]:
    for name, pin in pins.items():
        version = versions.get(name)
        remedy = _install([pin], extra)
        if version is None:
            yield fail("packages", f"{name} is not installed; {PACKAGE} needs {pin}", remedy)
        elif not pin.specifier.contains(version, prereleases=True):
            text = f"{name} {version} x {PACKAGE} {__version__}, which needs {pin}"
            yield fail("packages", text, remedy)


def _compare_with_each_other(
    pins: Mapping[str, Requirement], versions: Mapping[str, str], extra: str
) -> Iterator[Finding]:
    """Compare with what the core packages ask of one another.

    SGLang's metadata names a torch with CUDA. On a CPU it runs with the torch of our extra "cpu",
    under patches, so that one requirement says nothing there.
    """
    for name in CORE:
        if name not in versions:
            continue
        for wanted in _parse_requirements(name):
            other = canonicalize_name(wanted.name)
            version = versions.get(other)
            if other not in CORE or version is None or (extra, name, other) == _OTHER_ON_CPU:
                continue
            if not wanted.specifier.contains(version, prereleases=True):
                text = f"{name} {versions[name]} x {other} {version}: {name} needs {wanted}"
                both = [pins.get(one, Requirement(one)) for one in (name, other)]
                yield fail("packages", text, _install(both, extra))


_OTHER_ON_CPU = ("cpu", "sglang", "torch")


def check_torch_build(needs: MachineNeeds) -> list[Finding]:
    """Whether torch, Transformer Engine and the driver are for the same CUDA."""
    from mcore_rl.device import inventory

    built = inventory.cuda_of_torch()
    if not inventory.has_driver():
        return [
            ok("torch build", f"for CUDA {built}, on a machine without" if built else "for CPUs")
        ]
    gpu_pins = [pin for pin in _read_pins("gpu").values() if pin.name in CORE]
    remedy = _install(gpu_pins, "gpu")
    if not built:
        text = "for CPUs alone, but this machine has an NVIDIA driver"
        return [fail("torch build", text, remedy)]
    try:
        newest = inventory.cuda_of_driver()
    except inventory.NoAnswerError as error:
        return [fail("torch build", str(error), "repair the driver: nvidia-smi has to answer")]
    names = {
        str(canonicalize_name(found.name)): found.version for found in metadata.distributions()
    }
    engine = inventory.core_package_cuda(names)
    two = inventory.find_two_nccls(names, inventory.find_loaded_nccl(), built.partition(".")[0])
    findings = [judge_builds(built, newest, engine, inventory.nccl_version(), remedy)]
    return [*findings, fail("torch build", *two)] if two else findings


def judge_builds(built: str, newest: str, engine: str, nccl: str, remedy: str) -> Finding:
    """Return whether torch's CUDA is one that the driver runs, and Transformer Engine's, too.

    built     CUDA that torch was built for ("13.0")
    newest    newest CUDA that the driver runs, or "" if it does not say
    engine    major version of CUDA of Transformer Engine's kernels ("13"), or "" without them
    """
    check, major = "torch build", built.partition(".")[0]
    if newest and int(newest.partition(".")[0]) < int(major):
        text = f"for CUDA {built}, but the driver runs CUDA up to {newest}"
        return fail(check, text, f"install a driver for CUDA {built} or newer")
    if engine and engine != major:
        text = f"torch is for CUDA {built}, Transformer Engine's kernels for CUDA {engine}"
        return fail(check, text, remedy)
    if not newest:
        text = f"for CUDA {built}; nvidia-smi does not say which CUDA the driver runs"
        return warn(check, text, "compare the driver with CUDA's release notes")
    text = f"for CUDA {built}, NCCL {nccl}; the driver runs CUDA up to {newest}"
    return ok(check, text, cuda=built, cuda_of_driver=newest, NCCL=nccl)


def _install(pins: Sequence[Requirement], extra: str) -> str:
    # On a CPU without dependencies: SGLang's name CUDA wheels by the gigabyte.
    flags = " --no-deps" if extra == "cpu" else ""
    command = f"pip install{flags} " + " ".join(f"'{pin}'" for pin in pins)
    is_hidden = sys.version_info < (3, 12) and any(pin.name == "megatron-core" for pin in pins)
    return command + _HIDDEN if is_hidden else command


def _read_pins(extra: str) -> dict[str, Requirement]:
    """Normalized name -> what the package asks for: itself, by its extra, and SGLang in any case.

    The extra's pin of a package wins over a looser one of the package itself. Only the extra for
    GPUs names SGLang; a CPU runs the same version, which requirements/cpu.txt installs.
    """
    lines = _list_requirements()
    found = [line for line in lines if _applies(line, "gpu") and line.name == "sglang"]
    found += [line for line in lines if _applies(line, "")]
    found += [line for line in lines if _applies(line, extra) and not _applies(line, "")]
    return {str(canonicalize_name(line.name)): _strip_local(line) for line in found}


def _list_requirements() -> list[Requirement]:
    """From pyproject.toml of the checkout that runs, or from the installed package's metadata."""
    if PROJECT.is_file():
        project = tomllib.loads(PROJECT.read_text())["project"]
        lines = [Requirement(line) for line in project["dependencies"]]
        for extra, of_extra in project["optional-dependencies"].items():
            lines += [Requirement(f"{line} ; extra == '{extra}'") for line in of_extra]
        return lines
    return [Requirement(line) for line in metadata.requires(PACKAGE) or ()]


def _read_wanted_python() -> str:
    if PROJECT.is_file():
        return tomllib.loads(PROJECT.read_text())["project"]["requires-python"]
    try:
        return metadata.metadata(PACKAGE)["Requires-Python"] or PYTHON
    except metadata.PackageNotFoundError:
        return PYTHON


def _parse_requirements(name: str) -> list[Requirement]:
    """Return what an installed package asks for here."""
    lines = [Requirement(line) for line in metadata.requires(name) or ()]
    return [_strip_local(line) for line in lines if _applies(line, "")]


def _applies(line: Requirement, extra: str) -> bool:
    return line.marker is None or line.marker.evaluate({"extra": extra})


def _strip_local(line: Requirement) -> Requirement:
    """The requirement without its marker, as pip takes it on this platform."""
    plain = Requirement(str(line))
    plain.marker = None
    return plain
