"""Adapters as /sys shows them, in a planted tree."""

from pathlib import Path

import pytest

from mcore_rl.tools.doctor.machine.hardware import AdapterPort, check_infiniband, list_ports
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

NEEDS = MachineNeeds(num_nodes=2)


def plant(root: Path, **states: str) -> None:
    for name, state in states.items():
        port = root / f"sys/class/infiniband/{name}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")


def plant_devices(root: Path) -> None:
    (root / "dev/infiniband").mkdir(parents=True)
    (root / "dev/infiniband/uverbs0").touch()


def test_ports_have_name_state_and_rate(tmp_path: Path) -> None:
    plant(tmp_path, mlx5_0="4: ACTIVE")
    assert list_ports(tmp_path) == [AdapterPort("mlx5_0:1", "ACTIVE", "400 Gb/sec (4X NDR)")]


def test_no_adapter_is_no_failure(tmp_path: Path) -> None:
    assert [f.outcome for f in check_infiniband(NEEDS, tmp_path)] == ["ok"]


def test_adapters_that_are_all_down_are_a_failure(tmp_path: Path) -> None:
    plant(tmp_path, mlx5_0="1: DOWN", mlx5_1="2: INIT")
    [finding] = check_infiniband(NEEDS, tmp_path)
    assert (finding.outcome, finding.figures) == ("failed", {"ports": 2, "active": 0})
    assert "mlx5_0:1 DOWN, mlx5_1:1 INIT" in finding.text


def test_a_container_without_the_devices_is_a_failure(tmp_path: Path) -> None:
    plant(tmp_path, mlx5_0="4: ACTIVE")
    [finding, *_] = check_infiniband(NEEDS, tmp_path)
    assert finding.outcome == "failed"
    assert "--device /dev/infiniband" in finding.remedy


@pytest.mark.parametrize(("second", "outcome"), [("4: ACTIVE", "ok"), ("1: DOWN", "warning")])
def test_one_adapter_that_is_down_beside_others_is_a_warning(
    second: str, outcome: str, tmp_path: Path
) -> None:
    plant(tmp_path, mlx5_0="4: ACTIVE", mlx5_1=second)
    plant_devices(tmp_path)
    # Locked memory is limited on a laptop; that is a finding of its own.
    found = [f for f in check_infiniband(NEEDS, tmp_path) if "locked memory" not in f.text]
    assert [f.outcome for f in found] in ([outcome], [])
