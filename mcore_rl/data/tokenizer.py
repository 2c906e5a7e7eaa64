"""Loads the tokenizer of a model directory, unless it is missing, damaged or untrusted code."""

import json
import sys
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
    if _is_code(path):
        if not trust_remote_code:
            raise ValueError(
                f"{option}={folder}: its tokenizer is Python code (auto_map in"
                " tokenizer_config.json); read the code, then set model.trust_remote_code=true to"
                " run it, or save the tokenizer as a tokenizer.json"
            )
    elif not any(file for pattern in VOCABULARY_FILES for file in path.glob(pattern)):
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
        raise ValueError(
            f"{option}={folder}: its tokenizer cannot be opened ({type(error).__name__}:"
            f" {first_line}); copy the model's tokenizer files again"
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


def _is_code(path: Path) -> bool:
    """Return whether the tokenizer's class is to be imported from a file in the directory."""
    try:
        settings: Any = json.loads((path / "tokenizer_config.json").read_text())
    except (OSError, ValueError):  # transformers reports damaged files
        return False
    return isinstance(settings, dict) and "AutoTokenizer" in (settings.get("auto_map") or {})
