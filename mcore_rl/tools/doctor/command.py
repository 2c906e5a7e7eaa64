"""Checks this machine, several machines against one another, or what a GPU can do."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rl.process.command_line import parse_arguments
from mcore_rl.process.cores import check_threads
from mcore_rl.tools.doctor.gpu_checks import add_gpu_checks, is_for_gpu_checks, run_gpu_checks
from mcore_rl.tools.doctor.machine.needs import (
    CONTAINER_RUNTIMES,
    MachineNeeds,
    NamedModel,
    read_recipe,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="recipe=<name> and overrides, to check for; of the GPU checks, for the stage run",
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


def run_doctor(args: argparse.Namespace) -> None:
    """Raise ValueError if nothing can be checked as asked, RuntimeError if a check failed."""
    if is_for_gpu_checks(args):
        run_gpu_checks(args)
        return
    _check_machines(args)


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
