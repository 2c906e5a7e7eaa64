"""Mistakes of newcomers are told at once: before torch is imported, after little work.

Each message names the value, its place, and what to do instead.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from mcore_rl.data.rows import write_parquet
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
    (["submit", QWEN], "give one launch=<local|slurm|kuberay|skypilot or file>"),
    (["train", "tiny_moe_grpo"], "recipes are named by recipe=tiny_moe_grpo"),
    (["plan", "recipe=tab.yaml"], "tab.yaml: no YAML that is read here: while scanning"),
    (["plan", "recipe=flat.yaml"], "run is a group of options, and gets none: indent its"),
    (["plan", "recipe=row.yaml"], "train is a group of options, and gets the value ['optimizer']"),
    (["plan", "recipe=bare.yaml"], "begin the file with `defaults: [schema, _self_]`, or with"),
    (["train", QWEN, "run.steps=4,"], "run.steps=4,: mismatched input"),
    (["train", QWEN, "rollout.mode=asynch"], "rollout.mode='asynch': expected one of 'sync'"),
    (["train", QWEN, "run.steps=ten"], "run.steps: Value 'ten' of type 'str' could not be"),
    (["plan", QWEN, "rollout.max_response_len=8k"], "to Integer: give a whole number in digits"),
    (["plan", QWEN, "train.optimizer.lr=low"], "to Float: give a number, as 0.5 or 1e-6"),
    (["plan", "recipe=recipes/tiny_moe_grpo"], "Did you mean 'tiny_moe_grpo'?"),
    (["translate", "verl", "main_ppo.py"], "main_ppo.py: neither a YAML file nor an override"),
    (["translate", "verl", "trainer.nnodes="], "trainer.nnodes='' is not a number"),
    (["train", QWEN, "run.steps", "10"], "'run.steps'; overrides have the form key=value"),
    (["train", QWEN, "data.train=a.jsonl,b.jsonl"], "lists have brackets, as key=[a,b]"),
    (["train", QWEN, "train.mini_batches=7"], "2048 is not divisible by train.mini_batches=7"),
    (
        ["train", "recipe=tiny_moe_grpo", "rollout.quantization=fp8"],
        "rollout.quantization=fp8 with model.dtype=float32: needs model.dtype=bfloat16",
    ),
    (
        ["train", "recipe=deepseek_v3_grpo_128", "rollout.sglang.mem_fraction=0.5"],
        "mem_fraction=0.5: ServerArgs has no such field. Did you mean mem_fraction_static?",
    ),
    (["translate", "slime", "no.sh"], "no.sh: the script cannot be read"),
    (["view", "nowhere", "--once"], "nowhere"),
]
"""Command lines that need no model and no data, and what is answered."""
OF_INPUTS = [
    ("data.train=[no.jsonl]", "data.train: data file no.jsonl does not exist"),
    (
        "data.train=[table.csv]",
        "data.train: data file table.csv: expected .parquet or .jsonl; write",
    ),
    ("data.train=[several]", "data.train: several/b.jsonl line 1 is not UTF-8: "),
    ("data.train=[empty.jsonl]", "data.train: data file empty.jsonl has no rows"),
    ("data.train=[plain.jsonl]", "data.train: plain.jsonl line 1 is not JSON"),
    ("data.train=[trl.jsonl]", "line 1 lacks `data_source`; it has prompt, solution; data.columns"),
    ("data.train=[trl.parquet]", "lacks `data_source`, `reward_model`; it has prompt, solution"),
    ("data.train=[broken.parquet]", "data file broken.parquet is no parquet file"),
    ("model.path=bert", "model.path=bert: architectures = ['BertForMaskedLM'] in config.json"),
    ("model.path=bin", "only pytorch_model.bin: load and save it with transformers"),
    ("model.path=pointer", "model.safetensors is a pointer of Git LFS and no weights: run `git"),
    ("model.path=cut", "model.safetensors is cut off: it has 1008 bytes"),
    ("parallel.pp=5", "; set parallel.stage_layers=[10,10,10,9,9]"),
    ("model.path=ran", "ran is not a HuggingFace model directory; ran/hf is one"),
    ("parallel.tp=3", "parallel.tp=3 does not divide num_attention_heads=32"),
    ("rollout.kv_cache_len=4096", "exceeds rollout.kv_cache_len=4096: raise the latter"),
    ("rollout.speculate=ngram", "set drift.routed_experts=false, and train.router_replay=none"),
    ("train.mtp_loss=0.3", "train.mtp_loss=0.3, but Qwen3MoeForCausalLM"),
    ("rollout.samples_per_prompt=1", "set rollout.samples_per_prompt=2 or more (8 is usual)"),
    (
        "critic.path=a",
        "algorithm.advantage=grpo, which has no use for it: set algorithm.advantage=",
    ),
    ("teacher.path=a", "teacher.path=a with algorithm.advantage=grpo: nothing asks the teacher"),
    ("algorithm.advantage=distillation", "scores token ids, which needs SGLang's own interface"),
    ("reward.path=no.py", "reward.path=no.py: no such file"),
    ("reward.path=recipes/rewards/gsm9k.py", "; did you mean recipes/rewards/gsm8k.py?"),
    ("reward.path=brackets.py", "brackets.py line 1 is not Python: '(' was never closed"),
    ("reward.path=needs.py", "needs.py imports no_such_package, which this interpreter lacks"),
    ("reward.path=signature.py", "signature.py has no 'reward'; it has compute_score: name one of"),
    ("agents.environment=no.py:Game", "which 'no.py:Game' names"),
    ("run.dir=empty.jsonl/a", "empty.jsonl is not a folder; choose another run.dir"),
    ("checkpoint.best_metric=eval/accuracy", "did you mean eval/greedy_accuracy?"),
    ("reward.name=no", "reward.name=no: "),
    ("agents.environment=no", "there is no environment of kind 'no'"),
    ("checkpoint.hub_repo=policy", "checkpoint.hub_repo=policy: the hub names repositories owner"),
    ("checkpoint.hub_repo=me/policy", "there is no token of the hub here; log in by `hf auth"),
    ("log.wandb_project=mine", "needs the package wandb: pip install wandb"),
]
"""Options beside a model and data, and what is answered."""
BESIDE = {
    "parallel.tp=3": ["parallel.ep=1"],
    "checkpoint.best_metric=eval/accuracy": ["checkpoint.keep_best=2"],
}
"""Further options that bring a mistake to light."""
PROMPT = '{"prompt": "a", "data_source": "b", "reward_model": {"ground_truth": "c"}}\n'
FILES = {
    "tab.yaml": "defaults:\n  - schema\nrun:\n\tsteps: 3\n",
    "flat.yaml": "defaults:\n  - schema\nrun:\nsteps: 3\n",
    "row.yaml": "defaults: [schema, _self_]\ntrain: [optimizer]\n",
    "bare.yaml": "run:\n  steps: 3\n",
    "table.csv": "prompt,answer\n",
    "empty.jsonl": "",
    "plain.jsonl": "Ada has 12 coins\n",
    "trl.jsonl": '{"prompt": "Ada has 12 coins", "solution": "12"}\n',
    "broken.parquet": "prompt,answer\n",
    "several/a.jsonl": PROMPT,
    "brackets.py": "def reward(data_source\n    return 1.0\n",
    "needs.py": "import no_such_package\ndef reward(samples):\n    return 1.0\n",
    "signature.py": "def compute_score(answer, truth):\n    return 1.0\n",
    "bert/config.json": '{"architectures": ["BertForMaskedLM"], "model_type": "bert"}',
    "bin/pytorch_model.bin": "",
    "pointer/model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "ran/hf/config.json": "{}",
    "cut/model.safetensors": "\x10\x27" + "\0" * 1006,
}
"""File -> its text."""
CALL = """
import json, sys, time
sys.modules["wandb"] = None  # as if it were not installed
from mcore_rl.cli import main
spent_s = []
for words in json.loads(sys.argv[1]):
    assert main(words) == 2, words
    spent_s.append(time.process_time())
print(json.dumps([spent_s, [name for name in sys.argv[2:] if name in sys.modules]]))
"""
HEAVY = ("torch", "transformers", "megatron", "sglang", "ray")
"""Packages that take seconds to import."""
MOST_WORK = 5
"""So many times the CPU of the start with the first mistake, of which others take about two."""


def write_files(folder: Path, config: Path) -> None:
    """Write what the mistakes name; `config` is the config.json of a model that is supported."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "several/b.jsonl").write_text(PROMPT, encoding="utf-16")
    for model in ("bin", "pointer", "cut"):
        shutil.copy(config, folder / model / "config.json")
    write_parquet([{"prompt": "Ada has 12 coins", "solution": "12"}], folder / "trl.parquet")


def test_a_mistake_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    given = stub_inputs(tmp_path, "qwen3_30b_a3b_grpo_32")
    write_files(tmp_path, tmp_path / "qwen3_30b_a3b_grpo_32_model/config.json")
    mistakes = [
        *MISTAKES,
        *((["train", QWEN, *given, *BESIDE.get(word, []), word], told) for word, told in OF_INPUTS),
    ]
    taken = socket.create_server(("127.0.0.1", 0))
    port = f"log.prometheus_port={taken.getsockname()[1]}"
    mistakes.append((["train", QWEN, *given, port], f"{port} is not free on 127.0.0.1"))
    of_agent = ["agent", "run", QWEN, *given, "agents.environment=tools"]
    mistakes.append(([*of_agent, "reward.path=no.py"], "reward.path=no.py: no such file"))
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CALL, json.dumps([words for words, _ in mistakes]), *HEAVY],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    taken.close()
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("mcore-rl: ")]
    assert len(mistakes) == len(told) > 50
    wrong = [
        (words, expected, line)
        for (words, expected), line in zip(mistakes, told, strict=True)
        if expected not in line
    ]
    assert not wrong
    spent_s, imported = json.loads(done.stdout)
    assert imported == []
    alone_s = [spent_s[0] + after - before for before, after in pairwise(spent_s)]
    assert max(alone_s) < MOST_WORK * spent_s[0], alone_s
