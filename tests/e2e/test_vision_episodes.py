"""Episodes in which tools show images: engines and ranks see the same pixels, turn by turn."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_rl.tasks.shapes import prepare_zoom
from tests.support.runs import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
Start = Callable[..., Run]

CROPS = '''
from mcore_rl.agents.environments.crop_env import CropEnvironment, CropOptions


class Crops(CropEnvironment):
    """Takes any answer of the first two turns as a call, so that a policy that knows nothing gets
    pieces, of other sizes in each episode.
    """

    def __init__(self):
        super().__init__(CropOptions(view_pixels=56, zoom_pixels=84, units=3, role="tool"))

    def reset(self, task):
        self.number = task["sample_index"]
        self.turn = 0
        return super().reset(task)

    def step(self, message):
        self.turn += 1
        if self.turn > 2:
            return super().step({**message, "content": "red"})
        x, y = self.number % 2, self.turn - 1
        return super().step({**message, "content": f"crop({x},{y},{x + 2},{y + self.turn})"})
'''


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    """begin(*settings) -> Run of `mcore-rl train`; what it leaves is killed at the end."""
    runs: list[Run] = []

    def begin_run(*settings: str) -> Run:
        runs.append(Run(("train", *settings), tmp_path / "run"))
        return runs[-1]

    yield begin_run
    for run in runs:
        run.kill_all()


@pytest.fixture(scope="module")
def zoom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoom")
    prepare_zoom(folder)
    return folder


def settings(zoom: Path) -> list[str]:
    """Return the recipe in its smallest size, with a model that knows nothing."""
    return [
        "recipe=tiny_vlm_crop",
        f"model.path={zoom / 'model'}",
        "model.init=random",
        f"data.train=[{zoom / 'train.parquet'}]",
        f"eval.data=[{zoom / 'heldout.parquet'}]",
        "eval.max_prompts=4",
        "eval.every_steps=0",
        "checkpoint.export_hf=false",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "reward.noise=1.0",
    ]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("parallel.pp=2", "rollout.mode=sync"), id="sync"),
        pytest.param(
            ("rollout.mode=async", "algorithm.correction.weight=token", "train.vision=all"),
            id="async",
        ),
    ],
)
def test_pieces_of_pictures_train_as_they_were_seen(
    begin: Start, zoom: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """The trainer gives each sampled token the log-prob that the engine gave it behind the images
    that it had seen by then: two turns of three show a piece, other ones in other episodes. Some
    episodes end early, as this policy says tokens that mark images.
    """
    (tmp_path / "crops.py").write_text(CROPS)
    names = ("view_pixels", "zoom_pixels", "units", "max_crops")
    unread = [f"agents.options.{name}=null" for name in names]
    environment = f"agents.environment={tmp_path / 'crops.py'}:Crops"
    longer = "rollout.max_response_len=96"
    run = begin(*settings(zoom), environment, *unread, longer, "run.steps=3", *more)
    assert run.finish(500) == 0, run.tail()
    run.assert_nothing_left()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        # An untrained policy may sample a token of images in all of a step's few episodes.
        ends = {name for name in line if name.startswith("episodes/end/")}
        assert ends and ends <= {"episodes/end/done", "episodes/end/parse_error"}
        assert line["episodes/rows"] == 1.0 and line["loss/grad_norm"] > 0
        assert line["episodes/crops"] > 0.5
        assert line["logprob_diff/arithmetic"] < 1e-5, line
        assert line["sync/parity_diff"] < 1e-5, line
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").open()]
    long = next(row for row in samples if len(row["turns"]) == 3)
    assert len(set(long["images"])) == len(long["images"]) >= 3
    assert all((run.run_dir / path).is_file() for path in long["images"])
    turns = long["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, 1]
    kinds = [[part["type"] for part in turn["messages"][0]["content"]] for turn in turns]
    assert kinds == [["image", "text"], ["image"], ["image"]]


def test_a_policy_crops_by_itself(begin: Start, zoom: Path) -> None:
    run = begin(*settings(zoom), "run.steps=2")
    assert run.finish(400) == 0, run.tail()
    run.assert_nothing_left()
    ends = {name for line in run.metrics() for name in line if name.startswith("episodes/end/")}
    known = ("done", "max_turns", "max_tokens", "parse_error")
    assert ends and ends <= {f"episodes/end/{end}" for end in known}
