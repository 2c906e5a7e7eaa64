"""A shell that asks gets commands, recipes, options and values."""

import os
import subprocess
import sys

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import list_recipes
from mcore_rl.config.tree import leaves_under
from mcore_rl.tools.completion import complete_setting

SEPARATOR = "\013"


def ask(line: str) -> list[str]:
    """Return what bash would get for the line, with the cursor at its end."""
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": SEPARATOR, "_ARGCOMPLETE_SHELL": "bash"}
    place = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    code = "import os; os.dup2(1, 8); from mcore_rl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked, **place, "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout.split(SEPARATOR)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mcore-rl tra", ["train", "translate"]),
        ("mcore-rl train recipe=tiny_agent_ca", ["tiny_agent_calculator", "tiny_agent_cartpole"]),
        ("mcore-rl plan rollout.min_", ["rollout.min_engines=", "rollout.min_free_kv="]),
        ("mcore-rl train recipe=tiny_moe_grpo rollout.mode=", ["sync", "one_step_off", "async"]),
    ],
)
def test_bash_is_answered(line: str, expected: list[str]) -> None:
    assert sorted(word.strip() for word in ask(line)) == sorted(expected)


def test_settings_are_completed_by_recipes_names_and_values() -> None:
    names = [f"{name}=" for name in leaves_under(Config)]
    assert complete_setting("") == ["recipe=", *names]
    assert complete_setting("recipe=") == [f"recipe={name}" for name in list_recipes()]
    assert complete_setting("critic.colocated=") == [
        "critic.colocated=true",
        "critic.colocated=false",
    ]
    assert complete_setting("model.dtype=b") == ["model.dtype=bfloat16"]
    for free in ("run.steps=", "run.nothing=", "nothing=", "run.dir.x=", "rollout.sglang.x="):
        assert complete_setting(free) == []
