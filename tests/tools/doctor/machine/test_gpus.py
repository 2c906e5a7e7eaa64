"""GPUs beside what the recipe needs; a planted nvidia-smi stands for machines with GPUs."""

from pathlib import Path

import pytest

from mcore_rl.device import has_cuda
from mcore_rl.tools.doctor.machine.hardware import check_gpus, check_links, check_nodes
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

pytestmark = pytest.mark.skipif(has_cuda(), reason="torch would see the real GPUs")
LINKS = ("GPU0 X NV18 NV18", "GPU1 NV18 X {}", "GPU2 NV18 {} X")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch):
    def plant(*lines: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return plant


def test_a_machine_without_gpus_is_ok_unless_the_recipe_is_for_many_ranks() -> None:
    assert [f.outcome for f in check_gpus(MachineNeeds())] == ["ok"]
    [finding] = check_gpus(MachineNeeds(gpus=4096))
    assert finding.outcome == "warning" and "4096 ranks" in finding.text
    assert check_links(MachineNeeds()) == check_nodes(MachineNeeds(gpus=16)) == []


def test_gpus_that_torch_cannot_use_are_a_failure(smi, monkeypatch) -> None:
    smi("0, NVIDIA H200, 143771, 4, 580.65.06")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    [finding] = check_gpus(MachineNeeds(gpus=8))
    assert finding.outcome == "failed"
    assert "torch can use 0 of them, the recipe needs 8 per machine" in finding.text
    assert "CUDA_VISIBLE_DEVICES= hides GPUs" in finding.remedy


def test_a_driver_that_does_not_answer_is_a_failure(smi) -> None:
    smi("no devices were found")
    [finding] = check_gpus(MachineNeeds())
    assert finding.outcome == "failed" and "--gpus all" in finding.remedy


def test_a_recipe_for_more_machines_than_are_checked_is_a_warning(smi) -> None:
    smi("")
    [finding] = check_nodes(MachineNeeds(gpus=24, num_nodes=2))
    assert (finding.outcome, "fills 3 (24 GPUs)" in finding.text) == ("warning", True)
    assert check_nodes(MachineNeeds(gpus=24, num_nodes=3)) == []


@pytest.mark.parametrize(("link", "outcome"), [("NV18", "ok"), ("SYS", "warning")])
def test_a_pair_without_nvlink_beside_others_with_it_is_named(smi, link: str, outcome: str) -> None:
    smi(*(line.format(link) for line in LINKS))
    [finding] = check_links(MachineNeeds())
    assert finding.outcome == outcome
    if outcome == "warning":
        assert "GPU 1 and GPU 2 have no NVLink" in finding.text
        assert finding.figures == {"NV18": 2, "SYS": 1}
