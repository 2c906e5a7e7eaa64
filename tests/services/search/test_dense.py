"""Vectors of a tiny encoder: the nearest passages are found, alone and with words."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.services.search.build import build_index
from mcore_rl.services.search.index import PassageIndex
from mcore_rl.services.search.layout import EncoderOptions, IndexOptions, name_shard_folder
from mcore_rl.services.search.methods import DenseShards, Encoder, build_dense, refuse_missing_faiss
from mcore_rl.tasks.tiny_models import make_word_tokenizer
from tests.services.search.corpora import random_texts, write_corpus

needs_faiss = pytest.mark.skipif(
    importlib.util.find_spec("faiss") is None, reason="faiss is an extra: search"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT over the words of `random_texts`."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("encoder")
    words = ["<|pad|>", *(f"w{i}" for i in range(50)), *(f"title{i}" for i in range(50))]
    tokenizer = make_word_tokenizer(words)
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_have_length_one_and_do_not_depend_on_their_batch(
    model: Path, pooling: str
) -> None:
    encoder = Encoder(EncoderOptions(str(model), pooling, max_len=40))
    texts = random_texts(40)
    vectors = encoder.passages(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    alone = np.concatenate([encoder.passages([text]) for text in texts[:5]])
    np.testing.assert_allclose(alone, vectors[:5], atol=1e-5)


def test_prefixes_tell_queries_from_passages(model: Path) -> None:
    encoder = Encoder(EncoderOptions(str(model), query_prefix="w1 ", passage_prefix="w2 "))
    plain = Encoder(EncoderOptions(str(model)))
    np.testing.assert_allclose(encoder.queries(["w3"]), plain.queries(["w1 w3"]), atol=1e-6)
    np.testing.assert_allclose(encoder.passages(["w3"]), plain.queries(["w2 w3"]), atol=1e-6)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--encoder=.*cannot be loaded"):
        Encoder(EncoderOptions(str(tmp_path / "none")))


@needs_faiss
def test_passages_are_found_by_themselves_over_shards(model: Path, tmp_path: Path) -> None:
    refuse_missing_faiss()
    options = EncoderOptions(str(model), max_len=40)
    encoder = Encoder(options)
    texts = random_texts(45)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)

    def encode(batch, folder: Path) -> None:
        build_dense(encoder, batch, folder)

    build_index(corpus, tmp_path / "index", IndexOptions(20, options), encode)
    folders = [name_shard_folder(tmp_path / "index", i) / "dense" for i in range(3)]
    vectors = DenseShards(encoder, folders)
    cosines = encoder.passages(texts) @ encoder.queries(texts).T
    for i, found in enumerate(vectors.top(texts, 5)):
        assert [score for _, score in found] == pytest.approx(
            sorted(cosines[:, i], reverse=True)[:5], abs=1e-5
        )
        assert i in [passage for passage, score in found if score > 1 - 1e-5]
    assert vectors.top([], 5) == []
    hybrid = PassageIndex(tmp_path / "index", "hybrid", vectors)
    assert hybrid.retrieve([texts[33]], 1)[0][0].document["id"] == "33"
