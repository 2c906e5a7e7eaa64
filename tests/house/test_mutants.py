"""Faults that `make mutants` plants: which there are, what each changes, how they are counted."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.policy import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv-mutants/cosmic_ray").is_dir(), reason="needs make mutants-venv"
)
SOURCE = '''"""A module."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    value: float | None = 0.5


def shares(values: list[int], *, scale: float = 1.0) -> list[float]:
    """Return shares of a sum."""
    total = sum(values)
    if total <= 0:
        raise ValueError(f"{values[:8]} add up to {total}")
    values = sorted(values, reverse=True)
    return [scale * value / total for value in values]
'''


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("mutations")


@pytest.fixture
def mutants(mutations: ModuleType) -> ModuleType:
    return import_module("mutants")


def test_faults_are_in_what_computes_and_nowhere_else(mutations: ModuleType) -> None:
    found = {(each.operator, each.line) for each in mutations.list_mutations(SOURCE)}
    assert found == {
        ("NumberReplacer", 8),
        ("NumberReplacer", 11),
        ("AddNot", 14),
        ("ReplaceComparisonOperator_LtE_Lt", 14),
        ("NumberReplacer", 14),
        ("RemoveStatement", 15),
        ("RemoveStatement", 16),
        ("RemoveArgument", 16),
        ("ReplaceTrueWithFalse", 16),
        ("ReplaceBinaryOperator_Mul_Div", 17),
        ("ReplaceBinaryOperator_Div_Mul", 17),
        ("RemoveStatement", 17),
    }


def test_a_planted_fault_changes_one_line(mutations: ModuleType) -> None:
    described = {}
    for each in mutations.list_mutations(SOURCE):
        mutated = mutations.plant(SOURCE, each)
        assert mutated is not None
        lines = mutations.describe(SOURCE, mutated).splitlines()
        assert [line[0] for line in lines] == ["-", "+"]
        described[each.operator] = lines[1].strip("+ ")
    assert described["RemoveArgument"] == "values = sorted(values,)"
    assert described["ReplaceBinaryOperator_Div_Mul"].startswith("return [scale * value * total")
    assert described["RemoveStatement"] == "pass"


def test_operators_of_ours_do_what_their_examples_say(mutations: ModuleType) -> None:
    for name, operator in mutations.OWN.items():
        for example in operator.examples():
            fault = mutations.Mutation(name, example.occurrence, 1)
            assert mutations.plant(example.pre_mutation_code, fault) == example.post_mutation_code


def test_every_file_of_the_chosen_folders_has_tests(mutants: ModuleType) -> None:
    for folder, tests in mutants.TESTS.items():
        assert (ROOT / folder).exists() and all((ROOT / place).exists() for place in tests)
    folders = ["tests/algo", "tests/scenarios/algo"]
    assert mutants.tests_of("mcore_rl/algo/kl.py") == ["tests/algo/test_kl.py", *folders]
    roles = mutants.tests_of("mcore_rl/loops/roles.py")
    assert roles == ["tests/loops/test_roles.py", "tests/loops"]


def test_a_fault_is_tried_until_a_test_notices_it_or_nothing_changes(mutants: ModuleType) -> None:
    fault = mutants.Mutation("AddNot", 0, 3)
    mutant = mutants.Mutant("mcore_rl/algo/kl.py", fault, "file", "tests")
    row = {"key": mutant.key, "tests_digest": "tests"}
    assert not mutants.is_decided(mutant, {})
    for outcome, digest, decided in [
        ("survived", "tests", True),
        ("survived", "older tests", False),
        ("killed", "older tests", True),
    ]:
        known = {mutant.key: {**row, "outcome": outcome, "tests_digest": digest}}
        assert mutants.is_decided(mutant, known) is decided
    changed = mutants.Mutant("mcore_rl/algo/kl.py", fault, "another file", "tests")
    assert changed.key != mutant.key


def test_survivors_are_named_with_their_lines_and_scores_are_shares(
    mutants: ModuleType, tmp_path: Path
) -> None:
    faults = [
        mutants.Mutant("mcore_rl/algo/kl.py", mutants.Mutation("AddNot", i, 10 + i), "f", "t")
        for i in range(4)
    ]
    rows = [
        {"key": fault.key, "file": fault.file, "operator": "AddNot", "line": fault.mutation.line}
        | {"outcome": outcome, "tests_digest": "t", "diff": "-if a:\n+if not a:"}
        for fault, outcome in zip(faults, ["killed", "survived", "slow"], strict=False)
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"key": "cut o')
    *survivors, tally = mutants.summarize(faults, mutants.read_results(file)).splitlines()
    assert survivors[0] == "mcore_rl/algo/kl.py:11: AddNot"
    assert survivors[1:3] == ["-if a:", "+if not a:"]
    counted = {"mcore_rl/algo": {"tried": 3, "noticed": 0.667}}
    assert json.loads(tally) == {"folders": counted, "not tried": 1}


def test_nothing_of_the_project_is_imported_before_a_fault_is_planted(mutants: ModuleType) -> None:
    source = (ROOT / "benchmarks/mutants.py").read_text()
    assert "mcore_rl" not in mutants.PRELOADED and "import mcore_rl" not in source
    assert sys.modules["mutants"] is mutants
