"""Has an engine's server know an image by its patches and its grid.

SGLang keeps what a tower made of an image, and the KV cache behind it, under a hash of the patches
alone. A white image of 4 x 16 patches would get the positions of one of 8 x 8.
"""

import hashlib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

GRIDS = ("image_grid_thw", "image_grid_hws", "grid_thws", "video_grid_thw")
"""Names that SGLang's processors give to the grids of images."""


def tell_grids_apart() -> None:
    """Change SGLang in this process, which is to be the server's."""
    schedule_batch: Any = import_module("sglang.srt.managers.schedule_batch")
    item_class = schedule_batch.MultimodalDataItem
    set_pad_value = item_class.set_pad_value

    def hash_with_grid(self: Any) -> None:
        is_new = self.pad_value is None
        set_pad_value(self)
        grid = read_grid(self.model_specific_data)
        if is_new and grid:
            told = f"{self.hash} {grid}".encode()
            self.set_hash(int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big"))

    item_class.set_pad_value = hash_with_grid


def read_grid(data: Mapping[str, Any]) -> list[Any]:
    """Return the grids of an item; [] if it has none."""
    return [data[name].tolist() for name in GRIDS if data.get(name) is not None]
