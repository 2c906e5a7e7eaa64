"""Conversations become batches with the loss on the answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.sft import Answered, SftStream, load_conversations, tokenize_answered
from mcore_rl.data.tokenization import Tokenization
from mcore_rl.tasks.arithmetic import make_tokenizer


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def tokenize(messages: list[dict[str, str]], tokenizer: Any) -> Answered:
    (answered,) = tokenize_answered([messages], Tokenization(tokenizer), [], "messages")
    return answered


def test_the_loss_is_on_the_answer_and_its_end() -> None:
    tokenizer = make_tokenizer()
    ids, before = tokenize(conversation("Ada has 3 apples", "3 + 4 = 7"), tokenizer)
    assert tokenizer.decode(ids[:before]) == "<|user|> Ada has 3 apples <|assistant|>"
    assert tokenizer.decode(ids[before:]) == "3 + 4 = 7 <|end|>"


def test_batches_average_over_answer_tokens(tmp_path: Path) -> None:
    rows = [
        conversation("Ada has 3 apples", "3 + 4 = 7"),
        conversation("Ben has 2 pens", "2"),
        conversation("a " * 9, "1"),
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in rows))
    stream = SftStream([str(tmp_path / "c.jsonl")], make_tokenizer(), max_len=12, seed=0)
    batch = stream.next_batch(2)
    assert sorted(batch.lens_N) == [8, 12]
    assert int(batch.loss_mask_T.sum()) == 6 + 2
    assert batch.loss_weights_T is not None
    assert batch.loss_weights_T[batch.loss_mask_T].tolist() == pytest.approx([1 / 8] * 8)


def test_a_template_that_hides_the_answer_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
        "{{ 'Ada' if add_generation_prompt }}"
    )
    with pytest.raises(ValueError, match="the loss mask cannot be placed"):
        tokenize(conversation("has", "3"), tokenizer)


def test_conversations_must_end_with_an_answer(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n"
    )
    with pytest.raises(
        ValueError, match=r"c.jsonl line 1: `messages` must end with a message of role 'assistant'"
    ):
        load_conversations([str(tmp_path / "c.jsonl")])


def test_batches_are_the_same_from_the_cache(tmp_path: Path) -> None:
    rows = [conversation("Ada has 3 apples", str(n)) for n in range(4)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in rows))
    files = [str(tmp_path / "c.jsonl")]
    batches = [
        SftStream(files, make_tokenizer(), 20, seed=0, cache_dir=cache).next_batch(4)
        for cache in (None, tmp_path / "cache", tmp_path / "cache")
    ]
    assert len(list((tmp_path / "cache").iterdir())) == 2
    for batch in batches[1:]:
        assert batch.token_ids_T.tolist() == batches[0].token_ids_T.tolist()
        assert batch.loss_mask_T.tolist() == batches[0].loss_mask_T.tolist()
