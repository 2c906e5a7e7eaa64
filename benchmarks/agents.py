"""Measures the gateway that episodes of agents speak through, beside others.

Two measurements, each with a client, a gateway and a stand-in engine of fixed latency in a
process of its own, all on the same cores:

load     2,000 episodes of 8 turns at once, at 500 requests per second: how much later than the
         engine's latency an answer comes, lag of the gateway's event loop, memory per episode
speed    fewer episodes as fast as they go, some at a time: requests per second of this gateway,
         of rLLM's, which keeps its traces in memory, and of the interception server of verifiers,
         which keeps a graph of messages

The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agents_rivals import DEADLINE_S, RIVALS, python_path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"


def main() -> None:
    args = parse_arguments()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: args.cores]))
    figures: dict[str, Any] = {}
    if not args.skip_load:
        latency_s = args.episodes / args.rate
        figures["load"] = measure(args, "agents_gateway.py", latency_s, args.episodes, latency_s)
    if not args.skip_rivals:
        figures |= compare(args)
    print(json.dumps(rounded(figures)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rate", type=float, default=500.0, help="requests per second under load")
    parser.add_argument(
        "--at-once", type=int, nargs="+", default=[16, 100], help="episodes at a time, for speed"
    )
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--latency-s", type=float, default=0.02, help="of the engine, for speed")
    parser.add_argument("--speed-episodes", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement of speed")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--chat", default="agents_gateway:EngineChat", help="module:factory of the recorder"
    )
    parser.add_argument("--skip-load", action="store_true")
    parser.add_argument("--skip-rivals", action="store_true")
    return parser.parse_args()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Return the requests per second of each gateway, and by which factor ours is the fastest.

    All are measured in turns. A gateway's speed is its best over the numbers of episodes at a
    time, each the median of its repeats.
    """
    scripts = {"ours": "agents_gateway.py"}
    for name in args.rivals:
        RIVALS[name].install()
        scripts[name] = RIVALS[name].script
    found: dict[str, dict[str, list[float]]] = {name: {} for name in scripts}
    for _ in range(args.repeats):
        for at_once in args.at_once:
            for name, script in scripts.items():
                figures = measure(args, script, args.latency_s, at_once, 0.0, args.speed_episodes)
                found[name].setdefault(str(at_once), []).append(figures["requests_per_s"])
    best = {
        name: max(statistics.median(speeds) for speeds in by_number.values())
        for name, by_number in found.items()
    }
    fastest = max((best[name] for name in args.rivals), default=float("nan"))
    return {"requests_per_s": best, "ratio": best["ours"] / fastest, "runs": found}


def measure(
    args: argparse.Namespace,
    script: str,
    latency_s: float,
    at_once: int,
    ramp_s: float,
    episodes: int | None = None,
) -> dict[str, float]:
    """Return what client and gateway measured in one run."""
    episodes = episodes or args.episodes
    engine_command = ["agents_engine.py", f"--latency-s={latency_s}", f"--turns={args.turns}"]
    with started(engine_command) as engine:
        url = f"http://127.0.0.1:{json.loads(read_line(engine, 'the engine'))}"
        command = [script, f"--engine-url={url}", f"--episodes={episodes}"]
        if script == "agents_gateway.py":
            command.append(f"--chat={args.chat}")
        with started(command) as gateway:
            job = {
                **json.loads(read_line(gateway, script)),
                "turns": args.turns,
                "at_once": at_once,
                "ramp_s": ramp_s,
                "latency_s": latency_s,
                "seed": args.seed,
            }
            client = subprocess.run(
                [sys.executable, str(FOLDER / "agents_client.py")],
                input=json.dumps(job).encode(),
                stdout=subprocess.PIPE,
                timeout=DEADLINE_S,
            )
            if client.returncode:
                sys.exit(f"the client of {script} failed")
            output, _ = gateway.communicate(timeout=DEADLINE_S)
    figures = json.loads(client.stdout) | json.loads(output.strip().splitlines()[-1])
    print(script, rounded(figures), flush=True)
    return figures


@contextlib.contextmanager
def started(command: list[str]) -> "Iterator[subprocess.Popen[str]]":
    """Run a script of this folder, and end it afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(FOLDER / command[0]), *command[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path(command[0], FOLDER, ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_line(process: "subprocess.Popen[str]", name: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"{name} ended before it listened")
    return line


def rounded(figures: Any) -> Any:
    if isinstance(figures, dict):
        return {name: rounded(value) for name, value in figures.items()}
    if isinstance(figures, list):
        return [rounded(value) for value in figures]
    return round(figures, 2) if isinstance(figures, float) else figures


if __name__ == "__main__":
    main()
