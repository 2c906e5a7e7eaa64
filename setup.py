"""Puts recipes/ into the wheel, as mcore_rl/recipes. Everything else stands in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithRecipes(build_py):
    """A wheel carries the recipes; an editable installation reads them where they lie."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "mcore_rl" / "recipes"
            shutil.copytree(ROOT / "recipes", target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithRecipes})
