"""SGLang loads our GLM-4.5V, whose projector has the epsilon of transformers.

SGLang's own class still has another; once it has the same, ours is not needed anymore.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.rollout.server import find_package
from tests.support.image_requests import write_served_model
from tests.support.tiny_vision import load_vision_model


@pytest.mark.slow
def test_the_projectors_norm_has_the_epsilon_of_transformers(tmp_path: Path) -> None:
    folder = write_served_model(tmp_path, "glm4v_moe")
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.glm4v_norm_checks", str(folder)],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    wanted = load_vision_model(folder).model.visual.merger.post_projection_norm.eps
    assert json.loads(process.stdout.splitlines()[-1]) == {
        "module": "mcore_rl.rollout.vision_models.glm4v_moe",
        "eps": wanted,
        "upstream_eps": 1e-6,
    }


def test_only_models_that_need_it_are_given_our_classes(tmp_path: Path) -> None:
    for kind, package in (
        ("glm4v_moe", "mcore_rl.rollout.vision_models"),
        ("qwen2_5_vl", None),
    ):
        folder = write_served_model(tmp_path / kind, kind)
        assert find_package(["--model-path", str(folder), "--dtype", "float32"]) == package
    assert find_package(["--dtype", "float32"]) is None
