"""Configurations of NeMo-RL are read with those that their `defaults` name."""

from pathlib import Path

import pytest

from mcore_rl.tools.translate.nemo_rl import read_nemo_rl

BASE = """
policy: {tokens: 8, number: 3, product: '${mul:${policy.tokens}, ${add:${policy.number}, 0}}'}
optimizer: {name: adamw, lr: 1e-6}
data: {train: {name: a}}
"""
CHILD = """
defaults: base.yaml
policy: {tokens: 16}
optimizer: {_override_: true, kind: adam}
data: {_override_: true, train: [{name: b}]}
scheduler: null
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "child.yaml").write_text(CHILD)
    return tmp_path


def test_a_child_changes_what_it_inherits(folder: Path) -> None:
    options = read_nemo_rl([str(folder / "child.yaml")])
    assert options.is_whole
    assert options.given == {
        "policy.tokens": 16,
        "policy.number": 3,
        "policy.product": 48,
        "optimizer.kind": "adam",
        "data.train": [{"name": "b"}],
        "scheduler": None,
    }


def test_overrides_win_before_values_are_computed(folder: Path) -> None:
    command = ["run", "examples/run_grpo.py", "--config", str(folder / "child.yaml")]
    given = read_nemo_rl([*command, "policy.number=4", "++new.x=1"]).given
    assert given["policy.product"] == 64 and given["new.x"] == 1
    assert read_nemo_rl([f"--config={folder}/base.yaml"]).given["policy.product"] == 24


def test_several_defaults_are_merged_in_their_order(folder: Path) -> None:
    (folder / "third.yaml").write_text("policy: {tokens: 32}\n")
    for order, tokens in (("base.yaml, third.yaml", 32), ("third.yaml, base.yaml", 8)):
        (folder / "other.yaml").write_text(f"defaults: [{order}]\n")
        assert read_nemo_rl([str(folder / "other.yaml")]).given["policy.tokens"] == tokens


def test_overrides_alone_are_no_whole_configuration() -> None:
    options = read_nemo_rl(["grpo.seed=3"])
    assert options.given == {"grpo.seed": 3} and not options.is_whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "defaults: missing.yaml\n",
            r"missing.yaml: there is no such file, which .*run.yaml names",
        ),
        ("defaults: run.yaml\n", r"run.yaml: its `defaults` lead back to itself"),
        ("a: ${nothing}\n", r"run.yaml: a cannot be computed: .*nothing.*; .* give a=<value>"),
        ("a: {b: '${oc.env:NO_SUCH}'}\n", r"run.yaml: a.b cannot be .*'NO_SUCH' not found\"; set"),
        ("defaults: base.yaml\ndata: {train: [1]}\n", r"run.yaml: it cannot be merged with its"),
        ("- a=1\n", r"run.yaml: no configuration in YAML: it is a list"),
        ("a: [\n", r"run.yaml: no configuration in YAML"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_nemo_rl([str(tmp_path / "run.yaml")])


def test_words_that_are_no_overrides_are_named() -> None:
    with pytest.raises(ValueError, match="words: neither a YAML file nor an override"):
        read_nemo_rl(["words"])
