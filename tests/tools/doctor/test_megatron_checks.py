"""Checks of a rank in training are skipped where megatron-core is missing."""

from pathlib import Path

import pytest

from mcore_rl.tools.doctor import runner
from mcore_rl.tools.doctor.megatron_checks import MEGATRON


def test_without_megatron_core_every_check_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_there(name: str) -> None:
        assert name in {"megatron", "zlib_ng", "transformers"}

    monkeypatch.setattr(runner, "find_spec", not_there)
    for check in MEGATRON.checks:
        result = runner.run_check(MEGATRON, check, tmp_path)
        assert result.outcome == "skipped"
        assert result.why in ("megatron is not installed", "there is no GPU")
