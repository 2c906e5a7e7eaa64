"""Makes files that stand for a large recipe's weights and prompts, which nothing reads here."""

import json
import shutil
from pathlib import Path

from mcore_rl.config.recipe import load_recipe

STUB_ROW = json.dumps({"prompt": [], "data_source": "stub", "reward_model": {"ground_truth": "1"}})
"""A line of a file of prompts, with all columns that are needed."""


def stub_inputs(folder: Path, recipe: str) -> list[str]:
    """Return overrides that name a model with the recipe's config.json, and prompts."""
    config = load_recipe(recipe, [])
    model = folder / f"{recipe}_model"
    shutil.copytree(config.model.path, model)
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(STUB_ROW)
    index = [f"search.index={folder}"] if config.search.is_used else []
    return [f"model.path={model}", f"data.train=[{prompts}]", "eval.data=[]", *index]
