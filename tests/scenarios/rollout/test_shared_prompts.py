"""An engine on a CPU computes a prompt once for all of its samples that come at a time."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from tests.scenarios.rollout.test_native_forward import generate, largest_difference, save_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
LONG, OTHER, SHORT = list(range(3, 103)), list(range(20, 70)), [5, 9, 77, 30]


def cached_tokens(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


def test_samples_wait_for_the_one_that_computes_their_prompt(tmp_path: Path) -> None:
    model = save_model("qwen3_moe", tmp_path / "model")
    prompts = [LONG] * 6 + [OTHER] * 3 + [SHORT] * 2
    spec = EngineSpec(str(tmp_path / "model"), str(tmp_path / "engine.log"), deterministic=True)
    with EngineProcess(spec) as engine:
        answers = generate(engine.url, prompts, logprob_start_len=-1)
        cached = cached_tokens(answers)
        assert sorted(cached[:6]) == [0, *[len(LONG) - 1] * 5]
        assert sorted(cached[6:9]) == [0, *[len(OTHER) - 1] * 2]
        assert largest_difference(model, answers, prompts) < 1e-5
        # Log-probs of prompts are asked for: nothing of them can come from the cache.
        scored = generate(engine.url, prompts)
        assert cached_tokens(scored) == [0] * len(prompts)
        assert largest_difference(model, scored, prompts) < 1e-5


def test_without_a_prefix_cache_nobody_waits(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    spec = EngineSpec(
        str(tmp_path / "model"), str(tmp_path / "engine.log"), extra_args=("--disable-radix-cache",)
    )
    with EngineProcess(spec) as engine:
        answers = generate(engine.url, [LONG] * 4, logprob_start_len=-1)
    assert cached_tokens(answers) == [0] * 4
    assert largest_difference(model, answers, [LONG] * 4) < 1e-5
