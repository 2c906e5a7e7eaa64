"""Processes of a server die with the one that started it, however deep they were forked."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_rl.rollout.server import find_package

FAMILY = """
import os, sys, time
from mcore_rl.process.parent_death import die_with_parent
from mcore_rl.rollout.server import tie_forks_to_parents
die_with_parent(int(sys.argv[1]))
tie_forks_to_parents()
if os.fork() == 0:
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("architecture", "flags", "package"),
    [
        ("KimiVLForConditionalGeneration", [], "mcore_rl.rollout.vision_models"),
        ("KimiK25ForConditionalGeneration", [], "mcore_rl.rollout.vision_models"),
        ("Qwen2ForSequenceClassification", ["--is-embedding"], "mcore_rl.rollout.reward_heads"),
        ("Qwen2ForCausalLM", [], None),
    ],
)
def test_our_classes_serve_the_models_that_need_them(
    tmp_path: Path, architecture: str, flags: list[str], package: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert find_package(["--model-path", str(tmp_path), *flags]) == package


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_killed_server_takes_its_grandchildren_along() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(os.getpid())], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    pids = [int(server.stdout.readline()) for _ in range(2)]
    assert all(map(is_running, pids))
    server.kill()
    server.wait()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


@pytest.mark.timeout(60)
def test_a_child_whose_parent_is_gone_already_exits() -> None:
    not_the_parent = os.getppid()
    command = [sys.executable, "-c", FAMILY, str(not_the_parent)]
    assert subprocess.run(command, timeout=50, check=False).returncode == 1


SPAWNED = """
import multiprocessing.spawn
from importlib import import_module
multiprocessing.spawn._fixup_main_from_name("mcore_rl.rollout.server")
print(import_module("torch.distributed.rendezvous")._create_c10d_store.__module__)
"""


def test_a_spawned_process_of_the_server_binds_its_meetings_to_one_address() -> None:
    """On a GPU SGLang spawns its schedulers, as multiprocessing does it here."""
    spawned = subprocess.run(
        [sys.executable, "-c", SPAWNED], capture_output=True, text=True, timeout=120
    )
    assert spawned.stdout.strip() == "mcore_rl.process.network", spawned.stderr
