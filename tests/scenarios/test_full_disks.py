"""Every command that writes tells of a full disk in one line: the file, its space, what to do."""

import json
import re
from pathlib import Path

import pytest

from mcore_rl.tasks.arithmetic import prepare_arithmetic
from tests.support.small_disks import call_with_full_disk
from tests.support.small_hf import write_small_model

RUN_ALL = """
import contextlib, io, json, os, sys
import checkpoint_tools.cli
import mcore_rl.cli

answers = []
for program, *words in json.loads(sys.argv[1]):
    module = {"mcore-rl": mcore_rl.cli, "mcore-rl-ckpt": checkpoint_tools.cli}[program]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = module.main(words)
        except BaseException as error:
            status = repr(error)
    answers.append((status, said.getvalue()))
print(json.dumps(answers))
"""
"""Runs commands in one process, as their imports take most of the time."""
LINE = re.compile(
    r"cannot write (?P<path>.*?): no space left on device; its filesystem (?P<disk>\S+) \(tmpfs\)"
    r" has 0 bytes of 64 KiB free\. Free some space .* then run the same command again"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of the commands: a small model, prompts, metrics of a run, a corpus."""
    folder = tmp_path_factory.mktemp("source")
    write_small_model(folder / "model")
    prepare_arithmetic(folder / "arithmetic")
    rows = [{"id": i, "contents": f"passage {i}"} for i in range(3)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def commands(source: Path, disk: Path) -> dict[str, tuple[str, list[str]]]:
    """Return, by command, the start of the path that must be named and its words."""
    model = str(source / "model")
    arithmetic = source / "arithmetic"
    laptop = [
        "recipe=tiny_moe_grpo",
        f"model.path={arithmetic / 'model'}",
        f"data.train=[{arithmetic / 'train.parquet'}]",
        f"eval.data=[{arithmetic / 'heldout.parquet'}]",
        f"sft.data=[{arithmetic / 'sft.parquet'}]",
        "model.init=random",
        f"run.dir={disk / 'run'}",
    ]
    effort = ["--workers", "1"]
    made = str(disk / "made")
    recipe = str(disk / "recipe.yaml")
    index = str(disk / "index")
    run = str(disk / "run")
    corpus = str(source / "corpus.jsonl")
    return {
        "from-hf": (f"{made}.partial", ["mcore-rl-ckpt", "from-hf", model, made, *effort]),
        "to-fp8": (f"{made}.partial", ["mcore-rl-ckpt", "to-fp8", model, made, *effort]),
        "data": (f"{made}_1/", ["mcore-rl", "data", "arithmetic", "--out", f"{made}_1"]),
        "data search": (f"{made}_2/", ["mcore-rl", "data", "search", "--out", f"{made}_2"]),
        "translate": (recipe, ["mcore-rl", "translate", "verl", "--out", recipe, "data.seed=1"]),
        "search build": (
            index,
            ["mcore-rl", "search", "build", "--corpus", corpus, "--out", index],
        ),
        "submit": (run, ["mcore-rl", "submit", "--dry-run", "launch=slurm", *laptop]),
        "sft": (run, ["mcore-rl", "sft", *laptop]),
        "train": (run, ["mcore-rl", "train", *laptop]),
    }


def test_every_command_names_the_file_and_its_space(source: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    asked = commands(source, disk)
    answers = call_with_full_disk(RUN_ALL, disk, [words for _, words in asked.values()])
    for (name, (path, _)), (status, said) in zip(asked.items(), answers, strict=True):
        found = LINE.search(said)
        assert status == 1 and found, (name, status, said)
        assert found["path"].startswith(path) and found["disk"] == str(disk), (name, said)
        assert "Traceback" not in said and said.count("no space left") == 1, (name, said)
