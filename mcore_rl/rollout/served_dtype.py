"""Finds the dtype that "auto" stands for; SGLang's own would serve float32 as float16."""

from pathlib import Path

from mcore_rl.weights.hf.config import named_dtype, parse_hf_config
from mcore_rl.weights.hf.nested import with_text_settings

SERVED_DTYPES = ("float32", "bfloat16", "float16")
_SHORT = {"float": "float32", "half": "float16"}


def find_dtype(dtype: str, model_path: Path, option: str) -> str:
    """Return `dtype`, or for "auto" the one that config.json in `model_path` names.

    Raises ValueError, which names `option`, if config.json names none that a model is served in.
    """
    if dtype != "auto":
        return dtype
    config = with_text_settings(parse_hf_config(model_path))
    named = str(named_dtype(config)).removeprefix("torch.")
    found = _SHORT.get(named, named)
    if found not in SERVED_DTYPES:
        raise ValueError(
            f"{option}=auto: {model_path / 'config.json'} names the dtype {named}; set {option} to"
            f" one of {', '.join(SERVED_DTYPES)}"
        )
    return found
