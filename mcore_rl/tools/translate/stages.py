"""Converts what depends on the model: pipelines whose first and last stage have other layers.

    first 4, last 5, 61 layers, 4 stages   -->   parallel.stage_layers=[4,26,26,5]

verl and NeMo-RL leave the number of layers to the model: it is read where the model is.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rl.tools.translate.translation import Decision, Found, RecipeLine


def translate_ends(
    ours: str, pp: int, ends: Mapping[str, int | None], layers: int | None, sources: tuple[str, ...]
) -> Found:
    """Yield the layers of each of `pp` stages as an option under `ours`; nothing without `ends`.

    ends      the options of the first and of the last stage, in this order, and their layers
    layers    of the model; None: unknown, or stages are divided further
    sources   options that say so
    """
    given = {name: number for name, number in ends.items() if number is not None}
    if not given:
        return
    middle = pp - len(given)
    is_read = layers is not None and all(isinstance(number, int) for number in given.values())
    rest = layers - sum(given.values()) if layers is not None and is_read else 0
    is_shared = rest >= middle and rest % middle == 0 if middle > 0 else rest == middle == 0
    if not is_read or not is_shared:
        known = "num_hidden_layers of config.json" if layers is None else str(layers)
        for name, number in given.items():
            advice = f"set {ours}.stage_layers, {pp} numbers: {number} for this stage; the stages"
            yield Decision(name, number, f"{advice} without a number share the rest of {known}")
        return
    stages = [rest // middle] * middle if middle else []
    first, last = ends.values()
    stages = [*([first] if first is not None else []), *stages]
    stages += [last] if last is not None else []
    yield RecipeLine(f"{ours}.stage_layers", stages, (*given, *sources))


def read_num_layers(path: str) -> int | None:
    """Return the layers that config.json in the folder `path` names; None: it is not here."""
    return _read_number(path, ("num_hidden_layers",))


def read_num_experts(path: str) -> int | None:
    """Return the experts of a layer by config.json in `path`; None: it has none, or is not here."""
    return _read_number(path, ("num_experts", "n_routed_experts", "num_local_experts"))


def _read_number(path: str, names: Sequence[str]) -> int | None:
    try:
        config = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    fields = {**config, **config.get("text_config", {})}
    numbers = [fields[name] for name in names if isinstance(fields.get(name), int)]
    return numbers[0] if numbers else None
