"""A tiny /dev/shm, mounted for the doctor alone, as in a container without --ipc host."""

from mcore_rl.tools.doctor.machine.needs import MachineNeeds
from mcore_rl.tools.doctor.machine.sharing import check_shared_memory
from tests.support.machine_doctor import in_own_mounts, run_doctor


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
