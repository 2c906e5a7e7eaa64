"""A tiny random Qwen2.5-VL directory and packed batches of text and images of unequal sizes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.types import Images, TrainBatch

VOCAB = 99
PLACEHOLDER = 90
START = 92
END = 93
VIDEO = 91
VIDEO_START = 94
VIDEO_END = 95
PATCH = 14  # SGLang takes no other of Qwen2.5-VL
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [2, 3, 3],
    },
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,  # SGLang pads it to 48
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.08,
}
Sequence = tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]
"""The runs of a sequence: (text tokens, grids of the images that follow them)."""
BATCHES: tuple[tuple[Sequence, ...], ...] = (
    (((3, ((1, 4, 4),)), (4, ())), ((6, ()),), ((2, ((1, 2, 6), (1, 6, 4))), (5, ()))),
    (((1, ((1, 8, 10),)), (2, ((1, 2, 2),)), (3, ())),),
    (((9, ()),), ((5, ()),)),
    (((4, ((1, 4, 6),)), (3, ())), ((1, ((1, 2, 2),)), (11, ()))),
)
"""Packed micro-batches: several images of unequal sizes in a sequence, some text alone."""
WITH_VIDEOS: tuple[tuple[Sequence, ...], ...] = (
    (((2, ((3, 4, 8),)), (3, ())), ((1, ((1, 2, 2), (2, 4, 6))), (4, ()))),
    (((3, ((2, 6, 8),)), (5, ())),),
)
"""Micro-batches with videos, whose times are one rotary position apart."""
ALIKE: tuple[Sequence, ...] = (
    ((3, ((1, 4, 8),)), (4, ())),
    ((3, ((1, 8, 4),)), (4, ())),
)
"""Sequences that differ in the grid of their image alone if all patches are alike."""


def write_vision_model(
    folder: Path, seed: int = 0, vision: Mapping[str, Any] | None = None, **text: Any
) -> Path:
    """Save a random model: 4 layers, and a tower of 3 blocks with windows and full attention.

    `vision` changes settings of the tower, `text` those of the language model.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tied = text.pop("tie_word_embeddings", False)
    config: Any = Qwen2_5_VLConfig(
        text_config={**TEXT, **text, "tie_word_embeddings": tied},
        vision_config={**VISION, **(vision or {})},
        image_token_id=PLACEHOLDER,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    model: Any = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


def make_vision_batches(
    batches: tuple[tuple[Sequence, ...], ...] = BATCHES, patch: int = PATCH, frames: int = 2
) -> list[TrainBatch]:
    """Return micro-batches whose patches are `patch` pixels wide and high."""
    patch_values = 3 * frames * patch**2
    return [_make_batch(sequences, seed, patch_values) for seed, sequences in enumerate(batches)]


def batches_of(folder: str | Path) -> list[TrainBatch]:
    """Return micro-batches with the patches of the model in this directory.

    Qwen2.5-VL alone has videos of several times in one piece. Transformers reads them as images.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    batches = BATCHES + WITH_VIDEOS if config["model_type"] == "qwen2_5_vl" else BATCHES
    return make_vision_batches(batches, *_patch_of(config))


def batches_of_one_color(folder: str | Path) -> list[TrainBatch]:
    """Return micro-batches of `ALIKE`, each of one sequence with the same tokens."""
    patch, frames = _patch_of(json.loads((Path(folder) / "config.json").read_text()))
    batches = [_make_batch((sequence,), 0, 3 * frames * patch**2) for sequence in ALIKE]
    for batch in batches:
        assert batch.images is not None
        batch.images.pixels_PD.fill_(0.5)
    return batches


def _patch_of(config: dict[str, Any]) -> tuple[int, int]:
    """Return the side of a model's patches, and how many frames a patch has."""
    frames = 1 if config["model_type"] in ("kimi_vl", "kimi_k25") else 2
    return config["vision_config"]["patch_size"], frames


def model_type_of(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["model_type"]


def num_tokens(batches: list[TrainBatch]) -> int:
    return sum(len(batch.token_ids_T) for batch in batches)


def _make_batch(sequences: tuple[Sequence, ...], seed: int, patch_values: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    ids_N = [_token_ids(sequence, generator) for sequence in sequences]
    token_ids_T = torch.cat(ids_N)
    grids = [grid for sequence in sequences for _, images in sequence for grid in images]
    grids_I3 = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    num_patches = int(grids_I3.prod(-1).sum())
    lens_N = tuple(map(len, ids_N))
    mask_T = (torch.rand(len(token_ids_T), generator=generator) > 0.2) & (token_ids_T < PLACEHOLDER)
    mask_T[torch.tensor((0, *lens_N[:-1])).cumsum(0)] = False
    images = Images(
        torch.randn(num_patches, patch_values, generator=generator),
        grids_I3,
        tuple(sum(len(images) for _, images in sequence) for sequence in sequences),
    )
    return TrainBatch(
        token_ids_T=token_ids_T,
        loss_mask_T=mask_T,
        lens_N=lens_N,
        loss_weights_T=mask_T / 40.0,
        advantages_T=torch.randn(len(token_ids_T), generator=generator),
        images=images if grids else None,
    )


def _token_ids(sequence: Sequence, generator: torch.Generator) -> Tensor:
    parts: list[Tensor] = []
    for text_len, images in sequence:
        parts.append(torch.randint(0, PLACEHOLDER, (text_len,), generator=generator))
        for grid in images:
            image_len = grid[0] * grid[1] * grid[2] // 4
            parts += [
                torch.tensor([START]),
                torch.full((image_len,), PLACEHOLDER),
                torch.tensor([END]),
            ]
    return torch.cat(parts)


def split_batch(batch: TrainBatch) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return (token ids, arguments of transformers' model for the images) of each sequence."""
    ids_N = batch.token_ids_T.split(list(batch.lens_N))
    if batch.images is None:
        return [(ids_T, {}) for ids_T in ids_N]
    grids_N = batch.images.grids_I3.split(list(batch.images.nums_N))
    pixels_N = batch.images.pixels_PD.split([int(grids.prod(-1).sum()) for grids in grids_N])
    return [
        (ids_T, {"pixel_values": pixels, "image_grid_thw": grids} if len(grids) else {})
        for ids_T, grids, pixels in zip(ids_N, grids_N, pixels_N, strict=True)
    ]


def transformers_vision_logprobs(
    model: Any, batches: list[TrainBatch], temperature: float = 1.0
) -> list[Tensor]:
    """Return token-aligned log-probs of each batch by transformers, sequence by sequence."""
    out = []
    for batch in batches:
        parts = []
        for ids_T, images in split_batch(batch):
            kinds = (ids_T == PLACEHOLDER).int()[None]
            more = {"mm_token_type_ids": kinds, **images} if images else {}
            logits = model(ids_T[None], **more).logits[0] / temperature
            parts.append(torch.zeros(1))
            parts.append(logits[:-1].log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0])
        out.append(torch.cat(parts))
    return out


def load_vision_model(folder: Path) -> Any:
    """Return the oracle of a model directory."""
    from transformers import AutoModelForImageTextToText

    from tests.support.tiny_kimi_vl import KimiVl

    if model_type_of(folder) in ("kimi_vl", "kimi_k25"):
        return KimiVl(folder)

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
