"""The recorded rule of SGLang's layouts against SGLang itself: families, TP, EP, DP attention, stages."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import write_model

TIED = {"tie_word_embeddings": True}
CASES = [
    ("qwen3_moe", {}, {"tp": 4, "ep": 2}),
    ("qwen3_moe", {}, {"tp": 4, "ep": 4, "dp": 2}),
    ("qwen3_moe", {}, {"tp": 2, "pp": 3, "dp": 2}),
    ("deepseek_v3", {}, {"tp": 4, "ep": 4, "dp": 2}),
    ("deepseek_v3", {}, {"tp": 2, "pp": 3}),
    ("deepseek_v2", {}, {"tp": 2, "ep": 2}),
    ("qwen3", {}, {"tp": 4, "dp": 2}),
    ("qwen3", TIED, {"tp": 2, "pp": 2}),
    ("qwen2", {}, {"tp": 4, "pp": 2}),
    ("llama", {}, {"tp": 2, "pp": 2}),
    ("llama", TIED, {"tp": 4}),
]
"""(family, changes to its config.json, sizes of an engine)"""


def test_every_rank_loads_what_the_rule_says(tmp_path: Path) -> None:
    cases = []
    for i, (kind, changes, sizes) in enumerate(CASES):
        write_model(kind, tmp_path / str(i), **changes)
        cases.append({"hf_dir": str(tmp_path / str(i)), "sizes": sizes})
    process = subprocess.run(
        [sys.executable, "-m", "tests.rollout.sglang_layout_checks", json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    outcome = json.loads(process.stdout.splitlines()[-1])
    assert not outcome["errors"], "\n".join(outcome["errors"])
    assert outcome["num_ranks"] == sum(sizes["tp"] * sizes.get("pp", 1) for _, _, sizes in CASES)
