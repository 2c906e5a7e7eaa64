"""Tokenizers of model directories: opened, missing, damaged, or Python code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.tasks.arithmetic import make_tokenizer

COUNT = "import sys; print('torch._dynamo' in sys.modules)"
CODE = """
from transformers import PreTrainedTokenizerFast


class WordTokenizer(PreTrainedTokenizerFast):
    was_run = True
"""


def write_tokenizer_that_is_code(folder: Path) -> None:
    make_tokenizer().save_pretrained(folder)
    settings_path = folder / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text())
    settings["tokenizer_class"] = "WordTokenizer"
    settings["auto_map"] = {"AutoTokenizer": [None, "words.WordTokenizer"]}
    settings_path.write_text(json.dumps(settings))
    (folder / "words.py").write_text(CODE)


def test_a_tokenizer_that_is_code_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    write_tokenizer_that_is_code(tmp_path)
    with pytest.raises(ValueError, match=r"teacher.path=.*set model.trust_remote_code=true"):
        load_tokenizer(tmp_path, "teacher.path")
    tokenizer = load_tokenizer(tmp_path, "teacher.path", trust_remote_code=True)
    assert tokenizer.was_run
    assert tokenizer.decode(tokenizer("Ada has 12")["input_ids"]) == "Ada has 12"


def test_code_that_is_missing_is_named_before_anything_starts(tmp_path: Path) -> None:
    write_tokenizer_that_is_code(tmp_path)
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "settings.Settings"}}')
    with pytest.raises(ValueError, match=r"model.path=.*: settings.py, which auto_map names"):
        load_tokenizer(tmp_path, "model.path", trust_remote_code=True)


def test_code_that_fails_is_told_from_missing_files(tmp_path: Path) -> None:
    write_tokenizer_that_is_code(tmp_path)
    (tmp_path / "words.py").write_text("from transformers import NoSuchClass")
    with pytest.raises(ValueError, match=r"ImportError.*the code of the tokenizer, or of the"):
        load_tokenizer(tmp_path, "model.path", trust_remote_code=True)


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.path=.*: no tokenizer there, none of tokenizer"):
        load_tokenizer(tmp_path, "model.path")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"model.path=.*its tokenizer cannot be opened \(JSON"):
        load_tokenizer(tmp_path, "model.path")


def test_a_tokenizer_comes_without_what_models_need(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    load = f"load_tokenizer({str(tmp_path)!r}, 'model.path')"
    ours = f"from mcore_rl.data.tokenizer import load_tokenizer; {load}; {COUNT}"
    later = "from transformers import GenerationMixin; print(hasattr(GenerationMixin, 'generate'))"
    assert run_python(f"{ours}; {later}").split() == ["False", "True"]


@pytest.mark.slow
def test_transformers_itself_imports_what_models_need() -> None:
    """Fails once it does not: `import_auto_tokenizer` goes."""
    assert run_python(f"from transformers import AutoTokenizer; {COUNT}") == "True"


def run_python(code: str) -> str:
    """Return what a new process prints."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ended.stdout.strip()
