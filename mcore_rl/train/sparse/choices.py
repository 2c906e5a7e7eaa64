"""Brings the keys that a micro-batch names to attention, and counts where the indexer differs.

    Actor -> begin(batches)        opens a pass
    Actor -> enter(batch, placed)  returns what layers of a chunk read and count of a micro-batch
    layer -> given, count, loss    gets its keys, or reports those of its own indexer; trains it
    Actor -> reduce                adds up over ranks what the train step counted

Positions in a sample become positions among the packed keys of all context-parallel ranks:

    sequences   a a a a . . | b b b         "." is padding
    packed      0 1 2 3 4 5   6 7 8         key 1 of sequence b is packed key 7

The keys of a step may take gigabytes. They stay in host memory; those of one layer are on the
device while the layer runs. Axes: T local tokens of the micro-batch, K keys of a token, L layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer
from torch import Tensor

from mcore_rl.device import device, on_device
from mcore_rl.train.packing import RankBatch
from mcore_rl.train.sparse.loss import IndexerLoss

ROWS_AT_ONCE = 1024
"""Tokens whose keys are compared at once; each takes a byte per packed key."""


@dataclass(frozen=True)
class ChunkKeys:
    """The keys that a micro-batch names, for the layers of one chunk.

    batch     the micro-batch, in host memory
    replays   whether attention reads the keys that it names, not those that the indexer chooses
    counts    what `KeyChoices` adds up, int64 [L, 2] on the device; None: the micro-batch names no
              keys, or they have no effect
    loss      how indexers are trained; None: they are not
    """

    batch: RankBatch
    replays: bool
    counts: Tensor | None
    loss: IndexerLoss | None

    def get_given(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return the packed keys that a layer, from 1, is given, and the tokens without any.

        They are int64 [T, K], -1 for none, and int64, rising; both on the device.
        """
        keys_TK = self.batch.keys(layer_number - 1)
        without_U = (keys_TK < 0).all(1).nonzero()[:, 0]
        return on_device(keys_TK).long(), on_device(without_U)

    def count(self, layer_number: int, counts_L2: Tensor, own_TK: Tensor) -> None:
        """Count the given keys of a layer, from 1, and those among them that `own_TK` lacks."""
        given_TK, _ = self.get_given(layer_number)
        num_keys = int(self.batch.cu_seqlens_N1[-1])
        for given_tK, own_tK in zip(
            given_TK.split(ROWS_AT_ONCE), own_TK.split(ROWS_AT_ONCE), strict=True
        ):
            is_own_tS = torch.zeros(
                len(own_tK), num_keys + 1, dtype=torch.bool, device=own_tK.device
            )
            is_own_tS.scatter_(1, own_tK.long() + 1, True)
            is_given_tK = given_tK >= 0
            is_left_out_tK = is_given_tK & ~is_own_tS.gather(1, given_tK + 1)
            counts_L2[layer_number - 1, 0] += is_given_tK.sum()
            counts_L2[layer_number - 1, 1] += is_left_out_tK.sum()


@dataclass
class IndexedSeqParams(PackedSeqParams):
    """Packed sequences whose tokens may have been given keys; see ChunkKeys.

    The second field is megatron-core's: number of a layer, from 1 -> packed keys, [1, T, K]. The
    third has those of layers whose choice others take, for a recomputation of these as well.
    """

    keys: ChunkKeys | None = None
    _dsa_index_share_topk_holder: dict[int, Tensor] | None = None
    taken: dict[int, Tensor] = field(default_factory=dict)


class KeyChoices:
    """Tells layers with sparse attention which keys a micro-batch names, and how indexers learn."""

    def __init__(self, indexers: Sequence[bool], topk: int, coef: float) -> None:
        """indexers   for each layer of the model, whether it has an indexer
        coef       weight of the indexers' own loss; 0: they are not trained
        """
        num_layers = len(indexers)
        self._shape = (num_layers, topk)
        self._indexers = indexers
        self._coef = coef
        self._replays: bool | None = None
        self._counts_L2 = torch.zeros(num_layers, 2, dtype=torch.int64, device=device())
        self._losses_L = torch.zeros(num_layers, dtype=torch.float64, device=device())

    @classmethod
    def from_config(cls, config: TransformerConfig, coef: float) -> "KeyChoices | None":
        """Return the choices of a model; None if it has no indexers."""
        topk = config.dsa_indexer_topk
        if not topk:
            return None
        sharing = (config.dsa_indexer_skip_topk_offset, config.dsa_indexer_topk_freq)
        numbers = range(1, config.num_layers + 1)
        return cls([not is_dsa_skip_topk_layer(k, *sharing) for k in numbers], topk, coef)

    def begin(self, batches: Sequence[RankBatch], *, replay: bool | None) -> None:
        """Open a pass.

        replay   True: attention reads the keys that batches name; False: it counts where indexers
                 choose others; None: the keys that batches name have no effect
        Raises ValueError if the batches name keys of a model of another shape.
        """
        self._replays = replay
        self._counts_L2.zero_()
        self._losses_L.zero_()
        for batch in batches:
            if batch.named_keys is not None:
                keys_MLK = batch.named_keys.choices_MLK
                num_layers = len(batch.named_keys.layers) and self._shape[0]
                found = (num_layers or keys_MLK.shape[1], keys_MLK.shape[2])
                if found != self._shape:
                    raise ValueError(
                        f"keys of {found[0]} layers and {found[1]} keys per token, but the model"
                        f" has {self._shape[0]} and {self._shape[1]}: the samples come from another"
                        " model"
                    )

    def enter(self, batch: RankBatch, placed: RankBatch) -> ChunkKeys | None:
        """Return what the layers of a chunk read of a micro-batch; None if that is nothing.

        placed   what is on the device of it
        """
        loss = None
        if self._coef:
            loss = IndexerLoss(self._coef, placed.padding_T, self._losses_L)
        names_keys = batch.named_keys is not None and self._replays is not None
        if not names_keys and loss is None:
            return None
        replays = names_keys and bool(self._replays)
        return ChunkKeys(batch, replays, self._counts_L2 if names_keys else None, loss)

    def reduce(self, num_tokens: int) -> Mapping[str, float]:
        """Return the metrics of a step of so many tokens; a collective over all ranks.

        They are the share of given keys that indexers left out, if any were counted, and the
        indexers' mean loss, if they are trained: over all layers, and of each.
        """
        counts_L2 = self._counts_L2.clone()
        dist.all_reduce(counts_L2)
        given_L, left_out_L = counts_L2.double().cpu().unbind(1)
        metrics: dict[str, float] = {}
        if given_L.sum():
            metrics["indexer/differing_share"] = (left_out_L.sum() / given_L.sum()).item()
            shares_L = left_out_L / given_L.clamp(min=1)
            metrics |= _name_layers("differing_share", dict(enumerate(shares_L.tolist())))
        if self._coef:
            losses_L = self._losses_L.clone()
            dist.all_reduce(losses_L)
            # Tensor-parallel ranks compute the same.
            losses_L /= num_tokens * ps.get_tensor_model_parallel_world_size()
            losses = {
                layer: loss for layer, loss in enumerate(losses_L.tolist()) if self._indexers[layer]
            }
            metrics["indexer/loss"] = sum(losses.values()) / len(losses)
            metrics |= _name_layers("loss", losses)
        return metrics


def _name_layers(name: str, values: Mapping[int, float]) -> dict[str, float]:
    """Return the metrics of single layers."""
    return {f"indexer/layer_{layer:02d}/{name}": value for layer, value in values.items()}
