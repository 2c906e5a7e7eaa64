"""Ranks of trainer and critic that die or hang are replaced, and the run goes on bit for bit."""

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from mcore_rl.cluster.node_agent.ray_node import RayNode, RayProcesses
from mcore_rl.cluster.process_tags import make_ray_temp_dir
from tests.e2e.test_clusters import seated
from tests.support.books import assert_books_balance, assert_same_prompts
from tests.support.ray_token import set_ray_token
from tests.support.runs import Run, tiny_settings
from tests.support.submitted import SubmittedRun
from tests.support.victims import PHASES, assert_complete, count_processes

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
StartRay = Callable[[str], RayProcesses]
SETTINGS = (
    "train.mini_batches=2",
    "algorithm.kl.coef=0.01",
    "checkpoint.every_steps=2",
    "run.call_timeout_s=40",
    "run.recovery.restarts=20",
)
SIX_STEPS = ("run.steps=6", "eval.data=[]")
ALIKE = re.compile(
    r"step|loss/|kl/|ratio/|clip/|reward/|router/|staleness/|rollout/response_len"
    r"|train/(learning_rate|optimizer_steps|tokens$)|eval/|critic/(?!ranks/)|value/"
)
"""Metrics that must not depend on a recovery."""
Death = tuple[str, str, int, int]
"""Words of the process, phase, step, signal."""


def disturb(run: Run, deaths: Sequence[Death]) -> None:
    """Signal each process in its phase, and wait until its model is recovered."""
    for num_before, (words, phase, step, number) in enumerate(deaths):
        victim = run.find_one(words)
        run.wait_for(PHASES[phase].format(step=step), poll_s=0.002)
        victim.send_signal(number)
        wait_recovered(run, num_before + 1)
        assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE


def wait_recovered(run: Run, num_times: int) -> None:
    run.wait_until(lambda: len(find_recoveries(run)) >= num_times, f"recovery {num_times}")


def find_recoveries(run: Run) -> list[tuple[int, float]]:
    """Return the step that each recovery went back to, and its seconds."""
    told = re.findall(r"recovered step (\d+) from memory in ([\d.]+) s", run.tail(1_000_000))
    return [(int(step), float(seconds)) for step, seconds in told]


def numbers(run: Run | SubmittedRun) -> list[dict[str, float]]:
    """Return what must not depend on a recovery: losses, gradients, rewards, lengths."""
    return [
        {name: value for name, value in row.items() if ALIKE.match(name)} for row in run.metrics()
    ]


def compare(
    start: Start, tmp_path: Path, deaths: Sequence[Death], *more: str, num_steps: int = 6
) -> Run:
    """Check that a disturbed run has the numbers of one that was left alone, and ends whole.

    Return the disturbed run.
    """
    more = (*more, f"run.steps={num_steps}")
    whole = start("train", *SETTINGS, *more, run_dir=tmp_path / "whole")
    assert whole.finish() == 0, whole.tail()
    wanted = numbers(whole)
    assert "loss/total" in wanted[1] and "loss/grad_norm" in wanted[1], wanted[1]
    disturbed = start("train", *SETTINGS, *more, run_dir=tmp_path / "disturbed")
    disturb(disturbed, deaths)
    assert disturbed.finish() == 0, disturbed.tail()
    disturbed.assert_nothing_left()
    assert_complete(disturbed, num_steps)
    assert numbers(disturbed) == wanted
    # The last bits of an engine's log-probs depend on which requests it computes together.
    rows = [row for row in disturbed.metrics() if "logprob_diff/mean" in row]
    assert len(rows) == num_steps and all(row["logprob_diff/mean"] < 1e-5 for row in rows)
    assert_same_prompts(whole.run_dir, disturbed.run_dir)
    return disturbed


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
IN_EACH_PHASE = [
    ("trainer_rank1", "rollout", 2, KILL),
    ("trainer_rank0", "logprobs", 3, KILL),
    ("trainer_rank1", "checkpoint", 4, KILL),
    ("trainer_rank0", "train", 5, STOP),
    ("trainer_rank1", "sync", 6, KILL),
]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_replaced(start: Start, tmp_path: Path) -> None:
    disturbed = compare(start, tmp_path, [("trainer_rank1", "train", 2, KILL)], num_steps=3)
    assert count_processes(disturbed) == [1, 2], "the other one keeps its process"


@pytest.mark.slow
def test_ranks_that_die_or_hang_in_any_phase_are_replaced(start: Start, tmp_path: Path) -> None:
    disturbed = compare(start, tmp_path, IN_EACH_PHASE)
    noticed = re.findall(
        r"replacing the ranks of trainer: .* during ([a-z_ ]+)", disturbed.tail(10**6)
    )
    assert noticed[0] == "a health check", "engines sampled meanwhile"
    assert count_processes(disturbed) == [3, 4], "only those that were lost are replaced"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("tp=2",), ("pp=2", "ep=1")], ids=",".join)
def test_one_data_parallel_replica_is_enough(
    start: Start, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    settings = ["parallel.dp=1", *(f"parallel.{size}" for size in layout)]
    compare(start, tmp_path, IN_EACH_PHASE[1:4], *settings)


@pytest.mark.slow
def test_trainer_and_critic_go_back_together(start: Start, tmp_path: Path) -> None:
    deaths = [
        ("critic_rank0", "logprobs", 2, KILL),
        ("critic_rank0", "train", 3, KILL),
        ("trainer_rank0", "train", 4, KILL),
        ("critic_rank0", "checkpoint", 4, STOP),
    ]
    compare(start, tmp_path, deaths, "algorithm.advantage=gae", "critic.mini_batches=4")


LOST = [
    ("controller", "train", 2, KILL),
    ("gcs_server", "rollout", 3, KILL),
    ("raylet/raylet", "sync", 4, KILL),
    ("raylet/raylet", "logprobs", 6, STOP),
]


@pytest.mark.slow
def test_a_lost_controller_or_ray_starts_again_from_memory(start: Start, tmp_path: Path) -> None:
    """No checkpoint is written before the last step, so none is gone on from."""
    settings = (*SETTINGS, "algorithm.advantage=gae", "run.steps=7", "checkpoint.every_steps=0")
    whole = start("train", *settings, run_dir=tmp_path / "whole")
    assert whole.finish() == 0, whole.tail()
    run = start("train", *settings, run_dir=tmp_path / "disturbed")
    for num_before, (words, phase, step, number) in enumerate(LOST):
        run.wait_for(PHASES[phase].format(step=step), poll_s=0.002)
        controller = psutil.Process(run.process.pid).children()[0]
        victim = controller if words == "controller" else run.find_one(words)
        victim.send_signal(number)
        goes_on = f"goes on after step {step - 1} of 7, which is in memory"
        run.wait_until(lambda text=goes_on: text in run.tail(10**6), goes_on)
        assert run.tail(10**6).count("it starts again") == num_before + 1
        assert not controller.is_running() and not victim.is_running()
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    assert_complete(run, 7)
    assert numbers(run) == numbers(whole)
    assert_same_prompts(whole.run_dir, run.run_dir)


@pytest.mark.slow
def test_a_death_within_a_recovery_is_survived(start: Start, tmp_path: Path) -> None:
    whole = start("train", *SETTINGS, "run.steps=4", run_dir=tmp_path / "whole")
    assert whole.finish() == 0, whole.tail()
    run = start("train", *SETTINGS, "run.steps=4", run_dir=tmp_path / "disturbed")
    run.wait_for("step 2: train", poll_s=0.002)
    first = run.find_one("trainer_rank1")
    first.kill()
    run.wait_until(lambda: "replacing the ranks of trainer" in run.tail(), "a recovery")
    run.wait_until(
        lambda: any(p != first for p in run.find("trainer_rank1")), "a rank in its place"
    )
    run.find_one("trainer_rank1").kill()
    assert run.finish() == 0, run.tail()
    assert run.tail(100_000).count("replacing the ranks of trainer") == 2, run.tail(100_000)
    assert numbers(run) == numbers(whole)


@pytest.mark.slow
def test_the_run_ends_once_its_recoveries_are_spent(start: Start, tmp_path: Path) -> None:
    run = start("train", *SETTINGS, "run.steps=6", "run.recovery.restarts=1")
    disturb(run, [("trainer_rank1", "train", 2, KILL)])
    run.wait_for("step 4: train", poll_s=0.002)
    run.find_one("trainer_rank0").kill()
    assert run.finish(60) == 1, run.tail()
    said = r"trainer rank 0 .* died .*\n.*run\.recovery\.restarts=1 within an hour are spent"
    assert re.search(said, run.tail()), run.tail()
    run.assert_nothing_left()


RAISING = """
from pathlib import Path

import torch

from mcore_rl.algo.registry import losses


@losses.register("fails_on_a_gpu")
def make_failing(config):
    def fail(tokens):
        if torch.distributed.get_rank() == 1 and FILES and not FILES.pop().exists():
            MARK.touch()
            raise torch.AcceleratorError("CUDA error: SAID")
        return -tokens.advantages_T * tokens.log_ratio_T.exp(), {}

    return fail


MARK = Path("FOLDER/failed_once")
FILES = [TRIES]
"""


@pytest.mark.slow
def test_an_error_of_a_gpu_that_a_rank_raises_is_recovered(start: Start, tmp_path: Path) -> None:
    run = start("train", *SETTINGS, "run.steps=2", *fail_on_a_gpu(tmp_path, ECC, "MARK"))
    assert run.finish() == 0, run.tail()
    assert [step for step, _ in find_recoveries(run)] == [0]
    assert "replacing the ranks of trainer: rank 1 " in run.tail(100_000)
    assert_complete(run, 2)


@pytest.mark.slow
def test_an_error_that_comes_again_is_the_programs(start: Start, tmp_path: Path) -> None:
    failing = fail_on_a_gpu(tmp_path, "an illegal memory access was encountered", "Path('/no')")
    run = start("train", *SETTINGS, "run.steps=2", *failing)
    assert run.finish() == 1, run.tail()
    assert len(find_recoveries(run)) == 1, run.tail()
    said = r"AcceleratorError: CUDA error: an illegal memory access .*\n(.*\n)*.* of the program"
    assert re.search(said, run.tail()), run.tail()
    run.assert_nothing_left()


ECC = "uncorrectable ECC error encountered"


def fail_on_a_gpu(folder: Path, said: str, tries: str) -> list[str]:
    """Return settings of a loss by which rank 1 raises `said`, once if `tries` is "MARK"."""
    path = folder / "failing_loss.py"
    source = RAISING.replace("SAID", said).replace("FOLDER", str(folder))
    path.write_text(source.replace("TRIES", tries))
    return [f"algorithm.path={path}", "algorithm.loss=fails_on_a_gpu"]


@pytest.mark.slow
def test_fine_tuning_recovers_too(start: Start, tmp_path: Path) -> None:
    settings = ("sft.steps=8", "checkpoint.every_steps=3", "model.init=random")
    whole = start("sft", *settings, run_dir=tmp_path / "whole")
    assert whole.finish() == 0, whole.tail()
    run = start("sft", *settings, run_dir=tmp_path / "disturbed")
    disturb(run, [("trainer_rank1", "train", 3, KILL), ("trainer_rank0", "train", 7, KILL)])
    assert run.finish() == 0, run.tail()
    assert numbers(run) == numbers(whole)


@pytest.fixture
def on_four_nodes(arithmetic: Path, tmp_path: Path) -> Iterator[Callable[..., SubmittedRun]]:
    """Submits a run on nodes with room for a trainer rank or an engine each."""
    nodes = ["launch=local", "launch.gpus_per_node=0", "launch.cpus_per_node=1", "launch.nodes=4"]
    nodes += ["cluster.cpus_per_rank=1"]
    runs: list[SubmittedRun] = []

    def submit(*more: str) -> SubmittedRun:
        settings = [*tiny_settings(arithmetic), *SETTINGS, *SIX_STEPS, *nodes, *more]
        runs.append(SubmittedRun(settings, tmp_path / "run"))
        return runs[-1]

    yield submit
    for run in runs:
        run.kill()


def list_trainer_nodes(run: SubmittedRun) -> list[str]:
    """Return the nodes with a trainer rank that is not the controller's."""
    return [node for node, who in seated(run) if who.startswith("trainer") and node != "node0"]


def lose(run: SubmittedRun, node: str, num_before: int = 0) -> None:
    """Kill a node, and wait until the run has recovered."""
    run.kill_raylet(f"127.0.0.{int(node.removeprefix('node')) + 2}")
    again = f"recovery {num_before + 1}"
    run.wait_until(lambda: run.printed().count("recovered step") > num_before, again, 400)


@pytest.mark.slow
def test_a_spare_node_takes_the_place_of_a_lost_one(
    on_four_nodes: Callable[..., SubmittedRun], start: Start, tmp_path: Path
) -> None:
    """Two trainer ranks and an engine are on three of the nodes."""
    run = on_four_nodes()
    run.wait_for("step 3: train", 400)
    lose(run, list_trainer_nodes(run)[0])
    run.wait_ended(timeout_s=400)
    run.wait_until_nothing_is_left()
    whole = start("train", *SETTINGS, *SIX_STEPS, run_dir=tmp_path / "whole")
    assert whole.finish() == 0, whole.tail()
    assert numbers(run) == numbers(whole)


@pytest.mark.slow
def test_fewer_ranks_go_on_where_no_node_is_spare(
    on_four_nodes: Callable[..., SubmittedRun], start: Start, tmp_path: Path
) -> None:
    """Three trainer ranks, each on a node, become two, and then one."""
    layout = ("parallel.dp=3", "parallel.ep=1", "run.call_timeout_s=120")
    # The router's auxiliary loss is that of a micro-batch, and micro-batches differ by layout.
    constant = ("train.optimizer.schedule=constant", "train.optimizer.min_lr=0.0")
    same = (*layout, *constant, "train.router_aux_loss_coef=0")
    shrinks = ("run.steps=5", "run.recovery.min_dp=1")
    run = on_four_nodes(*same, *shrinks)
    run.wait_for("step 2: train", 400)
    first, second, *_ = list_trainer_nodes(run)
    lose(run, first)
    run.wait_for("step 4: train", 400)
    lose(run, second, num_before=1)
    run.wait_ended(timeout_s=400)
    run.wait_until_nothing_is_left()
    assert re.findall(r"trainer: (dp \d -> \d)", run.printed()) == ["dp 3 -> 2", "dp 2 -> 1"]
    rows = {row["step"]: row for row in run.metrics() if "loss/total" in row}
    assert [rows[step]["recovery/dp"] for step in range(1, 6)] == [3, 2, 2, 1, 1]
    assert_books_balance(run.run_dir, 5)
    resumed = start("train", *SETTINGS, *SIX_STEPS, *same, run_dir=run.run_dir)
    assert resumed.finish() == 0, resumed.tail()
    rows = {row["step"]: row for row in run.metrics() if "loss/total" in row}
    assert rows[6]["recovery/dp"] == 3, "the same command goes on in the layout of the recipe"
    whole = start("train", *SETTINGS, *SIX_STEPS, *same, run_dir=tmp_path / "whole")
    assert whole.finish() == 0, whole.tail()
    wanted = {row["step"]: row for row in whole.metrics() if "loss/total" in row}
    for step, bound in ((1, 0.0), (2, 1e-6), (3, 1e-4), (4, 1e-4), (5, 1e-4), (6, 1e-4)):
        for name in ("loss/total", "loss/grad_norm", "reward/mean", "train/tokens"):
            expected = pytest.approx(wanted[step][name], rel=bound, abs=bound)
            assert rows[step][name] == expected, (step, name)
    assert max(row["logprob_diff/mean"] for row in rows.values()) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_controller_may_be_lost_together_with_a_node(
    on_four_nodes: Callable[..., SubmittedRun], start: Start, tmp_path: Path
) -> None:
    """Two trainer ranks and an engine are on three nodes; the states of a lost one on another."""
    unsaved = "checkpoint.every_steps=0"
    run = on_four_nodes(unsaved)
    for step in (2, 4):
        run.wait_for(PHASES["train"].format(step=step), 400)
        [controller] = find_controllers(run)
        if step == 4:
            run.kill_raylet(f"127.0.0.{int(list_trainer_nodes(run)[0].removeprefix('node')) + 2}")
        controller.kill()
        again = f"goes on after step {step - 1} of 6, which is in memory"
        run.wait_until(lambda text=again: text in run.printed(), again, 400)
    run.wait_ended(timeout_s=400)
    run.wait_until_nothing_is_left()
    whole = start("train", *SETTINGS, *SIX_STEPS, unsaved, run_dir=tmp_path / "whole")
    assert whole.finish() == 0, whole.tail()
    assert numbers(run) == numbers(whole)
    assert_books_balance(run.run_dir, 6)


def find_controllers(run: SubmittedRun) -> list[psutil.Process]:
    """Return the processes that are children of the command and have its words."""
    words = {p.pid: p for p in run.processes() if "mcore_rl.cli train" in " ".join(p.cmdline())}
    return [process for process in words.values() if process.ppid() in words]


NODE_STARTS = 3
"""Ray gives a node up if the head does not answer for 30 s, as where other work has the cores."""


@pytest.fixture
def start_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartRay]:
    """Starts nodes with room for a rank or an engine each, by name; the first one is the head."""
    set_ray_token(tmp_path, monkeypatch)
    started: list[RayProcesses] = []
    with ExitStack() as stack:

        def try_to_start(name: str) -> RayProcesses | None:
            address = f"127.0.0.{len(started) + 2}"
            facts = RayNode(name, name, address, 1, 0, object_store_mib=80, resources={})
            temp_dir = stack.enter_context(make_ray_temp_dir())
            head = started[0].head_address if started else None
            ray = RayProcesses(facts, head, temp_dir, tmp_path / f"ray_{name}.log")
            stack.callback(ray.stop)
            while ray.exit_status() is None:
                if "Ray runtime started" in ray.log_path.read_text():
                    return ray
                time.sleep(0.2)
            return None

        def start_node(name: str) -> RayProcesses:
            ray = next(filter(None, (try_to_start(name) for _ in range(NODE_STARTS))))
            started.append(ray)
            return ray

        yield start_node


HELD_REWARD = """
import time
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info):
    while Path(HOLD).exists():
        time.sleep(0.05)
    return float(len(solution_str) % 2)
"""
SEATED = re.compile(r"cluster\.run: node (\S+) \(\S+\): (.*)")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_trainer_and_critic_become_smaller_and_grow_where_nodes_join(
    start_ray: StartRay, start: Start, tmp_path: Path
) -> None:
    """Each loses a node while samples are waited for: while there is a file `hold`.

    One after the other, as a node and its partner may not be lost at once.
    """
    nodes = {name: start_ray(name) for name in "abcde"}
    hold, reward = tmp_path / "hold", tmp_path / "held_reward.py"
    reward.write_text(HELD_REWARD.replace("HOLD", repr(str(hold))))
    scored = [f"reward.path={reward}", "reward.name=score"]
    scored += ["reward.workers=1", "reward.timeout_s=600"]
    trainer = ["parallel.dp=2", "parallel.ep=1", "train.router_aux_loss_coef=0"]
    critic = ["algorithm.advantage=gae", "critic.parallel.dp=2", "critic.mini_batches=2"]
    settings = (*SETTINGS, *trainer, *critic, *scored, "run.steps=5", "eval.data=[]")
    joining = (f"cluster.address={nodes['a'].head_address}", "cluster.num_nodes=5")
    room = ("run.recovery.min_dp=1", "cluster.cpus_per_rank=1", "run.call_timeout_s=120")
    run = start("train", *settings, *joining, *room)
    run.wait_for("step 1: train", 400, poll_s=0.002)
    hold.touch()
    run.wait_for("step 2: reward", 400)
    seats = [seat for seat in SEATED.findall(run.log()) if seat[0] != "a"]
    for num_before, role in enumerate(("trainer", "critic")):
        nodes[next(node for node, who in seats if who.startswith(role))].stop()
        run.wait_for(f"{role}: dp 2 -> 1", 400)
        wait_recovered(run, num_before + 1)
    for name in "fg":
        start_ray(name)
    hold.unlink()
    assert run.finish(400) == 0, run.tail()
    run.assert_nothing_left()
    for role in ("trainer", "critic"):
        told = re.findall(rf"{role}: (dp \d -> \d)", run.tail(10**6))
        assert told == ["dp 2 -> 1", "dp 1 -> 2"], run.tail(10**6)
    assert len(find_recoveries(run)) == 2, "to grow is no recovery"
    rows = [row for row in run.metrics() if "loss/total" in row]
    sizes = [row["recovery/dp"] for row in rows]
    assert sizes[:2] == [2, 1] and sizes[-1] == 2, sizes
    assert_books_balance(run.run_dir, 5)
    assert max(row["logprob_diff/mean"] for row in rows) < 1e-5
    whole = start("train", *settings, run_dir=tmp_path / "whole")
    assert whole.finish() == 0, whole.tail()
    wanted = [row for row in whole.metrics() if "loss/total" in row]
    for name in ("loss/total", "loss/grad_norm", "critic/loss", "reward/mean", "train/tokens"):
        found, expected = [row[name] for row in rows], [row[name] for row in wanted]
        assert found[1] == pytest.approx(expected[1], rel=1e-6, abs=1e-6), name
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4), name


@pytest.mark.slow
def test_models_that_give_up_their_memory_recover(start: Start, tmp_path: Path) -> None:
    deaths = [
        ("trainer_rank0", "logprobs", 2, KILL),
        ("critic_rank0", "train", 3, KILL),
        ("trainer_rank1", "sync", 4, KILL),
    ]
    engines = ("cluster.colocated=true", "rollout.stage_weights=false", "rollout.restarts=0")
    critic = ("critic.colocated=true", "critic.parallel.tp=2", "algorithm.advantage=gae")
    compare(start, tmp_path, deaths, "cluster.offload=true", *engines, *critic)


FACTORS = ("train.lora.rank=4", "train.router_aux_loss_coef=0")


@pytest.mark.slow
@pytest.mark.parametrize("trained", [(), FACTORS], ids=["weights", "factors"])
def test_a_run_that_samples_beside_training_goes_on(start: Start, trained: tuple[str, ...]) -> None:
    more = ("rollout.mode=async", "algorithm.correction.weight=token", "run.steps=8", *trained)
    run = start("train", *SETTINGS, *more, "rollout.deterministic=false")
    disturb(run, [("trainer_rank1", "train", 3, KILL), ("trainer_rank0", "sync", 5, KILL)])
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    assert_complete(run, 8)
    rows = [row for row in run.metrics() if "loss/total" in row]
    assert max(row["logprob_diff/arithmetic"] for row in rows) < 1e-4
    assert {row["rollout/samples"] for row in rows} == {16.0}
