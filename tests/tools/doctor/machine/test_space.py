"""Free space of the folders that a run writes."""

from pathlib import Path

from mcore_rl.tools.doctor.machine.needs import MachineNeeds, NamedModel
from mcore_rl.tools.doctor.machine.space import check_space, read_space
from tests.support.machine_doctor import in_own_mounts, run_doctor


def test_a_small_filesystem_is_a_failure_of_its_folder_alone(tmp_path: Path) -> None:
    before = in_own_mounts(f"mount -t tmpfs -o size=200m tmpfs {tmp_path}")
    run = run_doctor("--only", "space", "--run-dir", str(tmp_path), before=before)
    [finding] = [f for f in run.findings if f.text.startswith("run folder")]
    assert run.status == 1
    assert finding.outcome == "failed"
    assert finding.figures == {"free_gib": 0.2}


def test_checkpoints_that_do_not_fit_are_a_warning(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    free = read_space(tmp_path).free_bytes
    with weights.open("wb") as file:
        file.truncate(free // 10)  # sparse: takes no space
    models = (NamedModel("model.path", str(tmp_path)),)
    [fits] = run_folder(MachineNeeds(run_dir=tmp_path, models=models, kept_checkpoints=1))
    [finding] = run_folder(MachineNeeds(run_dir=tmp_path, models=models, kept_checkpoints=2))
    assert "the checkpoints that are kept" not in fits.text
    assert finding.outcome == "warning"
    assert "the checkpoints that are kept take about" in finding.text
    assert "checkpoint.keep" in finding.remedy


def run_folder(needs: MachineNeeds) -> list:
    return [f for f in check_space(needs) if f.text.startswith("run folder")]
