"""Commands in documents are executed: as written, with fewer steps, or dry where they need GPUs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_rl.process.network import find_free_port
from tests.support.documented import Documented, documented, in_workspace, own_algorithm
from tests.support.forked_commands import run_forked
from tests.support.policy import ROOT

WALKED = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "recipes",
            "agents",
            "code",
            "ledger",
            "algorithms",
            "async",
            "rewards",
            "sandbox",
            "view",
            "vision",
        )
    ),
)
"""Documents whose commands run one after the other, and then those of mcore-rl in
docs/checkpoints.md; its commands of mcore-rl-ckpt have a test of their own (test_convert.py)."""
OTHERS = (
    "docs/install.md",
    "docs/plan.md",
    "docs/simulate.md",
    "docs/doctor.md",
    "docs/checkpoints.md",
    # its commands of mcore-rl-ckpt: scenarios/train/test_lora_files.py; its serve:
    # scenarios/rollout/test_many_adapters.py; its eval: e2e/test_lora.py
    "docs/lora.md",
    "docs/debugging.md",
    "docs/launch.md",
    "docs/monitoring.md",  # tests/logs/prometheus, tests/logs/trackers
    "docs/security.md",
    "docs/upstream_options.md",
    "docs/switching.md",
    "CONTRIBUTING.md",
)
MODULES = {"mcore-rl": "mcore_rl.cli", "mcore-rl-ckpt": "checkpoint_tools.cli"}
FORKED = ("options", "plan", "simulate", "submit", "translate")
"""Commands that spend most of their time on imports."""
TIMEOUT_S = 420


def execute(words: Sequence[str], folder: Path) -> None:
    program, *arguments = words
    answered = (0, 1) if arguments[:1] == ["plan"] else (0,)  # 1: the recipe does not fit its GPUs
    if program == "mcore-rl" and arguments[0] in FORKED:
        status, output = run_forked(in_workspace(arguments, folder), folder, TIMEOUT_S)
        assert status in answered, f"{' '.join(words)}\n{output[-5000:]}"
        return
    if program == "make":
        command, folder = list(words), ROOT
    else:
        command = [sys.executable, "-m", MODULES[program], *in_workspace(arguments, folder)]
    if "serve" in arguments and "--port" not in arguments:
        command += ["--port", str(find_free_port("127.0.0.1"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode in answered, (
        f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    )


QUICK = [
    command
    for command in documented(*WALKED, *OTHERS)
    if command.is_quick and command.how != "elsewhere"
]


@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK, ids=str)
def test_a_quick_command_runs(command: Documented, tmp_path: Path) -> None:
    execute(command.attempt(), tmp_path)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_documents_commands_run_in_their_order(tmp_path: Path) -> None:
    """README's commands make what the other documents' commands start from."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / ".venv-agents").symlink_to(ROOT / ".venv-agents")  # `make agents-venv`
    (tmp_path / "my_algo.py").write_text(own_algorithm())
    tried = 0
    for command in documented(*WALKED, "docs/checkpoints.md"):
        of_tools = command.document == "docs/checkpoints.md" and command.words[0] != "mcore-rl"
        if command.how in ("run", "short") and command.words[0] != "make" and not of_tools:
            execute(command.attempt(), tmp_path)
            tried += 1
    assert tried > 25


def test_every_command_of_ours_is_tried_somewhere() -> None:
    elsewhere = {
        "docs/add_a_family.md",  # tests/checkpoint_tools/support/test_worked_example.py
        "docs/models.md",
        "docs/search.md",  # tests/e2e/test_search.py
    }
    known = {*WALKED, *OTHERS, *elsewhere}
    everywhere = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    untried = [
        str(command)
        for command in documented(*sorted(everywhere - known))
        if command.how in ("run", "short", "dry")
    ]
    assert not untried, "commands in documents that no test walks through:\n" + "\n".join(untried)
