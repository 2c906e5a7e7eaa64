"""SGLang scores with our Qwen classes, whose heads hold nothing that no checkpoint fills.

SGLang's own classes still have a bias; once they have none, ours are not needed anymore.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.tiny_models import write_reward_model


def test_a_reward_models_head_is_its_checkpoints(tmp_path: Path) -> None:
    kinds = ("qwen2", "qwen3")
    folders = [str(write_reward_model(kind, tmp_path / kind)) for kind in kinds]
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.reward_head_checks", *folders],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    for kind, built in zip(kinds, json.loads(process.stdout.splitlines()[-1]), strict=True):
        assert built == {
            "module": "mcore_rl.rollout.reward_heads.qwen",
            "upstream_module": f"sglang.srt.models.{kind}_classification",
            "upstream_has_bias": True,
            "has_bias": False,
            "unfilled": [],
            "score_is_loaded": True,
        }
