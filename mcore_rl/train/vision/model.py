"""A GPTModel that sees images: its first stage replaces the embeddings of placeholder tokens.

    token ids --> embedding --> [t, 1, H] --+
    pixels ----> tower ------> [R, H] ------+--> decoder_input [t, 1, H]
                   +---------> K x [R, H] ------> added behind the first K layers, on later stages,
                                                  too
    layer 0 --> + features[0] --> layer 1 --> + features[1] --> layer 2 --> ...

t are the tokens of this tensor-parallel rank: sequence parallelism has cut the embeddings already.

The features of the tower's inner blocks travel as `context` (DeepStack, arXiv:2406.04334).
megatron-core hands it from layer to layer, through recomputed layers too, for cross-attention that
these models do not have. Between pipeline stages the features are rows below the hidden states:

    [t, 1, H] hidden states
    [t, 1, H] features of the next layer
    [t, 1, H] features of the layer behind it ...

In Qwen3-VL the three rotary axes take turns over the frequencies of a head; megatron-core 0.19.2
has only axes whose frequencies lie in a row (T T T T H H W W):

    frequency    0 1 2 3 4 5 6 7
    axis         T H W T H W T T      sections 4, 2, 2
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from mcore_rl.train.router import layers_of
from mcore_rl.train.vision.rank_images import RankImages
from mcore_rl.train.vision.tower import embed_images, make_tower, zero_of
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.settings import read_rope
from mcore_rl.weights.models.table import HfConfig


class DeepstackLayer(TransformerLayer):
    """A layer whose output has the features of its number added, if there are any.

    A feature of the tower's recomputed blocks must come in as an argument: taken from an attribute,
    each recomputed layer would run the tower's backward pass by itself.
    """

    def forward(
        self, *args: Any, context: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (hidden states, features for later layers).

        context   [K, t, 1, H], features of this layer and the next K - 1 layers for the tokens of
                  this rank, 0 for text; None where there are none
        """
        hidden_t1H, _ = super().forward(*args, **kwargs)
        if context is None:
            return hidden_t1H, None
        return hidden_t1H + context[0], context[1:] if len(context) > 1 else None


def spread_features(features: tuple[Tensor, ...], rows_t: Tensor, like: Tensor) -> Tensor | None:
    """Return `context` of DeepstackLayer in the dtype of `like`; None without features.

    features   of each layer, [R, H] each
    rows_t     row of each token of this rank, -1 for text
    """
    if not features:
        return None
    is_image_t11 = (rows_t >= 0)[:, None, None]
    own_Kt1H = torch.stack([rows_RH[rows_t.clamp(min=0), None] for rows_RH in features])
    return torch.where(is_image_t11, own_Kt1H, 0).to(like.dtype)


def count_carried_features(chunk: GPTModel) -> tuple[int, int]:
    """Return how many features of each image travel into a chunk of a model, and out of it."""
    num_features = getattr(chunk, "num_features", 0)
    if not num_features:
        return 0, 0
    layers = layers_of(chunk)
    return max(num_features - layers.start, 0), max(num_features - layers.stop, 0)


def join_features(hidden_t1H: Tensor, features_Kt1H: Tensor | None) -> Tensor:
    """Return hidden states and features as rows of one tensor, [(1 + K) t, 1, H]."""
    if features_Kt1H is None:
        return hidden_t1H
    return torch.cat([hidden_t1H, features_Kt1H.flatten(0, 1)])


def part_features(rows: Tensor, num_tokens: int) -> tuple[Tensor, Tensor | None]:
    """Return what `join_features` joined of so many tokens."""
    hidden_t1H, rest = rows[:num_tokens], rows[num_tokens:]
    if not len(rest):
        return rows, None
    return hidden_t1H, rest.unflatten(0, (-1, num_tokens))


def interleave_axes(section: Sequence[int], num_frequencies: int) -> list[int]:
    """Return the axis of each frequency: 0 for time, 1 for height, 2 for width.

    section   frequencies of each axis; height and width have every third until theirs are used up
    """
    axes = [0] * num_frequencies
    for axis in (1, 2):
        for turn in range(section[axis]):
            axes[3 * turn + axis] = axis
    return axes


class InterleavedPositions(MultimodalRotaryEmbedding):
    """The angles of the whole packed micro-batch on every context-parallel rank, interleaved.

    megatron-core's attention cuts them sequence by sequence (rope_utils, "exact mapping").
    """

    def __init__(self, *, section: Sequence[int], **options: Any) -> None:
        """`section` as of `interleave_axes`; `options` are those of megatron-core's class."""
        super().__init__(**options)
        axes = interleave_axes(section, len(self.inv_freq))
        self._axes_F = torch.tensor(axes, device=self.inv_freq.device)

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: Any = None) -> Any:
        """Return the angles [P, 1, 1, head] of `position_ids` [3, 1, P]."""
        assert self.cp_group is None and cp_group is None
        turns_PF = position_ids[:, 0][self._axes_F].T.to(self.inv_freq)
        angles_PF = turns_PF * self.inv_freq
        return torch.cat([angles_PF, angles_PF], dim=-1)[:, None, None]


class WholePositions(MultimodalRotaryEmbedding):
    """The rotary angles of the whole packed micro-batch on every context-parallel rank.

    megatron-core's class would cut them as if the micro-batch were one sequence. Its attention cuts
    them once more, sequence by sequence (rope_utils, "exact mapping").
    """

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: Any = None) -> Any:
        """Return the angles [P, 1, 1, head] of `position_ids` [3, 1, P]."""
        assert self.cp_group is None and cp_group is None
        return super().forward(position_ids, mrope_section)


def _rotary_embedding(
    config: TransformerConfig,
    hf_config: HfConfig,
    *,
    rotary_percent: float,
    rotary_base: float,
    **_: Any,
) -> MultimodalRotaryEmbedding:
    options: dict[str, Any] = {
        "kv_channels": config.kv_channels or config.hidden_size // config.num_attention_heads,
        "rotary_percent": rotary_percent,
        "rotary_base": rotary_base,
    }
    if read_rope(hf_config).get("mrope_interleaved"):
        assert config.mrope_section is not None
        rotary = InterleavedPositions(section=config.mrope_section, **options)
    else:
        rotary = WholePositions(**options)
    rotary.cp_group = None
    return rotary


class VisionLanguageModel(GPTModel):
    """One chunk of the model; the first chunk has the tower under the name `visual`."""

    def __init__(
        self, config: TransformerConfig, *args: Any, hf_config: HfConfig, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        if kwargs["position_embedding_type"] == "mrope":
            self.rotary_pos_emb = _rotary_embedding(config, hf_config, **kwargs)
        self.num_features = family_of(hf_config).sizes(hf_config).get("deepstack_mergers", 0)
        self._received: Tensor | None = None
        if self.pre_process:
            self.visual = make_tower(config, hf_config)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the tensor of the previous stage: hidden states, and the features beside them."""
        [self._received] = input_tensor if isinstance(input_tensor, list) else [input_tensor]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        *,
        vision: RankImages,
        padding_mask: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Return what GPTModel does. `position_ids` are RankImages.rotary_3P, [3, 1, P]."""
        if self.pre_process:
            assert decoder_input is None
            embeddings_t1H = self.embedding(input_ids, position_ids)
            decoder_input, features_Kt1H = self._with_images(embeddings_t1H, vision)
            padding_mask = self._own_part(padding_mask, 1)
        else:
            features_Kt1H = self._take_received(input_ids.shape[1])
        if features_Kt1H is not None:
            more["extra_block_kwargs"] = {"context": features_Kt1H}
        out = super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input,
            padding_mask=padding_mask,
            **more,
        )
        _, num_behind = count_carried_features(self)
        if features_Kt1H is None or not num_behind:
            return out
        return join_features(out, features_Kt1H[-num_behind:])

    def _take_received(self, num_tokens: int) -> Tensor | None:
        """Give the layers the hidden states that were received; return the features beside them."""
        received, self._received = self._received, None
        assert received is not None, "no input from the previous stage"
        if self.config.sequence_parallel:
            num_tokens //= ps.get_tensor_model_parallel_world_size()
        hidden_t1H, features_Kt1H = part_features(received, num_tokens)
        self.decoder.set_input_tensor(hidden_t1H)
        return features_Kt1H

    def _with_images(
        self, embeddings_t1H: Tensor, vision: RankImages
    ) -> tuple[Tensor, Tensor | None]:
        """Return (embeddings of text and images, features for the first layers [K, t, 1, H])."""
        if vision.images is None:
            return embeddings_t1H + zero_of(self.visual).to(embeddings_t1H), None
        embedded = embed_images(self.visual, vision.images)
        images_RH = embedded.embeddings_RH.to(embeddings_t1H.dtype)
        rows_t = self._own_part(vision.rows_T, 0)
        assert rows_t is not None
        own_t1H = images_RH[rows_t.clamp(min=0), None]
        mixed_t1H = torch.where((rows_t >= 0)[:, None, None], own_t1H, embeddings_t1H)
        return mixed_t1H, spread_features(embedded.inner, rows_t, embeddings_t1H)

    def _own_part(self, values: Tensor | None, axis: int) -> Tensor | None:
        """Return the part on this tensor-parallel rank if sequence parallelism cuts the tokens."""
        if values is None or not self.config.sequence_parallel:
            return values
        parts = values.chunk(ps.get_tensor_model_parallel_world_size(), axis)
        return parts[ps.get_tensor_model_parallel_rank()].contiguous()
