"""A wheel works where there is no checkout: recipes, stand-ins and commands come with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl import __version__
from tests.support.policy import ROOT, tracked

PACKAGED = {"mcore_rl", "checkpoint_tools", "launch", "recipes"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of this tree was installed, without its requirements."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in tracked():
        if path.parts[0] in PACKAGED or len(path.parts) == 1:
            copy = folder / "source" / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", ".", "./source"]
    subprocess.run(build, cwd=folder, check=True)
    [wheel] = folder.glob("*.whl")
    install = [*pip, "install", "--no-deps", "--target", "site", str(wheel)]
    subprocess.run(install, cwd=folder, check=True)
    return folder / "site"


def run_installed(site: Path, folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "mcore_rl.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_recipes_stand_ins_c_sources_and_pages_are_in_the_wheel(installed: Path) -> None:
    shipped = {path for path in tracked() if path.parts[0] == "recipes"}
    missing = [path for path in shipped if not (installed / "mcore_rl" / path).is_file()]
    assert shipped
    assert not missing
    assert (installed / "mcore_rl/cpu/standins/triton/__init__.py").is_file()
    sources = [path for path in tracked() if path.suffix in {".c", ".h", ".js", ".css", ".html"}]
    assert {path.suffix for path in sources} == {".c", ".h", ".js", ".css", ".html"}
    assert all((installed / path).is_file() for path in sources)


def test_the_wheel_says_its_version(installed: Path, tmp_path: Path) -> None:
    assert run_installed(installed, tmp_path, "--version") == f"mcore-rl {__version__}\n"


def test_an_installed_package_lists_and_plans_its_recipes(installed: Path, tmp_path: Path) -> None:
    assert "tiny_moe_grpo" in run_installed(installed, tmp_path, "--help")
    planned = run_installed(installed, tmp_path, "plan", "recipe=qwen3_30b_a3b_grpo_8")
    assert "GPUs: 8 on 1 host" in planned


def test_a_shipped_recipe_finds_its_reward_from_any_folder(installed: Path, tmp_path: Path) -> None:
    lines = (
        "from mcore_rl.config.recipe import load_recipe",
        "from mcore_rl.rewards.user_function import find_file",
        "print(find_file('reward.path', load_recipe('tiny_moe_grpo', []).reward.path))",
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(installed / "mcore_rl/recipes/rewards/arithmetic.py"), done
