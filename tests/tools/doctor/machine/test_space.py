"""Free space of the folders that a run writes, and of a tiny /dev/shm."""

from pathlib import Path

from mcore_rl.tools.doctor.machine.needs import MachineNeeds, NamedModel
from mcore_rl.tools.doctor.machine.sharing import check_shared_memory
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


def test_a_tiny_shared_memory_is_a_failure_that_names_the_size_to_give() -> None:
    before = in_own_mounts("mount -t tmpfs -o size=64m tmpfs /dev/shm")
    settings = ("recipe=tiny_moe_grpo", "cluster.object_store_mib=100")
    run = run_doctor("--only", "shm", *settings, before=before)
    [finding] = run.outcome("shared memory")
    assert run.status == 1
    assert finding.outcome == "failed"
    assert finding.figures == {"size_mib": 64, "free_mib": 64, "wanted_mib": 356}
    assert "--shm-size 356m" in finding.remedy


def test_a_ray_that_runs_elsewhere_asks_for_less(tmp_path) -> None:
    [finding] = check_shared_memory(MachineNeeds(object_store_mib=0), tmp_path)
    assert finding.figures["wanted_mib"] == 256
    [finding] = check_shared_memory(MachineNeeds(object_store_mib=2**40), tmp_path)
    assert finding.outcome == "failed"
