"""Whom a real engine lets in, what it listens on, and where its keys can be seen: nowhere."""

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl.process.server_keys import ServerKeys, bearer
from mcore_rl.rollout import image_request
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.request_gates import ADMIN_PATHS, OPEN_PATHS, USER_PATHS
from tests.support.engines import live_processes, save_tiny_moe

pytestmark = pytest.mark.e2e

KEYS = ServerKeys.make()
ADMINISTRATIVE = {
    "/update_weights_from_tensor": {"serialized_named_tensors": ["gASVAAAAAAAAAAAu"]},
    "/update_weights_from_disk": {"model_path": "/tmp/other"},
    "/update_weight_version": {"new_version": "99"},
    "/pause_generation": {"mode": "abort"},
    "/continue_generation": {},
    "/flush_cache": {},
    "/release_memory_occupation": {"tags": ["weights"]},
    "/load_lora_adapter_from_tensors": {"lora_name": "a", "serialized_tensors": "gASVAAA="},
    "/abort_request": {"abort_all": True},
    "/init_weights_update_group": {"master_address": "10.0.0.1", "master_port": 1},
    "/server_info": {},
    "/set_internal_state": {"server_args": {}},
}
LIST_ROUTES = """
import json
from mcore_rl.device.sglang_setup import use_cpu
use_cpu(["--model-path", "m"])
from sglang.srt.entrypoints.http_server import app
def paths(routes):
    for route in routes:
        if hasattr(route, "path"):
            yield route.path
        inner = getattr(route, "original_router", None)
        yield from paths(getattr(inner, "routes", ()))
print(json.dumps(sorted(set(paths(app.routes)))))
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("doors")
    spec = EngineSpec(
        save_tiny_moe(folder / "model"), str(folder / "engine.log"), tp=2, ep=2, keys=KEYS
    )
    with EngineProcess(spec) as engine:
        yield engine


def ask(
    engine: EngineProcess, path: str, body: Any = None, key: str = "", method: str = "", **more: str
) -> tuple[int, Any]:
    """Return HTTP status and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", int(engine.url.rsplit(":", 1)[1]), 30)
    try:
        headers = {"Content-Type": "application/json", **bearer(key), **more}
        data = None if body is None else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text[:1] in (b"{", b"[") else text
    finally:
        connection.close()


def sample(engine: EngineProcess, key: str) -> Any:
    body = {
        "input_ids": list(range(10, 22)),
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    }
    status, answer = ask(engine, "/generate", body, key)
    assert status == 200, answer
    return answer["output_ids"], answer["meta_info"]["weight_version"]


def test_administrative_calls_without_the_key_are_refused_and_change_nothing(
    engine: EngineProcess,
) -> None:
    before = sample(engine, KEYS.user)
    for path, body in ADMINISTRATIVE.items():
        for key in ("", "guess", KEYS.user, KEYS.admin[:-1]):
            for method in ("POST", "GET", "PUT", "OPTIONS"):
                status, answer = ask(engine, path, body, key, method)
                assert status in (401, 403), (path, method, key, answer)
    assert sample(engine, KEYS.user) == before
    status, info = ask(engine, "/server_info", key=KEYS.admin)
    assert status == 200 and info["tp_size"] == 2
    assert ask(engine, "/pause_generation", {"mode": "retract"}, KEYS.admin)[0] == 200
    assert ask(engine, "/continue_generation", {}, KEYS.admin)[0] == 200
    assert ask(engine, "/freeze_gc", {}, KEYS.admin)[0] == 200
    assert sample(engine, KEYS.admin) == before
    assert engine.is_alive() and engine.is_healthy()


def test_sampling_needs_a_key_and_no_key_opens_what_a_run_does_not_need(
    engine: EngineProcess,
) -> None:
    assert ask(engine, "/generate", {"input_ids": [5]})[0] == 401
    assert ask(engine, "/v1/models")[0] == 401
    assert ask(engine, "/v1/models", key=KEYS.user)[0] == 200
    for path in ("/update_weights_from_ipc", "/load_lora_adapter_from_tensors", "/openapi.json"):
        assert ask(engine, path, {}, KEYS.admin)[0] == 403


@pytest.mark.parametrize("host", ["x/health?", "a/health#", "127.0.0.1"])
def test_no_header_makes_a_path_another_one(engine: EngineProcess, host: str) -> None:
    for path in ("/server_info", "/server_info?a=/health", "/health/../server_info"):
        status, _ = ask(engine, path, Host=host, **{"X-Forwarded-Prefix": "/health"})
        assert status in (400, 401, 403), path


@pytest.mark.slow
def test_every_route_of_sglang_is_closed_unless_it_is_listed() -> None:
    listing = subprocess.run(
        [sys.executable, "-c", LIST_ROUTES], capture_output=True, text=True, timeout=120
    )
    routes = set(json.loads(listing.stdout.splitlines()[-1]))
    listed = OPEN_PATHS | USER_PATHS | ADMIN_PATHS
    assert len(routes) > 80
    # SGLang mounts the metrics' routes when it starts with --enable-metrics.
    # The route of images is added for models that see.
    added = {"/metrics", "/metrics/", image_request.PATH}
    assert listed - routes == added, "a path that this SGLang does not have"
    unpickling = {path for path in routes if "weights" in path or "lora" in path} - ADMIN_PATHS
    assert unpickling and not unpickling & listed


def test_all_its_sockets_are_on_loopback(engine: EngineProcess) -> None:
    listening = {
        connection.laddr
        for pid in live_processes(engine.pid)
        for connection in psutil.Process(pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) > 2, listening  # HTTP, the ranks' store, gloo
    assert {at.ip for at in listening} == {"127.0.0.1"}


def test_its_log_tells_of_no_failure(engine: EngineProcess) -> None:
    """SGLang's own request to freeze objects came before it listened, and failed."""
    log = Path(engine.spec.log_path).read_text(errors="replace")
    assert "fired up" in log
    assert "Traceback" not in log and "freeze_gc failed" not in log


def test_the_keys_are_in_no_command_line_environment_answer_or_log(
    engine: EngineProcess,
) -> None:
    pids = live_processes(engine.pid)
    assert len(pids) >= 3
    seen = [ask(engine, path, key=KEYS.admin)[1] for path in ("/server_info", "/model_info")]
    for pid in pids:
        process = psutil.Process(pid)
        seen += [process.cmdline(), process.environ()]
    seen.append(Path(engine.spec.log_path).read_text())
    assert "server_args" in str(seen[-1])
    for key in (KEYS.user, KEYS.admin):
        assert key not in str(seen) and key not in repr(engine.spec) + repr(engine.address)


def test_a_way_around_the_gate_keeps_the_engine_from_starting(
    engine: EngineProcess, tmp_path: Path
) -> None:
    around = EngineSpec(
        engine.spec.model_path,
        str(tmp_path / "log"),
        keys=KEYS,
        extra_args=("--tokenizer-worker-num", "2"),
    )
    with (
        pytest.raises(RuntimeError, match="tokenizer_worker_num: SGLang would also take requests"),
        EngineProcess(around),
    ):
        pass
