"""Whole runs of low-rank factors: policy and critic on shared GPUs, and engines with factors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_tools.cli import main
from tests.support.runs import Run

pytestmark = pytest.mark.e2e
SETTINGS = (
    "train.lora.rank=4",
    "train.router_aux_loss_coef=0",
    "train.optimizer.lr=3e-3",
    "train.optimizer.warmup_steps=0",
    "algorithm.kl.coef=0.01",
    "cluster.colocated=true",
    "cluster.offload=true",
    "rollout.stage_weights=false",
    "rollout.restarts=0",
    "checkpoint.every_steps=1",
    "algorithm.advantage=gae",
    "critic.colocated=true",
    "critic.parallel.ep=2",
    "critic.lora.rank=8",
    "critic.lora.experts=false",
    "critic.optimizer.lr=3e-3",
    "critic.optimizer.warmup_steps=0",
)


@pytest.mark.slow
def test_factors_train_resume_and_merge(
    start: Callable[..., Run], arithmetic: Path, tmp_path: Path
) -> None:
    run = start("train", *SETTINGS, "run.steps=2")
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    folder = run.run_dir
    other = start("train", *SETTINGS, "run.steps=3", "train.lora.alpha=8", run_dir=folder)
    assert other.finish() == 2, other.tail()
    assert "train.lora.alpha=32, and this run has train.lora.alpha=8" in other.tail()
    other = start("train", *SETTINGS, "run.steps=3", "critic.lora.alpha=8", run_dir=folder)
    assert other.finish() == 2, other.tail()
    assert "critic.lora.alpha=32, and this run has critic.lora.alpha=8" in other.tail()
    resumed = start("train", *SETTINGS, "run.steps=3", run_dir=folder)
    assert resumed.finish() == 0, resumed.tail()
    resumed.assert_nothing_left()
    steps = [line for line in resumed.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert steps[0]["critic/value"] == 0.0 != steps[2]["critic/value"]
    divergence = [line["kl/ref"] for line in steps]
    assert abs(divergence[0]) < 1e-6 < divergence[1], divergence  # B is 0 at first
    assert all(line["logprob_diff/mean"] < 1e-4 for line in steps), steps

    base = ["--source-hf", str(arithmetic / "model")]
    for name, exported in (("step_000003", "hf"), ("critic_000003", "critic_hf")):
        saved, merged = str(folder / "checkpoints" / name), tmp_path / name
        assert main(["merge-lora", saved, str(merged), *base]) == 0
        made, export = (read_all(path) for path in (merged, folder / exported))
        assert made.keys() == export.keys()
        for key, value in export.items():
            torch.testing.assert_close(made[key], value, rtol=0, atol=1e-6)


STAGED = (
    "train.lora.rank=4",
    "train.router_aux_loss_coef=0",
    "train.optimizer.lr=3e-3",
    "train.optimizer.warmup_steps=0",
    "sync.verify_every=1",
    "run.steps=3",
)


@pytest.mark.slow
def test_engines_merge_factors_themselves(start: Callable[..., Run]) -> None:
    run = start("train", *STAGED)
    assert run.finish(400) == 0, run.tail()
    run.assert_nothing_left()
    lines = run.metrics()
    sizes = [line["sync/mib"] for line in lines if "sync/mib" in line]
    whole = sum(file.stat().st_size for file in (run.run_dir / "hf").glob("*.safetensors")) / 2**20
    assert len(sizes) >= 2 and len(set(sizes)) == 1 and 2 * sizes[0] < whole, (sizes, whole)
    assert all(line["sync/engines_verified"] == 1 for line in lines if "sync/mib" in line)
    steps = [line for line in lines if "loss/total" in line]
    assert all(line["logprob_diff/mean"] < 1e-4 for line in steps), steps


@pytest.mark.slow
def test_engines_merge_into_a_base_in_block_fp8(
    start: Callable[..., Run], arithmetic: Path, tmp_path: Path
) -> None:
    """Ranks decode the published files; the engine starts without weights and gets plain ones."""
    base, merged = tmp_path / "fp8", tmp_path / "merged"
    assert main(["to-fp8", str(arithmetic / "model"), str(base), "--workers", "1"]) == 0
    run = start("train", *STAGED, f"model.path={base}", "checkpoint.every_steps=3")
    assert run.finish(400) == 0, run.tail()
    run.assert_nothing_left()
    lines = run.metrics()
    assert all(line["sync/engines_verified"] == 1 for line in lines if "sync/mib" in line)
    steps = [line for line in lines if "loss/total" in line]
    assert len(steps) == 3 and all(line["logprob_diff/mean"] < 1e-4 for line in steps), steps
    saved = str(run.run_dir / "checkpoints" / "step_000003")
    assert main(["merge-lora", saved, str(merged), "--source-hf", str(base)]) == 0
    made, export = read_all(merged), read_all(run.run_dir / "hf")
    assert made.keys() == export.keys()
    for key, value in export.items():
        torch.testing.assert_close(made[key].float(), value.float(), rtol=0, atol=1e-6)
    assert "quantization_config" not in (merged / "config.json").read_text()


SERVED = (
    *STAGED[:-1],
    "train.lora.targets=[q_proj,k_proj,v_proj,o_proj]",
    "train.lora.sync=adapter",
    "run.steps=2",
    "checkpoint.every_steps=2",
)


@pytest.mark.slow
def test_engines_serve_factors_as_an_adapter(
    start: Callable[..., Run], arithmetic: Path, tmp_path: Path
) -> None:
    below = f"eval.sets=[{{name:below,path:{arithmetic / 'heldout.parquet'},model:base}}]"
    run = start("train", *SERVED, below)
    assert run.finish(400) == 0, run.tail()
    run.assert_nothing_left()
    lines = run.metrics()
    sizes = [line["sync/mib"] for line in lines if "sync/mib" in line]
    whole = sum(file.stat().st_size for file in (run.run_dir / "hf").glob("*.safetensors")) / 2**20
    assert sizes and len({*sizes}) == 1 and 10 * sizes[0] < whole, (sizes, whole)
    assert all(line["sync/engines_verified"] == 1 for line in lines if "sync/mib" in line)
    steps = [line for line in lines if "loss/total" in line]
    assert len(steps) == 2 and all(line["logprob_diff/mean"] < 1e-4 for line in steps), steps
    first, *_, last = (line for line in lines if "eval/below/greedy_reward" in line)
    changed = {key for key in first if key.startswith("eval/") and first[key] != last[key]}
    assert not any("below" in key for key in changed), changed
    assert first["eval/below/greedy_reward"] == first["eval/greedy_reward"]  # B is 0 at first

    adapter = str(tmp_path / "adapter")
    saved, base = str(run.run_dir / "checkpoints" / "step_000002"), str(arithmetic / "model")
    assert main(["to-hf", saved, adapter, "--lora", "--source-hf", base]) == 0
    merged = [*SERVED[:-4], "eval.every_steps=0", f"model.path={run.run_dir / 'hf'}"]
    served = [*SERVED, "eval.every_steps=0", f"train.lora.path={adapter}"]
    responses = [evaluate(start, *settings) for settings in (merged, served)]
    assert responses[0] == responses[1]


def evaluate(start: Callable[..., Run], *settings: str) -> list[str]:
    """Return the greedy responses to held-out prompts."""
    run = start("eval", *settings)
    assert run.finish() == 0, run.tail()
    samples = (run.run_dir / "eval" / "samples.jsonl").read_text().splitlines()
    assert samples
    return [json.loads(line)["response"] for line in samples]


@pytest.mark.slow
def test_adapters_take_turns_and_resume(
    start: Callable[..., Run], arithmetic: Path, tmp_path: Path
) -> None:
    files = f"data:[{arithmetic / 'train.parquet'}],eval:[{arithmetic / 'heldout.parquet'}]"
    settings = (
        *SERVED[:-2],
        *(
            "data.train=[]",
            "eval.data=[]",
            "checkpoint.every_steps=2",
            "checkpoint.export_hf=false",
        ),
        f"train.lora.adapters=[{{name:ada,{files}}},{{name:bob,rank:2,alpha:8,{files}}}]",
    )
    run = start("train", *settings, "run.steps=3")
    assert run.finish() == 2 and "run.steps=3 with 2 train.lora.adapters" in run.tail()
    run = start("train", *settings, "run.steps=2", run_dir=run.run_dir)
    assert run.finish(400) == 0, run.tail()
    run.assert_nothing_left()
    folder = run.run_dir
    run = start("train", *settings, "run.steps=4", run_dir=folder)
    assert run.finish(400) == 0, run.tail()
    run.assert_nothing_left()
    lines = run.metrics()
    steps = [line for line in lines if "loss/total" in line]
    assert [line.get("adapters/ada/version") for line in steps] == [1, None, 2, None]
    assert [line.get("adapters/bob/version") for line in steps] == [None, 1, None, 2]
    for line in steps:
        assert line["logprob_diff/mean"] < 1e-4 and line["sync/parity_diff"] < 1e-4, line
        assert line["sync/engines_verified"] == 1
    sizes = [line["sync/mib"] for line in steps]
    assert sizes[0] == sizes[2] > 1.5 * sizes[1] == 1.5 * sizes[3], sizes
    held_out = [line for line in lines if "eval/ada/greedy_accuracy" in line]
    assert held_out and all("eval/bob/greedy_accuracy" in line for line in held_out)

    saved, base = str(folder / "checkpoints" / "step_000004"), str(arithmetic / "model")
    factors = []
    for name in ("ada", "bob"):
        out = tmp_path / name
        command = ["to-hf", saved, str(out), "--lora", "--name", name, "--source-hf", base]
        assert main(command) == 0
        factors.append(read_all(out))
    shapes = [{key: factor.shape for key, factor in own.items()} for own in factors]
    assert shapes[0].keys() == shapes[1].keys() and shapes[0] != shapes[1]
    assert all(factor.any() for own in factors for factor in own.values())


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}
