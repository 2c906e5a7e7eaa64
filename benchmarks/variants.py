"""Trains variants of a laptop recipe from one warm start, over seeds; returns the runs' folders.

A run that exists is not repeated, so a killed benchmark continues where it was.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.logs.rows import read_rows

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 3600
Folders = dict[str, list[Path]]
"""Variant -> its run folders, by seed."""


@dataclass(frozen=True)
class Problems:
    """A recipe, and the kind of problems it trains on (`mcore-rl data <kind>`)."""

    kind: str
    recipe: str


ARITHMETIC = Problems("arithmetic", "recipe=tiny_moe_grpo")
COUNTDOWN = Problems("countdown", "recipe=tiny_moe_countdown")


def train_variants(
    text: str, problems: Problems, variants: Mapping[str, Sequence[str]], name: str
) -> tuple[Folders, Path]:
    """Carry out the runs that the command line asks for; return their folders and parent folder."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--only", default=",".join(variants), help="comma-separated")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / name)
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    args = parser.parse_args()
    chosen = args.only.split(",")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    unknown = sorted(set(chosen) - set(variants))
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(variants)}")
    warm_start = make_warm_start(problems, args.out)
    folders: Folders = {variant: [] for variant in chosen}
    for seed in seeds:
        for variant in chosen:
            folder = args.out / f"{variant}_{seed}"
            folders[variant].append(folder)
            settings = [
                f"model.path={warm_start}",
                f"run.seed={seed}",
                *variants[variant],
                *args.overrides,
            ]
            train(problems, folder, settings)
    return folders, args.out


def make_warm_start(problems: Problems, out: Path) -> Path:
    """Return the HuggingFace directory of the warm-started model, made if it does not exist."""
    data = ROOT / "data" / problems.kind
    folder = out / "warm_start"
    if not (data / "train.parquet").exists():
        mcore_rl(["data", problems.kind, "--out", str(data)])
    if not (folder / "hf" / "config.json").exists():
        mcore_rl(["sft", problems.recipe, "model.init=random", f"run.dir={folder}"])
    return folder / "hf"


def train(problems: Problems, folder: Path, settings: Sequence[str]) -> None:
    if not (folder / "summary.json").exists():
        common = ["checkpoint.export_hf=false", "log.console=false"]
        mcore_rl(["train", problems.recipe, f"run.dir={folder}", *common, *settings])


def mcore_rl(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "mcore_rl.cli", *arguments]
    print(" ".join(arguments), flush=True)
    subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)


def read_summaries(folders: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads((folder / "summary.json").read_text()) for folder in folders]


def step_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each training step."""
    return [row for row in read_rows(folder / "metrics.jsonl") if "rollout/samples" in row]
