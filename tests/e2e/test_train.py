"""GRPO end to end: agreement of engine and trainer, layouts, resume, export."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ahead import StartedAhead, chosen_cases
from tests.support.books import assert_books_balance, assert_same_prompts
from tests.support.doors import find_open_doors, listening_sockets
from tests.support.runs import Run, tiny_settings
from tests.support.tiny_models import write_model

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]

OLD_PASS, ENGINE = "train.router_replay=old_pass", "train.router_replay=engine"
FROZEN = ["train.freeze_router=true", "train.router_aux_loss_coef=0"]
COLOCATED = ["cluster.colocated=true", "rollout.stage_weights=false", "rollout.restarts=0"]
REINFORCE_PLUS_PLUS = [
    "algorithm.advantage=reinforce_plus_plus",
    "algorithm.kl.coef=0.01",
    "algorithm.kl.estimator=k1",
    "algorithm.kl.in_reward=true",
]
KL_COV = [
    "algorithm.advantage=optimal_token_baseline",
    "algorithm.loss=kl_cov",
    "algorithm.covariance.share=0.1",
    "train.mini_batches=2",
]
DAPO = [
    "rollout.dynamic_sampling=true",
    "rollout.oversampling=1.5",
    "rollout.max_rounds=2",
    "reward.workers=1",
    "reward.overlong_buffer_len=4",
]
OTHER_LAYOUT = ["parallel.ep=1", "parallel.pp=2", "critic.parallel.pp=2"]
CRITIC = ("critic/loss", "critic/value", "critic/grad_norm")
PPO = ["algorithm.advantage=gae", "critic.optimizer.lr=1e-3"]
SHARED_CRITIC = ["critic.colocated=true", "critic.parallel.tp=2", "cluster.offload=true", *PPO]
GSPO = [
    "algorithm.loss=gspo",
    "algorithm.aggregation=sequence_mean",
    "algorithm.correction.weight=sequence",
]
TWO_NODES = [
    "rollout.tp=2",
    "rollout.ep=2",
    "rollout.nodes_per_engine=2",
    "train.router_bias_rate=0.01",
]
LAYOUTS = {
    "tp2-ep2-engine-tp2-on-two-nodes": (
        "deepseek_v3",
        ["parallel.tp=2", *TWO_NODES, *REINFORCE_PLUS_PLUS, OLD_PASS],
    ),
    "pp2-two-engines": (
        "qwen3_moe",
        ["parallel.pp=2", "parallel.ep=1", "rollout.engines=2", *KL_COV, *DAPO, ENGINE],
    ),
    "cp2-ep2-colocated-with-critic": (
        "qwen3_moe",
        ["parallel.cp=2", "model.dtype=float32", *COLOCATED, *SHARED_CRITIC, *GSPO, *FROZEN],
    ),
}
QUICK_LAYOUT = "tp2-ep2-engine-tp2-on-two-nodes"
EVALUATED = [
    "run.steps=3",
    "train.mini_batches=2",
    "train.optimizer.lr=1e-3",
    "algorithm.kl.coef=0.01",
    "eval.pass_k=2",
    "eval.every_steps=2",
    "checkpoint.every_steps=2",
]
RESUMED = [
    "run.steps=4",
    "train.optimizer.lr=1e-3",
    "eval.data=[]",
    "checkpoint.every_steps=2",
    "checkpoint.export_hf=false",
    "critic.warmup_steps=1",
    *PPO,
]
FIRST_RUNS = {
    "evaluated": ("qwen3_moe", EVALUATED),
    **{
        case: (kind, ["run.steps=2", "train.optimizer.lr=1e-3", "eval.data=[]", *settings])
        for case, (kind, settings) in LAYOUTS.items()
    },
    "resumed": ("qwen3_moe", RESUMED),
}
"""Family and settings of the first run of each test."""


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, arithmetic: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartedAhead[Run]]:
    """Half of a run is its start, which keeps one core busy: the next one has the other."""

    def start(case: str) -> Run:
        (kind, settings), folder = FIRST_RUNS[case], tmp_path_factory.mktemp(case)
        model = model_of(kind, arithmetic, folder)
        return Run(
            ["train", *tiny_settings(arithmetic), f"model.path={model}", *settings], folder / "run"
        )

    ahead = StartedAhead(chosen_cases(request), start, 1)
    yield ahead
    for run in ahead.started.values():
        run.kill_all()


def model_of(kind: str, arithmetic: Path, folder: Path) -> Path:
    """Return the model of the arithmetic problems, or one of another family, made in `folder`."""
    if kind == "qwen3_moe":
        return arithmetic / "model"
    return (
        folder / kind if (folder / kind).exists() else write_family(kind, arithmetic, folder / kind)
    )


def write_family(kind: str, arithmetic: Path, folder: Path) -> Path:
    """Random weights, and the tokenizer of the arithmetic problems."""
    vocab_size = json.loads((arithmetic / "model" / "config.json").read_text())["vocab_size"]
    write_model(kind, folder, vocab_size=vocab_size)
    for path in (arithmetic / "model").iterdir():
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    return folder


def steps_of(run: Run) -> list[dict[str, float]]:
    return [line for line in run.metrics() if "rollout/samples" in line]


def assert_engine_agrees(run: Run, num_steps: int) -> None:
    """At every step the engine's log-probs are those of the trainer's current weights."""
    steps = steps_of(run)
    assert [line["step"] for line in steps] == list(range(1, num_steps + 1)), run.tail()
    for line in steps:
        assert line["logprob_diff/mean"] < 1e-4, line
        assert line["logprob_diff/token_max"] < 1e-2, line
        assert line["logprob_diff/router_flip_share"] < 0.01, line
        assert line["logprob_diff/stale_share"] == 0, line
        assert 0 < line["sync/parity_diff"] < 1e-4, line
        if line["step"] <= 2:
            assert line["sync/engines_verified"] >= 1, line
        assert line["loss/grad_norm"] > 0, line


@pytest.mark.parametrize("case", ["evaluated"])
def test_train_eval_export_and_report(runs: StartedAhead[Run], case: str) -> None:
    run = runs.take(case)
    run.wait_until(run.metrics, "metrics")
    listening = dict(listening_sockets(run.processes()))
    assert listening and find_open_doors(listening) == {}, "no run on one machine listens beyond it"
    assert run.finish() == 0, run.tail()
    assert_engine_agrees(run, num_steps=3)
    run.assert_nothing_left()
    assert "kl/ref" in steps_of(run)[-1]
    evaluations = evaluations_of(run)
    assert [line["step"] for line in evaluations] == [0, 2, 3]
    assert all("eval/pass_at_2" in line for line in evaluations)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["grpo_steps"] == 3
    assert summary["step0_logprob_diff_mean"] < 1e-4
    assert run.tail().strip().splitlines()[-1].endswith(str(run.run_dir))
    balance = assert_books_balance(run.run_dir, num_steps=3)
    sampled = sum(line["rollout/samples"] for line in steps_of(run))
    assert balance.samples["trained"] + sum(balance.left_out.values()) == sampled


def evaluations_of(run: Run) -> list[dict[str, float]]:
    return [line for line in run.metrics() if "eval/greedy_accuracy" in line]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["evaluated"])
def test_an_export_answers_as_its_run_did(start: Start, runs: StartedAhead[Run], case: str) -> None:
    run = runs.take(case)
    assert run.finish() == 0, run.tail()
    after = start("eval", f"model.path={run.run_dir / 'hf'}", "eval.every_steps=0")
    assert after.finish() == 0, after.tail()
    exported = [line for line in after.metrics("eval") if "eval/greedy_accuracy" in line][-1]
    assert exported["eval/greedy_accuracy"] == evaluations_of(run)[-1]["eval/greedy_accuracy"]


def load_hf(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def changed_tensors(before: Path, after: Path) -> list[str]:
    """Names of the tensors that differ between two HuggingFace directories."""
    first, second = load_hf(before), load_hf(after)
    return [
        name for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])
    ]


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != QUICK_LAYOUT)) for name in LAYOUTS],
)
def test_weights_reach_the_engine_from_every_layout(
    arithmetic: Path, runs: StartedAhead[Run], case: str
) -> None:
    run, (kind, layout) = runs.take(case), LAYOUTS[case]
    model = model_of(kind, arithmetic, run.run_dir.parent)
    assert run.finish() == 0, run.tail()
    assert_engine_agrees(run, num_steps=2)
    run.assert_nothing_left()
    changed = changed_tensors(model, run.run_dir / "hf")
    assert any("experts" in name for name in changed)
    assert any("mlp.gate.weight" in name for name in changed) == (FROZEN[0] not in layout)
    biases = [name for name in load_hf(model) if name.endswith("e_score_correction_bias")]
    assert len(biases) == (3 if kind == "deepseek_v3" else 0) and set(biases) <= set(changed)
    for line in steps_of(run):
        assert 0 <= line["router/max_violation"] <= line["router/max_violation_max"]
        if "rollout.dynamic_sampling=true" in layout:
            assert 1 <= line["sampling/rounds"] <= 2
            assert line["reward/errors"] == 0 and line["reward/part/overlong_penalty"] <= 0
        if OLD_PASS in layout:  # the first step's weights are those of the pass
            assert line["router/replaced_share"] == 0
        if ENGINE in layout:
            assert line["logprob_diff/router_flip_share"] == line["logprob_diff/router"] == 0
            assert 0 <= line["router/replaced_share"] < 1
        if "algorithm.loss=kl_cov" in layout:
            assert 0 < line["clip/held_back_share"] < 0.3
        if "algorithm.correction.weight=sequence" in layout:
            assert line["correction/weight"] == pytest.approx(1, abs=1e-4)
    if "algorithm.advantage=gae" in layout:
        assert_critic_learns(run)


def assert_critic_learns(run: Run) -> None:
    first, second = steps_of(run)
    assert first["critic/value"] == 0.0 and second["critic/value"] != 0.0
    assert {"critic/explained_variance", "critic/grad_norm", "critic/clipped_share"} <= first.keys()
    config = json.loads((run.run_dir / "critic_hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForSequenceClassification"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["resumed"])
def test_resume_continues_exactly_also_in_another_layout(
    start: Start, runs: StartedAhead[Run], tmp_path: Path, case: str
) -> None:
    """From the checkpoint of a run that went on beyond it, whose rows are dropped."""
    whole = runs.take(case)
    assert whole.finish() == 0, whole.tail()
    expected, parted = steps_of(whole), tmp_path / "parted"
    shutil.copytree(whole.run_dir, parted)
    for checkpoint in (parted / "checkpoints").glob("*_000004"):
        shutil.rmtree(checkpoint)
    second = start("train", *RESUMED, *OTHER_LAYOUT, run_dir=parted)
    assert second.finish() == 0, second.tail()
    got = steps_of(second)
    assert [line["step"] for line in got] == [1, 2, 3, 4]
    assert_books_balance(parted, num_steps=4)
    assert_same_prompts(parted, whole.run_dir)
    assert got[:2] == expected[:2]
    assert got[2]["timestamp"] > expected[3]["timestamp"]
    assert "loss/policy" not in got[0]
    for name in (
        "loss/total",
        "loss/policy",
        "loss/entropy",
        "reward/mean",
        "rollout/response_len",
        *CRITIC,
    ):
        assert [line.get(name, 0.0) for line in got] == pytest.approx(
            [line.get(name, 0.0) for line in expected], rel=1e-6, abs=1e-6
        ), name
