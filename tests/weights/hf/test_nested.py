"""Settings of a nested language model are read at the top, and written where they were."""

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.hf.config import with_text_settings, without_text_settings

KEYS = st.sampled_from(["hidden_size", "dtype", "tie_word_embeddings", "vocab_size"])
SETTINGS = st.dictionaries(KEYS, st.integers(0, 2))


def test_the_language_models_settings_stand_at_the_top() -> None:
    config = {"text_config": {"hidden_size": 64, "dtype": "float32"}, "dtype": "bfloat16"}
    read = with_text_settings(config)
    assert (read["hidden_size"], read["dtype"]) == (64, "bfloat16")
    assert without_text_settings(read) == config


@given(SETTINGS, SETTINGS)
def test_writing_keeps_what_was_read(text: dict[str, int], top: dict[str, int]) -> None:
    read = with_text_settings({"text_config": text, **top})
    written = without_text_settings(read)
    assert with_text_settings(written) == read


@given(SETTINGS)
def test_a_text_model_is_left_alone(config: dict[str, int]) -> None:
    assert with_text_settings(config) == config == without_text_settings(config)
