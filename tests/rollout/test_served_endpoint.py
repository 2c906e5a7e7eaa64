"""Served models that cannot be started or found are refused before anything starts."""

from pathlib import Path

import pytest

from mcore_rl.config import ServedModelConfig
from mcore_rl.rollout.served_models import check_served_path, find_endpoint


def test_a_folder_that_holds_no_model_or_no_tokenizer_is_refused(tmp_path: Path) -> None:
    config = ServedModelConfig(path=str(tmp_path))
    with pytest.raises(ValueError, match=r"judge.path=.*: there is no config.json"):
        check_served_path("judge", config)
    (tmp_path / "config.json").write_text("{}")
    check_served_path("teacher", config)
    with pytest.raises(ValueError, match=r"judge.path=.*: there is no tokenizer_config.json"):
        check_served_path("judge", config)


def test_a_server_that_is_not_there_or_wants_a_key_that_is_not_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"judge.url=http://127.0.0.1:9: .* does not list models: URLError"
    ):
        find_endpoint("judge", ServedModelConfig(url="http://127.0.0.1:9"))
    with pytest.raises(
        ValueError, match=r"judge.api_key_env=NO_SUCH_KEY: there is no such environment"
    ):
        find_endpoint(
            "judge", ServedModelConfig(url="http://127.0.0.1:9", api_key_env="NO_SUCH_KEY")
        )
