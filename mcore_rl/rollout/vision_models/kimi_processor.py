"""Makes the patches of chats that an engine of Kimi-VL or Kimi-K2.5 gets: those of the trainer.

"<|media_pad|>What?" and one image --> ids with a placeholder for each token of the image, pixels
[P, 3, 14, 14], grids [1, 2] (height, width) or [1, 3] (frames, height, width)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor

from mcore_rl.data.images.encoded import expand_placeholders
from mcore_rl.data.images.processor import PatchRule, open_rule
from mcore_rl.rollout.image_outputs import shape_as_images

PLACEHOLDER = "<|media_pad|>"


class KimiVlProcessor:
    """Has as much of a processor of transformers as SGLang's server asks for."""

    def __init__(self, tokenizer: Any, rule: PatchRule) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self._rule = rule

    @classmethod
    def from_pretrained(
        cls, folder: str, trust_remote_code: bool = False, revision: str | None = None, **_: Any
    ) -> Self:
        """Raises ValueError if the directory has no image processor that can be opened."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, revision=revision
        )
        return cls(tokenizer, open_rule(Path(folder)))

    def __call__(
        self, text: Sequence[str], images: Sequence[Image.Image] = (), **_: Any
    ) -> dict[str, Tensor]:
        """Return ids [1, T], pixels and grids of one chat and all its images.

        Raises ValueError if the text has another number of placeholders.
        """
        [chat] = text
        ids = self.tokenizer.encode(chat, add_special_tokens=False)
        placeholder_id = self.tokenizer.convert_tokens_to_ids(PLACEHOLDER)
        if ids.count(placeholder_id) != len(images):
            raise ValueError(f"{len(images)} images for {ids.count(placeholder_id)} {PLACEHOLDER}")
        made = [self._rule.make(image.convert("RGB"), None) for image in images]
        counts = [len(each.pixels_PD) // self._rule.merge**2 for each in made]
        found = {"input_ids": torch.tensor([expand_placeholders(ids, placeholder_id, counts)])}
        if made:
            found["pixel_values"] = shape_as_images(torch.cat([each.pixels_PD for each in made]))
            found |= self._name_grids(torch.tensor([each.grid for each in made]))
        return found

    def _name_grids(self, grids_I3: Tensor) -> dict[str, Tensor]:
        return {"image_grid_hws": grids_I3[:, 1:]}


class KimiK25Processor(KimiVlProcessor):
    def _name_grids(self, grids_I3: Tensor) -> dict[str, Tensor]:
        return {"image_grid_thw": grids_I3}
