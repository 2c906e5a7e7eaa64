"""The step's reward, and that figures which are wrong fail the check."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.tools.doctor import step_checks
from mcore_rl.tools.doctor.lone_rank import qwen3_moe
from mcore_rl.tools.doctor.step_checks import STEPS, Rows, count_even_tokens, pack_as_a_run
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import ModelFlops


def test_the_reward_is_the_share_of_even_tokens() -> None:
    prompt = Prompt(0, (1,), (), "random", None)
    span = VersionSpan(0, 4, WeightVersion(0))
    sample = Sample(prompt, 0, (2, 4, 5, 7), (0.0,) * 4, "length", (span,), "")
    assert count_even_tokens([sample]).rewards_N == [0.5]


def test_batches_are_packed_by_the_work_of_sequences_as_in_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(qwen3_moe()))
    flops = ModelFlops.from_facts(ModelFacts.read(str(tmp_path)))
    packing = pack_as_a_run(str(tmp_path), ParallelConfig(), TrainConfig())
    assert packing == replace(packing, flops=flops)


def rows(file: Path, **last: float) -> Rows:
    log = Rows(file)
    for step in range(1, STEPS + 1):
        row = {"reward/mean": step / 10, "logprob_diff/mean": 1e-7, "sync/parity_diff": 1e-7}
        log.log(step, row | {"time/train": 0.5})
    log.log(STEPS, last)
    return log


def test_figures_of_a_run_that_learns(tmp_path: Path) -> None:
    figures = step_checks._figures(rows(tmp_path / "m.jsonl"), {"sync/parity_diff": 3e-7})
    assert figures["reward_first"] == 0.1 and figures["reward_last"] == STEPS / 10
    assert figures["parity_diff"] == 3e-7


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"reward/mean": 0.05}, "rewards"),
        ({"logprob_diff/mean": 0.5}, "samples' log-probs differ by 0.5"),
    ],
)
def test_a_run_that_learns_nothing_or_drifts_fails_and_its_metrics_stay(
    last: dict[str, float], message: str, tmp_path: Path
) -> None:
    log = rows(tmp_path / "metrics.jsonl", **last)
    with pytest.raises(AssertionError, match=message):
        step_checks._figures(log, {"sync/parity_diff": 0.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1), STEPS]
    assert lines[-1] == {"step": STEPS, **last}
