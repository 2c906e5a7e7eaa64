"""The command line: help lists recipes, wrong input exits with 2 and one line."""

import argparse
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from mcore_rl import __version__
from mcore_rl.cli import main, make_parser
from mcore_rl.config.recipe import list_recipes
from mcore_rl.config.shipped import RECIPES_DIR, describe_making
from mcore_rl.tasks.arithmetic import prepare_arithmetic


def test_help_lists_the_recipes(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, headline in list_recipes().items():
        [line] = [line for line in lines if line.startswith(f"  {name} ")]
        assert line.endswith(f"  {headline}")


def test_the_help_of_each_command_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    [commands] = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        lines = command.format_help().splitlines()
        assert len(lines) <= 40, name
        assert max(map(len, lines)) <= 80, name
    shown = commands.choices["train"].format_help()
    assert "example: mcore-rl train recipe=tiny_moe_grpo" in shown
    assert "qwen3" not in shown, "the recipes are listed once, by mcore-rl --help"


def test_every_task_of_the_shipped_recipes_is_made_by_mcore_rl_data() -> None:
    for recipe in RECIPES_DIR.glob("tiny*.yaml"):
        for path in re.findall(r"\bdata/\S+(?:\.parquet|/model)\b", recipe.read_text()):
            [task] = re.findall(r"`mcore-rl data (\w+)`", describe_making(path))
            assert make_parser().parse_args(["data", task]).out == Path("data", task)
    assert describe_making("data/mine/model") == describe_making("code/model") == ""


def test_the_version_is_the_installed_one(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"mcore-rl {__version__}\n"
    assert __version__ == metadata.version("mcore_rl")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train"], "give one recipe=<name>, got 0; recipes: "),
        (["train", "recipe=nope"], "recipe=nope: no file"),
        (
            ["train", "recipe=tiny_moe_grpo", "rollout.temprature=1"],
            "Did you mean 'rollout.temperature'?",
        ),
        (
            ["train", "recipe=tiny_moe_grpo", "model.path=/nowhere"],
            "model.path=/nowhere: /nowhere/config.json does not exist",
        ),
        (
            ["eval", "recipe=tiny_moe_grpo", "rollout.quantization=fp8", "model.dtype=bfloat16"],
            "rollout.quantization=fp8: trainer ranks quantize, and an evaluation has none",
        ),
        (["report", "/nowhere"], "no metrics.jsonl"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(capsys, argv: list[str], message: str) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_help_does_not_wait_for_torch_and_ray() -> None:
    code = (
        "import sys; from mcore_rl.cli import make_parser; make_parser();"
        " print('ray' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "False"


def test_a_model_directory_without_weights_is_refused(tmp_path, capsys) -> None:
    prepare_arithmetic(tmp_path)
    settings = [f"model.path={tmp_path / 'model'}", f"data.train=[{tmp_path / 'train.parquet'}]"]
    assert main(["train", "recipe=tiny_moe_grpo", f"run.dir={tmp_path / 'run'}", *settings]) == 2
    assert re.search(r"no \.safetensors files: .*; model.init=random", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


DROPPED_INTERRUPT = """
import time
from mcore_rl.process.signals import keep_interrupts

class Dropping:
    def __del__(self):
        raise KeyboardInterrupt

keep_interrupts()
try:
    Dropping()
    time.sleep(5)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_that_python_drops_comes_again():
    done = subprocess.run(
        [sys.executable, "-c", DROPPED_INTERRUPT], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


DROPPED_SIGTERM = """
import signal, sys, time
from mcore_rl.process.signals import keep_interrupts

class Dropping:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

keep_interrupts()
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
Dropping()
time.sleep(20)
"""


def test_a_sigterm_that_python_drops_comes_again():
    done = subprocess.run(
        [sys.executable, "-c", DROPPED_SIGTERM], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (143, "")
