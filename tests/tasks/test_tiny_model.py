"""The tiny model's folder: configuration and tokenizer agree, one word is one token."""

import json
from pathlib import Path

from transformers import AutoTokenizer

from mcore_rl.tasks.tiny_models import (
    SPECIAL_TOKENS,
    make_vocabulary,
    make_word_tokenizer,
    write_tiny_model,
)
from mcore_rl.weights.hf.config import ModelFacts

VOCABULARY = make_vocabulary(12, {"use", "to", "+"})


def test_special_tokens_come_first_then_numbers_then_words_in_order() -> None:
    assert VOCABULARY[:4] == list(SPECIAL_TOKENS)
    assert VOCABULARY[4:17] == [str(number) for number in range(13)]
    assert VOCABULARY[17:] == ["+", "to", "use"]


def test_each_word_is_one_token_and_comes_back() -> None:
    tokenizer = make_word_tokenizer(VOCABULARY)
    ids = tokenizer.encode("use 12 + 3")
    assert ids == [VOCABULARY.index(word) for word in ("use", "12", "+", "3")]
    assert tokenizer.decode(ids) == "use 12 + 3"


def test_the_chat_template_marks_turns_and_ends_the_answer() -> None:
    tokenizer = make_word_tokenizer(VOCABULARY)
    messages = [{"role": "user", "content": "use 3"}, {"role": "assistant", "content": "3 + 3"}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False)
    assert shown == "<|user|> use 3 <|assistant|> 3 + 3 <|end|>"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|> use 3 <|assistant|>"


def test_the_folder_holds_a_supported_model_of_the_vocabularys_size(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, VOCABULARY)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == len(VOCABULARY) == len(AutoTokenizer.from_pretrained(tmp_path))
    assert VOCABULARY[config["eos_token_id"]] == "<|end|>"
    assert ModelFacts.read(str(tmp_path)).has_experts


def test_a_model_may_be_smaller(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, VOCABULARY, num_hidden_layers=1, hidden_size=64)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (1, 64)
    assert config["num_experts"] == 8
