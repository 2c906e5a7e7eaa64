"""An engine computes a prompt once for all of its samples that come at a time.

tests/support/sglang_process_checks.py checks which requests wait.
"""

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.rollout import engine as engine_module
from mcore_rl.rollout.engine import FORKS, EngineProcess
from mcore_rl.rollout.engine_spec import SHARE_PROMPTS, SHARE_PROMPTS_ON_CPU, EngineSpec
from mcore_rl.rollout.scheduler_setup import LEAST_TOKENS
from mcore_rl.rollout.server import may_share_prompts
from tests.scenarios.rollout.test_native_forward import generate, largest_difference, save_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
LONG, OTHER, SHORT = list(range(3, 103)), list(range(20, 70)), list(range(4, 4 + LEAST_TOKENS))
RUNS_AHEAD = """
import sys
from mcore_rl.device import sglang_setup
sglang_setup.CPU_FLAGS = tuple(f for f in sglang_setup.CPU_FLAGS if "overlap" not in f)
from mcore_rl.rollout.server import main
main(sys.argv[1:])
"""
"""A server whose scheduler prepares a batch before it sees the last one's tokens, as on GPUs."""


def cached_tokens(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


@pytest.mark.parametrize("runs_ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_samples_wait_for_the_one_that_computes_their_prompt(
    runs_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runs_ahead:
        monkeypatch.delenv(FORKS, raising=False)
        monkeypatch.setattr(engine_module, "SERVER", ["-c", RUNS_AHEAD])
    model = save_model("qwen3_moe", tmp_path / "model")
    prompts = [LONG] * 6 + [OTHER] * 3 + [SHORT] * 2
    spec = EngineSpec(
        str(tmp_path / "model"),
        str(tmp_path / "engine.log"),
        deterministic=True,
        share_prompts=True if runs_ahead else None,  # None: as this engine has no GPU
    )
    with EngineProcess(spec) as engine:
        answers = generate(engine.url, prompts, logprob_start_len=-1)
        cached = cached_tokens(answers)
        assert sorted(cached[:6]) == [0, *[len(LONG) - 1] * 5]
        assert sorted(cached[6:9]) == [0, *[len(OTHER) - 1] * 2]
        assert len(set(cached[9:])) == 1, "nobody waits for so few tokens"
        assert largest_difference(model, answers, prompts) < 1e-5
        # Log-probs of prompts are asked for: nothing of them can come from the cache.
        scored = generate(engine.url, prompts)
        assert cached_tokens(scored) == [0] * len(prompts)
        assert largest_difference(model, scored, prompts) < 1e-5
        with urllib.request.urlopen(f"{engine.url}/server_info", timeout=60) as response:
            assert json.load(response)["disable_overlap_schedule"] is not runs_ahead


@pytest.mark.slow
def test_without_a_prefix_cache_nobody_waits(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    spec = EngineSpec(
        str(tmp_path / "model"),
        str(tmp_path / "engine.log"),
        share_prompts=True,
        extra_args=("--disable-radix-cache",),
    )
    with EngineProcess(spec) as engine:
        answers = generate(engine.url, [LONG] * 4, logprob_start_len=-1)
    assert cached_tokens(answers) == [0] * 4
    assert largest_difference(model, answers, [LONG] * 4) < 1e-5


@pytest.mark.slow
def test_switched_off_samples_that_are_admitted_together_compute_their_prompt_each(
    tmp_path: Path,
) -> None:
    model = save_model("llama", tmp_path / "model")
    spec = EngineSpec(str(tmp_path / "model"), str(tmp_path / "engine.log"), share_prompts=False)
    with EngineProcess(spec) as engine:
        answers = generate(engine.url, [LONG] * 4, logprob_start_len=-1)
        assert cached_tokens(answers) == [0] * 4
        assert largest_difference(model, answers, [LONG] * 4) < 1e-5
        later = generate(engine.url, [LONG] * 2, logprob_start_len=-1)
    assert cached_tokens(later) == [len(LONG) - 1] * 2, "SGLang's cache has it by then"


def test_on_a_gpu_a_recipe_has_to_ask_for_the_rule() -> None:
    assert not may_share_prompts(SHARE_PROMPTS_ON_CPU, has_gpu=True)
    assert may_share_prompts(SHARE_PROMPTS_ON_CPU, has_gpu=False)
    assert may_share_prompts(SHARE_PROMPTS, has_gpu=True)
