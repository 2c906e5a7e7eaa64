"""Hugging Face's cache: where it lies, whether it serves, and its offline mode."""

from pathlib import Path

import pytest

from mcore_rl.tools.doctor.machine.needs import MachineNeeds
from mcore_rl.tools.doctor.machine.space import check_hub_cache, find_hub_home, is_offline


def test_the_folder_is_that_of_huggingface_hub(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert find_hub_home() == tmp_path / "hf"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_hub_home() == tmp_path / "huggingface"


@pytest.mark.parametrize(
    ("home", "offline", "outcome", "text"),
    [
        ("here", "", "ok", "online"),
        ("here", "1", "ok", "offline"),
        ("new", "", "ok", "will be made"),
        ("new", "1", "failed", "does not exist"),
    ],
)
def test_a_cache_that_is_used_offline_has_to_exist(
    home: str, offline: str, outcome: str, text: str, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HF_HOME", str(tmp_path / home))
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    [finding] = check_hub_cache(MachineNeeds())
    assert (finding.outcome, is_offline()) == (outcome, bool(offline))
    assert text in finding.text
