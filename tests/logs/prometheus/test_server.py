"""A running run answers Prometheus, on loopback unless told otherwise."""

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mcore_rl.checks.inputs import list_input_checks, refuse_missing
from mcore_rl.config import Config, LogConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.logs.logger import MetricsLogger
from mcore_rl.logs.prometheus.server import PrometheusServer
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.run.parts import make_log
from tests.support.stub_inputs import STUB_ROW


def ask(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=9) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def make_logger(folder: Path) -> MetricsLogger:
    config = Config()
    config.log = LogConfig(console=False, tensorboard=False, prometheus_port=0)
    config.alarms.when = ["kl/ref > 0.2 for 1 step"]
    return make_log(config, RunFolder(folder / "mine"), 9, 0)


def test_each_row_is_answered_until_the_run_ends(tmp_path: Path) -> None:
    with make_logger(tmp_path) as log:
        assert log._prometheus is not None
        url = log._prometheus.url
        assert url.startswith("http://127.0.0.1:")
        assert ask(url) == {"mcore_rl_steps_total": 9}
        log.log(3, {"reward/mean": 0.5, "sync/seconds": 1.5})
        log.log(3, {"kl/ref": 0.3})
        values = ask(url)
        assert values.pop("mcore_rl_logged_seconds") > 1e9
        assert values == {
            "mcore_rl_steps_total": 9,
            "mcore_rl_step": 3,
            "mcore_rl_reward_mean": 0.5,
            "mcore_rl_sync_seconds": 1.5,
            "mcore_rl_kl_ref": 0.3,
            "mcore_rl_alarm": 1,
        }
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(url.replace("/metrics", "/"))
    with pytest.raises(urllib.error.URLError):
        ask(url)


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with PrometheusServer("mine", "127.0.0.1", 0, None) as server:
        port = int(server.url.split(":")[2].partition("/")[0])
        (tmp_path / "train.jsonl").write_text(STUB_ROW)
        given = [
            f"log.prometheus_port={port}",
            "model.path=recipes/model/qwen3_30b_a3b",
            "model.init=random",
            f"data.train={tmp_path}/train.jsonl",
            "eval.data=[]",
        ]
        with pytest.raises(ValueError, match=rf"prometheus_port={port} is not free .* another"):
            refuse_missing(list_input_checks(load_recipe("tiny_moe_grpo", given), "train"))
        with pytest.raises(ValueError, match=rf"prometheus_port={port} on 127.0.0.1: .* another"):
            PrometheusServer("mine", "127.0.0.1", port, None)
