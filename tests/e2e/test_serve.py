"""`mcore-rl serve`: a chat completion from a checkpoint; bad paths are refused before the start."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from mcore_rl.cli import main
from mcore_rl.process.network import find_free_port
from mcore_rl.process.server_keys import bearer
from tests.support.runs import MARK, find_marked

pytestmark = pytest.mark.e2e


def serve(*arguments: object, cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "mcore_rl.cli", "serve", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", MARK: f"{cwd}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_a_model_answers_a_chat_and_ctrl_c_leaves_nothing(arithmetic: Path, tmp_path: Path) -> None:
    port = find_free_port("127.0.0.1")
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("0123456789abcdef")
    options = [
        "--port",
        port,
        "--kv-cache-len",
        4096,
        "--key-file",
        key,
        "--ask",
        "Ada has 12 coins and gets 5 more .",
    ]
    process = serve(arithmetic / "model", *options, cwd=tmp_path)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert f"127.0.0.1:{port}/v1 serves {arithmetic / 'model'}; log serve.log" in lines[0], lines
    assert lines[2].strip(), "no answer"
    models = f"http://127.0.0.1:{port}/v1/models"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(models, timeout=20)
    with_key = urllib.request.Request(models, headers=bearer("0123456789abcdef"))
    with urllib.request.urlopen(with_key, timeout=20) as response:
        assert response.status == 200
    begun = find_marked(f"{tmp_path}") - {psutil.Process(process.pid)}
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    gone, alive = psutil.wait_procs(begun, timeout=10)
    assert gone and not alive


def test_what_cannot_be_served_is_refused(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "untold").mkdir()
    (tmp_path / "untold" / "config.json").write_bytes(
        (arithmetic / "model" / "config.json").read_bytes()
    )
    (tmp_path / "step_000001").mkdir()
    (tmp_path / "step_000001" / ".metadata").touch()
    for arguments, message in (
        ([tmp_path / "nowhere"], "nowhere/config.json does not exist"),
        ([tmp_path / "untold"], "has no tokenizer_config.json: chats need the model's tokenizer"),
        ([tmp_path / "step_000001"], "is a Megatron checkpoint: give --source-hf"),
        (
            [arithmetic / "model", "--once"],
            "--once ends after the answer to a question: give --ask",
        ),
    ):
        assert main(["serve", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
