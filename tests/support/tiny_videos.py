"""Sequences of text, images and videos, as this project and as transformers read them.

ours           every placeholder is that of images, pixels and grids of pieces
transformers   placeholders of videos, pixels and grids of whole videos
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.data.images.places import ImageTokens
from mcore_rl.types import Images, TrainBatch
from tests.support.tiny_vision import (
    END,
    PLACEHOLDER,
    START,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
)

Grid = tuple[int, int, int]
Run = int | tuple[str, Grid]
"""So many tokens of text, or an image or a video of this grid."""
SEQUENCES: tuple[tuple[Run, ...], ...] = (
    (3, ("video", (3, 4, 16)), 4),
    (2, ("image", (1, 4, 6)), 3, ("video", (2, 6, 12)), 2, ("video", (1, 2, 4)), 5),
    (1, ("video", (4, 2, 20)), 2, ("image", (1, 2, 2)), 6),
)
SECONDS = 0.5
"""From one patch to the next along time. Transformers goes on behind the width of a video."""
TOKENS_PER_SECOND = 4
LATE: tuple[Run, ...] = (2, ("video", (5, 2, 4)), 7)
"""A video of more time than width."""


@dataclass(frozen=True)
class Watched:
    """A sequence and its form in transformers.

    images      this project's
    whole       arguments of transformers' model
    """

    token_ids_T: Tensor
    images: Images
    whole: dict[str, Tensor]


class _Writer:
    def __init__(self, kind: str, patch: int, seed: int) -> None:
        self._kind = kind
        self._values = 3 * 2 * patch**2
        self._random = torch.Generator().manual_seed(seed)
        self.ids: list[int] = []
        self.types: list[int] = []
        self.grids: list[Grid] = []
        self.intervals: list[float] = []
        self.pixels: list[tuple[str, Tensor]] = []
        self.whole_grids: dict[str, list[Grid]] = {"image": [], "video": []}

    def text(self, num_tokens: int) -> None:
        ids = torch.randint(0, PLACEHOLDER, (num_tokens,), generator=self._random)
        self._put(ids.tolist(), 0)

    def _put(self, ids: Sequence[int], kind: int) -> None:
        self.ids += ids
        self.types += [kind] * len(ids)

    def see(self, kind: str, grid: Grid) -> None:
        """Write an image or a video as the family does."""
        frames, height, width = grid
        is_whole = kind == "image" or self._kind == "qwen2_5_vl"
        is_marked = kind == "video" and self._kind == "glm4v_moe"
        pieces = [grid] if is_whole else [(1, height, width)] * frames
        self._put([VIDEO_START] * is_marked, 0)
        for piece in pieces:
            self.text(2 * (not is_whole))
            self._put([START], 0)
            self._put([PLACEHOLDER] * (piece[0] * height * width // 4), 1 + (kind == "video"))
            self._put([END], 0)
        self._put([VIDEO_END] * is_marked, 0)
        self.grids += pieces
        is_timed = kind == "video" and is_whole
        self.intervals += [TOKENS_PER_SECOND * SECONDS if is_timed else 1.0] * len(pieces)
        pixels = torch.randn(frames * height * width, self._values, generator=self._random)
        self.pixels.append((kind, pixels))
        self.whole_grids[kind].append(grid)


def watch(kind: str, runs: tuple[Run, ...], patch: int, seed: int = 0) -> Watched:
    """Return a sequence of a family (model_type) whose patches are `patch` pixels wide."""
    writer = _Writer(kind, patch, seed)
    for run in runs:
        if isinstance(run, int):
            writer.text(run)
        else:
            writer.see(*run)
    ids_T = torch.tensor(writer.ids)
    types_T = torch.tensor(writer.types)
    their_ids_T = ids_T if kind == "glm4v_moe" else ids_T.masked_fill(types_T == 2, VIDEO)
    whole = {"input_ids": their_ids_T[None], "mm_token_type_ids": types_T[None]}
    if kind == "glm4v_moe" and all(writer.whole_grids.values()):
        # transformers' GLM-4.5V cannot read both in one sequence; pieces of videos are as images.
        writer.pixels = [("image", pixels) for _, pixels in writer.pixels]
        writer.whole_grids = {"image": writer.grids, "video": []}
        whole["mm_token_type_ids"] = types_T.clamp(max=1)[None]
    for name, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        pixels = [pixels for own, pixels in writer.pixels if own == name]
        if pixels:
            whole[key] = torch.cat(pixels)
            whole[f"{name}_grid_thw"] = torch.tensor(writer.whole_grids[name])
    if kind == "qwen2_5_vl":
        whole["second_per_grid_ts"] = torch.full((len(writer.whole_grids["video"]),), SECONDS)
    images = Images(
        torch.cat([pixels for _, pixels in writer.pixels]),
        torch.tensor(writer.grids),
        (len(writer.grids),),
        torch.tensor(writer.intervals),
    )
    return Watched(ids_T, images, whole)


def watch_late(patch: int) -> Watched:
    """Return a sequence of Qwen2.5-VL with a long video; its positions are told to transformers."""
    watched = watch("qwen2_5_vl", LATE, patch, seed=9)
    ids_T, images = watched.token_ids_T, watched.images
    tokens = ImageTokens(PLACEHOLDER, 2)
    rotary_3T = tokens.rotary(ids_T, images.grids_I3, len(ids_T), images.intervals())
    return Watched(ids_T, images, {**watched.whole, "position_ids": rotary_3T[:, None]})


def pack(sequences: Sequence[Watched]) -> TrainBatch:
    """Return a micro-batch of all sequences, in which text is trained."""
    ids_T = torch.cat([each.token_ids_T for each in sequences])
    lens_N = tuple(len(each.token_ids_T) for each in sequences)
    mask_T = ids_T < PLACEHOLDER
    mask_T[torch.tensor((0, *lens_N[:-1])).cumsum(0)] = False
    return TrainBatch(
        token_ids_T=ids_T,
        loss_mask_T=mask_T,
        lens_N=lens_N,
        loss_weights_T=mask_T / 40.0,
        advantages_T=torch.randn(len(ids_T), generator=torch.Generator().manual_seed(1)),
        images=Images(
            torch.cat([each.images.pixels_PD for each in sequences]),
            torch.cat([each.images.grids_I3 for each in sequences]),
            tuple(len(each.images.grids_I3) for each in sequences),
            torch.cat([each.images.intervals() for each in sequences]),
        ),
    )


def watched_of(folder: Path) -> list[Watched]:
    """Return sequences of the model in this directory."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    patch = config["vision_config"]["patch_size"]
    made = [watch(kind, runs, patch, seed) for seed, runs in enumerate(SEQUENCES)]
    return [*made, watch_late(patch)] if kind == "qwen2_5_vl" else made


def transformers_video_logprobs(model: Any, watched: Watched) -> Tensor:
    """Return the token-aligned log-probs of this project's ids by transformers' model."""
    logits = model(**watched.whole).logits[0]
    next_ids_T = watched.token_ids_T[1:, None]
    return torch.cat([torch.zeros(1), logits[:-1].log_softmax(-1).gather(-1, next_ids_T)[:, 0]])
