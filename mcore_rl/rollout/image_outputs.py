"""Gives SGLang's processors the patches of images and videos, as their `processor_output`.

Qwen2.5-VL   images; each patch along the time of a video is one, whose place is told, and the
             rotary positions of the whole sequence, too
Qwen3-VL     images: each piece of a video is one
GLM-4.5V     images, and videos of one frame for the pieces between the marks of a video
Kimi-VL      images without frames
Kimi-K2.5    images of one frame
"""

from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from mcore_rl.data.images.places import ImageTokens
from mcore_rl.types import Images
from mcore_rl.weights.hf.config import with_text_settings
from mcore_rl.weights.models.table import HfConfig

Output = Callable[[Mapping[str, Any], Images], Any]
"""(request with `input_ids`, its images) -> `image_data` of SGLang's request."""


class ProcessorOutput(dict[str, Any]):
    """A dictionary whose grids are also attributes.

    SGLang 0.5.23 reads them from the dictionary for Qwen's models. For GLM's it reads the
    attributes, and without them gives images the rotary positions of text.
    """

    @property
    def image_grid_thw(self) -> Tensor | None:
        return self.get("image_grid_thw")

    @property
    def video_grid_thw(self) -> Tensor | None:
        return self.get("video_grid_thw")


def choose_output(config: HfConfig) -> Output:
    """Return how patches are given to SGLang's processor of a model, by its config.json."""
    config = with_text_settings(config)
    tokens = ImageTokens.from_config(config)
    kind = config.get("model_type")
    if kind == "kimi_vl":
        return lambda body, images: moonvit_output(
            body, images, image_grid_hws=images.grids_I3[:, 1:]
        )
    if kind == "kimi_k25":
        return lambda body, images: moonvit_output(body, images, image_grid_thw=images.grids_I3)
    if kind == "glm4v_moe":
        marks = (config.get("video_start_token_id", -1), config.get("video_end_token_id", -1))
        return lambda body, images: glm_output(body, images, tokens, *marks)
    return lambda body, images: qwen_output(body, images, tokens)


def qwen_output(body: Mapping[str, Any], images: Images, tokens: ImageTokens) -> Any:
    """Return the output for models of Qwen.

    In Qwen2.5-VL's tower, patches of a video do not see those of other times. In SGLang 0.5.23 they
    do, unless each time is an image of its own.
    """
    grids_I3 = images.grids_I3
    times_I = grids_I3[:, 0]
    if not (times_I > 1).any():
        return [_output(body, pixel_values=images.pixels_PD, image_grid_thw=grids_I3)]
    frames_F3 = grids_I3.repeat_interleave(times_I, dim=0)
    frames_F3[:, 0] = 1
    output = _output(body, pixel_values=images.pixels_PD, image_grid_thw=frames_F3)
    ids_T = output["input_ids"]
    rotary_3T = tokens.rotary(ids_T, grids_I3, len(ids_T), images.intervals())
    output["mrope_positions"] = rotary_3T
    output["mrope_position_delta"] = rotary_3T.max() + 1 - len(ids_T)
    output["offsets"] = _first_and_last(tokens, ids_T, grids_I3)
    return [output]


def _first_and_last(tokens: ImageTokens, ids_T: Tensor, grids_I3: Tensor) -> Tensor:
    """Return the first and last token of each patch along the time of each image, int64 [F, 2]."""
    places = []
    starts = tokens.image_starts(ids_T, grids_I3)
    for start, num_tokens, times in zip(
        starts, tokens.nums_tokens(grids_I3), grids_I3[:, 0].tolist(), strict=True
    ):
        step = num_tokens // times
        places += [(first, first + step - 1) for first in range(start, start + num_tokens, step)]
    return torch.tensor(places)


def glm_output(
    body: Mapping[str, Any], images: Images, tokens: ImageTokens, start_id: int, end_id: int
) -> Any:
    """Return the output for GLM-4.5V; `start_id` and `end_id` mark a video."""
    ids_T = torch.tensor(body["input_ids"])
    depth_T = (ids_T == start_id).cumsum(0) - (ids_T == end_id).cumsum(0)
    in_video_I = depth_T[tokens.image_starts(ids_T, images.grids_I3)] > 0
    in_video_P = in_video_I.repeat_interleave(images.grids_I3.prod(-1))
    parts: dict[str, Tensor] = {}
    if not in_video_I.all():
        parts["pixel_values"] = images.pixels_PD[~in_video_P]
        parts["image_grid_thw"] = images.grids_I3[~in_video_I]
    if in_video_I.any():
        parts["pixel_values_videos"] = images.pixels_PD[in_video_P]
        parts["video_grid_thw"] = images.grids_I3[in_video_I]
    return [_output(body, **parts)]


def moonvit_output(body: Mapping[str, Any], images: Images, **grids: Tensor) -> Any:
    """Return the output for a model with MoonViT; its grids have a name and shape of their own."""
    return [_output(body, pixel_values=shape_as_images(images.pixels_PD), **grids)]


def shape_as_images(pixels_PD: Tensor) -> Tensor:
    """Return patches as MoonViT's convolution takes them, [P, 3, side, side]."""
    side = isqrt(pixels_PD.shape[-1] // 3)
    return pixels_PD.unflatten(-1, (3, side, side))


def _output(body: Mapping[str, Any], **parts: Tensor) -> ProcessorOutput:
    ids_T = torch.tensor(body["input_ids"])
    return ProcessorOutput(format="processor_output", input_ids=ids_T, **parts)
