"""Predicts the bytes of images and of a vision tower's activations on a rank of the first stage.

Each rank of that stage runs the whole tower on all images of its micro-batch (docs/vision.md), so
neither tensor nor context parallelism makes them fewer.
"""

from mcore_rl.planning.activations import FLOAT32, Pass
from mcore_rl.slices.families import family_of
from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.families.tower import tower_sizes, vision_settings


def tower_activations(hf_config: HfConfig, step: Pass, vision: str, in_flight: float) -> float:
    """Return the bytes of activations if every token of the micro-batch is of an image.

    vision      train.vision; blocks that are not trained keep nothing for a backward pass
    in_flight   micro-batches whose activations the stage keeps
    """
    sizes = family_of(hf_config).sizes(hf_config)
    merge = vision_settings(hf_config).get("spatial_merge_size", 2)
    num_patches = step.tokens * merge**2
    hidden = sizes["tower_hidden"]
    # norms' inputs and outputs, queries, keys and values before and after rotation, output; gate,
    # up, activation and product
    block = 10 * hidden + 4 * sizes["tower_block_ffn"]
    kept = sizes["tower_blocks"] * (hidden if step.recomputed else block)
    if vision != "all":
        kept = 0
    return num_patches * (in_flight * kept + block) * step.itemsize


def pixel_bytes(config: HfConfig, num_tokens: int) -> float:
    """Return the bytes of the pixels of a micro-batch whose tokens all stand for images."""
    sizes = tower_sizes(config)
    num_patches = num_tokens * vision_settings(config).get("spatial_merge_size", 2) ** 2
    return num_patches * sizes["channels"] * sizes["patch_frames"] * sizes["patch"] ** 2 * FLOAT32
