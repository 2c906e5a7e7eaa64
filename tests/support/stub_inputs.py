"""Makes files that stand for a large recipe's weights and prompts, which nothing reads here."""

import shutil
from pathlib import Path

from mcore_rl.config.recipe import load_recipe


def stub_inputs(folder: Path, recipe: str) -> list[str]:
    """Return overrides that name a model with the recipe's config.json, and prompts."""
    config = load_recipe(recipe, [])
    model = folder / f"{recipe}_model"
    shutil.copytree(config.model.path, model)
    (model / "model.safetensors").write_bytes(b"")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("")
    index = [f"search.index={folder}"] if config.search.is_used else []
    return [f"model.path={model}", f"data.train=[{prompts}]", "eval.data=[]", *index]
