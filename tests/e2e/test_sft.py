"""Supervised fine-tuning end to end: the loss falls, the export loads, a second run continues."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.support.runs import Run

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
COMMON = ("model.init=random", "sft.batch_size=16")


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def losses_of(run: Run) -> dict[int, float]:
    return {int(line["step"]): line["loss/nll"] for line in run.metrics() if "loss/nll" in line}


def test_sft_from_random_weights_learns_and_exports(start: Start) -> None:
    profile = ("profile.steps=[2,5]", "profile.ranks=[1]")
    exports = ("checkpoint.every_steps=10", "checkpoint.export_every_steps=10")
    run = start("sft", "sft.steps=20", *profile, *exports, *COMMON)
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    losses = [*losses_of(run).values()]
    assert len(losses) == 20
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]
    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "hf")
    assert model.config.architectures == ["Qwen3MoeForCausalLM"]
    steps = run.run_dir / "hf_steps"
    assert sorted(path.name for path in steps.iterdir()) == ["step_000010", "step_000020"]
    whole = read_folder(run.run_dir / "hf")
    assert read_folder(steps / "step_000020") == whole != read_folder(steps / "step_000010")
    captures = sorted(path.name for path in (run.run_dir / "profile").iterdir())
    assert captures == [f"trainer_rank1_step{step}.json.gz" for step in (2, 5)]
    speed = [line["train/tflops_per_gpu"] for line in run.metrics() if "loss/nll" in line]
    assert all(value > 0 for value in speed)
    assert run.tail().strip().splitlines()[-1].endswith("hf")


@pytest.mark.slow
def test_sft_continues_where_it_ended(start: Start, tmp_path: Path) -> None:
    common = (*COMMON, "checkpoint.every_steps=2", "checkpoint.export_hf=false")
    for num_steps in (4, 6):
        run = start("sft", f"sft.steps={num_steps}", *common, run_dir=tmp_path / "run")
        assert run.finish() == 0, run.tail()
    at_once = start("sft", "sft.steps=6", *common)
    assert at_once.finish() == 0, at_once.tail()
    assert [line["step"] for line in run.metrics() if "loss/nll" in line] == list(range(1, 7))
    assert losses_of(run) == pytest.approx(losses_of(at_once), rel=1e-6)
