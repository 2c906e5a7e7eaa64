"""Loads the tokenizer of a model directory, unless it is missing, damaged or untrusted code."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

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
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"{option}={folder}: its tokenizer cannot be opened ({type(error).__name__}:"
            f" {first_line}); copy the model's tokenizer files again"
        ) from error


def _is_code(path: Path) -> bool:
    """Return whether the tokenizer's class is to be imported from a file in the directory."""
    try:
        settings: Any = json.loads((path / "tokenizer_config.json").read_text())
    except (OSError, ValueError):  # transformers reports damaged files
        return False
    return isinstance(settings, dict) and "AutoTokenizer" in (settings.get("auto_map") or {})
