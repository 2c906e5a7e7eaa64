"""Loads the tokenizer of a model directory, unless it is missing, damaged or untrusted code."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")


def load_tokenizer(
    folder: str | Path, option: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a HuggingFace directory.

    `option`: the recipe's option that names the directory, for messages.
    Raises ValueError if there is no tokenizer, if it cannot be opened, or if it is Python code
    beside the model and `trust_remote_code` is false.
    """
    path = Path(folder)
    is_code = is_tokenizer_code(path)
    if is_code and not trust_remote_code:
        raise ValueError(
            f"{option}={folder}: its tokenizer is Python code (auto_map in tokenizer_config.json);"
            " read the code, then set model.trust_remote_code=true to run it, or save the tokenizer"
            " as a tokenizer.json"
        )
    if trust_remote_code and (missing := _find_missing_code(path)):
        raise ValueError(
            f"{option}={folder}: {missing}, which auto_map names, is not there: copy the model's"
            " Python files into it"
        )
    if not is_code and not any(file for pattern in VOCABULARY_FILES for file in path.glob(pattern)):
        # transformers would make an empty tokenizer of config.json alone
        raise ValueError(
            f"{option}={folder}: no tokenizer there, none of {', '.join(VOCABULARY_FILES)}; copy"
            " the model's tokenizer files into it"
        )
    auto_tokenizer = import_auto_tokenizer()
    try:
        return auto_tokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        first_line = str(error).partition("\n")[0]
        remedy = "copy the model's tokenizer files again"
        if is_code:
            remedy += (
                "; it may also be that the code of the tokenizer, or of the configuration beside"
                " it, wants another version of transformers"
            )
        raise ValueError(
            f"{option}={folder}: its tokenizer cannot be opened ({type(error).__name__}:"
            f" {first_line}); {remedy}"
        ) from error


def import_auto_tokenizer() -> Any:
    """Return transformers' AutoTokenizer without what only models need.

    Its module also serves AutoModel, and so imports GenerationMixin and with it torch's distributed
    tensors and compiler: a second of each process. Until then a class without members stands in its
    place; the one use of it is to give `generate` to models that are code beside their weights.
    """
    if "transformers.models.auto.auto_factory" not in sys.modules:
        import transformers.generation

        generation: Any = transformers.generation
        is_there = "GenerationMixin" in vars(generation)
        if not is_there:
            generation.GenerationMixin = type("GenerationMixin", (), {})
        try:
            import transformers.models.auto.auto_factory
        finally:
            if not is_there:
                del generation.GenerationMixin
    from transformers import AutoTokenizer

    return AutoTokenizer


def is_tokenizer_code(path: Path) -> bool:
    """Return whether the tokenizer's class is to be imported from a file in the directory."""
    return "AutoTokenizer" in _read_code_names(path / "tokenizer_config.json")


def _find_missing_code(path: Path) -> str:
    """Return a file with the class of configuration or tokenizer that is not there; "" if none."""
    settings = _read_code_names(path / "config.json").get("AutoConfig")
    tokenizer = _read_code_names(path / "tokenizer_config.json").get("AutoTokenizer")
    named = [settings, *(tokenizer if isinstance(tokenizer, list) else [tokenizer])]
    for name in named:
        if isinstance(name, str) and "--" not in name:  # with it, it is in another repository
            file = f"{name.partition('.')[0]}.py"
            if not (path / file).is_file():
                return file
    return ""


def _read_code_names(path: Path) -> Mapping[str, Any]:
    """Return `auto_map` of a file in JSON: transformers' class -> module and class to import."""
    try:
        settings: Any = json.loads(path.read_text())
    except (OSError, ValueError):  # transformers reports damaged files
        return {}
    return (settings.get("auto_map") or {}) if isinstance(settings, dict) else {}
