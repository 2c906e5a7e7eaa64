"""Rotary angles of three axes that take turns over the frequencies of a head, as in Qwen3-VL.

    frequency    0 1 2 3 4 5 6 7
    axis         T H W T H W T T      sections 4, 2, 2

megatron-core 0.16.1 has only axes whose frequencies lie in a row (T T T T H H W W).
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from torch import Tensor


def interleaved_axes(section: Sequence[int], num_frequencies: int) -> list[int]:
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
        """`section` as of `interleaved_axes`; `options` are those of megatron-core's class."""
        super().__init__(**options)
        axes = interleaved_axes(section, len(self.inv_freq))
        self._axes_F = torch.tensor(axes, device=self.inv_freq.device)

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: Any = None) -> Any:
        """Return the angles [P, 1, 1, head] of `position_ids` [3, 1, P]."""
        assert self.cp_group is None and cp_group is None
        turns_PF = position_ids[:, 0][self._axes_F].T.to(self.inv_freq)
        angles_PF = turns_PF * self.inv_freq
        return torch.cat([angles_PF, angles_PF], dim=-1)[:, None, None]
