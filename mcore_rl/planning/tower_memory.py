"""Predicts the bytes of images and of a vision tower's activations on a rank of the first stage.

Each rank of that stage runs the whole tower on all images of its micro-batch (docs/vision.md), so
neither tensor nor context parallelism makes them fewer.
"""

from collections.abc import Mapping, Sequence

from mcore_rl.planning.activations import FLOAT32, Pass
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.tower import PREFIX, merge_size

GATE = PREFIX + "blocks.mlp.gate_proj.weight"
"""Key of a tensor that only blocks with a gated MLP have."""


def tower_activations(hf_config: HfConfig, step: Pass, vision: str, in_flight: float) -> float:
    """Return the bytes of activations if every token of the micro-batch is of an image.

    vision      train.vision; blocks that are not trained keep nothing for a backward pass
    in_flight   micro-batches whose activations the stage keeps
    """
    family = family_of(hf_config)
    sizes = family.sizes(hf_config)
    num_patches = step.tokens * merge_size(hf_config) ** 2
    hidden = sizes["tower_hidden"]
    # norms' inputs and outputs, queries, keys and values before and after rotation, output; gate,
    # up, activation and product, or the activation's input and output
    is_gated = any(rule.key == GATE for rule in family.rules)
    block = 10 * hidden + (4 if is_gated else 2) * sizes["tower_block_ffn"]
    kept = sizes["tower_blocks"] * (hidden if step.recomputed else block)
    if vision != "all":
        kept = 0
    inner = sizes.get("deepstack_mergers", 0) * _inner_feature(sizes, step, num_patches, vision)
    numbers = num_patches * (in_flight * kept + block) + in_flight * inner
    return numbers * step.itemsize


def received_features(
    hf_config: HfConfig, step: Pass, runs: Sequence[range], in_flight: float
) -> float:
    """Return the bytes of inner features that a stage gets from earlier ones.

    runs        the layers of each of its model chunks
    in_flight   micro-batches whose activations the stage keeps in each chunk
    """
    sizes = family_of(hf_config).sizes(hf_config)
    num_features = sizes.get("deepstack_mergers", 0)
    received = sum(max(num_features - run.start, 0) for run in runs if run.start)
    own_tokens = step.tokens / (step.tp * step.cp)
    return in_flight * received * sizes["hidden"] * own_tokens * step.itemsize


def _inner_feature(sizes: Mapping[str, int], step: Pass, num_patches: int, vision: str) -> float:
    """Return the numbers that features of one inner block take, with those of their projector.

    Each rank has the features of all images, and those of its own tokens.
    """
    features = sizes["hidden"] * (step.tokens + step.tokens / (step.tp * step.cp))
    # the outputs of norm, first layer and activation
    projector = 0 if vision == "none" else 3 * sizes["tower_hidden"] * num_patches
    return features + projector


def pixel_bytes(config: HfConfig, num_tokens: int) -> float:
    """Return the bytes of the pixels of a micro-batch whose tokens all stand for images."""
    sizes = family_of(config).sizes(config)
    num_patches = num_tokens * merge_size(config) ** 2
    return num_patches * sizes["channels"] * sizes["patch_frames"] * sizes["patch"] ** 2 * FLOAT32
