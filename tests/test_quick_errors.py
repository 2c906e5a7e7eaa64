"""A mistake is told at once: before torch is imported, in less than two seconds of CPU."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests.support.stub_inputs import stub_inputs

QWEN = "recipe=qwen3_30b_a3b_grpo_32"
PODS = ["launch=kuberay", "launch.image=i", "launch.claims={runs: /mnt/runs}"]
MISTAKES = [
    (["train"], "give one recipe=<name>"),
    (["train", "recipe=qwen"], "recipe=qwen: no file"),
    (["train", QWEN, "rollout.n=8"], "Did you mean 'rollout.samples_per_prompt'"),
    (
        ["train", QWEN, "algorithm=gsp"],
        "algorithm=gsp: there is no such file. Did you mean 'gspo'?",
    ),
    (["train", QWEN, "~parallel.cp"], "~parallel.cp: there is nothing to take out"),
    (["train", QWEN, "cluster.gpus=8", "~parallel.dp"], "cluster.gpus=8 leaves 0 for the trainer"),
    (["train", QWEN], "qwen3_30b_a3b holds config.json alone: set model.path"),
    (["sft", "recipe=tiny_moe_grpo"], "`mcore-rl data arithmetic` makes it"),
    (["plan", "recipe=tiny_moe_grpo"], "`mcore-rl data arithmetic` makes it"),
    (["plan", QWEN, "algorithm.loss=gsp"], "algorithm.loss='gsp' (did you mean 'gspo'?)"),
    (["simulate", "recipe=tiny_moe_grpo"], "`mcore-rl data arithmetic` makes it"),
    (["simulate", QWEN, "algorithm.loss=gsp"], "algorithm.loss='gsp' (did you mean 'gspo'?)"),
    (["agent", "run", "recipe=tiny_moe_grpo"], "agents.environment is not set: give what the"),
    (["agent", "run", "recipe=tiny_agent_code"], "`mcore-rl data code` makes it"),
    (["submit", QWEN, "launch=slurm"], "qwen3_30b_a3b holds config.json alone: set model.path"),
    (["submit", QWEN, *PODS, "run.dir=/mnt/runs/a", "model.path=/m"], "model.path: /m lies in no"),
    (["submit", QWEN, *PODS, "run.dir=/a"], "run.dir: /a lies in no folder"),
]
OF_INPUTS = [
    ("data.train=[no.jsonl]", "data.train: data file no.jsonl does not exist"),
    ("reward.path=no.py", "reward.path=no.py: no such file"),
    ("reward.name=no", "reward.name=no: "),
    ("agents.environment=no", "there is no environment of kind 'no'"),
    ("checkpoint.hub_repo=policy", "checkpoint.hub_repo=policy: the hub names repositories owner"),
    ("checkpoint.hub_repo=me/policy", "there is no token of the hub here; log in by `hf auth"),
    ("log.wandb_project=mine", "needs the package wandb: pip install wandb"),
]
CALL = """
import json, sys, time
sys.modules["wandb"] = None  # as if it were not installed
from mcore_rl.cli import main
spent_s = []
for words in json.loads(sys.argv[1]):
    assert main(words) == 2, words
    spent_s.append(time.process_time())
print(json.dumps([spent_s, "torch" in sys.modules]))
"""


def test_a_mistake_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    given = stub_inputs(tmp_path, "qwen3_30b_a3b_grpo_32")
    mistakes = [*MISTAKES, *((["train", QWEN, *given, word], told) for word, told in OF_INPUTS)]
    of_agent = ["agent", "run", QWEN, *given, "agents.environment=tools"]
    mistakes.append(([*of_agent, "reward.path=no.py"], "reward.path=no.py: no such file"))
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CALL, json.dumps([words for words, _ in mistakes])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("mcore-rl: ")]
    for (words, expected), line in zip(mistakes, told, strict=True):
        assert expected in line, words
    spent_s, has_torch = json.loads(done.stdout)
    assert not has_torch
    alone_s = [spent_s[0] + after - before for before, after in pairwise(spent_s)]
    assert max(alone_s) < 2, alone_s
