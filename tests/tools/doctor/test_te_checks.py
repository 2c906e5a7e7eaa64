"""Checks with Transformer Engine are skipped on a GPU without it, and keep figures they miss."""

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.tools.doctor import te_checks
from mcore_rl.tools.doctor.check import MissedTargetError, SkipCheckError
from mcore_rl.tools.doctor.lone_rank import qwen3_moe


def test_without_transformer_engine_a_gpu_skips_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = qwen3_moe()
    monkeypatch.setattr(te_checks, "has_cuda", lambda: True)
    monkeypatch.setattr(te_checks, "has_transformer_engine", lambda: False)
    with pytest.raises(SkipCheckError, match="Transformer Engine is not"), te_checks._rank(config):
        pass


def test_memory_off_the_plan_is_told_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def missed(rank: Any) -> Any:
        raise MissedTargetError("1.4 of the plan", {"ratio": 1.4})

    figures: dict[str, Any] = {}
    rank: Any = SimpleNamespace()
    monkeypatch.setattr(te_checks, "compare_with_plan", missed)
    assert te_checks._memory(rank, "qwen_none", figures) == ["qwen_none: 1.4 of the plan"]
    assert figures == {"qwen_none_ratio": 1.4}
    monkeypatch.setattr(te_checks, "compare_with_plan", lambda rank: {"ratio": 1.0})
    assert te_checks._memory(rank, "qwen_full", figures) == []
    assert figures["qwen_full_ratio"] == 1.0
