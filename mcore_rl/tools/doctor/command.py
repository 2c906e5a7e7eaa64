"""Checks this machine, several machines against one another, or what a GPU can do."""

import argparse
import json
import os
import sys
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rl.process.command_line import parse_arguments
from mcore_rl.process.cores import check_threads
from mcore_rl.tools.doctor.machine.needs import (
    CONTAINER_RUNTIMES,
    MachineNeeds,
    NamedModel,
    read_recipe,
)

CACHES = Path("runs/doctor_caches")
"""Holds all that compilers of GPU kernels write, so that it can be carried: the first run on a
machine compiles for minutes, a run with the folder of an earlier one does not."""
_VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "SGLANG_CACHE_DIR": "sglang",
    "CUDA_CACHE_PATH": "driver",
}
"""Variable -> folder below the one that is named; the last is of the driver, which compiles PTX."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="recipe=<name> and overrides to check for",
    )
    _add_machine(parser.add_argument_group("checks of this machine"))
    _add_nodes(parser.add_argument_group("checks of several machines, started once on each"))
    add_gpu_checks(
        parser.add_argument_group(
            "GPU checks: real processes, minutes; instead of the checks above"
        )
    )
    parser.set_defaults(run=run_doctor)


def _add_machine(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--json", action="store_true", help="one JSON object per line")
    group.add_argument("--only", default="", metavar="CHECKS", help="comma-separated; else all")
    group.add_argument("--model", type=Path, metavar="DIR", help="HuggingFace directory to check")
    group.add_argument("--run-dir", type=Path, help="folder of a run, if no recipe gives it")
    group.add_argument("--interface", default="", help="network interface of the collectives")
    group.add_argument("--ports", default="", help="comma-separated ports that have to be free")
    group.add_argument("--ray-head", action="store_true", help="a Ray head's default ports, too")
    group.add_argument(
        "--container", choices=CONTAINER_RUNTIMES, default="", help="runtime to look for"
    )


def _add_nodes(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--rendezvous", type=Path, metavar="DIR", help="shared folder where the machines meet"
    )
    group.add_argument("--nodes", type=int, help="machines in all (SLURM_NTASKS)")
    group.add_argument("--node-rank", type=int, help="number of this one (SLURM_PROCID)")
    group.add_argument("--node-name", default="", help="its name in the report (host name)")
    group.add_argument(
        "--timeout-s", type=float, default=60.0, help="of each wait for the others (%(default)s)"
    )


def add_gpu_checks(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--gpu", action="store_true", help="run the GPU checks on this machine's GPU"
    )
    group.add_argument(
        "--stages", default="", help="comma-separated, or all; without --gpu on the CPU"
    )
    group.add_argument(
        "--checks",
        default="",
        metavar="STAGE:CHECK",
        help="such as te:speed,te:shared prefixes; likewise",
    )
    group.add_argument("--list", action="store_true", help="show the checks and start none")
    group.add_argument(
        "--seconds", type=float, help="skip checks that may take longer than is left"
    )
    group.add_argument(
        "--logs", type=Path, default=Path("runs/doctor"), help="folder for output (%(default)s)"
    )
    group.add_argument(
        "--caches",
        type=Path,
        default=CACHES,
        help="folder for compiled kernels (%(default)s)",
    )
    group.add_argument(
        "--warm-start",
        type=Path,
        help="what make warm-start made (data/warm_start)",
    )


def run_doctor(args: argparse.Namespace) -> None:
    """Raise ValueError if nothing can be checked as asked, RuntimeError if a check failed."""
    if is_for_gpu_checks(args):
        run_gpu_checks(args)
        return
    _check_machines(args)


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
    from mcore_rl.tools.doctor.runner import choose_stages, describe_checks, run_stages

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


def keep_compiled(folder: Path, environ: MutableMapping[str, str]) -> None:
    """Set the variables that compilers read; those that are set already stay."""
    for variable, name in _VARIABLES.items():
        environ.setdefault(variable, str(folder.resolve() / name))


def _check_machines(args: argparse.Namespace) -> None:
    from mcore_rl.tools.doctor.machine.checks import choose_checks, run_checks
    from mcore_rl.tools.doctor.machine.finding import has_failed, print_report
    from mcore_rl.tools.doctor.machine.meeting import read_place

    began_s = time.monotonic()
    checks = choose_checks(args.only)
    place = None
    if args.rendezvous or args.nodes is not None or args.node_rank is not None:
        place = read_place(args.nodes, args.node_rank, args.node_name, os.environ)
        if args.rendezvous is None:
            raise ValueError(f"--nodes={place.size}: give --rendezvous, a folder all nodes share")
    needs = read_needs(args, place.size if place else 1)
    findings = run_checks(checks, needs)
    failed = has_failed(findings)
    shown = True
    if place is not None:
        from mcore_rl.tools.doctor.machine.nodes import check_nodes  # imports torch

        findings = [finding.name_node(place.name) for finding in findings]
        outcome = check_nodes(args.rendezvous, place, needs, findings, args.timeout_s)
        findings, failed, shown = outcome.findings, outcome.failed, outcome.shown
    if shown:
        seconds = time.monotonic() - began_s
        print_report(
            findings,
            sys.stdout,
            as_json=args.json,
            seconds=seconds,
            num_nodes=needs.num_nodes,
        )
    if failed:
        where = "the report" if shown else f"the report of node 0 of {needs.num_nodes}"
        raise RuntimeError(f"checks failed: {where} says which, and what to do")


def read_needs(args: argparse.Namespace, num_nodes: int) -> MachineNeeds:
    """Return what the recipe and the options ask of this machine.

    Raises ValueError naming the option at fault.
    """
    ports = [*_parse_ports(args.ports), *(_list_ray_head_ports() if args.ray_head else ())]
    needs = MachineNeeds(
        ports=tuple(dict.fromkeys(ports)),
        interface=args.interface,
        container=args.container,
        num_nodes=num_nodes,
    )
    if args.settings:
        needs = replace(needs, **vars(read_recipe(args.settings)))
    if args.run_dir is not None:
        needs = replace(needs, run_dir=args.run_dir)
    if args.model is not None:
        needs = replace(needs, models=(*needs.models, NamedModel("--model", str(args.model))))
    return needs


def _parse_ports(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdigit() or not 0 < int(word) < 65536:
            raise ValueError(f"--ports={text}: {word!r} is no port; give numbers from 1 to 65535")
    return [int(word) for word in words]


def _list_ray_head_ports() -> tuple[int, ...]:
    from mcore_rl.tools.doctor.machine.needs import RAY_HEAD_PORTS

    return RAY_HEAD_PORTS


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if no check failed, 1 if one did, 2 if nothing could be checked."""
    parser = argparse.ArgumentParser(prog="mcore-rl doctor", description=__doc__)
    add_arguments(parser)
    try:
        check_threads(os.environ)
        run_doctor(parse_arguments(parser, argv))
    except (ValueError, RuntimeError) as error:
        print(f"mcore-rl doctor: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0
