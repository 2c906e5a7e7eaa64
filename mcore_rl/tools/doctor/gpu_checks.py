"""The options of the GPU checks, which run as real processes: which checks, and in what time.

One folder holds all that compilers of GPU kernels write, so that it can be carried: the first run
on a machine compiles for minutes, a run with the folder of an earlier one does not.
"""

import argparse
import json
import os
from collections.abc import MutableMapping
from pathlib import Path

CACHES = Path("runs/doctor_caches")
_VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "SGLANG_CACHE_DIR": "sglang",
    "CUDA_CACHE_PATH": "driver",
}
"""Variable -> folder below the one that is named; the last is of the driver, which compiles PTX."""


def keep_compiled(folder: Path, environ: MutableMapping[str, str]) -> None:
    """Set the variables that compilers read; those that are set already stay."""
    for variable, name in _VARIABLES.items():
        environ.setdefault(variable, str(folder.resolve() / name))


def add_gpu_checks(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--gpu", action="store_true", help="run the GPU checks on this machine's GPU"
    )
    group.add_argument(
        "--stages", default="", help="comma-separated, or all; without --gpu they run on the CPU"
    )
    group.add_argument(
        "--checks",
        default="",
        metavar="STAGE:CHECK",
        help='comma-separated, as in "te:speed,te:shared prefixes"; likewise',
    )
    group.add_argument("--list", action="store_true", help="show the checks and start none")
    group.add_argument(
        "--seconds", type=float, help="skip checks that may take longer than what is left of it"
    )
    group.add_argument(
        "--logs", type=Path, default=Path("runs/doctor"), help="folder for output (%(default)s)"
    )
    group.add_argument(
        "--caches",
        type=Path,
        default=CACHES,
        help="folder for what compilers of GPU kernels make (%(default)s)",
    )
    group.add_argument(
        "--warm-start",
        type=Path,
        help="folder that make warm-start made, for the check 'reward rises' (data/warm_start)",
    )


def is_for_gpu_checks(args: argparse.Namespace) -> bool:
    """Return whether the GPU checks are asked for.

    Raises ValueError for an option of the GPU checks without --gpu, --stages or --checks.
    """
    if args.gpu or args.stages or args.checks or args.list:
        return True
    for name in ("seconds", "warm_start"):
        value = getattr(args, name)
        if value is not None:
            option = f"--{name.replace('_', '-')}={value}"
            raise ValueError(
                f"{option} is an option of the GPU checks: add --gpu, --stages or --checks"
            )
    return False


def run_gpu_checks(args: argparse.Namespace) -> None:
    """Raise ValueError if nothing can be checked as asked, RuntimeError if a check failed."""
    if args.rendezvous or args.only:
        raise ValueError(
            "--gpu, --stages and --checks run the GPU checks, without --only and nodes"
        )
    if not args.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks, here and in the checks
    from mcore_rl.device import has_cuda
    from mcore_rl.tools.doctor.run_checks import RUN, SETTINGS, WARM_START
    from mcore_rl.tools.doctor.runner import run_stages
    from mcore_rl.tools.doctor.stages import choose_stages, describe_checks

    stages = choose_stages("" if args.stages == "all" else args.stages, args.checks)
    if args.list:
        print(describe_checks(stages))
        return
    if args.gpu and not has_cuda():
        raise ValueError("--gpu: torch sees no GPU here; --stages all runs the checks on the CPU")
    if args.settings and RUN.name not in [stage.name for stage in stages]:
        raise ValueError(
            f"{args.settings[0]}: the GPU checks take settings for the stage run alone"
        )
    os.environ[SETTINGS] = json.dumps(args.settings)  # for the check's process
    if args.warm_start is not None:
        if not args.warm_start.is_dir():
            raise ValueError(f"--warm-start={args.warm_start} is no folder: make warm-start")
        os.environ[WARM_START] = str(args.warm_start.resolve())
    if args.gpu:
        keep_compiled(args.caches, os.environ)
    if not run_stages(stages, args.logs, args.seconds):
        raise RuntimeError(f"checks failed; what they printed lies in {args.logs}")
