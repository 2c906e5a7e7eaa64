"""Runs the chosen stages on this machine's GPU, or on its CPU."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", action="store_true", help="on this machine's GPU; without it, on the CPU"
    )
    parser.add_argument("--stages", default="", help="comma-separated; all by default")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use, without a network")
    parser.add_argument(
        "--logs", type=Path, default=Path("runs/doctor"), help="folder for output (%(default)s)"
    )


def run_doctor(args: argparse.Namespace) -> None:
    """Raise ValueError if nothing can be checked as asked, RuntimeError if a check failed."""
    if not args.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks, here and in the checks
    from mcore_rl.device import has_cuda
    from mcore_rl.doctor.runner import run_stages
    from mcore_rl.doctor.stages import choose_stages
    from mcore_rl.doctor.wheels import wheels_installed

    if args.gpu and not has_cuda():
        raise ValueError("--gpu: torch sees no GPU here; leave it out to check on the CPU")
    stages = choose_stages(args.stages)
    with wheels_installed(args.wheels):
        if not run_stages(stages, args.logs):
            raise RuntimeError(f"checks failed; what they printed lies in {args.logs}")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if no check failed, 1 if one did, 2 if nothing could be checked."""
    parser = argparse.ArgumentParser(prog="mcore-rl doctor", description=__doc__)
    add_arguments(parser)
    try:
        run_doctor(parser.parse_args(argv))
    except (ValueError, RuntimeError) as error:
        print(f"mcore-rl doctor: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0
