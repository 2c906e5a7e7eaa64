"""Draws the layers of pyproject.toml, and writes them into the pages that show them.

python -m tests.support.layers
"""

import re
import tomllib
from pathlib import Path

from tests.support.policy import ROOT

PAGES = (Path("docs/architecture.md"), Path("docs/file_map.md"))
BEGIN = "<!-- layers of pyproject.toml, written by `make layers` -->"
END = "<!-- end of layers -->"
ROOMS = {
    "cli": "the commands",
    "api": "the Python API: names that docs/python_api.md promises to keep",
    "tools": "doctor, translate, simulate, view: beside a run, no part of it",
    "run": "what each command does: assembly, start-up; run/roles implements the loop's roles",
    "cpu": "what a machine without CUDA needs: stand-ins, patches, compiled code, fork servers",
    "cluster": "actors, groups, placement, node_agent: the only importer of ray",
    "workers": "what runs inside each process, without ray: trainer, critic, engine, collector",
    "planning": "memory and traffic of a recipe, without starting anything",
    "loops": "the sequence of steps: RL, SFT, DPO, evaluation; roles.py has the roles",
    "agents": "episodes of several turns: environments, chat templates, gateway",
    "rollout": "one node's engines (SGLang), and the collector that asks them",
    "train": "Megatron: model, actor, critic, packing, checkpoints",
    "weight_sync": "weights from trainer to engines: sender, receiver, controller, transports",
    "tasks": "problems for small models, and data sets of others in our columns",
    "batches": "samples in stores, batches, what each rank reads of them",
    "data": "prompts, conversations, pairs; streamed and mixed; images",
    "rewards": "functions, judges, reward models, tests of programs",
    "algo": "advantages, losses, KL, corrections: pure functions",
    "weights": "shards, families, layouts, plans of transfers, HuggingFace's and Megatron's files",
    "services": "the sandbox and the search: servers of their own",
    "checks": "combinations of options that are refused",
    "device": "the only place that distinguishes CUDA and CPU",
    "logs": "metrics, samples, episodes, the report",
    "config": "the typed tree of every recipe",
    "process": "processes, files and networks, without Ray and torch",
    "types": "the values that flow through the loop",
}
"""Room -> what it holds."""


def draw_layers() -> str:
    """Return the layers from the highest to the lowest, one room a line, as a fenced block."""
    layers = read_layers()
    width = max(len(room) for _, rooms in layers for room in rooms) + 4
    rule = f"\n{'-' * 100}\n"
    drawn = [
        "\n".join(f"{mark} {room:<{width}}{ROOMS[room]}" for room in rooms)
        for mark, rooms in layers
    ]
    return f"```\n{rule.join(drawn)}\n```"


def read_layers() -> list[tuple[str, list[str]]]:
    """Return (" ", "|" or ":", rooms) of each layer.

    Rooms with "|" do not import one another, rooms with ":" may.
    """
    text = (ROOT / "pyproject.toml").read_text()
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [
        ("|" if "|" in layer else ":" if ":" in layer else " ", re.findall(r"\w+", layer))
        for layer in layers
    ]


def cut_layers(text: str) -> tuple[str, str, str]:
    """Return the text of a page before, in and behind its picture of the layers."""
    before, _, rest = text.partition(BEGIN + "\n")
    drawn, end, behind = rest.partition("\n" + END)
    assert end, f"no lines {BEGIN} and {END}"
    return before, drawn, behind


if __name__ == "__main__":
    for page in PAGES:
        before, _, behind = cut_layers((ROOT / page).read_text())
        (ROOT / page).write_text(f"{before}{BEGIN}\n{draw_layers()}\n{END}{behind}")
