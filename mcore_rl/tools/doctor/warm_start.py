"""Makes a small model, with sizes that kernels for GPUs have, that solves some sums already.

    python -m mcore_rl.tools.doctor.warm_start --out data/warm_start

    data/warm_start/train.parquet    prompts of arithmetic word problems
    data/warm_start/hf/              the weights after supervised fine-tuning, and the tokenizer

A machine without a GPU makes it, in minutes; the GPU check "reward rises" trains from it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.process.command_line import parse_arguments
from mcore_rl.process.cores import check_threads
from mcore_rl.process.safe_path import keep_path_safe, safe_module

SIZES = {"head_dim": 64, "moe_intermediate_size": 128}
"""Entries of the tiny model's config.json that differ, as kernels for GPUs ask."""
FOLDER = Path("data/warm_start")
PROMPTS, WEIGHTS = "train.parquet", "hf"


def prepare(folder: Path) -> None:
    """Write the arithmetic data to `folder`, and a model of these sizes to `folder`/model."""
    # Late: checks that need torch alone are listed where pyarrow and transformers are missing.
    from mcore_rl.tasks.arithmetic import prepare_arithmetic

    prepare_arithmetic(folder)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SIZES))


def make_warm_start(out: Path, settings: Sequence[str] = ()) -> None:
    """Fine-tune a random model and leave prompts and weights in `out`, which appears when whole.

    settings   further ones of `mcore-rl sft`, in the words of its command line

    Raises ValueError if `out` is there already, RuntimeError if the training fails.
    """
    if out.exists():
        raise ValueError(f"--out={out} is there already: remove it, or name another folder")
    work = out.with_name(f"{out.name}.partial").resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    prepare(work)
    command = [*safe_module("mcore_rl.cli"), "sft", "recipe=tiny_moe_grpo"]
    command += [f"run.dir={work / 'sft'}", f"model.path={work / 'model'}", "model.init=random"]
    command += [f"sft.data=[{work / 'sft.parquet'}]", *settings]
    status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    if status:
        raise RuntimeError(f"mcore-rl sft ended with status {status}; its logs are in {work}/sft")
    whole = work / "whole"
    whole.mkdir()
    (work / "sft" / "hf").rename(whole / WEIGHTS)
    (work / PROMPTS).rename(whole / PROMPTS)
    whole.rename(out)
    shutil.rmtree(work)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Make a small model that the GPU checks train from."
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to make (%(default)s)")
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="of mcore-rl sft, as run.seed=1"
    )
    args = parse_arguments(parser, argv)
    keep_path_safe()
    try:
        check_threads(os.environ)
        make_warm_start(args.out, args.settings)
    except (ValueError, RuntimeError) as error:
        print(f"warm_start: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    num_mib = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file()) / 2**20
    print(f"{args.out}: {num_mib:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
