"""Measures whole GRPO steps of this system and of TRL on one GPU, one after the other.

    python benchmarks/gpu_grpo.py --trl-site DIR --logs DIR
    python benchmarks/gpu_grpo.py --device cpu        # the smallest size, without a GPU

Both train the same model, of random weights made here, on the same prompts with the same lengths,
number of samples and settings of the optimizer (grpo_options.py). Here trainer and SGLang take
turns on the GPU, in bfloat16 with float32 copies of the weights in the optimizer. TRL runs in every
way that --ways names, and the fastest counts; all but "padded" compute less than this system, as
they keep no float32 weights. Its samples come from transformers, so TRL is not given: vLLM or
another engine, Flash Attention, Liger's kernels, torch.compile, and a search for the fastest
micro-batch. Nor does it recompute activations. This system is not given a search either.

A side that fails, or for which no time is left, says so in the last line, which is JSON.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from grpo_models import make_workload
from grpo_options import WAYS
from grpo_rivals import ALLOCATOR, TRL_SITE, install_trl
from grpo_workload import BY_NAME, GPU_WORKLOADS, WORKLOADS, Workload
from mcore_rl.device import describe_device, has_cuda
from mcore_rl.process.clock import now_s
from quiet_command import ROOT

WARMUP_STEPS = 2
PACKAGES = ("torch", "sglang", "megatron-core", "transformer-engine", "ray", "transformers")
LEAST_S = 60.0
"""Time that must be left for a side to begin."""
ENDING_S = 45.0
"""How long a side that is out of time may take to end what it started."""
VERSIONS_S = 300.0
"""How long TRL's side may take to import what it needs."""
Side = dict[str, Any]


class UnusableError(ValueError):
    """An option names what this machine does not have."""


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    until_s = now_s() + args.seconds
    try:
        versions = check(args)
    except UnusableError as error:
        parser.error(str(error))
    cells = {}
    for workload in choose_workloads(args):
        with tempfile.TemporaryDirectory(prefix="gpu_grpo_") as folder:
            cells[workload.name] = compare(workload, Path(folder), until_s, args)
    print(json.dumps({**describe_device(), "versions": versions, "workloads": cells}))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["ways:", *(f"  {name:18}{text}" for name, text in WAYS.items())]),
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--workloads", nargs="+", choices=tuple(BY_NAME), help="the first by device"
    )
    parser.add_argument("--steps", type=int, default=6, help=f"{WARMUP_STEPS} of them warm-up")
    parser.add_argument("--seconds", type=float, default=530.0, help="for everything")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), help="of TRL; all on a GPU")
    parser.add_argument("--trl-micro-batch", type=int, help="sequences; a quarter of a step's")
    parser.add_argument("--trl-python", help="a Python with torch of its own (this one)")
    parser.add_argument("--trl-site", type=Path, help="what trl_site.py made (installed if unset)")
    parser.add_argument("--max-tokens", type=int, default=32768, help="of a micro-batch here")
    parser.add_argument("--logs", type=Path, default=Path("runs/gpu_grpo"), help="must be new")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value, of mcore-rl train")
    return parser


def choose_workloads(args: argparse.Namespace) -> list[Workload]:
    """Return the workloads that were asked for, or the first one for the device."""
    if args.workloads:
        return [BY_NAME[name] for name in args.workloads]
    return [(GPU_WORKLOADS if args.device == "cuda" else WORKLOADS)[0]]


def choose_micro_batch(args: argparse.Namespace, workload: Workload) -> int:
    """Return the sequences of TRL's micro-batch."""
    return args.trl_micro_batch or max(1, workload.num_samples // 4)


def check(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the versions of both sides. Raises UnusableError, in seconds, for what cannot run."""
    check_options(args)
    if args.trl_site is None:
        install_trl()
    command = make_trl_command(args, "--versions", "--device", args.device)
    done = subprocess.run(
        command,
        env=make_trl_environment(args),
        capture_output=True,
        text=True,
        timeout=VERSIONS_S,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UnusableError(f"TRL's side cannot run on {args.device}: {' '.join(command)}: {why}")
    return {"ours": find_versions(), "trl": json.loads(done.stdout.splitlines()[-1])}


def check_options(args: argparse.Namespace) -> None:
    """Raise UnusableError for an option that names what is not there or does not fit."""
    if args.device == "cuda" and not has_cuda():
        raise UnusableError("--device cuda: torch finds no GPU here; try --device cpu")
    if args.steps <= WARMUP_STEPS:
        raise UnusableError(f"--steps {args.steps}: more than {WARMUP_STEPS}, which are warm-up")
    if args.logs.exists():
        raise UnusableError(f"--logs {args.logs} is there already: name another folder")
    if args.trl_site and not (args.trl_site / "trl").is_dir():
        raise UnusableError(f"--trl-site {args.trl_site} has no trl: make it by trl_site.py")
    if args.trl_python and shutil.which(args.trl_python) is None:
        raise UnusableError(f"--trl-python {args.trl_python} is no program")
    for workload in choose_workloads(args):
        size = choose_micro_batch(args, workload)
        if size < 1 or workload.num_samples % size:
            samples = f"the {workload.num_samples} samples of {workload.name}"
            raise UnusableError(f"--trl-micro-batch {size} does not divide {samples}")


def find_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def compare(
    workload: Workload, folder: Path, until_s: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of each side, which are printed as they come, and their ratio."""
    # In a process of its own, which gives back the GPU's memory.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(make_workload, workload, folder).result()
    options = ["--workload", workload.name, "--folder", str(folder), "--steps", str(args.steps)]
    options += ["--device", args.device]
    logs = args.logs / workload.name
    logs.mkdir(parents=True)
    own = [sys.executable, str(ROOT / "benchmarks/grpo_ours.py"), *options]
    own += ["--run-dir", str(logs.resolve() / "run"), "--max-tokens", str(args.max_tokens)]
    commands = {"ours": ([*own, *args.overrides], dict(os.environ))}
    micro_batch = choose_micro_batch(args, workload)
    for way in args.ways or (WAYS if args.device == "cuda" else ["padded"]):
        told = [*options, "--micro-batch", str(micro_batch), "--way", way]
        commands[f"trl_{way}"] = (make_trl_command(args, *told), make_trl_environment(args))
    sides = {}
    for name, (command, environment) in commands.items():
        side = run_side(command, environment, until_s, logs / f"{name}.log")
        sides[name] = summarize_side(workload, side)
        print(json.dumps({workload.name: {name: sides[name]}}), flush=True)
    return summarize(sides)


def make_trl_command(args: argparse.Namespace, *options: str) -> list[str]:
    script = str(ROOT / "benchmarks/grpo_trl.py")
    return [args.trl_python or sys.executable, script, *options]


def make_trl_environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables of TRL's process, whose packages come from its site first.

    Another Python sees nothing else than its own besides.
    """
    site = str((args.trl_site or TRL_SITE).resolve())
    inherited = "" if args.trl_python else os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (site, inherited)))
    return os.environ | ALLOCATOR | {"PYTHONPATH": path}


def run_side(
    command: Sequence[str], environment: Mapping[str, str], until_s: float, log: Path
) -> Side:
    """Return what a side prints last; {"failed": ...} or {"left_out": ...} without it.

    until_s  when it has to be done, by process/clock.py
    log      gets all it prints
    """
    left_s = until_s - now_s()
    if left_s < LEAST_S:
        return {"left_out": f"{left_s:.0f} s were left"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(left_s)
        except subprocess.TimeoutExpired:
            status = f"none after {left_s:.0f} s"
            end(process)
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    if status == 0:
        return json.loads(lines[-1])
    return {"failed": f"status {status}: {lines[-1][-500:]}"}


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process and what it started, and kill them if that does not end them."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def summarize_side(workload: Workload, side: Side) -> Side:
    """Return tokens per second and seconds of the steps after the warm-up, by phase."""
    if "tokens" not in side:
        return side
    warm = WARMUP_STEPS - 1  # the first step is not in the lists
    seconds, tokens = side["seconds"][warm:], side["tokens"][warm:]
    phases = {name: statistics.median(times[warm:]) for name, times in side["phases"].items()}
    return {
        "tokens_per_second": round(sum(tokens) / sum(seconds), 1),
        "response_len": round(statistics.fmean(tokens) / workload.num_samples, 1),
        "steps": len(seconds),
        "step_s": round(statistics.median(seconds), 3),
        "slowest_step_s": round(max(seconds), 3),
        "phases_s": {name: round(value, 3) for name, value in phases.items()},
    }


def summarize(sides: Mapping[str, Side]) -> dict[str, Any]:
    """Return the sides, TRL's fastest way and the ratio to it; null where a side has no figures."""
    rates = {name: side.get("tokens_per_second", 0.0) for name, side in sides.items()}
    fastest = max((name for name in rates if name != "ours"), key=lambda name: rates[name])
    is_whole = rates["ours"] and rates[fastest]
    return {
        **sides,
        "fastest": fastest if rates[fastest] else None,
        "ratio": round(rates["ours"] / rates[fastest], 3) if is_whole else None,
    }


if __name__ == "__main__":
    main()
