"""Values of a recipe fit declared types as Python's own would."""

import ast

import pytest

from mcore_rl.config.upstream.values import fits, is_code


def kind(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("declared", "good", "bad"),
    [
        ("bool", [True, False], [1, "true", None]),
        ("int", [3, -1], [True, 1.5, "3", None]),
        ("float", [1, 0.5], [True, "0.5"]),
        ("str", ["a"], [1, None]),
        ("Optional[int]", [None, 2], ["2", 2.5]),
        ("int | None", [None, 2], ["2"]),
        ("Literal['a', 'b']", ["a"], ["c", 1]),
        ("Optional[Literal['full', 'selective']]", [None, "full"], ["half"]),
        ("List[str]", [["a"], []], ["a", [1]]),
        ("Optional[Tuple[int, int]]", [None, [1, 2]], [1, ["a"]]),
        ("Union[str, List[str]]", ["p2p", ["p2p", "a2a"]], [1, [1]]),
        ("Dict[str, Any]", [{}, {"a": 1}], [[], "a"]),
        ("torch.dtype", ["bfloat16"], ["bf16", 16]),
        ("AttnBackend", ["flash", 3], []),
        ("typing.Optional[float]", [None, 0.5], ["x"]),
    ],
)
def test_values_of_a_type(declared: str, good: list[object], bad: list[object]) -> None:
    assert all(fits(kind(declared), value) for value in good)
    assert not any(fits(kind(declared), value) for value in bad)


def test_what_only_code_can_give() -> None:
    assert is_code(kind("Optional[Callable]")) and is_code(kind("Callable[[int], None]"))
    assert not is_code(kind("Optional[List[str]]"))
