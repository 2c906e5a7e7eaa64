"""Token ids of whole files: equal to one call per conversation, and kept from run to run."""

import logging
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data import tokenization
from mcore_rl.data.tokenization import Tokenization, fingerprint
from mcore_rl.tasks.arithmetic import make_tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": f"Ada has {n} apples and gets 4 more ."}] for n in range(9)
]


class Counted:
    """A tokenizer without a backend, which is asked one conversation at a time; counts calls."""

    chat_template = "unused"

    def __init__(self) -> None:
        self.num_calls = 0

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        self.num_calls += 1
        assert options["tokenize"] and not options["return_dict"]
        return [len(messages[0]["content"]), int(options["add_generation_prompt"])]


def encode(tokenizer: Any, cache: Path | None, file: Path, **options: Any) -> list[tuple[int, ...]]:
    given = {"add_generation_prompt": True, "column": "prompt", "files": [str(file)]}
    return Tokenization(tokenizer, cache).encode(CONVERSATIONS, **(given | options))


def one_by_one(tokenizer: Any, add_generation_prompt: bool = True) -> list[tuple[int, ...]]:
    options = {"tokenize": True, "return_dict": False}
    return [
        tuple(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, **options
            )
        )
        for messages in CONVERSATIONS
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("contents")
    return path


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("batch", [1, 4, 100])
def test_batches_give_what_single_calls_give(
    file: Path, monkeypatch: pytest.MonkeyPatch, batch: int, add_generation_prompt: bool
) -> None:
    monkeypatch.setattr(tokenization, "BATCH", batch)
    tokenizer = make_tokenizer()
    got = encode(tokenizer, None, file, add_generation_prompt=add_generation_prompt)
    assert got == one_by_one(tokenizer, add_generation_prompt)


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_matter(file: Path) -> None:
    tokenizer = make_tokenizer()
    expected = one_by_one(tokenizer)
    plain = fingerprint(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert fingerprint(tokenizer) == plain
    assert encode(tokenizer, None, file) == expected


def test_a_second_run_takes_ids_from_the_cache(tmp_path: Path, file: Path) -> None:
    cache = tmp_path / "cache"
    first = encode(make_tokenizer(), cache, file)
    (entry,) = cache.iterdir()
    tokenizer = make_tokenizer()
    before = entry.stat().st_mtime_ns
    assert encode(tokenizer, cache, file) == first == one_by_one(make_tokenizer())
    assert entry.stat().st_mtime_ns == before and list(cache.iterdir()) == [entry]


def test_another_file_tokenizer_template_or_option_is_another_entry(
    tmp_path: Path, file: Path
) -> None:
    cache = tmp_path / "cache"
    changed = make_tokenizer()
    changed.chat_template = "{{ messages[0]['content'] }}"
    with_token = make_tokenizer()
    with_token.add_tokens(["more"])
    other = tmp_path / "other.jsonl"
    other.write_text("other contents")
    for tokenizer, path, options in (
        (make_tokenizer(), file, {}),
        (make_tokenizer(), other, {}),
        (changed, file, {}),
        (with_token, file, {}),
        (make_tokenizer(), file, {"add_generation_prompt": False}),
        (make_tokenizer(), file, {"column": "chosen"}),
    ):
        before = len(list(cache.glob("*"))) if cache.exists() else 0
        assert encode(tokenizer, cache, path, **options)
        assert len(list(cache.iterdir())) == before + 1
    copy = tmp_path / "copy.jsonl"
    copy.write_text("contents")
    encode(make_tokenizer(), cache, copy)
    assert len(list(cache.iterdir())) == 6


def test_what_changes_by_the_day_or_is_not_known_is_not_kept(tmp_path: Path, file: Path) -> None:
    dated = make_tokenizer()
    dated.chat_template = "{{ strftime_now('%d') }} {{ messages[0]['content'] }}"
    assert fingerprint(dated) is None
    encode(dated, tmp_path / "cache", file)
    counted = Counted()
    got = encode(counted, tmp_path / "cache", file)
    assert got == [(len(c[0]["content"]), 1) for c in CONVERSATIONS] and counted.num_calls == 9
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    with caplog.at_level(logging.WARNING):
        assert encode(make_tokenizer(), tmp_path / "cache", file) == one_by_one(make_tokenizer())
    assert "token ids are not kept in" in caplog.text
