"""SGLang serves Kimi-VL by our class, as long as its own has another activation and keeps copies.

Once its own class passes, ours is not needed anymore.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.image_requests import write_served_model

MODULE = "mcore_rl.rollout.vision_models.kimi_vl"


def test_our_class_is_served_and_still_needed(tmp_path: Path) -> None:
    folder = write_served_model(tmp_path / "model", "kimi_vl")
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.kimi_vl_checks", str(folder)],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads(process.stdout.splitlines()[-1]) == {
        "module": MODULE,
        "activation": "GELU",
        "upstream_activation": "QuickGELU",
        "kept": {
            "chosen_loaded": [],
            "chosen_in_place": [],
            "upstream_loaded": ["positions"],
            "upstream_in_place": ["positions", "latent"],
        },
        "processor": f"{MODULE}_processor",
    }
