"""Measures the gateway that episodes of agents speak through, beside others.

Two measurements, each with a client, a gateway and a stand-in engine of fixed latency in a
process of its own, all on the same cores. This system's gateway has its recorder behind it, with a
chat template and a tokenizer (agents_model.py).

load     2,000 episodes of 8 turns at once, at 500 requests per second: how much later than the
         engine's latency an answer comes, lag of each process's event loop, CPU time per request,
         memory per episode; then the same of a bare server that passes requests on
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
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents_model import write_tokenizer
from agents_rivals import DEADLINE_S, RIVALS, python_path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"
OURS = "agents_gateway.py"
ECHO = "agents_echo.py"


@dataclass(frozen=True)
class Scene:
    """The parts that all runs share: arguments, the tokenizer's folder, an answer's tokens."""

    args: argparse.Namespace
    model: str
    answer_ids: list[int]


def main() -> None:
    args = parse_arguments()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: args.cores]))
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as model:
        scene = Scene(args, model, write_tokenizer(Path(model)))
        if not args.skip_load:
            latency_s = args.episodes / args.rate
            for name, script in (("load", OURS), ("load_echo", ECHO)):
                job = {"latency_s": latency_s, "at_once": args.episodes, "ramp_s": latency_s}
                figures[name] = measure(scene, script, args.episodes, job)
        if not args.skip_speed:
            figures |= compare(scene)
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
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement of speed")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-load", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    return parser.parse_args()


def compare(scene: Scene) -> dict[str, Any]:
    """Return the requests per second of each gateway, and how many times as fast ours is.

    All are measured in turns. `requests_per_s` and `ratios` are by the number of episodes at a
    time; a ratio is the median of ours over that of the fastest other.
    """
    args = scene.args
    scripts = {"ours": OURS}
    for name in args.rivals:
        RIVALS[name].install()
        scripts[name] = RIVALS[name].script
    runs: dict[str, dict[str, list[float]]] = {str(number): {} for number in args.at_once}
    for _ in range(args.repeats):
        for at_once in args.at_once:
            for name, script in scripts.items():
                job = {"latency_s": args.latency_s, "at_once": at_once, "ramp_s": 0.0}
                figures = measure(scene, script, args.speed_episodes, job)
                runs[str(at_once)].setdefault(name, []).append(figures["requests_per_s"])
    medians = {
        number: {name: statistics.median(speeds) for name, speeds in by_name.items()}
        for number, by_name in runs.items()
    }
    ratios = {
        number: speeds["ours"] / max(speeds[name] for name in args.rivals)
        for number, speeds in medians.items()
        if args.rivals
    }
    return {"requests_per_s": medians, "ratios": ratios, "runs": runs}


def measure(
    scene: Scene, script: str, num_episodes: int, job: dict[str, float]
) -> dict[str, float]:
    """Return what client, gateway and engine measured in one run."""
    args = scene.args
    engine_command = ["agents_engine.py", f"--latency-s={job['latency_s']}"]
    engine_command += [f"--turns={args.turns}", "--answer-ids", *map(str, scene.answer_ids)]
    with started(engine_command) as engine:
        url = f"http://127.0.0.1:{read_line(engine, 'the engine').strip()}"
        command = [script, f"--engine-url={url}", f"--episodes={num_episodes}"]
        if script == OURS:
            command += [f"--model={scene.model}", f"--stop-id={scene.answer_ids[-1]}"]
            command.append(f"--turns={args.turns}")
        with started(command) as gateway:
            started_job = json.loads(read_line(gateway, script))
            figures = play({**started_job, **job, "turns": args.turns, "seed": args.seed})
            figures |= ending(gateway)
        figures |= ending(engine)
    for name in ("client", "gateway", "engine"):
        figures[f"{name}_cpu_ms"] = 1000 * figures.pop(f"{name}_cpu_s") / figures["requests"]
    print(script, job["at_once"], json.dumps(rounded(figures)), flush=True)
    return figures


def play(job: dict[str, Any]) -> dict[str, float]:
    """Return what the client measured."""
    client = subprocess.run(
        [sys.executable, str(FOLDER / "agents_client.py")],
        input=json.dumps(job).encode(),
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
    )
    return json.loads(client.stdout)


def ending(process: "subprocess.Popen[str]") -> dict[str, float]:
    """End a process's input, and return what it measured."""
    output, _ = process.communicate(timeout=DEADLINE_S)
    return json.loads(output.strip().splitlines()[-1])


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
