"""Every command with tiny input, and how it ends; a process in a rough place runs all of them.

prepare(folder)          models, data, a run ... that an ordinary user cannot change
quick_commands(folder)   name -> Command, with paths in `folder` and in the working folder
python -c WALK           forks a process for each, which has imported torch already
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.process.network import find_free_port
from tests.support.runs import SMALL

WALK = "from tests.support.rough_commands import walk; walk()"
COMMANDS = {
    "mcore-rl": "import sys; from mcore_rl.cli import main; sys.exit(main())",
    "mcore-rl-ckpt": "import sys; from checkpoint_tools.cli import main; sys.exit(main())",
}
"""Name of an installed command -> the code that it runs."""
CKPT = "ckpt "
"""How names of commands of mcore-rl-ckpt begin."""
DATA = {"data.train": "train", "eval.data": "heldout"}
NO_PERMISSION = "no permission for user "


@dataclass(frozen=True)
class Command:
    """Words of a command line, its exit status, and text that it prints."""

    words: tuple[str, ...]
    status: int = 0
    says: str = ""


def prepare(folder: Path) -> None:
    """Make what the commands read. All may read all of it, but for what is named closed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mcore_rl.tasks.arithmetic import prepare_arithmetic
    from mcore_rl.tasks.calculator import prepare_calculator

    prepare_arithmetic(folder, seed=0)
    prepare_calculator(folder / "calculator")
    torch.manual_seed(0)
    for model in (folder / "model", folder / "calculator" / "model"):
        config = AutoConfig.from_pretrained(model)
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights.save_pretrained(model)
        (model / "model.safetensors").chmod(0o644)  # made by safetensors with 0600
    _write_small(folder)
    for name in ("bare", "closed"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes((folder / "model/config.json").read_bytes())
    for closed in (folder / "closed" / "model.safetensors", folder / "closed.parquet"):
        closed.touch(0)


def _write_small(folder: Path) -> None:
    """Write a run to report on, passages to search and pairs to prefer."""
    from mcore_rl.data.preferences import preference_row
    from mcore_rl.data.rows import write_parquet
    from mcore_rl.logs.ledger.ledger import LaunchEntry, RunLedger

    rows = [{"step": 0, "eval/accuracy": 0.1}, {"step": 1, "reward/mean": 0.2}]
    passages = [{"id": str(i), "contents": f"Ada {i}\nhas {i} coins"} for i in range(9)]
    (folder / "run").mkdir()
    for path, lines in (("run/metrics.jsonl", rows), ("corpus.jsonl", passages)):
        (folder / path).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with RunLedger(folder / "run/ledger.jsonl") as ledger:
        ledger.begin(LaunchEntry(0, 0, (), (9,), 0, "sync", 0, 1))
    question = [{"role": "user", "content": "Ada has 12 coins"}]
    pair = preference_row(question, "12 coins", "coins")
    write_parquet([pair] * 8, folder / "pairs.parquet")


def quick_commands(given: Path) -> Mapping[str, Command]:
    """Return commands that do all their work, or refuse their input, without Ray and SGLang."""
    model, bare = f"{given}/model", f"{given}/bare"
    recipe = (*_recipe_with_data(given), "run.dir=run")
    with_model = (*recipe, f"model.path={model}")
    without = (*recipe, f"model.path={bare}", f"sft.data=[{given}/sft.parquet]", "dpo.data=[x]")
    no_weights = f"{bare} has no .safetensors files"
    refused = ("sft", "dpo", "pairs", "train", "eval")
    no_job = "no job was submitted for this folder"
    option = "actor_rollout_ref.actor.optim.lr=1e-6"
    checks = "--only=packages,limits,space,folder,cache,model"
    return {
        **{name: Command((name, *without), 2, no_weights) for name in refused},
        **{name: Command((name, "run"), 2, no_job) for name in ("status", "logs", "cancel")},
        "data": Command(("data", "arithmetic", "--out=made"), says="6000 training"),
        "plan": Command(("plan", *with_model), says="fits"),
        "simulate": Command(("simulate", *with_model), says="picture, trace and numbers"),
        "options": Command(("options", "kl"), says="algorithm.kl.coef"),
        "translate": Command(("translate", "verl", option, "--out=made.yaml"), says="options"),
        "submit": Command(
            ("submit", "train", *with_model, "launch=local", "--dry-run"), says="submit it with"
        ),
        "doctor": Command(("doctor", f"--model={model}", "--run-dir=run", checks), says="0 failed"),
        "report": Command(("report", "own_run"), says="reward_curve.png"),
        "ledger": Command(("ledger", "own_run"), says="the books balance"),
        **{
            f"engines {do}": Command(
                ("engines", do, "own_run", *engine), 2, "no command that takes requests runs"
            )
            for do, *engine in (("list",), ("add",), ("drain", "0"))
        },
        "view": Command(("view", "own_run", "--once"), says="own_run: step"),
        "serve": Command(("serve", bare), 2, "has no tokenizer_config.json"),
        "agent run": Command(("agent", "run", *without), 2, "agents.environment is not set"),
        "sandbox serve": Command(("sandbox", "serve", "--port=0", "--once", "--workers=1")),
        **_search_commands(given),
        **{f"{CKPT}{name}": command for name, command in _ckpt_commands(model).items()},
    }


def _recipe_with_data(given: Path) -> tuple[str, ...]:
    data = (f"{group}=[{given}/{name}.parquet]" for group, name in DATA.items())
    return ("recipe=tiny_moe_grpo", *data)


def _search_commands(given: Path) -> Mapping[str, Command]:
    build = ("build", f"--corpus={given}/corpus.jsonl", "--out=index")
    ask = ("serve", "--index=index", "--port=0", "--ask=coins", "--once")
    return {
        "search build": Command(("search", *build), says="9 passages"),
        "search query": Command(("search", "query", "coins", "--index=index"), says="has 1 coins"),
        "search serve": Command(("search", *ask), says="has 1 coins"),
    }


def _ckpt_commands(model: str) -> Mapping[str, Command]:
    """Return commands of mcore-rl-ckpt; each reads what those before it wrote."""
    return {
        "from-hf": Command(("from-hf", model, "megatron"), says="12 tensors"),
        "inspect": Command(("inspect", "megatron"), says="checksums.json"),
        "to-hf": Command(("to-hf", "megatron", "hf", f"--source-hf={model}"), says="135 tensors"),
        "merge-lora": Command(
            ("merge-lora", model, "merged", f"--source-hf={model}"), 2, "holds no adapter"
        ),
        "verify": Command(("verify", "megatron", "hf"), says="equal: 135 tensors"),
        "checksums": Command(("checksums", "megatron"), says="checksums.json"),
        "to-fp8": Command(("to-fp8", model, "fp8"), says="247 tensors"),
        "dequantize": Command(("dequantize", "fp8", "plain"), says="135 tensors"),
        "turn-experts": Command(("turn-experts", model, "turned"), 2, "one form of experts"),
        "text-only": Command(("text-only", model, "text"), 2, "one of another family"),
        "support": Command(("support", model), says="Qwen3MoeForCausalLM: supported"),
        "upcycle": Command(("upcycle", model, "upcycled"), 2, "has no counterpart with experts"),
    }


def refused_commands(given: Path) -> Mapping[str, Command]:
    """Return commands that read or write what an ordinary user may not."""
    recipe = _recipe_with_data(given)
    with_model = (*recipe, f"model.path={given}/model")
    option = "actor_rollout_ref.actor.optim.lr=1e-6"
    words = {
        "train": (*recipe, f"model.path={given}/closed", "run.dir=run"),
        "sft": (*with_model, f"sft.data=[{given}/closed.parquet]", "run.dir=run"),
        "data": ("arithmetic", f"--out={given}/made"),
        "simulate": (*with_model, f"--out={given}/made"),
        "submit": (*with_model, f"run.dir={given}/run", "launch=local", "--dry-run"),
        "translate": ("verl", option, f"--out={given}/made.yaml"),
        "report": (f"{given}/run",),
        "search": ("build", f"--corpus={given}/corpus.jsonl", f"--out={given}/index"),
        f"{CKPT}from-hf": (f"{given}/closed", "closed_megatron"),
        f"{CKPT}to-fp8": (f"{given}/model", f"{given}/fp8"),
    }
    return {
        name: Command((name.removeprefix(CKPT), *more), 2, NO_PERMISSION)
        for name, more in words.items()
    }


def long_commands(given: Path) -> Mapping[str, Command]:
    """Return commands that train and serve for a few seconds each."""
    recipe = (
        "recipe=tiny_moe_grpo",
        f"model.path={given}/model",
        f"data.train=[{given}/train.parquet]",
        f"eval.data=[{given}/heldout.parquet]",
        *SMALL,
        "reward.noise=1.0",
    )
    agent = (
        "recipe=tiny_agent_calculator",
        f"model.path={given}/calculator/model",
        f"data.train=[{given}/calculator/train.parquet]",
        f"eval.data=[{given}/calculator/heldout.parquet]",
    )
    serve = (f"{given}/model", "--kv-cache-len=4096", "--ask=Ada has 12 coins .", "--once")
    steps = ("sft.steps=1", "sft.batch_size=8", "dpo.steps=1", "dpo.batch_size=4", "run.steps=1")
    data = (f"sft.data=[{given}/sft.parquet]", f"dpo.data=[{given}/pairs.parquet]")
    few = ("dpo.prompts=16", "rollout.samples_per_prompt=32")  # of which one in ten ends by itself
    trained = {name: (name, *recipe, *steps, *data, f"run.dir={name}") for name in ("sft", "dpo")}
    words = {
        **trained,
        "pairs": ("pairs", *recipe, *few, "run.dir=pairs"),
        "train": ("train", *recipe, "run.steps=1", "checkpoint.every_steps=1", "run.dir=train"),
        "eval": ("eval", *recipe, "run.dir=eval"),
        "serve": ("serve", *serve, f"--port={find_free_port('127.0.0.1')}"),
        "agent run": ("agent", "run", *agent),
    }
    return {name: Command(each) for name, each in words.items()}


def walk() -> None:
    """Run commands (JSON in argv: name -> words) in forks; print name -> [status, output]."""
    from mcore_rl.process.folders import keep_home_usable

    keep_home_usable()  # as a command does, before libraries look for their caches
    import checkpoint_tools.cli
    import checkpoint_tools.to_hf  # imports torch
    import mcore_rl.cli
    import mcore_rl.run.commands  # imports Ray

    ended: dict[str, tuple[int, str]] = {}
    for name, words in json.loads(sys.argv[1]).items():
        main = checkpoint_tools.cli.main if name.startswith(CKPT) else mcore_rl.cli.main
        with tempfile.TemporaryFile() as output:
            if not (child := os.fork()):
                _run(main, words, output.fileno())
            _, status = os.waitpid(child, 0)
            output.seek(0)
            text = output.read().decode(errors="replace")
        ended[name] = (os.waitstatus_to_exitcode(status), text)
    print(json.dumps(ended))


def _run(main: Callable[[Sequence[str]], int], words: Sequence[str], output: int) -> None:
    """Carry out a command in this process, a fork, and end it."""
    status = 1
    try:
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        status = main(words)
    except SystemExit as refusal:  # of arguments
        status = int(refusal.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
