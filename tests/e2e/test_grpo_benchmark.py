"""The comparisons of GRPO steps with other systems tell both sides the same, and print figures."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.device import has_cuda
from mcore_rl.process.clock import now_s
from tests.support.benchmarks import figures_of
from tests.support.policy import ROOT

PHASES = {"rollout", "reward", "train"}


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def read_own_values(config: Config) -> dict[str, Any]:
    """Return what a run's options mean, by the names of TRL's."""
    optimizer, algorithm, rollout = config.train.optimizer, config.algorithm, config.rollout
    assert (algorithm.advantage, algorithm.loss) == ("grpo", "ppo_clip")
    assert algorithm.kl.coef == 0
    return {
        "generation_batch_size": rollout.prompts_per_step * rollout.samples_per_prompt,
        "num_generations": rollout.samples_per_prompt,
        "max_completion_length": rollout.max_response_len,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": max(rollout.top_k, 0),
        "num_iterations": config.train.epochs * config.train.mini_batches,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": optimizer.schedule,
        "warmup_steps": optimizer.warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "max_grad_norm": optimizer.clip_grad,
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "router_aux_loss_coef": config.train.router_aux_loss_coef,
        "loss_type": {"token_mean": "dapo"}[algorithm.aggregation],
        "mask_truncated_completions": algorithm.filter_overlong,
        "gradient_checkpointing": config.train.recompute != "none",
        "beta": algorithm.kl.coef,
        "scale_rewards": "group",
    }


def test_both_sides_are_told_the_same(tmp_path: Path) -> None:
    from trl.trainer.grpo_config import GRPOConfig

    sides, sizes = import_module("grpo_options"), import_module("grpo_workload")
    for workload in (sizes.WORKLOADS[0], *sizes.GPU_WORKLOADS):
        own_told = sides.list_own(workload, tmp_path, tmp_path / "run", 4)
        options = [f"{name}={value}" for name, value in own_told.items()]
        config = load_recipe(sides.RECIPE, options)
        told = sides.list_trl(workload, tmp_path, 4, 16)
        theirs = GRPOConfig(**told)
        own = read_own_values(config)
        values = {name: getattr(theirs, name) for name in own}
        values["epsilon_high"] = theirs.epsilon_high or theirs.epsilon
        values["router_aux_loss_coef"] = theirs.router_aux_loss_coef or 0.0
        assert values == own, workload.name
        assert theirs.gradient_accumulation_steps * 16 == workload.num_samples
        assert config.run.steps == theirs.max_steps + 1, "this system saves in one more step"

        on_gpu = load_recipe(sides.RECIPE, [*options, *sides.list_own_on_gpu(workload, 32768)])
        assert on_gpu.model.dtype == "bfloat16" and on_gpu.cluster.colocated
        assert read_own_values(on_gpu) == own
        differing = {"use_cpu": False, "bf16": True, "dataloader_pin_memory": True}
        for way in sides.WAYS:
            paged = {"use_transformers_continuous_batching": way == "continuous"}
            gpu_told = sides.list_trl(workload, tmp_path, 4, 16, on_gpu=True, way=way)
            assert gpu_told == told | differing | paged


@pytest.mark.skipif(has_cuda(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    gpu_grpo = import_module("gpu_grpo")
    args = gpu_grpo.make_parser().parse_args(["--logs", str(tmp_path / "logs")])
    with pytest.raises(gpu_grpo.UnusableError, match=r"--device cuda: torch finds no GPU.*cpu"):
        gpu_grpo.check(args)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--steps", "2"], "--steps 2: more than 2"),
        (["--logs", "."], r"--logs \. is there already"),
        (["--trl-micro-batch", "5"], "--trl-micro-batch 5 does not divide the 32 samples of 1M"),
        (["--trl-python", "no-python"], "--trl-python no-python is no program"),
        (["--trl-site", "nowhere"], "--trl-site nowhere has no trl: make it by trl_site.py"),
        (["--trl-site", "{site}"], "TRL's side cannot run on cpu: .*grpo_trl.py"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_made(
    tmp_path: Path, options: list[str], problem: str
) -> None:
    gpu_grpo = import_module("gpu_grpo")
    (tmp_path / "site" / "trl").mkdir(parents=True)
    filled = [option.format(site=tmp_path / "site") for option in options]
    logs = ["--logs", str(tmp_path / "logs")]
    args = gpu_grpo.make_parser().parse_args(["--device", "cpu", *logs, *filled])
    with pytest.raises(gpu_grpo.UnusableError, match=problem):
        gpu_grpo.check(args)
    assert not (tmp_path / "logs").exists()


def test_a_side_that_fails_or_has_no_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_grpo = import_module("gpu_grpo")

    def run(code: str, left_s: float) -> dict[str, Any]:
        command = [sys.executable, "-c", code]
        return gpu_grpo.run_side(command, {}, now_s() + left_s, tmp_path / "log")

    assert run("print('{\"a\": 1}')", 100) == {"a": 1}
    failed = run("raise SystemExit('no engine')", 100)
    assert failed == {"failed": "status 1: no engine"}
    assert run("", gpu_grpo.LEAST_S - 10) == {
        "left_out": f"{gpu_grpo.LEAST_S - 10:.0f} s were left"
    }
    monkeypatch.setattr(gpu_grpo, "LEAST_S", 0)
    late = run("import time; print('began', flush=True); time.sleep(600)", 2)
    assert late["failed"].startswith("status none after 2 s: ")
    figures = gpu_grpo.summarize({"ours": {"tokens_per_second": 9.0}, "trl_padded": failed})
    assert figures["ratio"] is None and figures["fastest"] is None
    assert figures["trl_padded"] == failed


def test_only_what_no_step_loads_stays_out_of_the_folder_for_trl() -> None:
    site = import_module("trl_site")
    for name, names in (("bench.txt", site.FROM_BENCH), ("cpu.txt", site.FROM_CPU)):
        pins = site.find_pins(ROOT / "requirements" / name, names)
        assert [pin.partition("==")[0] for pin in pins] == list(names)
    for library in ("lib.cpython-312-x86_64-linux-gnu.so", "libarrow_python.so.2600", "dataset.py"):
        assert not site.is_left_out(f"pyarrow/{library}")
    for path in ("pyarrow/libarrow_flight.so.2600", "pandas/tests/x/y.py"):
        assert site.is_left_out(path)


def test_a_random_model_samples_known_tokens_and_ends_as_often_as_asked(tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    from mcore_rl.tasks.arithmetic import prepare_arithmetic

    models, shapes = import_module("grpo_models"), import_module("grpo_workload")
    prepare_arithmetic(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
    workload = replace(shapes.GPU_WORKLOADS[1], shape=shapes.DENSE | sizes, mean_len=20)
    model = models.make_model(workload, tokenizer)
    with torch.no_grad():
        chances = model(torch.arange(5, 25)[None]).logits.softmax(-1)[0]
    assert chances[:, : len(tokenizer)].sum(-1).min() > 0.9999
    assert chances[:, tokenizer.eos_token_id].mean() == pytest.approx(1 / 20, rel=0.2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_comparison_on_a_gpu_runs_in_its_smallest_size(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--steps", "3", "--seconds", "1400"]
    options += ["--ways", "padded", "continuous", "--logs", str(tmp_path / "logs")]
    figures = figures_of("gpu_grpo.py", *options, timeout_s=1500)
    assert figures["device"] == "CPU"
    assert figures["versions"]["trl"]["trl"] == "1.16.0"
    assert {"torch", "sglang", "megatron-core"} <= figures["versions"]["ours"].keys()
    cell = figures["workloads"]["1M-32x64"]
    sides = {name: cell[name] for name in ("ours", "trl_padded", "trl_continuous")}
    for name, side in sides.items():
        assert side["response_len"] == 64 and side["steps"] == 1, name
        assert side["phases_s"].keys() >= PHASES, name
        assert side["tokens_per_second"] == pytest.approx(32 * 64 / side["step_s"], rel=1e-2), name
        assert 0.5 * side["step_s"] < sum(side["phases_s"].values()) <= 1.01 * side["step_s"], name
    rates = {name: side["tokens_per_second"] for name, side in sides.items()}
    fastest = max(("trl_padded", "trl_continuous"), key=lambda name: rates[name])
    assert cell["fastest"] == fastest
    assert cell["ratio"] == pytest.approx(rates["ours"] / rates[fastest], rel=1e-2)
    assert (tmp_path / "logs" / "1M-32x64" / "run" / "metrics.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rival", ["trl", "verl"])
def test_it_compares_one_workload(rival: str) -> None:
    options = ("--workloads", "1M-32x64", "--steps", "4", "--repeats", "1", "--against", rival)
    # Two processes are TRL's alone; the search for the fastest way takes a grid of runs.
    options += ("--rival-resources", *(("2", "1", "16") if rival == "trl" else ("1", "2", "32")))
    figures = figures_of("grpo_step.py", *options, timeout_s=1500)
    cell = figures["workloads"]["1M-32x64"]
    assert figures["rival"] == rival
    for system in ("compiled", "plain", "rival"):
        assert cell[f"{system}_response_len"] == 64, system
    for system in ("compiled", "plain"):
        ratio = cell[f"{system}_tokens_per_second"] / cell["rival_tokens_per_second"]
        assert cell[f"{system}_ratio"] == pytest.approx(ratio, rel=1e-2), system
    assert cell["compiled_tokens_per_second"] > cell["plain_tokens_per_second"]
