"""A run's folder outlives its nodes, and a recipe of one's own goes with the job."""

from pathlib import Path

import pytest

from launch.away import find_own_recipe, make_job_name, read_recipe, replace_recipe, require_mounted
from launch.submission import Submission
from mcore_rl.config.shipped import RECIPES_DIR
from mcore_rl.planning.bundles import NodeNeeds


def submission(run_dir: str = "/mnt/runs/a", recipe: str = "a") -> Submission:
    settings = [f"recipe={recipe}", "run.steps=3"]
    return Submission("train", settings, Path(run_dir), NodeNeeds(1, 0, 8, 64))


def test_a_folder_on_no_mount_is_refused() -> None:
    require_mounted(submission(), ["/data", "/mnt/runs"], "launch.claims")
    for mounts in ([], ["/data"], ["/mnt/run"], ["/mnt/runs/a/b"]):
        with pytest.raises(ValueError, match=r"run.dir=/mnt/runs/a lies on no .*launch.claims"):
            require_mounted(submission(), mounts, "launch.claims")


@pytest.mark.parametrize(
    ("run_dir", "name"),
    [("/r/a", "train-a"), ("/r/Qwen3_30B.v2", "train-qwen3-30b-v2"), ("/r/" + "x_" * 40, 23)],
)
def test_a_folders_name_becomes_a_name_for_kubernetes(run_dir: str, name: str | int) -> None:
    made = make_job_name("", submission(run_dir), "launch.name", 47)
    assert made == name if isinstance(name, str) else len(made) <= 47 and made.endswith("x")


@pytest.mark.parametrize("given", ["Train", "1a", "a-", "a_b", "a" * 48])
def test_a_name_that_kubernetes_refuses_is_refused_here(given: str) -> None:
    with pytest.raises(ValueError, match=f"launch.name={given}: expected at most 47 lower-case"):
        make_job_name(given, submission(), "launch.name", 47)


def test_only_a_file_of_ones_own_is_sent() -> None:
    assert find_own_recipe(submission()) is None
    mine = submission(recipe="here/mine.yaml")
    assert find_own_recipe(mine) == Path("here/mine.yaml")
    assert replace_recipe(mine, "/etc/r.yaml")[1] == "recipe=/etc/r.yaml"
    assert replace_recipe(mine, None) == mine.arguments


def test_a_recipe_that_holds_a_secret_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    for text in ("judge: {api_key: abc}", "data: {train: ['https://me:pass@host/a.parquet']}"):
        mine.write_text(text)
        with pytest.raises(ValueError, match=r"mine.yaml: (judge.api_key|data.train) is a secret"):
            read_recipe(mine)
    mine.write_text("judge: {api_key: '${oc.env:KEY}', api_key_env: KEY}")
    assert read_recipe(mine)
    assert all(map(read_recipe, RECIPES_DIR.glob("*.yaml")))


def test_a_recipe_that_takes_files_beside_it_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [schema, algorithm: grpo, _self_]\nrun: {steps: 3}\n")
    assert read_recipe(mine) == mine.read_text()
    (tmp_path / "base.yaml").write_text("run: {steps: 4}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("path: /m\n")
    mine.write_text("defaults: [base, override model: small, _self_]\n")
    with pytest.raises(ValueError, match=r"mine.yaml takes base.yaml, model/small.yaml from its"):
        read_recipe(mine)
