"""Options that go to megatron-core and SGLang by upstream's own names, checked before a run starts.

    train.megatron            TransformerConfig          rollout.sglang   ServerArgs
    train.optimizer.megatron  OptimizerConfig            judge.sglang     likewise, and so on
    train.ddp                 DistributedDataParallelConfig

The names come from the installed source, which is parsed, not imported. Refused are names that
upstream does not have, values of another type, and fields that this system sets by itself: the
error names the option to set instead, or the reason. docs/upstream_options.md lists them.
"""

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.tree import spell
from mcore_rl.config.upstream.fields import (
    DDP,
    OPTIMIZER,
    SERVER,
    TRANSFORMER,
    UpstreamClass,
    UpstreamField,
    is_installed,
    read_fields,
)
from mcore_rl.config.upstream.owned import (
    DDP_RULES,
    OPTIMIZER_RULES,
    ROLLOUT_RULES,
    SERVED_RULES,
    TRANSFORMER_RULES,
    Rules,
)
from mcore_rl.config.upstream.values import fits, is_code, problem_on_command_line

Passed = Mapping[str, Any]
"""Options by upstream's names."""


@dataclass(frozen=True)
class OpenGroup:
    """A kind of group of options that go to an upstream class."""

    upstream: UpstreamClass
    rules: Rules


TO_TRANSFORMER = OpenGroup(TRANSFORMER, TRANSFORMER_RULES)
TO_OPTIMIZER = OpenGroup(OPTIMIZER, OPTIMIZER_RULES)
TO_DDP = OpenGroup(DDP, DDP_RULES)
TO_ENGINES = OpenGroup(SERVER, ROLLOUT_RULES)
TO_SERVED = OpenGroup(SERVER, SERVED_RULES)


def check_passed(group: str, options: Passed, kind: OpenGroup, owners: Mapping[str, str]) -> None:
    """Raise ValueError naming the first of `options` that the upstream class cannot be given.

    Where upstream is not installed, as SGLang on a machine that only plans, names and values are
    not checked.

    group     dotted name of the options ("train.megatron")
    owners    what {parallel}, {optimizer} and {engine} stand for in the rules' texts
    """
    knows_fields = bool(options) and is_installed(kind.upstream)
    fields = read_fields(kind.upstream) if knows_fields else {}
    for name, value in options.items():
        problem = kind.rules.refusal(name)
        if problem is not None:
            problem = problem.format(**owners)
        elif knows_fields:
            problem = _problem(name, value, kind, fields)
        if problem is not None:
            raise ValueError(f"{group}.{name}={spell(value)}: {problem}")


def _problem(
    name: str, value: object, kind: OpenGroup, fields: Mapping[str, UpstreamField]
) -> str | None:
    upstream = kind.upstream.name
    found = fields.get(name)
    if found is None:
        close = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]}?" if close else ""
        return f"{upstream} has no such field.{hint}"
    if is_code(found.kind):
        return f"{upstream}.{name} takes a Python object, which a recipe cannot give"
    if not fits(found.kind, value):
        return f"{upstream}.{name} is declared as {_format_type(found)}"
    if found.choices and value is not None and value not in found.choices:
        return f"{upstream}.{name} is one of {', '.join(map(str, found.choices))}"
    if kind.upstream is SERVER:
        without_form = problem_on_command_line(found, value)
        if without_form is not None:
            return without_form
    allowed, why = kind.rules.values.get(name, ((), ""))
    if allowed and value not in allowed:
        return f"only {' or '.join(map(str, allowed))} here: {why}"
    return None


def _format_type(found: UpstreamField) -> str:
    return ast.unparse(found.kind)
