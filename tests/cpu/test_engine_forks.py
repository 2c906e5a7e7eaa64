"""A forked engine answers as a started one, token by token, and is titled as what it is."""

import os
import urllib.request
from pathlib import Path

import orjson
import psutil
import pytest

from mcore_rl.cpu import engine_forks
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from tests.support.engine_keys import KEYS
from tests.support.engines import live_processes, save_tiny_moe

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def generate(engine: EngineProcess) -> object:
    body = {
        "input_ids": list(range(3, 40)),
        "sampling_params": {"max_new_tokens": 16, "temperature": 1.0, "sampling_seed": 5},
        "return_logprob": True,
    }
    request = urllib.request.Request(
        f"{engine.url}/generate",
        orjson.dumps(body),
        {**KEYS.user_headers, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = orjson.loads(response.read())
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]


def test_a_fork_serves_as_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EngineSpec(
        save_tiny_moe(tmp_path / "model"), str(tmp_path / "log"), keys=KEYS, deterministic=True
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with engine_forks.engine_forks():
        with EngineProcess(spec) as engine:
            forked = generate(engine)
            parent = psutil.Process(engine.pid).parent()
            assert parent is not None and engine_forks.__name__ in " ".join(parent.cmdline())
            titles = [" ".join(psutil.Process(p).cmdline()) for p in live_processes(engine.pid)]
            for title in ("mcore_rl.rollout.server --model-path", "sglang::scheduler"):
                assert any(title in shown for shown in titles), titles
        monkeypatch.delenv(engine_forks.FORKS)
        with EngineProcess(spec) as engine:
            assert psutil.Process(engine.pid).ppid() == os.getpid()
            assert generate(engine) == forked
