"""A run on prompts that are streamed, mixed and ordered by difficulty continues exactly."""

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.data.rows import load_rows
from mcore_rl.data.streamed.open import open_prompts
from mcore_rl.data.tokenizer import load_tokenizer
from tests.support.prompt_sets import are_right
from tests.support.runs import Run

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
NUM_PARQUET = 200
NUM_ROWS = 300
STEPS, PROMPTS_PER_STEP, SAMPLES = 5, 4, 4


@pytest.fixture
def settings(arithmetic: Path, tmp_path: Path) -> list[str]:
    """Prompts of a folder of parquet files and of a jsonl file, the longer ones later."""
    rows = [dict(row) for _, row in load_rows([str(arithmetic / "train.parquet")])][:NUM_ROWS]
    for row in rows:
        row["extra_info"]["words"] = len(row["prompt"][0]["content"].split())
    (tmp_path / "shards").mkdir()
    for start in range(0, NUM_PARQUET, 50):
        table = pa.Table.from_pylist(rows[start : start + 50])
        pq.write_table(table, tmp_path / "shards" / f"{start:03}.parquet", row_group_size=20)
    lines = "".join(json.dumps(row) + "\n" for row in rows[NUM_PARQUET:])
    (tmp_path / "more.jsonl").write_text(lines)
    return [
        "data.train=[]",
        f"data.sources=[{{path: {tmp_path}/shards, weight: 3}}, {{path: {tmp_path}/more.jsonl}}]",
        "data.lookahead=16",
        "data.workers=1",
        "data.curriculum.column=extra_info.words",
        "data.curriculum.stages=[{most: 14}, {after: 12, most: 40}]",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_that_was_stopped_draws_the_prompts_of_one_that_was_not(
    start: Start, arithmetic: Path, settings: list[str], tmp_path: Path
) -> None:
    """It stops a step after its checkpoint, so some prompts were drawn that it draws again."""
    every = [*settings, f"run.steps={STEPS}", "eval.data=[]", "checkpoint.export_hf=false"]
    first = start("train", *every, "checkpoint.every_steps=2", run_dir=tmp_path / "run")
    first.wait_for("step 4: rollout", poll_s=0.01)
    first.process.send_signal(signal.SIGINT)
    assert first.finish(90) == 130, first.tail()
    first.assert_nothing_left()
    second = start("train", *every, run_dir=tmp_path / "run")
    assert second.finish() == 0, second.tail()
    second.assert_nothing_left()
    steps = [line for line in second.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert "step 3: rollout" in second.log() and "step 2: rollout" not in second.log()

    drawn = [row["prompt_index"] for row in rows_by_step(second.run_dir)][::SAMPLES]
    config = load_recipe("tiny_moe_grpo", settings)
    make_tokenizer = partial(load_tokenizer, str(arithmetic / "model"), "model.path")
    whole = open_prompts(config.data, config.run.seed, make_tokenizer, are_right)
    expected = whole.take(STEPS * PROMPTS_PER_STEP)
    whole.close()
    assert drawn == [prompt.index for prompt in expected]
    num_of_shards = sum(index < NUM_PARQUET for index in drawn)
    assert num_of_shards == len(drawn) * 3 // 4
    words = [prompt.extra_info["words"] for prompt in expected]
    assert words[0] <= 14 < max(words)


def rows_by_step(run_dir: Path) -> list[dict[str, int]]:
    """Return the samples of each step as they were written last."""
    rows: dict[tuple[int, int, int], dict[str, int]] = {}
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        of_step = [key for key in rows if key[0] == row["step"]]
        rows[row["step"], len(of_step), row["prompt_index"]] = row
    return list(rows.values())
