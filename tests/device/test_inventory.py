"""GPUs as nvidia-smi lists them; a planted one prints what it does on a machine of four."""

from pathlib import Path

import pytest

from mcore_rl.device import inventory

LIST = """0, NVIDIA H200, 143771, 4, 580.65.06
1, NVIDIA H200, 143771, 2048, 580.65.06"""
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tNV18\tSYS\tSYS\t0-47\t0
GPU2\tNV18\tNV18\t X \tSYS\tNODE\t0-47\t0
GPU3\tSYS\tSYS\tSYS\t X \tPIX\t48-95\t1
NIC0\tPIX\tSYS\tNODE\tPIX\t X

Legend:
  SYS  = Connection traversing PCIe as well as the SMP interconnect
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch):
    """Plants an nvidia-smi that runs a shell script."""

    def plant(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return plant


def test_gpus_have_memory_and_driver(smi) -> None:
    smi(f"cat <<'X'\n{LIST}\nX")
    assert inventory.has_driver()
    assert inventory.list_gpus() == [
        inventory.Gpu(0, "NVIDIA H200", 143771, 4, "580.65.06"),
        inventory.Gpu(1, "NVIDIA H200", 143771, 2048, "580.65.06"),
    ]


def test_links_between_gpus_are_read_without_those_to_adapters(smi) -> None:
    smi(f"cat <<'X'\n{TOPOLOGY}\nX")
    links = inventory.gpu_links()
    assert links == {
        (0, 1): "NV18",
        (0, 2): "NV18",
        (0, 3): "SYS",
        (1, 2): "NV18",
        (1, 3): "SYS",
        (2, 3): "SYS",
    }


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0     |", "13.0"),
        ("CUDA Version        : 12.4", "12.4"),
        ("CUDA UMD Version: 13.1", "13.1"),
        ("CUDA Version: N/A", ""),
    ],
)
def test_the_cuda_of_the_driver_is_read(smi, line: str, version: str) -> None:
    smi(f"echo '{line}'")
    assert inventory.cuda_of_driver() == version


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'no devices were found'; exit 6", "says 'no devices were found'"),
        ("echo '0, NVIDIA H200, [N/A], 4, 580'", "says '0, NVIDIA H200, "),
        ("sleep 5", "did not answer in 0.2 s"),
    ],
)
def test_a_driver_that_does_not_answer_is_an_error(
    smi, script: str, message: str, monkeypatch
) -> None:
    monkeypatch.setattr(inventory, "DEADLINE_S", 0.2 if "sleep" in script else 15.0)
    smi(script)
    with pytest.raises(inventory.NoAnswerError) as error:
        inventory.list_gpus()
    assert message in str(error.value)


def test_transformer_engines_cuda_is_in_the_name_of_its_kernels() -> None:
    names = {"transformer-engine": "2.11.0", "transformer-engine-cu13": "2.11.0"}
    assert inventory.core_package_cuda(names) == "13"
    assert inventory.core_package_cuda({"torch": "2.14.1"}) == ""
