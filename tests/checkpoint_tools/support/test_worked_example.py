"""The table in docs/add_a_family.md carries a family that is not in the list."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checkpoint_tools.cli import main
from checkpoint_tools.support.report import find_support
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.models import FAMILIES, refuse_unsupported
from mcore_rl.weights.models.table import Family
from tests.support.policy import ROOT
from tests.support.small_hf import assert_equal, read_all
from tests.support.tiny_models import GROUPED_QUERIES, SIZES


@pytest.fixture
def mistral(monkeypatch: pytest.MonkeyPatch) -> Family:
    """The table that the document shows, among the families."""
    page = (ROOT / "docs/add_a_family.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    family = names["MISTRAL"]
    assert family.architecture not in FAMILIES
    monkeypatch.setitem(FAMILIES, family.architecture, family)
    return family


@pytest.fixture
def source(tmp_path: Path) -> Path:
    settings = {**SIZES, **GROUPED_QUERIES, "num_hidden_layers": 2, "sliding_window": None}
    config = transformers.MistralConfig(**settings)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_its_rows_are_the_tensors_that_transformers_saves(mistral: Family, source: Path) -> None:
    facts = ModelFacts.read(source)
    shapes = {name: tuple(tensor.shape) for name, tensor in read_all(source).items()}
    assert mistral.shapes(facts.config) == shapes
    assert mistral.options(facts.config)["num_query_groups"] == 2
    assert find_support(source).is_supported


def test_it_goes_through_megatrons_format(mistral: Family, source: Path, tmp_path: Path) -> None:
    step, back = tmp_path / "step", tmp_path / "back"
    assert main(["from-hf", str(source), str(step), "--workers=1"]) == 0
    arguments = [str(step), str(back), "--source-hf", str(source), "--workers=1"]
    assert main(["to-hf", *arguments]) == 0
    assert_equal(back, source)


def test_a_window_is_refused(mistral: Family, source: Path) -> None:
    config = {**ModelFacts.read(source).config, "sliding_window": 4096}
    with pytest.raises(ValueError, match="sliding_window=4096"):
        refuse_unsupported(config)
