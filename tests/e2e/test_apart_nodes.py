"""A node with a run folder of its own trains, saves, resumes and exports as one that shares it."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mcore_rl.cluster.node_agent import ray_node as local_ray
from mcore_rl.cluster.node_agent.ray_node import RayNode, RayProcesses
from mcore_rl.cluster.process_tags import make_ray_temp_dir
from tests.support.debuggers import wait_for_match
from tests.support.ray_token import set_ray_token
from tests.support.runs import Run

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
SETTINGS = (
    "eval.data=[]",
    "rollout.tp=2",
    "cluster.cpus_per_rank=1",
    "checkpoint.every_steps=1",
    "checkpoint.asynchronous=false",
)
HEAD, OTHER = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """Two Rays; the second sees another folder at tmp_path/runs. Yields Ray's address, and that.

    Ranks are numbered from the second node on: it has rank 0, and the engine of two.
    """
    set_ray_token(tmp_path, monkeypatch)
    folder = tmp_path / "other_runs"
    for path in (tmp_path / "runs", folder):
        path.mkdir()
    mount = f'mount --bind "{folder}" "{tmp_path}/runs" && echo mounted && exec "$@"'
    elsewhere = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    tried = subprocess.run([*elsewhere, "true"], capture_output=True, text=True)
    if tried.stdout != "mounted\n":
        pytest.skip(f"no permission to mount a folder: {tried.stderr}")
    with ExitStack() as stack:

        def start_ray(
            name: str, order: str, address: str, cpus: int, head: str | None
        ) -> RayProcesses:
            facts = RayNode(name, order, address, cpus, 0, object_store_mib=80, resources={})
            temp_dir = stack.enter_context(make_ray_temp_dir())
            ray = RayProcesses(facts, head, temp_dir, tmp_path / f"ray_{name}.log")
            stack.callback(ray.stop)
            wait_for_match("Ray runtime started", ray.log_path.read_text, 60)
            return ray

        head = start_ray("head", "1", HEAD, 1, None)
        monkeypatch.setattr(local_ray, "_RAY_START", (*elsewhere, *local_ray._RAY_START))
        start_ray("other", "0", OTHER, 3, head.head_address)
        yield head.head_address, folder


def exported(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.run_dir / "hf").iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_files_of_a_node_with_its_own_folder_come_to_the_controller(
    start: Start, apart: tuple[str, Path], tmp_path: Path
) -> None:
    address, others_folder = apart
    joining = (f"cluster.address={address}", "cluster.num_nodes=2")
    run_dir = tmp_path / "runs" / "run"
    for num_steps in (1, 2):
        run = start("train", *SETTINGS, *joining, f"run.steps={num_steps}", run_dir=run_dir)
        assert run.finish() == 0, run.tail()
        assert "run.dir=" in run.log() and "is not seen on other" in run.log(), run.log()
    assert "resumed from" in run.tail(100_000), run.tail()
    assert "node other (127.0.0.3): trainer rank 0; engine 0" in run.log(), run.log()
    log = (run_dir / "logs" / "trainer_rank0.log").read_text()
    assert log == (others_folder / "run" / "logs" / "trainer_rank0.log").read_text()

    left = [path for path in (others_folder / "run").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left if path.suffix != ".fetching"} == {"logs"}, left

    # This one keeps no sample in memory, which changes nothing, either.
    settings = (*SETTINGS, "run.steps=2", "rollout.store_gib=1.0e-9")
    alone = start("train", *settings, run_dir=tmp_path / "alone")
    assert alone.finish() == 0, alone.tail()
    collector = (alone.run_dir / "logs" / "collector_rank0.log").read_text()
    assert "further ones go to files in" in collector
    assert exported(run) == exported(alone)
    for name in ("loss/total", "train/grad_norm"):
        assert [row[name] for row in run.metrics() if name in row] == [
            row[name] for row in alone.metrics() if name in row
        ], name
