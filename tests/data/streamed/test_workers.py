"""Token ids of workers: those of one process, in order; a row that fails and a lost worker."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from mcore_rl.data.streamed import workers as module
from mcore_rl.data.streamed.workers import TokenWorkers
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.tasks.arithmetic import make_tokenizer

CONVERSATIONS = [[{"role": "user", "content": f"Ada has {n} apples ."}] for n in range(20)]
UNUSABLE = [{"role": "user"}]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def workers(tokenizer_dir: Path) -> Iterator[TokenWorkers]:
    found = TokenWorkers(partial(load_tokenizer, str(tokenizer_dir), "model.path"), 2)
    yield found
    found.close()


def expected_ids() -> list[list[int]]:
    template = make_tokenizer().apply_chat_template
    options = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}
    return [list(template(messages, **options)) for messages in CONVERSATIONS]


def test_batches_come_back_in_order_and_as_of_one_process(workers: TokenWorkers) -> None:
    results = [workers.submit(CONVERSATIONS[start : start + 3]) for start in range(0, 20, 3)]
    assert [ids for result in results for ids in result()[0]] == expected_ids()
    here = TokenWorkers(make_tokenizer, num_workers=0)
    assert here.submit(CONVERSATIONS)() == (expected_ids(), "")
    assert here.submit([])() == ([], "")
    here.close()


def test_a_conversation_that_cannot_be_rendered_is_found(workers: TokenWorkers) -> None:
    batch = [*CONVERSATIONS[:2], UNUSABLE, *CONVERSATIONS[2:]]
    for one in (workers, TokenWorkers(make_tokenizer, num_workers=0)):
        encoded, error = one.submit(batch)()
        assert encoded == expected_ids()[:2]
        assert "content" in error


@pytest.mark.parametrize("is_busy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_is_reported(tokenizer_dir: Path, is_busy: bool) -> None:
    others = forked_processes()
    workers = TokenWorkers(partial(load_tokenizer, str(tokenizer_dir), "model.path"), 1)
    workers.submit(CONVERSATIONS)()
    mine = forked_processes() - others
    assert len(mine) == 1
    slow = workers.submit(CONVERSATIONS * (20_000 if is_busy else 0))
    if is_busy:
        time.sleep(0.5)
    else:
        slow()
    for worker in mine:
        worker.kill()
    with pytest.raises(RuntimeError, match=r"data.workers=1 that tokenizes prompts ended"):
        slow() if is_busy else submit_until(workers, time.monotonic() + 60)
    workers.close()


def forked_processes() -> set[psutil.Process]:
    """Return the grandchildren of this process: children of the server that forks workers."""
    return {child for server in psutil.Process().children() for child in server.children()}


def submit_until(workers: TokenWorkers, deadline_s: float) -> None:
    """Submit again and again until it fails."""
    while time.monotonic() < deadline_s:
        workers.submit(CONVERSATIONS[:1])()
        time.sleep(0.05)


def test_the_wait_for_tokens_ends(workers: TokenWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.001)
    result = workers.submit(CONVERSATIONS * 2000)
    with pytest.raises(TimeoutError, match=r"not tokenized within 0.001 s by data.workers=2"):
        result()
