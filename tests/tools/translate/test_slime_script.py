"""Options are read from slime's scripts without running them, and from whole command lines."""

from pathlib import Path

import pytest

from mcore_rl.tools.translate.slime_script import Script, read_slime

MODEL = """
LAYERS=()
for ((i=0; i<2; i++)); do
  LAYERS+=(1)
done
printf -v FREQ "[%s]" "$(IFS=,; echo "${LAYERS[*]}")"
MODEL_ARGS=(
   --num-layers 48
   --moe-layer-freq "$FREQ"
)
"""
RUN = """#!/bin/bash
pkill -9 sglang
DIR="$(cd "$(dirname "$0")" && pwd)"
MODEL_ARGS_ROTARY_BASE=5 source "${DIR}/models/tiny.sh"
HOME_OF=${HOME_OF_NOBODY:-/data}
if [ -n "$X" ]; then
   EXTRA=(--use-wandb)
fi
ROLLOUT_ARGS=(
   --prompt-data ${HOME_OF}/train.jsonl
   --lr 1e-6
   # --eval-interval 3
   --sglang-cuda-graph-bs 1 2 $(seq 4 8)
   --apply-chat-template-kwargs '{"enable_thinking": false}'
)
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 train_async.py --colocate ${MODEL_ARGS[@]} \\
   ${ROLLOUT_ARGS[@]} ${EXTRA[@]} ${NOT_SET[@]} 2>&1 | tee log
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/tiny.sh").write_text(MODEL)
    (tmp_path / "run.sh").write_text(RUN)
    return str(tmp_path / "run.sh")


def test_a_script_is_read_with_those_that_it_sources(script: str) -> None:
    options = read_slime([script])
    assert options.given == {
        "--colocate": True,
        "--num-layers": 48,
        "--prompt-data": "/data/train.jsonl",
        "--lr": 1e-6,
        "--apply-chat-template-kwargs": {"enable_thinking": False},
    }
    assert options.config_name == "train_async.py" and not options.is_whole
    assert options.unreadable == {
        "--moe-layer-freq": "$FREQ",
        "--sglang-cuda-graph-bs": "1 2 $(seq 4 8)",
        "--use-wandb": "(in a branch of the script)",
    }


def test_options_after_the_script_win(script: str) -> None:
    options = read_slime(
        [script, "--lr", "2e-6", "--sglang-cuda-graph-bs=4", "--rollout-stop", "a"]
    )
    assert options.given["--lr"] == 2e-6 and options.given["--sglang-cuda-graph-bs"] == 4
    assert "--sglang-cuda-graph-bs" not in options.unreadable


def test_a_command_line_is_read_from_the_program_on() -> None:
    line = [
        "job",
        "submit",
        "--address=x",
        "--",
        "python3",
        "/root/slime/train.py",
        "--n",
        "1",
        "a",
    ]
    options = read_slime(line)
    assert options.given == {"--n": [1, "a"]} and options.config_name == "train.py"
    assert read_slime(["--x", "true"]).given == {"--x": True}


def test_a_script_that_is_not_there_is_told_as_an_option(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("source /nowhere/models/x.sh\npython train.py ${MODEL_ARGS[@]} --lr 1\n")
    script = Script()
    script.read(file)
    assert script.missing == {"source /nowhere/models/x.sh": "/nowhere/models/x.sh"}
    options = read_slime([str(file)])
    assert options.given == {"--lr": 1}
    assert "${MODEL_ARGS[@]}" in options.unreadable
    assert "source /nowhere/models/x.sh" in options.unreadable


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "run.sh: the script cannot be read"),
        ("echo train\n", r"run.sh: no command in it runs train.py or train_async.py"),
        ("python train.py --a\npython train.py --b\n", "run.sh: 2 commands start slime: keep one"),
        ("python train.py words\n", r"words: neither a script \(.sh\) nor an option --name"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "run.sh"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_slime([str(file)])


@pytest.mark.parametrize("line", ["${ROLLOUT_ARGS[@]}", '"${ROLLOUT_ARGS[@]}"', "--lr 2e-6"])
def test_options_that_a_missing_backslash_cuts_off_are_told(script: str, line: str) -> None:
    Path(script).write_text(f"{RUN}{line} --seed 3\n")
    with pytest.raises(
        ValueError, match=r"run.sh: .* begins a command of its own, .* lacks a \\ at"
    ):
        read_slime([script])
    Path(script).write_text(f"{RUN}LAUNCH=(echo done)\n${{LAUNCH[@]}} --seed 3\n")
    assert "--seed" not in read_slime([script]).given
