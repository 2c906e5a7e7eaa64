"""Finds passages by vectors of a HuggingFace encoder, in flat faiss indexes on disk.

faiss is no part of the default installation. Vectors are normalized, so scores are cosines. A flat
index is exact: a query reads every vector, num_passages * size * 4 bytes of the mapped files.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.services.search.layout import EncoderOptions

_FILE = "vectors.faiss"
_BATCH_LEN = 32


def refuse_missing_faiss() -> None:
    """Raise ValueError, with the remedy, if faiss is not installed."""
    if importlib.util.find_spec("faiss") is None:
        raise ValueError("dense vectors need faiss: pip install 'mcore_rl[search]'")


class Encoder:
    """A HuggingFace model that turns texts into vectors of length 1, on the CPU."""

    def __init__(self, options: EncoderOptions) -> None:
        """Load the model. Raises ValueError if it cannot be loaded."""
        from transformers import AutoModel, AutoTokenizer

        self._options = options
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(options.model)
            self._model: Any = AutoModel.from_pretrained(options.model).eval()
        except (OSError, ValueError) as error:
            raise ValueError(f"--encoder={options.model}: it cannot be loaded: {error}") from error

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of passages, float32 [texts, size]."""
        return self._encode([self._options.passage_prefix + text for text in texts])

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of queries, float32 [texts, size]."""
        return self._encode([self._options.query_prefix + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        batches = []
        for start in range(0, len(texts), _BATCH_LEN):
            inputs = self._tokenizer(
                list(texts[start : start + _BATCH_LEN]),
                max_length=self._options.max_len,
                padding=True,
                truncation=True,
                return_tensors="pt",
            )
            with torch.inference_mode():
                states = self._model(**inputs).last_hidden_state
            if self._options.pooling == "cls":
                pooled = states[:, 0]
            else:
                mask = inputs["attention_mask"][..., None]
                pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
            batches.append(torch.nn.functional.normalize(pooled.float(), dim=-1).numpy())
        return np.concatenate(batches)


def build_dense(encoder: Encoder, texts: Sequence[str], folder: Path) -> None:
    """Write the vectors of `texts` to `folder`."""
    import faiss  # pyright: ignore[reportMissingImports]

    vectors = encoder.passages(texts)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    folder.mkdir()
    faiss.write_index(index, str(folder / _FILE))


class DenseShards:
    """The vectors of all shards of an index. Threads may share it."""

    def __init__(self, encoder: Encoder, folders: Sequence[Path]) -> None:
        """`folders`: those that `build_dense` wrote, in the order of the corpus."""
        import faiss  # pyright: ignore[reportMissingImports]

        self._encoder = encoder
        self._shards = [
            faiss.read_index(str(folder / _FILE), faiss.IO_FLAG_MMAP_IFC) for folder in folders
        ]
        self._firsts = np.cumsum([0, *(shard.ntotal for shard in self._shards)]).tolist()

    def top(self, queries: Sequence[str], num: int) -> list[list[tuple[int, float]]]:
        """Return for each query (passage, cosine) of the `num` nearest, the nearest first."""
        if not queries:
            return []
        vectors = self._encoder.queries(queries)
        found: list[list[tuple[int, float]]] = [[] for _ in queries]
        for first, shard in zip(self._firsts, self._shards, strict=False):
            scores, places = shard.search(vectors, min(num, shard.ntotal))
            for ranking, row_scores, row_places in zip(found, scores, places, strict=True):
                ranking += [
                    (first + int(place), float(score))
                    for place, score in zip(row_places, row_scores, strict=True)
                ]
        return [sorted(each, key=lambda item: (-item[1], item[0]))[:num] for each in found]
