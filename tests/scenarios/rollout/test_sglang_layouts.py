"""The recorded SGLang layouts against SGLang itself: families, TP, EP, DP attention, stages."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_glm4v import write_glm4v_model
from tests.support.tiny_kimi_vl import write_kimi_k25_model, write_kimi_vl_model
from tests.support.tiny_models import write_model
from tests.support.tiny_qwen3_vl import (
    write_qwen3_5_model,
    write_qwen3_5_moe_model,
    write_qwen3_vl_model,
    write_qwen3_vl_moe_model,
)
from tests.support.tiny_vision import write_vision_model

TIED = {"tie_word_embeddings": True}
CASES = [
    ("qwen3_moe", {}, {"tp": 4, "ep": 2}),
    ("qwen3_moe", {}, {"tp": 4, "ep": 4, "dp": 2}),
    ("qwen3_moe", {}, {"tp": 2, "pp": 3, "dp": 2}),
    ("qwen2_moe", {}, {"tp": 4, "ep": 2, "dp": 2}),
    ("qwen2_moe", {}, {"tp": 2, "pp": 2}),
    ("mixtral", {}, {"tp": 4, "ep": 2}),
    ("mixtral", {}, {"tp": 2, "pp": 2, "ep": 2}),
    ("olmoe", {}, {}),
    ("glm4_moe", {}, {"tp": 4, "ep": 4, "dp": 2}),
    ("glm4_moe", {"use_qk_norm": False}, {"tp": 2, "pp": 3}),
    ("minimax_m2", {}, {"tp": 4, "ep": 2}),
    ("minimax_m2", {}, {"tp": 2, "pp": 2, "dp": 2}),
    ("gpt_oss", {}, {"tp": 4}),
    ("gpt_oss", {}, {"tp": 2, "pp": 2, "dp": 2}),
    ("deepseek_v3", {}, {"tp": 4, "ep": 4, "dp": 2}),
    ("deepseek_v3", {}, {"tp": 2, "pp": 3}),
    ("deepseek_v2", {}, {"tp": 2, "ep": 2}),
    ("glm4_moe_lite", {}, {"tp": 2, "pp": 3}),
    ("deepseek_v32", {}, {"tp": 2, "pp": 2, "ep": 2}),
    ("glm5", {}, {"tp": 4, "ep": 4, "dp": 2}),
    ("hunyuan_v3", {}, {"tp": 4, "ep": 4}),
    ("hunyuan_v3", TIED, {"tp": 2}),
    ("qwen3", {}, {"tp": 4, "dp": 2}),
    ("qwen3", TIED, {"tp": 2, "pp": 2}),
    ("qwen2", {}, {"tp": 4, "pp": 2}),
    ("llama", {}, {"tp": 2, "pp": 2}),
    ("llama", TIED, {"tp": 4}),
    ("nemotron3", {}, {"tp": 4, "ep": 4}),
    ("nemotron3", {}, {"tp": 2, "pp": 2, "ep": 2}),
    ("nemotron3_latent", {}, {"tp": 2}),
]
"""(family, changes to its config.json, sizes of an engine)"""
HEAD, DENSE, DEEPEP = (
    {"head_by_dp": True},
    {"whole_dense_layers": True},
    {"whole_shared_experts": True},
)
WITH_DP = {"tp": 4, "ep": 4, "dp": 2}
CASES += [
    ("deepseek_v3", {}, WITH_DP | HEAD | DENSE),
    ("deepseek_v3", {}, WITH_DP | DEEPEP),
    ("glm4_moe_lite", {}, WITH_DP | HEAD | DENSE),
    ("glm4_moe_lite", {}, WITH_DP | DEEPEP),
    ("deepseek_v32", {}, WITH_DP | HEAD | DENSE),
    ("glm5", {}, WITH_DP | DEEPEP),
    ("glm4_moe", {}, WITH_DP | HEAD | DENSE),
    ("glm4_moe", {}, WITH_DP | DEEPEP),
    ("qwen3_moe", {}, WITH_DP | HEAD),
    ("qwen3_moe", {}, WITH_DP | DEEPEP),
    ("qwen2_moe", {}, WITH_DP | HEAD | DEEPEP),
    ("gpt_oss", {}, {"tp": 4, "dp": 2} | HEAD),
    ("qwen3", {}, {"tp": 4, "dp": 2} | HEAD),
]
"""The same with SGLang's options that place tensors otherwise."""
BFLOAT16 = [
    ("deepseek_v3", {}, {}),
    ("deepseek_v32", {}, {}),
    ("glm4_moe", {}, {"tp": 2}),
    ("glm4_moe_lite", {}, {"tp": 2}),
    ("hunyuan_v3", {}, {"tp": 2}),
    ("minimax_m2", {}, {"tp": 2}),
    ("gpt_oss", {"dtype": "bfloat16"}, {}),
    ("nemotron3", {}, {"tp": 2}),
]
"""Families with tensors that have a dtype of their own."""
JOINED = [("deepseek_v32", {}, {}), ("glm5", {}, {"tp": 2, "ep": 2})]
"""Families whose tensors lie elsewhere on GPUs."""
HEADS = {"vision": {"num_heads": 4}}
ALL_PADDING = {"vision": {"num_heads": 4, "intermediate_size": 4}}
VISION = [
    ({}, {"tp": 2}),
    (HEADS, {"tp": 2, "pp": 2}),
    (HEADS | TIED, {"pp": 2}),
    (ALL_PADDING, {"tp": 4}),
    ({}, {"tp": 4, "whole_tower": True}),
]
"""The same for Qwen2.5-VL; each is loaded as on CPUs and as on GPUs."""
GLM4V = [
    ({}, {"tp": 2, "ep": 2, "pp": 2}),
    (HEADS, {"tp": 4, "ep": 4, "dp": 2} | HEAD | DENSE),
    ({"vision": {"attention_bias": True}}, {"tp": 2, "whole_tower": True}),
]
"""The same for GLM-4.5V."""
SIX_LAYERS = {"num_hidden_layers": 6}
EIGHT_LAYERS = {"num_hidden_layers": 8}
QWEN3_VL = [
    (SIX_LAYERS, {"tp": 2, "pp": 2}),
    (SIX_LAYERS | TIED, {"pp": 2}),
    (HEADS, {"tp": 4, "dp": 2} | HEAD),
    (TIED, {"tp": 2, "whole_tower": True}),
]
"""The same for Qwen3-VL, whose first stage has the layers that take features of the tower."""
QWEN3_VL_MOE = [
    (HEADS, {"tp": 4, "ep": 2}),
    (SIX_LAYERS, {"tp": 2, "pp": 2}),
    (HEADS, {"tp": 4, "ep": 4, "dp": 2} | HEAD | DEEPEP),
]
"""The same for Qwen3-VL with experts."""
QWEN3_5 = [
    (EIGHT_LAYERS, {"tp": 2, "pp": 2}),
    (EIGHT_LAYERS | TIED, {"pp": 2}),
    (HEADS, {"tp": 4, "dp": 2} | HEAD),
]
"""The same for Qwen3.5."""
QWEN3_5_MOE = [
    (HEADS, {"tp": 4, "ep": 2}),
    (EIGHT_LAYERS, {"tp": 2, "pp": 2}),
    (HEADS, {"tp": 4, "ep": 4, "dp": 2} | HEAD),
]
"""The same for Qwen3.5 with experts."""
KIMI_VL = [
    ({}, {"tp": 2, "ep": 2}),
    ({"vision": {"num_attention_heads": 4}}, {"tp": 4, "ep": 2}),
    ({}, {"tp": 4, "ep": 4, "whole_tower": True} | DENSE),
    ({}, {"tp": 2, "ep": 2, "whole_shared_experts": True}),
]
"""The same for Kimi-VL."""
KIMI_K25 = [
    ({}, {"tp": 2, "ep": 2}),
    (EIGHT_LAYERS, {"tp": 2, "pp": 2}),
    ({}, {"tp": 4, "ep": 4, "whole_tower": True} | DENSE),
    ({"vision": {"num_attention_heads": 4}}, {"tp": 4, "ep": 4, "dp": 2} | HEAD | DEEPEP),
]
"""The same for Kimi-K2.5."""


TOWERS = [
    *((write_vision_model, case) for case in VISION),
    *((write_glm4v_model, case) for case in GLM4V),
    *((write_qwen3_vl_model, case) for case in QWEN3_VL),
    *((write_qwen3_vl_moe_model, case) for case in QWEN3_VL_MOE),
    *((write_kimi_vl_model, case) for case in KIMI_VL),
    *((write_kimi_k25_model, case) for case in KIMI_K25),
    *((write_qwen3_5_model, case) for case in QWEN3_5),
    *((write_qwen3_5_moe_model, case) for case in QWEN3_5_MOE),
]
QUICK = [TOWERS[1], TOWERS[8]]
"""Those of `make test`: padded heads of a tower, and features of its inner layers."""
QUICK_FAMILIES = ("qwen3_moe", "deepseek_v3", "nemotron3", "qwen3")


@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_rank_loads_what_the_rule_says(tmp_path: Path, is_quick: bool) -> None:
    listed = [
        (dtype, case)
        for dtype, of_dtype in (("float32", CASES), ("bfloat16", BFLOAT16))
        for case in of_dtype
        if (case[0] in QUICK_FAMILIES) == is_quick
    ]
    cases = make_tower_cases(QUICK, tmp_path / "towers") if is_quick else []
    for i, (dtype, (kind, changes, sizes)) in enumerate(listed):
        write_model(kind, tmp_path / str(i), **changes)
        folder = str(tmp_path / str(i))
        cases.append({"hf_dir": folder, "dtype": dtype, "loader": "cpu", "sizes": sizes})
    for kind, changes, sizes in JOINED[:1] if is_quick else JOINED[1:]:
        folder = str(write_model(kind, tmp_path / kind, **changes))
        cases.append({"hf_dir": folder, "dtype": "bfloat16", "loader": "gpu", "sizes": sizes})
    check_ranks(cases)


@pytest.mark.slow
def test_every_rank_loads_of_a_tower_what_the_rule_says(tmp_path: Path) -> None:
    check_ranks(make_tower_cases(TOWERS, tmp_path))


def make_tower_cases(towers: Sequence[Any], root: Path) -> list[dict[str, Any]]:
    """Write the models of `towers`, each to be loaded as on CPUs and as on GPUs."""
    cases: list[dict[str, Any]] = []
    for i, (write, (changes, sizes)) in enumerate(towers):
        folder = str(write(root / str(i), **changes))
        cases += [
            {"hf_dir": folder, "dtype": dtype, "loader": loader, "sizes": sizes}
            for dtype, loader in (("float32", "cpu"), ("bfloat16", "gpu"))
        ]
    return cases


def check_ranks(cases: list[dict[str, Any]]) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.sglang_layout_checks", json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    outcome = json.loads(process.stdout.splitlines()[-1])
    assert not outcome["errors"], "\n".join(outcome["errors"])
    sizes = [case["sizes"] for case in cases]
    assert outcome["num_ranks"] == sum(s.get("tp", 1) * s.get("pp", 1) for s in sizes)
