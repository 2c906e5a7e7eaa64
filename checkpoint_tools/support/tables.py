"""Finds the table nearest to a model, the settings that it reads and the tensors that it names.

model.layers.7.mlp.experts.3.up_proj.weight  -->  layers.{layer}.mlp.experts.{expert}.up_proj...
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from checkpoint_tools.support.parts import is_silent
from mcore_rl.weights.hf.fp8 import find_scaled_name
from mcore_rl.weights.models import FAMILIES, LANGUAGE
from mcore_rl.weights.models.table import Family, Shape

READ_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Exceptions that a table's functions raise on settings of another family."""
ALWAYS_READ = (
    *("vocab_size", "tie_word_embeddings", "num_hidden_layers"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
"""Keys that are read of every family, whatever its table asks for."""
NUMBERED = r"\b(layers?|blocks?|experts?|h|\w+_list)\.\d+\."
"""Regular expression of a number of equal modules; `proj.0` and `mlp.2` are different ones."""
COST_OF_LACKING = 0.03
"""How much a key that config.json lacks counts against a table, as a share of its settings."""


class ReadKeys(dict[str, Any]):
    """A config.json that notes which of its keys were asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.keys_read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)


@dataclass(frozen=True)
class Reading:
    """The settings of a config.json that a table reads.

    keys      keys of config.json that the table asks for, or that may have certain values only
    lacking   keys without which the table cannot read the model
    problem   why it cannot, first of all; "" if it can
    """

    keys: frozenset[str]
    lacking: frozenset[str]
    problem: str


def read_with(family: Family, config: Mapping[str, Any]) -> Reading:
    """Return which settings a table reads."""
    noted = ReadKeys(config)
    functions: tuple[Callable[[Any], Any], ...] = (
        *(family.sizes, family.options, family.refusal, family.carried, family.rotary_share),
        lambda settings: family.is_moe_layer(settings, 0),
    )
    lacking: set[str] = set()
    problems: list[str] = []
    for function in functions:
        while problem := _find_problem(function, noted):
            problems.append(problem)
            match = re.search(r"lacks '(\w+)'", problem)
            if match is None or match[1] in lacking:
                break
            lacking.add(match[1])
            noted[match[1]] = 1  # so that the function asks for the next key
    keys = {*noted.keys_read, *family.supported, *ALWAYS_READ}
    return Reading(frozenset(keys), frozenset(lacking), next(iter(problems), ""))


def _find_problem(function: Callable[[Any], Any], config: ReadKeys) -> str:
    try:
        function(config)
    except READ_ERRORS as error:
        return str(error) or type(error).__name__
    return ""


def find_nearest(config: Mapping[str, Any], names: Iterable[str]) -> Family:
    """Return the table of the architecture, or else the one that fits names and settings best."""
    architecture = (config.get("architectures") or [""])[0]
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    patterns = set(map(make_pattern, names))

    def rate(family: Family) -> tuple[float, float, float]:
        rows = list_patterns(family)
        named = len(rows & patterns) / max(1, len(rows | patterns))
        reading = read_with(family, config)
        told = {key for key, value in config.items() if not is_silent(key, value)}
        settings = len(told & reading.keys) / max(1, len(told))
        settings -= COST_OF_LACKING * len(reading.lacking) + bool(reading.problem)
        return named, settings, SequenceMatcher(None, family.architecture, architecture).ratio()

    return max(LANGUAGE, key=rate)


def make_pattern(name: str) -> str:
    """Return a stored name without the language model's prefix, its numbers and its packing."""
    name = find_scaled_name(name) or name
    name = re.sub(r"(\.weight)_(packed|scale|shape)$", r"\1", name)
    name = re.sub(r"_(blocks|scales)$", "", name)
    name = re.sub(r"^(model\.language_model\.|language_model\.model\.|model\.)", "", name)
    name = name.removeprefix("language_model.")
    for field in ("{layer}", "{expert}"):
        name = re.sub(NUMBERED, rf"\g<1>.{field}.", name, count=1)
    return name


def list_patterns(family: Family) -> set[str]:
    """Return the patterns of the HF names in a table."""
    zero = {"layer": "0", "expert": "0"}
    return {make_pattern(t.name.format(**zero)) for rule in family.rules for t in rule.tensors}


@dataclass(frozen=True)
class RowMatch:
    """How the tensors of a model compare with a table's rows.

    missing    pattern -> (shape of the first tensor if known, number of tensors) without a row
    unfilled   patterns of rows for which the model has no tensor
    reshaped   pattern -> (shape in the files, shape by the table)
    """

    missing: Mapping[str, tuple[Shape | None, int]]
    unfilled: tuple[str, ...]
    reshaped: Mapping[str, tuple[Shape, Shape]]


def compare_rows(
    family: Family, config: Mapping[str, Any], stored: Mapping[str, Shape | None]
) -> RowMatch:
    """Compare the names of stored tensors, and their shapes if they are known, with a table."""
    rows = list_patterns(family)
    wanted: dict[str, Shape] = {}
    if not read_with(family, config).problem:
        wanted = {make_pattern(name): shape for name, shape in family.shapes(config).items()}
        rows &= wanted.keys()
    counts: Counter[str] = Counter()
    first: dict[str, Shape | None] = {}
    for name, shape in stored.items():
        if not _is_carried(family, config, name):
            pattern = make_pattern(name)
            counts[pattern] += 1
            first.setdefault(pattern, shape)
    tied = {make_pattern(name) for name in family.find_left_out(config)}
    reshaped: dict[str, tuple[Shape, Shape]] = {}
    for pattern, shape in first.items():
        if shape is not None and shape != wanted.get(pattern, shape):
            reshaped[pattern] = shape, wanted[pattern]
    return RowMatch(
        {name: (first[name], count) for name, count in counts.items() if name not in rows | tied},
        tuple(sorted(rows - counts.keys() - tied)),
        reshaped,
    )


def _is_carried(family: Family, config: Mapping[str, Any], name: str) -> bool:
    try:
        return family.is_carried(config, name)
    except READ_ERRORS:
        return False
