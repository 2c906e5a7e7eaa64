"""The recipes for GPUs, by name: all, a sample for `make test`, and what `mcore-rl plan` says."""

import functools
import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import list_recipes

LARGE = [name for name in list_recipes() if not name.startswith("tiny_")]
SAMPLE = {
    "deepseek_v3_grpo_256": "experts in FP8 on hundreds of GPUs",
    "mixtral_8x7b_ppo_16": "a critic",
    "qwen2_5_vl_7b_grpo_8": "a dense model that sees images",
}
"""The large recipes of `make test`, and what each has that the others lack."""
LARGE_BY_LANE = [
    pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in LARGE
]
"""Parameters for a test of every recipe; those outside SAMPLE are left to the night."""


@functools.cache
def plan_of(recipe: str) -> dict[str, Any]:
    """Return that of the recipe as it is shipped; made once for all tests, which only read it."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["plan", f"recipe={recipe}", "--json"]) == 0
    return json.loads(out.getvalue())
