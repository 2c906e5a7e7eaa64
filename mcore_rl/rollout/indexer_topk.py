"""Reads which keys the indexers of an engine chose, as SGLang reports them.

A token t sees the keys 0 to t. If these are no more than K, it attends to all of them:

    t = 1, K = 3   reported 1  0 -1   or anything, where SGLang ran no indexer   ->   0  1 -1
    t = 6, K = 3   reported 5  0  6                                              ->   0  5  6
"""

from dataclasses import dataclass

import numpy as np
import pybase64
import torch
from torch import Tensor

from mcore_rl.types import Array

_REMEDY = (
    "the engine serves another model than model.path says, or reports slots of its KV cache instead"
    " of positions (rollout.sglang must leave the attention backend of SGLang alone);"
    " drift.indexer_topk=false does without"
)


@dataclass(frozen=True)
class IndexerTopkShape:
    """The shape that an answer must have: layers of the model, and keys that each token chooses."""

    num_layers: int
    top_k: int

    def decode(self, encoded: str | None, num_tokens: int, where: str) -> Tensor:
        """Return positions of keys, [num_tokens, L, K], rising, then -1; int16 if they fit in it.

        SGLang's base64 of int32 tells of all tokens of a sequence but its last. Raises ValueError
        naming `where`, token and layer if nothing was reported or no indexer can have chosen so.
        """
        if encoded is None:
            raise ValueError(f"{where}: the engine did not tell which keys it chose: {_REMEDY}")
        flat = np.frombuffer(pybase64.b64decode(encoded), np.int32)
        if flat.size != num_tokens * self.num_layers * self.top_k:
            raise ValueError(
                f"{where}: the engine told of {flat.size} choices of keys, expected {num_tokens}"
                f" tokens * {self.num_layers} layers * {self.top_k} keys per token: {_REMEDY}"
            )
        reported_TLK = flat.reshape(num_tokens, self.num_layers, self.top_k)
        dtype = np.int16 if num_tokens <= np.iinfo(np.int16).max else np.int32
        positions_TLK = np.empty(reported_TLK.shape, dtype)
        num_all = min(num_tokens, self.top_k)
        key_K = np.arange(self.top_k)
        all_TK = np.where(key_K <= np.arange(num_all)[:, None], key_K, -1)
        positions_TLK[:num_all] = all_TK[:, None]
        self._check_bounds(reported_TLK, where)
        positions_TLK[num_all:] = reported_TLK[num_all:]
        positions_TLK[num_all:].sort()
        self._check_distinct(positions_TLK, where)
        return torch.from_numpy(positions_TLK)

    def _check_bounds(self, reported_TLK: Array, where: str) -> None:
        """Raise ValueError if a token that has to choose reports a key that it does not see."""
        chosen_TLK = reported_TLK[self.top_k :]
        token_T1 = np.arange(self.top_k, self.top_k + len(chosen_TLK))[:, None]
        wrong_TL = chosen_TLK.min(2, initial=0) < 0
        wrong_TL |= chosen_TLK.max(2, initial=0) > token_T1
        self._refuse(wrong_TL, reported_TLK, where)

    def _check_distinct(self, positions_TLK: Array, where: str) -> None:
        chosen_TLK = positions_TLK[self.top_k :]
        wrong_TL = (chosen_TLK[..., 1:] == chosen_TLK[..., :-1]).any(2)
        self._refuse(wrong_TL, positions_TLK, where)

    def _refuse(self, wrong_TL: Array, positions_TLK: Array, where: str) -> None:
        if wrong_TL.any():
            late, layer = np.argwhere(wrong_TL)[0].tolist()
            token = late + self.top_k
            keys = positions_TLK[token, layer].tolist()
            raise ValueError(
                f"{where}: keys {keys!r:.80} of token {token} in layer {layer} are not {self.top_k}"
                f" different ones of 0 to {token}: {_REMEDY}"
            )
