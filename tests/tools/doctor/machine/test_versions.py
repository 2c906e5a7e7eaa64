"""Packages and the pairs that fit: planted dist-info folders in front of the installed ones."""

from importlib.metadata import version
from pathlib import Path

import pytest

from mcore_rl.device.inventory import find_two_nccls
from mcore_rl.tools.doctor.machine import versions
from mcore_rl.tools.doctor.machine.needs import MachineNeeds
from mcore_rl.tools.doctor.machine.versions import (
    check_python,
    check_torch_build,
    compare_packages,
    find_versions,
    judge_builds,
)
from tests.support.machine_doctor import run_doctor
from tests.support.policy import ROOT


def plant(folder: Path, name: str, version: str, *requirements: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requirements]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def run_with(folder: Path):
    return run_doctor("--only", "packages", environ={"PYTHONPATH": f"{folder}:{ROOT}"})


def test_a_wrong_pair_is_named_with_the_command_that_mends_it(tmp_path: Path) -> None:
    plant(tmp_path, "sglang", "0.4.6", "transformers==4.51.1")
    run = run_with(tmp_path)
    assert run.status == 1
    [pin, pair] = run.outcome("packages")
    assert pin.outcome == pair.outcome == "failed"
    assert pin.text.startswith("sglang 0.4.6 x mcore_rl ")
    assert pin.text.endswith("which needs sglang==0.5.23")
    here = version("transformers")
    assert pair.text == (f"sglang 0.4.6 x transformers {here}: sglang needs transformers==4.51.1")
    assert "pip install" in pair.remedy
    assert f"'sglang==0.5.23' 'transformers=={here}'" in pair.remedy


def test_another_transformer_engine_than_the_locked_one_is_a_wrong_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, "transformer-engine", "2.11.0")
    monkeypatch.syspath_prepend(tmp_path)
    texts = [finding.text for finding in compare_packages("gpu")]
    wanted = "transformer-engine 2.11.0 x mcore_rl "
    assert [text for text in texts if text.startswith(wanted)], texts


@pytest.mark.parametrize("python", [(3, 11), (3, 12)])
def test_a_megatron_that_pip_hides_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: tuple[int, int]
) -> None:
    plant(tmp_path, "megatron-core", "0.16.1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(versions.sys, "version_info", python)
    [finding] = [f for f in compare_packages("cpu") if f.text.startswith("megatron-core 0.16.1 x ")]
    assert ("declare Python 3.12: take Python 3.12" in finding.remedy) == (python == (3, 11))


def test_the_environment_of_the_tests_fits() -> None:
    [finding] = compare_packages("cpu")
    assert finding.outcome == "ok", finding
    assert f"sglang {version('sglang')}" in finding.text


def test_a_package_that_is_missing_is_named() -> None:
    """The extra for GPUs asks for Transformer Engine, and for torch with CUDA."""
    if "transformer-engine" in find_versions():
        pytest.skip("Transformer Engine is installed")
    texts = [finding.text for finding in compare_packages("gpu")]
    assert any(text.startswith("transformer-engine is not installed") for text in texts)
    assert any(text.startswith(f"sglang 0.5.23 x torch {version('torch')}") for text in texts)


def test_this_python_is_one_of_those_that_are_supported() -> None:
    [finding] = check_python(MachineNeeds())
    assert finding.outcome == "ok"


def plant_driver(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_torch_for_cpus_on_a_machine_with_a_driver_is_a_failure(
    tmp_path: Path, monkeypatch
) -> None:
    if "+cpu" not in version("torch"):
        pytest.skip("needs a torch for CPUs")
    assert check_torch_build(MachineNeeds())[0].outcome == "ok"
    plant_driver(tmp_path, "echo 'CUDA Version: 13.0'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    [finding] = check_torch_build(MachineNeeds())
    assert finding.outcome == "failed"
    assert finding.remedy.startswith("pip install ") and "'torch==2.14.1'" in finding.remedy


@pytest.mark.parametrize(
    ("newest", "engine", "outcome", "text"),
    [
        ("13.0", "13", "ok", "for CUDA 13.0, NCCL 2.28.9; the driver runs CUDA up to 13.0"),
        ("13.2", "", "ok", "up to 13.2"),
        ("12.8", "13", "failed", "but the driver runs CUDA up to 12.8"),
        ("13.0", "12", "failed", "Transformer Engine's kernels for CUDA 12"),
        ("", "13", "warning", "does not say"),
    ],
)
def test_torch_driver_and_transformer_engine_are_for_the_same_cuda(
    newest: str, engine: str, outcome: str, text: str
) -> None:
    finding = judge_builds("13.0", newest, engine, "2.28.9", "pip install it")
    assert finding.outcome == outcome
    assert text in finding.text


INSIDE = "/opt/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"
OUTSIDE = "/usr/lib/x86_64-linux-gnu/libnccl.so.2.28.3"


@pytest.mark.parametrize(
    ("packages", "loaded", "text", "remedy"),
    [
        (
            {"nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.30.7"},
            [INSIDE],
            "two NCCLs, nvidia-nccl-cu12 2.27.5 x nvidia-nccl-cu13 2.30.7",
            "pip uninstall --yes nvidia-nccl-cu12 && pip install --force-reinstall --no-deps"
            " nvidia-nccl-cu13==2.30.7",
        ),
        (
            {"nvidia-nccl-cu13": "2.30.7"},
            [OUTSIDE],
            f"two NCCLs: torch loads {OUTSIDE}, not that of nvidia-nccl-cu13 2.30.7",
            "LD_LIBRARY_PATH",
        ),
    ],
)
def test_two_nccls_are_told_with_what_leaves_one(
    packages: dict[str, str], loaded: list[str], text: str, remedy: str
) -> None:
    told = find_two_nccls(packages | {"torch": "2.14.1"}, loaded, major="13")
    assert told is not None
    assert told[0].startswith(text)
    assert remedy in told[1]


@pytest.mark.parametrize(
    ("packages", "loaded"), [({"nvidia-nccl-cu13": "2.30.7"}, [INSIDE]), ({}, [OUTSIDE])]
)
def test_one_nccl_is_no_finding(packages: dict[str, str], loaded: list[str]) -> None:
    assert find_two_nccls(packages, loaded, major="13") is None
