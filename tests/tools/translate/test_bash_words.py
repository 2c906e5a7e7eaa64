"""Scripts are split into words without being run, and words are expanded if they can be."""

import pytest

from mcore_rl.tools.translate.slime_script import Computed, end_of_word, expand, statements_of

TEXT = """# a comment
A=1; B="two words"  # another
LIST=(
   --one 1   # with a comment (in brackets)
   # --left-out 2
   --two "$(seq 1 3)"
)
run \\
   ${LIST[@]} 'single $A'
"""


def test_statements_are_words_with_their_quotes() -> None:
    a, b, array, run = list(statements_of(TEXT))
    assert a == ["A=1"] and b == ['B="two words"']
    assert array[0].startswith("LIST=(") and array[0].endswith(")")
    assert run == ["run", "${LIST[@]}", "'single $A'"]
    inner = [word for words in statements_of(array[0][6:-1]) for word in words]
    assert inner == ["--one", "1", "--two", '"$(seq 1 3)"']


def test_a_word_ends_after_its_brackets() -> None:
    text = '$(echo "a b" ${x}) next'
    assert text[: end_of_word(text, 0)] == '$(echo "a b" ${x})'


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("plain", ["plain"]),
        ('"$A/file"', ["one/file"]),
        ("${A}-${NONE:-other}", ["one-other"]),
        ("$PAIR", ["x", "y"]),
        ('"$PAIR"', ["x y"]),
        ("${LIST[@]}", ["--a", "1"]),
        ('"${LIST[@]}"', ["--a", "1"]),
        ("'$A'", ["$A"]),
        ('\'{"image": "images"}\'', ['{"image": "images"}']),
        ('"$JSON"', ['{"a": 1}']),
    ],
)
def test_words_that_can_be_expanded_are(word: str, words: list[str]) -> None:
    variables = {"A": "one", "PAIR": "x y", "JSON": '{"a": 1}'}
    found = expand(word, variables, {"LIST": ["--a", "1"]})
    assert found == words and not any(isinstance(part, Computed) for part in found)


@pytest.mark.parametrize(
    "word",
    ["$(seq 1 3)", "$((2 ** 3))", "`date`", "${MISSING_NAME}", "${A%.sh}", "$GONE", "${NO[@]}"],
)
def test_other_words_stay_as_they_are_written(word: str) -> None:
    found = expand(word, {"A": "one", "GONE": Computed("$(date)")}, {})
    assert found == [word] and isinstance(found[0], Computed)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("$((DENSE + MOE))", ["78"]),
        ('"$((2 * $DENSE))"', ["6"]),
        ("$(( (MOE - DENSE) / 8 ))", ["9"]),
        ("$((DENSE + NOBODY_SET_THIS))", None),
        ("$((MOE / 0))", None),
        ("$((MOE ** 2))", None),
        ("$(seq 3)", None),
    ],
)
def test_sums_of_known_numbers_are_worked_out(word: str, expected: list[str] | None) -> None:
    found = expand(word, {"DENSE": "3", "MOE": "75"}, {})
    if expected is None:
        [left] = found
        assert isinstance(left, Computed) and left == word.strip('"')
    else:
        assert found == expected and not isinstance(found[0], Computed)
