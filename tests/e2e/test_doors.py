"""One run seen from outside: its sockets, who may command its engine, the secrets it writes."""

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.doors import answers_without_key, find_open_doors, listening_sockets
from tests.support.runs import Run, tiny_settings
from tests.support.second_namespace import neighbor

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PLANTED = [f"planted_{i}_secret_0123" for i in range(10)]
ENVIRONMENT = {
    "WANDB_API_KEY": PLANTED[0],
    "HF_TOKEN": PLANTED[1],
    "AWS_SECRET_ACCESS_KEY": PLANTED[2],
    "DATABASE_PASSWORD": PLANTED[3],
    "CACHE_ROOM": PLANTED[4],
    "REWARD_NAME": PLANTED[5],
}
REWARD = f"""
import logging
import os
from itertools import count

calls = count()

def {PLANTED[5]}(*, data_source, solution_str, ground_truth, extra_info):
    names = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DATABASE_PASSWORD")
    values = " ".join(os.environ[name] for name in names)
    if next(calls) % 4:
        return float(len(solution_str) % 3)
    log = logging.getLogger("mcore_rl.mine")
    log.warning("asked with %s in %s by %s", values, os.environ["CACHE_ROOM"], reward_name())
    raise ValueError(
        "no answer from http://me:{PLANTED[6]}@10.0.0.1/score?api_key={PLANTED[7]}&n=1"
        f" with Bearer {PLANTED[8]}, nor from redis://:{PLANTED[9]}@10.0.0.2; {{values}}"
    )

def reward_name():
    return os.environ["REWARD_NAME"]
"""


@dataclass(frozen=True)
class Seen:
    """A run that is over, and what was seen of it while it trained.

    listening              (address, port) of each socket -> the process that listens
    reached_from_outside   ports that another network namespace reached; a text says why none was
    answers                HTTP status of each command without a key
    """

    run: Run
    listening: dict[tuple[str, int], str]
    reached_from_outside: list[int] | str
    answers: dict[str, int]


@pytest.fixture(scope="module")
def seen(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("doors")
    (folder / "reward.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        settings = [
            *("train", *tiny_settings(arithmetic), "run.steps=8", "parallel.ep=2"),
            *(f"reward.path={folder / 'reward.py'}", "reward.name=${oc.env:REWARD_NAME}"),
            *("eval.data=[]", "checkpoint.export_hf=false", "log.tensorboard=true"),
            f"data.cache_dir={folder}/${{oc.env:CACHE_ROOM}}",
        ]
        run = Run(settings, folder / "run")
    try:
        run.wait_until(run.metrics, "metrics")
        listening = dict(listening_sockets(run.processes()))
        [url] = re.findall(r"engine (http://\S+) is linked", run.log())
        answers = answers_without_key(url)
        reached = scan_from_outside([port for _, port in listening])
        assert run.finish() == 0, run.tail()
        yield Seen(run, listening, reached, answers)
    finally:
        run.kill_all()


def scan_from_outside(ports: list[int]) -> list[int] | str:
    """Return those of `ports` that a neighbor reaches, and one that listens to everybody."""
    try:
        with neighbor() as outside, socket.create_server(("0.0.0.0", 0)) as for_all:
            return outside.open_ports([*ports, for_all.getsockname()[1]])
    except pytest.skip.Exception as skipped:
        return str(skipped)


def test_nothing_of_a_run_on_one_machine_listens_beyond_it(seen: Seen) -> None:
    who = set(seen.listening.values())
    assert len(seen.listening) > 8 and len(who) > 3, seen.listening
    assert find_open_doors(seen.listening) == {}


def test_no_port_of_a_run_is_reached_from_another_network(seen: Seen) -> None:
    reached = seen.reached_from_outside
    if isinstance(reached, str):
        pytest.skip(reached)
    assert len(reached) == 1, "only the socket that the test itself opened to everybody"
    assert reached[0] not in {port for _, port in seen.listening}


def test_commands_without_the_key_are_refused_and_the_run_goes_on(seen: Seen) -> None:
    assert len(seen.answers) > 10
    assert set(seen.answers.values()) == {401, 403}, seen.answers
    assert {row["step"] for row in seen.run.metrics()} == set(range(1, 9))
    assert "out of rotation" not in seen.run.log()


def test_no_file_of_a_run_and_no_output_has_a_secret(seen: Seen) -> None:
    run = seen.run
    samples = (run.run_dir / "samples.jsonl").read_text()
    assert "no answer from http://***@10.0.0.1/score?api_key=***&n=1 with Bearer ***" in samples
    collector = (run.run_dir / "logs" / "collector_rank0.log").read_text()
    assert "asked with *** *** *** *** in *** by ***" in collector
    config = (run.run_dir / "config.yaml").read_text()
    assert "name: ${oc.env:REWARD_NAME}" in config and "${oc.env:CACHE_ROOM}" in config
    written = [path for path in run.run_dir.rglob("*") if path.is_file()]
    assert len(written) > 10
    for path in (*written, run.output):
        content = path.read_bytes()
        assert [secret for secret in PLANTED if secret.encode() in content] == [], path
