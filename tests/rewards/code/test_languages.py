"""Programs in responses: which block, in which language."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.rewards.code.languages import Program, blocks_of, program_of, read_languages


@pytest.mark.parametrize(
    ("response", "languages", "program"),
    [
        ("a\n```python\nx\n```\nb\n```py\ny\n```", ["python"], Program("y\n")),
        ("```\nz```", ["python"], Program("z")),
        ("no fence", ["python"], None),
        ("```python\nnot closed", ["python"], None),
        ("```Python3 \nx\n```", ["python"], Program("x\n")),
        ("```C++\nx\n```", ["cpp"], Program("x\n", "cpp")),
        ("```cpp\nx\n```", ["python"], None),
        ("```cpp\nx\n```\nand\n```text\n5\n```", ["cpp", "python"], Program("x\n", "cpp")),
        ("```cpp\nx\n```\nand\n```\ny\n```", ["cpp", "python"], Program("y\n", "cpp")),
        ("```cpp title=a.cpp\nx\n```", ["cpp"], Program("x\n", "cpp")),
        ("```cpp\nx\n```\nprint(1)\n```\n```", ["python"], Program("")),
    ],
)
def test_the_last_block_in_a_language_is_the_program(
    response: str, languages: list[str], program: Program | None
) -> None:
    assert program_of(response, languages) == program


@given(st.lists(st.tuples(st.sampled_from(["", "cpp", "py"]), st.text("ab \n"))))
def test_blocks_are_found_as_they_were_written(blocks: list[tuple[str, str]]) -> None:
    response = "text\n".join(f"```{tag}\n{text}```" for tag, text in blocks)
    assert blocks_of(response) == blocks


def test_names_of_languages() -> None:
    assert read_languages(None) == read_languages([]) == ("python",)
    assert read_languages("C++") == ("cpp",)
    assert read_languages(["js", "rs"]) == ("nodejs", "rust")
    with pytest.raises(ValueError, match="language is 'kobol'"):
        read_languages(["python", "kobol"])
