"""Every logged metric is documented, and renamed ones keep their former names for one version."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.logs.names import METRICS, add_former_names, find_documented, make_document
from tests.support.policy import ROOT, parse, python_files

NAMES = [name for meanings in METRICS.values() for name in meanings]
PREFIXES = {name.partition("/")[0] for name in NAMES}
KEY = re.compile(r"[a-z_]+/[a-z0-9_/*]+")
ANY = "*"
"""Stands for a placeholder of an f-string."""
OTHER_KEYS = {"order/*", "report/*/*", "data/arithmetic", "data/gsm8k"}
"""Strings of the same form that are no metrics."""


def test_every_logged_metric_is_documented() -> None:
    unknown = [
        f"{path}:{line}: {key}"
        for path, line, key in logged_keys()
        if not any(may_be_same(key, name) for name in NAMES)
    ]
    assert not unknown, "not in mcore_rl/logs/names.py:\n" + "\n".join(unknown)


def test_every_documented_metric_is_logged() -> None:
    keys = {key for _, _, key in logged_keys()}
    unlogged = [name for name in NAMES if not any(may_be_same(key, name) for key in keys)]
    assert not unlogged, f"nothing logs {unlogged}"


def test_the_search_finds_keys_and_patterns() -> None:
    source = 'm = {"loss/new": 1, f"router/{name}": 2, f"eval/pass_at_{k}": 3}\nopen("a/b.py")'
    assert [key for _, key in keys_of(ast.parse(source))] == [
        "loss/new",
        "router/*",
        "eval/pass_at_*",
    ]
    assert not any(may_be_same("loss/new", name) for name in NAMES)
    assert may_be_same("router/layer_*/*", "router/layer_<i>/<name>")
    assert may_be_same("eval/*", "eval/preference/<name>")


def test_the_document_is_up_to_date() -> None:
    remedy = "make it again with the command at its head"
    assert (ROOT / "docs" / "metrics.md").read_text() == make_document(), remedy


def test_a_metric_is_found_by_what_its_name_stands_for() -> None:
    assert find_documented("time/step") == ("time/step", {})
    assert find_documented("time/rollout") == ("time/<phase>", {"phase": "rollout"})
    found = find_documented("router/layer_3/idle_share")
    assert found == ("router/layer_<i>/<name>", {"i": "3", "name": "idle_share"})
    assert find_documented("episodes/end/done") == ("episodes/end/<reason>", {"reason": "done"})
    assert find_documented("kl/reff") is None


def test_a_renamed_metric_is_kept_under_both_names() -> None:
    metrics = {"sync/seconds": 1.0, "time/sync": 2.0, "time/pause": 3.0, "time/step": 4.0}
    former = {"refit/seconds": 1.0, "time/refit": 2.0, "time/settle": 3.0}
    assert add_former_names(metrics) == {**metrics, **former}


def test_metrics_without_a_former_name_stay_as_they_are() -> None:
    assert add_former_names({"loss/policy": 1.0}) == {"loss/policy": 1.0}


def logged_keys() -> Iterator[tuple[Path, int, str]]:
    """(file, line, key) of all strings in the package that look like a metric's name."""
    for path in python_files("mcore_rl"):
        if path.name == "names.py" and path.parent.name == "metrics":
            continue
        for line, key in keys_of(parse(path)):
            if key.partition("/")[0] in PREFIXES and key not in OTHER_KEYS:
                yield path, line, key


def keys_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, key) of strings and f-strings; the constant pieces of an f-string are no keys."""
    pieces: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces.update(id(piece) for piece in node.values)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant | ast.JoinedStr) or id(node) in pieces:
            continue
        text = text_of(node)
        if KEY.fullmatch(text) and not text.endswith(("/", "_")):
            yield node.lineno, text


def text_of(node: ast.Constant | ast.JoinedStr) -> str:
    """The string with ANY for each placeholder; empty if the node is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        str(piece.value) if isinstance(piece, ast.Constant) else ANY for piece in node.values
    )


def may_be_same(key: str, name: str) -> bool:
    """Whether a key, with wildcards, and a documented name, with <placeholders>, can agree."""
    sample = re.sub(r"<\w+>", "x", name)
    key_pattern = re.escape(key).replace(re.escape(ANY), r"[\w/]+")
    name_pattern = re.sub(r"<\w+>", r"[\\w/]+", name)
    return bool(
        re.fullmatch(key_pattern, sample) or re.fullmatch(name_pattern, key.replace(ANY, "x"))
    )
