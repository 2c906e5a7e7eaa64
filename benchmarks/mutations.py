"""Lists the small faults that can be planted in a source file, and plants one of them.

Most operators are those of cosmic-ray, which lies in .venv-mutants (requirements/mutants.txt). It
removes no statements and no arguments; two operators here do. mutmut would not do: it passes over
functions with decorators, and every registered advantage and loss has one.

Left out are faults that no test could notice: in annotations, in options of dataclasses, in the
words of errors, and `*` between parameters.
"""

# pyright: reportMissingImports=false

import ast
import difflib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parso

sys.path.append(str(Path(__file__).resolve().parents[1] / ".venv-mutants"))

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator

Place = tuple[int, int]
"""Line, counted from 1, and column, counted from 0."""
REPLACED = (
    *("BinaryOperator_Add_Sub", "BinaryOperator_Sub_Add", "BinaryOperator_Mul_Div"),
    *("BinaryOperator_Div_Mul", "BinaryOperator_FloorDiv_Div", "BinaryOperator_Mod_FloorDiv"),
    *("BinaryOperator_Pow_Mul", "BinaryOperator_BitAnd_BitOr", "BinaryOperator_BitOr_BitAnd"),
    *("ComparisonOperator_Eq_NotEq", "ComparisonOperator_NotEq_Eq"),
    *("ComparisonOperator_Lt_LtE", "ComparisonOperator_LtE_Lt", "ComparisonOperator_Lt_GtE"),
    *("ComparisonOperator_Gt_GtE", "ComparisonOperator_GtE_Gt", "ComparisonOperator_Gt_LtE"),
    *("ComparisonOperator_Is_IsNot", "ComparisonOperator_IsNot_Is"),
    *("UnaryOperator_Delete_USub", "UnaryOperator_Delete_Invert", "UnaryOperator_Delete_Not"),
    *("TrueWithFalse", "FalseWithTrue", "AndWithOr", "OrWithAnd"),
    *("BreakWithContinue", "ContinueWithBreak"),
)
OTHERS = ("AddNot", "NumberReplacer", "ZeroIterationForLoop")


class RemoveStatement(Operator):
    """Put `pass` in place of a statement that a function may do without and still be valid."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Place, Place]]:
        if node.type == "simple_stmt" and _can_go(node):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        prefix = node.children[0].get_first_leaf().prefix
        node.children[0] = parso.parse(f"{prefix}pass")
        return node

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return (Example("def f(x):\n    assert x\n", "def f(x):\n    pass\n"),)


class RemoveArgument(Operator):
    """Leave a named argument out of a call."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Place, Place]]:
        for argument in _named_arguments(node):
            yield argument.start_pos, argument.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        argument = list(_named_arguments(node))[index]
        at = node.children.index(argument)
        del node.children[at : at + 2]  # with the comma behind it, if there is one
        return node

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return (Example("f(a, dim=1)", "f(a,)"),)


OWN: dict[str, Operator] = {
    "RemoveStatement": RemoveStatement(),
    "RemoveArgument": RemoveArgument(),
}


@dataclass(frozen=True)
class Mutation:
    """The fault number `occurrence` of an operator in a file, which begins in `line`."""

    operator: str
    occurrence: int
    line: int


def list_mutations(source: str) -> list[Mutation]:
    """Return all faults that can be planted in a module, and that a test could notice."""
    tree = get_ast(source)
    unseen = list(_unseen(source))
    found = []
    for name in (*(f"Replace{name}" for name in REPLACED), *OTHERS, *OWN):
        operator = _operator(name)
        nodes = (
            (node, place) for node in ast_nodes(tree) for place in operator.mutation_positions(node)
        )
        for occurrence, (node, (start, end)) in enumerate(nodes):
            within = any(first <= start and end <= last for first, last in unseen)
            if not (within or _separates_parameters(node)):
                found.append(Mutation(name, occurrence, start[0]))
    return found


def plant(source: str, mutation: Mutation) -> str | None:
    """Return the source with a fault in it; None if that is no valid Python, or the same."""
    mutated = mutate_code(source, _operator(mutation.operator), mutation.occurrence)
    if mutated is None or mutated == source:
        return None
    try:
        same = ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return None
    return None if same else mutated


def describe(source: str, mutated: str) -> str:
    """Return the lines that a fault removes and adds, with - and + in front."""
    lines = difflib.unified_diff(source.splitlines(), mutated.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _operator(name: str) -> Any:
    return OWN[name] if name in OWN else get_operator(f"core/{name}")()


def _unseen(source: str) -> Iterator[tuple[Place, Place]]:
    """Yield where annotations, options of dataclasses and the words of errors begin and end."""
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, field, None) for field in ("annotation", "returns")]
        if isinstance(node, ast.Raise):
            parts.append(node.exc)
        elif isinstance(node, ast.Assert):
            parts.append(node.msg)
        elif isinstance(node, ast.ClassDef):
            parts += node.decorator_list
        for part in parts:
            if part is not None:
                assert part.end_lineno is not None and part.end_col_offset is not None
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def _separates_parameters(node: Any) -> bool:
    """Return whether a node is the star of `f(*, a)` or `f(*values)`."""
    stars = node.type == "operator" and node.value in ("*", "**")
    return stars and node.parent.type in ("parameters", "param", "argument", "star_expr", "lambdef")


def _can_go(statement: Any) -> bool:
    inner = statement.children[0]
    if inner.search_ancestor("funcdef", "async_funcdef") is None:
        return False
    if inner.type in ("assert_stmt", "raise_stmt", "return_stmt"):
        return True
    if inner.type == "atom_expr":  # a call whose result nobody takes
        return inner.children[-1].type == "trailer"
    if inner.type != "expr_stmt":
        return False
    target, sign = inner.children[:2]
    if target.type == "atom_expr" or (sign.type == "operator" and sign.value != "="):
        return True  # something that was there before is changed
    return target.type == "name" and any(
        leaf.type == "name" and leaf.value == target.value
        for part in inner.children[2:]
        for leaf in ast_nodes(part)
    )


def _named_arguments(node: Any) -> Iterator[Any]:
    """Yield `name=value` of a call with several arguments, in order."""
    if node.type == "arglist" and node.parent.type == "trailer":
        for child in node.children:
            if child.type == "argument" and getattr(child.children[1], "value", "") == "=":
                yield child
