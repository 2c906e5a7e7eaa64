"""What a model directory must hold."""

import json
import shutil
from pathlib import Path

import pytest

from mcore_rl.config import Config, DataConfig, ModelConfig, RunConfig
from mcore_rl.run.inputs import open_policy


def test_a_tokenizer_that_is_code_beside_the_model_is_refused(tmp_path: Path) -> None:
    shutil.copy("recipes/model/kimi_k2/config.json", tmp_path)
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit('was run')")
    model, run = (
        ModelConfig(path=str(tmp_path), init="random"),
        RunConfig(dir=str(tmp_path / "run")),
    )
    with pytest.raises(
        ValueError, match=r"(?s)no tokenizer there that can be opened .*auto_map.*tokenizer.json"
    ):
        open_policy(Config(model=model, run=run, data=DataConfig(train=["x.jsonl"])), "data.train")
