"""The page's server lets in who has the key, and answers from the files of real logs."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from mcore_rl.logs.episode_log import EpisodeLog
from mcore_rl.tools.view.server import PAGE, TYPES, ViewServer
from mcore_rl.tools.view.watched_run import open_runs
from mcore_rl.types.scores import Scores
from tests.support.samples import HeldSampleLog, make_sample

CONTROLLER_LOG = """\
2026-11-28 17:00:32,973 INFO mcore_rl.run.commands: start-up
2026-11-28 17:01:01,000 INFO mcore_rl.logs.logger: step 1: rollout
2026-11-28 17:01:02,500 INFO mcore_rl.logs.logger: step 1: train
2026-11-28 17:01:03,000 WARNING mcore_rl.loops.outcomes: 1 of 4 samples have no outcome
its second line
2026-11-28 17:01:04,000 INFO mcore_rl.logs.logger: step 2: rollout
2026-11-28 17:01:05,000 INFO mcore_rl.logs.logger: step 2: train
2026-11-28 17:01:06,000 ERROR mcore_rl.run.commands: it died
2026-11-28 18:00:00,000 INFO mcore_rl.run.commands: start-up
"""
ENGINE_LOG = """\
[2026-11-28 17:01:01] Prefill batch, #new-seq: 1, token usage: 0.03, #running-req: 2, #queue-req: 5
[2026-11-28 17:01:02 TP0] Decode batch, #running-req: 7, token usage: 0.50, #queue-req: 0
[2026-11-28 17:01:02] Prefill batch, #new-seq: 1, token usage: 0.60, #running-req: 8, #queue-req: 1
"""


def write_run(folder: Path, lr: str = "0.1") -> Path:
    with HeldSampleLog(folder, console=False) as log:
        for step in (1, 2):
            held = [make_sample(number, f"<b>{number}</b>") for number in (0, 0, 1)]
            rewards = [1.0, 0.0, float("nan")]
            log.log(step, {"reward/mean": step / 4, "rollout/samples": 3.0, "reward/errors": 1.0})
            log.log_held(step, held, Scores(rewards, {}, ["", "", "ValueError: no"]))
    episodes = EpisodeLog(folder / "episodes.jsonl")
    episodes.end(episodes.begin(make_sample(0, "").prompt, 2, greedy=False), ["done", "length"])
    (folder / "config.yaml").write_text(f"run: {{steps: 9}}\ntrain: {{optimizer: {{lr: {lr}}}}}\n")
    (folder / "logs").mkdir()
    (folder / "logs" / "controller.log").write_text(CONTROLLER_LOG)
    (folder / "logs" / "sglang_0.log").write_text(ENGINE_LOG)
    (folder / "images").mkdir()
    (folder / "images" / f"{'0' * 16}.png").write_bytes(b"PNG")
    (folder / "secret.png").write_bytes(b"no")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewServer]:
    folder = tmp_path_factory.mktemp("view")
    runs = open_runs([write_run(folder / "a"), write_run(folder / "b", "0.2")])
    with ViewServer(runs, 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        deadline_s = time.monotonic() + 20
        while not all(run.describe()["is_indexed"] for run in runs):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        yield serving
        serving.shutdown()


def ask(server: ViewServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def get(server: ViewServer, path: str, **query: object) -> Any:
    full = f"/api/{path}?{urlencode(query)}"
    status, _, body = ask(server, full, Authorization=f"Bearer {server.key}")
    return json.loads(body) if status == 200 else (status, json.loads(body)["error"])


def test_only_the_key_opens_and_it_leaves_the_address(server: ViewServer) -> None:
    for path in ("/", "/main.js", "/api/runs", "/image?path=x", "/?key=wrong", "/nothing"):
        status, headers, body = ask(server, path)
        assert (status, body) == (401, b"open the address that `mcore-rl view` printed")
        assert "Set-Cookie" not in headers
    address = urlsplit(server.url)
    status, headers, _ = ask(server, f"/?{address.query}")
    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    status, headers, body = ask(server, "/", Cookie=cookie.partition(";")[0])
    assert (status, body) == (200, (PAGE / "index.html").read_bytes())
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert ask(server, "/", Cookie=cookie.partition(";")[0][:-1])[0] == 401


def test_it_listens_on_loopback_and_for_no_foreign_name(server: ViewServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    key = f"Bearer {server.key}"
    assert ask(server, "/", Host="evil.example", Authorization=key)[0] == 403
    assert ask(server, "/", Host="localhost:9999", Authorization=key)[0] == 200


def test_pages_and_images_are_those_of_a_list(server: ViewServer) -> None:
    key = f"Bearer {server.key}"
    for file in PAGE.iterdir():
        assert file.suffix in TYPES, file
        assert "http://" not in file.read_text() and "https://" not in file.read_text()
        assert ask(server, f"/{file.name}", Authorization=key)[0] == 200
    assert ask(server, f"/image?run=1&path=images/{'0' * 16}.png", Authorization=key)[2] == b"PNG"
    for path in ("images/../secret.png", "secret.png", "/etc/passwd", "images/1.png"):
        assert ask(server, f"/image?{urlencode({'path': path})}", Authorization=key)[0] == 404
    for path in ("/../server.py", "/%2e%2e/server.py", "//etc/passwd", "/page/main.js"):
        assert ask(server, path, Authorization=key)[0] == 404


def test_runs_and_series(server: ViewServer) -> None:
    first = get(server, "runs")["runs"][0]
    assert (first["name"], first["last_step"], first["steps"]) == ("a", 2, 9)
    assert (first["num_samples"], first["length_unit"]) == (6, "tokens")
    assert first["metrics"] == ["reward/errors", "reward/mean", "rollout/samples"]
    names = "reward/mean,absent"
    by_step = get(server, "series", run=1, names=names)
    assert by_step == {
        "reward/mean": {"x": [1.0, 2.0], "y": [0.25, 0.5]},
        "absent": {"x": [], "y": []},
    }
    assert get(server, "series", names=names, x="sample")["reward/mean"]["x"] == [3.0, 6.0]
    assert get(server, "series", names=names, x="time")["reward/mean"]["x"][0] == 0.0
    assert get(server, "series", names=names, x="y") == (400, "x=y: one of step, sample, time")


def test_samples_are_listed_and_shown_whole(server: ViewServer) -> None:
    listed = get(server, "samples", sort="-reward", number=2)
    assert (listed["total"], listed["mean_reward"], listed["num_searched"]) == (6, 0.5, 6)
    assert [row["reward"] for row in listed["rows"]] == [1.0, 1.0]
    assert listed["rows"][0]["response"] == "<b>0</b>"
    assert get(server, "samples", failed=1)["total"] == 2
    assert get(server, "samples", min_reward="x") == (400, "min_reward=x: not a number")
    whole = get(server, "sample", sample=2)
    assert (whole["prompt"], whole["reward_error"]) == ("What is 1 + 1?", "ValueError: no")
    assert get(server, "sample", sample=99) == (404, "no sample 99; there are 6")
    assert get(server, "sample", run=5, sample=0)[0] == 404


def test_groups_have_rewards_and_what_they_are_relative_to(server: ViewServer) -> None:
    first, second = get(server, "groups", step=2)["groups"]
    assert (first["prompt_index"], first["mean"], first["std"]) == (0, 0.5, 0.5)
    assert [sample["relative"] for sample in first["samples"]] == [1.0, -1.0]
    assert second["samples"][0]["relative"] is None
    assert get(server, "groups", step=3) == {"groups": []}


def test_configurations_are_compared_with_each_other_and_defaults(server: ViewServer) -> None:
    rows = {row["option"]: row for row in get(server, "config")["rows"]}
    assert rows["train.optimizer.lr"] == {
        "option": "train.optimizer.lr",
        "values": ["0.1", "0.2", "1e-06"],
        "differs": True,
    }
    assert rows["run.steps"]["values"] == ["9", "9", "100"]
    assert rows["model.dtype"]["values"] == [None, None, "float32"]


def test_phases_end_where_the_next_begins_or_the_launch_does(server: ViewServer) -> None:
    timeline = get(server, "timeline", first_step=1, last_step=2)
    phases = [
        (phase["step"], phase["name"], phase["end_s"] - phase["start_s"])
        for phase in timeline["phases"]
    ]
    assert phases == [
        (1, "rollout", 1.5),
        (1, "train", 1.5),
        (2, "rollout", 1.0),
        (2, "train", 1.0),
    ]
    loads = timeline["engines"]["engine 0"]
    assert [(load["running"], load["queued"], load["kv_share"]) for load in loads] == [
        (2, 5, 0.03),
        (8, 1, 0.6),
    ]


def test_the_trace_has_slices_and_counters(server: ViewServer) -> None:
    events = get(server, "trace")["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == [
        *("start-up", "rollout", "train", "rollout", "train", "start-up")
    ]
    [slice_] = [event for event in events if event.get("dur") == 28_027_000]
    assert slice_["name"] == "start-up"
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        "engine 0: requests",
        "engine 0: KV cache",
    }


def test_faults_are_listed_with_launches(server: ViewServer) -> None:
    faults = get(server, "faults")
    assert [(record["level"], record["text"]) for record in faults["records"]] == [
        ("INFO", "start-up"),
        ("WARNING", "1 of 4 samples have no outcome\nits second line"),
        ("ERROR", "it died"),
        ("INFO", "start-up"),
    ]
    assert [(row["step"], row["metric"]) for row in faults["steps"]] == [
        (1, "reward/errors"),
        (2, "reward/errors"),
    ]
    assert faults["ends"] == {"done": 1, "length": 1}


def test_a_folder_without_a_run_is_refused_with_those_below(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    with pytest.raises(ValueError, match=r"no config\.yaml or metrics\.jsonl .*; give .*/one"):
        open_runs([tmp_path])
    with pytest.raises(ValueError, match=r"absent: no config\.yaml"):
        open_runs([tmp_path / "absent"])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / each / "run") for each in ("x", "y")]
    assert [run.name for run in open_runs(paths)] == [str(path) for path in paths]
