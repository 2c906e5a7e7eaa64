"""Functions are named by verbs in the imperative: no participle and no "of" comes first."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.policy import parse, python_files

FOLDERS = ("mcore_rl", "checkpoint_tools", "launch", "examples", "recipes")
PARTICIPLES = {
    *("begun", "bought", "brought", "built", "chosen", "done", "drawn", "fed", "felt"),
    *("forgotten", "found", "frozen", "given", "gone", "grown", "held", "hidden", "kept", "known"),
    *("laid", "led", "left", "lent", "lost", "made", "mistaken", "met", "paid", "proven", "seen"),
    *("sent", "shown", "shrunk", "slept", "sold", "spent", "spoken", "stood", "sunk", "taken"),
    *("taught", "thrown", "told", "understood", "unseen", "won", "worn", "woven", "written"),
}
VERBS = {
    *("bleed", "breed", "bring", "cling", "embed", "exceed", "feed", "need", "ping", "proceed"),
    *("ring", "seed", "shed", "sing", "speed", "spring", "sting", "string", "swing", "weed"),
}
"""Verbs whose infinitive ends like a participle."""
FOREIGN = "the name is an interface of megatron-core or torch"
FIELD = "the field's name of a quantity or a function"
ON_PURPOSE = {
    ("mcore_rl/algo/losses.py", "clipped_surrogate"): FIELD,
    ("mcore_rl/algo/values.py", "explained_variance"): FIELD,
    ("mcore_rl/config/bounds.py", "bounded"): "declares a field: num: int = bounded(1, ge=1)",
    ("mcore_rl/cpu/kernels/matmul.py", "grouped_linear"): FIELD,
    ("mcore_rl/cpu/megatron_patches.py", "elapsed_time"): FOREIGN,
    ("mcore_rl/cpu/te_workalike.py", "grouped_mlp_modules"): FOREIGN,
    ("mcore_rl/cpu/te_workalike.py", "sharded_state_dict"): FOREIGN,
    ("mcore_rl/cpu/gated_norm.py", "sharded_state_dict"): FOREIGN,
    ("mcore_rl/train/lora/adapter.py", "sharded_state_dict"): FOREIGN,
    ("mcore_rl/device/gpu_memory.py", "running"): "a context manager: with stream.running()",
    ("mcore_rl/train/router.py", "routing"): FOREIGN,
}
"""(file, function) -> why its name remains."""


def test_functions_are_named_by_verbs() -> None:
    """Properties are values and have names of values."""
    found = set(_participles())
    renamed = set(ON_PURPOSE) - found
    assert not renamed, f"no such function any more: {sorted(renamed)}"
    assert not found - set(ON_PURPOSE), "\n".join(
        f"{path}: {name} begins with no verb in the imperative"
        for path, name in sorted(found - set(ON_PURPOSE))
    )


@pytest.mark.parametrize(
    ("name", "is_participle"),
    [
        *(("_loaded_rows", True), ("loading", True), ("of_tokens", True), ("of", True)),
        *(("_shown", True), ("load_rows", False), ("seed_all", False), ("embed", False)),
        *(
            ("with_images", False),
            ("to_host", False),
            ("bring_rest", False),
            ("__getitem__", False),
        ),
    ],
)
def test_a_participle_is_found(name: str, is_participle: bool) -> None:
    assert _begins_with_participle(name) == is_participle


def _participles() -> Iterator[tuple[str, str]]:
    for path in python_files(*FOLDERS):
        if "standins" in path.parts:  # Names of the packages that they stand for.
            continue
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
            if marks & {"property", "cached_property", "setter"}:
                continue
            if _begins_with_participle(node.name):
                yield path.as_posix(), node.name


def _begins_with_participle(name: str) -> bool:
    if name.startswith("__"):
        return False
    first = name.lstrip("_").split("_")[0]
    if first in VERBS:
        return False
    return first == "of" or first in PARTICIPLES or first.endswith(("ed", "ing"))
