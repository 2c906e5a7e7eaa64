"""Files in options get absolute paths, wherever they are named."""

from pathlib import Path

from mcore_rl.config import AgentsConfig
from mcore_rl.config.shipped import HOME
from mcore_rl.workers.episodes import EpisodeSpec, make_absolute, make_environment_options


def test_files_are_found_from_here_or_beside_the_recipes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    options = {
        "functions": ["mine.py:look", "recipes/tools/calculator.py:calculator"],
        "id": "CartPole-v1",
        "module": "package.module:Class",
        "number": 3,
    }
    assert make_absolute(options) == {
        "functions": [
            f"{tmp_path}/mine.py:look",
            f"{HOME}/recipes/tools/calculator.py:calculator",
        ],
        "id": "CartPole-v1",
        "module": "package.module:Class",
        "number": 3,
    }


def test_workers_get_the_options_of_the_recipe(tmp_path: Path) -> None:
    agents = AgentsConfig(
        environment="gymnasium", options={"id": "CartPole-v1"}, workers=3, variables={"A": 1}
    )
    spec = EpisodeSpec(agents, "model", False, "Qwen3MoeForCausalLM", (1,), 64, 8, tmp_path)
    options = make_environment_options(spec, "collector_1")
    assert (options.kind, options.options, options.workers) == (
        "gymnasium",
        {"id": "CartPole-v1"},
        3,
    )
    assert options.variables == {"A": "1"}
    assert options.log_folder == str(tmp_path / "collector_1")
    assert options.run_timeout_s == agents.deadline_s
