"""Lays out a micro-batch whose sequences share beginnings, which are computed once.

A sequence attends to the keys of the tokens that it takes over, and to its own:

    micro-batch   s a b c d e | s a b f g h         indices 0 to 11
    computed      s a b c d e | b f g h             positions 0 to 5, and 2 to 5
    keys          s a b c d e | s a b f g h         of the local tokens 0 to 5, and 0 1 6 7 8 9

Entry t of `twins_T` is the token that is computed in place of token t: 0 1 2 for s a b of sequence
1, whose log-probs and values are those of sequence 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mcore_rl.batches.shared_prefixes import Sharing
from mcore_rl.device import on_device


@dataclass(frozen=True)
class SharedRows:
    """Which keys the computed tokens of a micro-batch attend to.

    keys_K       int64, the local tokens whose keys each sequence sees, end to end
    cu_keys_N1   int32, cumulative numbers of keys
    max_keys     most keys of a sequence
    twins_T      int64, index in the micro-batch of the token that is computed for each token; on
                 the host
    """

    keys_K: Tensor
    cu_keys_N1: Tensor
    max_keys: int
    twins_T: Tensor

    def on_device(self) -> "SharedRows":
        keys_K, cu_keys_N1 = on_device(self.keys_K), on_device(self.cu_keys_N1)
        return replace(self, keys_K=keys_K, cu_keys_N1=cu_keys_N1)


def lay_out_shared(lens_N: Sequence[int], padded_N: Sequence[int], sharing: Sharing) -> SharedRows:
    """Return the layout of sequences of `lens_N` tokens of which `padded_N` are computed.

    The computed tokens lie end to end, with padding behind a sequence.
    """
    first_N = torch.tensor((0, *padded_N)).cumsum(0)
    source_N = torch.tensor((0, *lens_N)).cumsum(0)
    keys: dict[int, Tensor] = {}
    twins: dict[int, Tensor] = {}
    for n in sharing.order:
        start, parent = sharing.starts[n], sharing.parents[n]
        own_keys = torch.arange(padded_N[n]) + first_N[n]
        own_tokens = torch.arange(lens_N[n]) + source_N[n]
        if parent < 0:
            keys[n], twins[n] = own_keys, own_tokens
            continue
        keys[n] = torch.cat([keys[parent][:start], own_keys])
        # The parent predicts the token at `start` as well, with the same log-prob.
        twins[n] = torch.cat([twins[parent][: start + 1], own_tokens[start + 1 :]])
    in_order = range(len(lens_N))
    nums_keys = [len(keys[n]) for n in in_order]
    return SharedRows(
        keys_K=torch.cat([keys[n] for n in in_order]),
        cu_keys_N1=torch.tensor((0, *nums_keys)).cumsum(0).int(),
        max_keys=max(nums_keys),
        twins_T=torch.cat([twins[n] for n in in_order]),
    )
