"""Makes the readers of a recipe's images: beside the files, and beside the engines."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcore_rl.agents.environments.adapters import is_program
from mcore_rl.config import DataConfig, ImagesConfig, ServedModelConfig
from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.data.images.prompts import ImagePrompts, ImageRules
from mcore_rl.data.sft import MESSAGES, SftImages
from mcore_rl.types import Prompt
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.models.tower import PLACEHOLDERS, merge_size, read_placeholder
from mcore_rl.workers.collector_worker import PatchMaker

MARKS = (
    *PLACEHOLDERS,
    *("video_token_id", "vision_start_token_id", "image_start_token_id", "video_start_token_id"),
)
"""The tokens that mark images and videos, by their names in config.json."""


def sees_images(policy: ModelFacts) -> bool:
    return policy.family.has_tower


def image_marks(policy: ModelFacts) -> tuple[int, ...]:
    """Return the tokens by which an engine finds images among ids; none for a model of text.

    A policy may sample such tokens. In a request, an engine would take them for parts of images.
    """
    if not sees_images(policy):
        return ()
    return tuple(sorted({policy.config[name] for name in MARKS if name in policy.config}))


def model_with_images(path: str) -> ModelFacts | None:
    """Return the model in a directory if the model sees images; None without config.json, too.

    Other checks refuse a directory without config.json where a model is needed.
    """
    if not (Path(path) / "config.json").is_file():
        return None
    policy = ModelFacts.read(path)
    return policy if sees_images(policy) else None


def patch_maker(images: ImagesConfig, policy: ModelFacts) -> PatchMaker | None:
    """Return the maker of a model's patches; None if the model sees text alone."""
    if not sees_images(policy):
        return None
    return PatchMaker(policy.path, int(images.cache_gib * 2**30))


def image_prompts(
    model_path: str,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_len: int,
    column: str = "prompt",
) -> ImagePrompts | None:
    """Return the reader that makes prompts from rows; None if the model sees text alone.

    Raises ValueError if the model directory lacks a processor or a placeholder of images.
    """
    policy = model_with_images(model_path)
    if policy is None:
        return None
    options = data.images
    rules = ImageRules(
        max_prompt_len=max_len,
        overlong="shrink" if options.shrink else data.overlong,
        bad=options.bad,
        max_pixels=options.max_pixels,
        max_bytes=options.max_mib << 20,
        max_tokens=options.max_tokens,
        verify=options.verify,
    )
    placeholder_id = read_placeholder(policy.config)
    assert placeholder_id is not None, "the family refuses config.json without a placeholder"
    processor = ImageProcessor(policy.path, cache_bytes=0)
    check_patches(processor, policy)
    encode = partial(_encode, tokenizer, generation_prompt=True)
    return ImagePrompts(processor, encode, placeholder_id, rules, column)


def check_patches(processor: ImageProcessor, policy: ModelFacts) -> None:
    """Raise ValueError if a processor makes other patches than the model's tower takes."""
    merge, patch = merge_size(policy.config), policy.sizes["patch"]
    made = (processor.patches_per_token, processor.pixels_per_token)
    if made != (merge**2, (merge * patch) ** 2):
        raise ValueError(
            f"model.path={policy.path}: preprocessor_config.json makes tokens of"
            f" {made[0]} patches and {made[1]} pixels, the tower of config.json takes {merge**2}"
            f" patches of {patch} x {patch} pixels: copy both files from one model"
        )


def sft_images(
    model_path: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_len: int
) -> SftImages | None:
    """Return the reader of conversations with images; None if the model sees text alone.

    Raises ValueError as `image_prompts` does.
    """
    prompts = image_prompts(model_path, data, tokenizer, max_len, MESSAGES)
    if prompts is None:
        return None
    processor = ImageProcessor(model_path, int(data.images.cache_gib * 2**30))
    return SftImages(prompts, partial(_encode, tokenizer), processor.patches_of)


def check_critic_images(path: str, critic: ModelFacts, policy: ModelFacts) -> None:
    """Raise ValueError if the critic reads other patches or placeholders than the policy.

    Patches are made once, for the policy. A critic of text alone reads placeholders as text.

    path   critic.path
    """
    if not (sees_images(critic) and sees_images(policy)):
        return
    wanted = _image_form(policy)
    for what, value in _image_form(critic).items():
        if value != wanted[what]:
            raise ValueError(
                f"critic.path={path}: its {what} is {value}, the policy's {wanted[what]}, for which"
                " images are prepared; take a critic that reads the same images"
            )


def _image_form(model: ModelFacts) -> dict[str, int | None]:
    sizes = model.sizes
    return {
        "patch size": sizes["patch"],
        "number of frames in a patch": sizes["patch_frames"],
        "number of channels": sizes["channels"],
        "merged patches along a side": merge_size(model.config),
        "placeholder of images": read_placeholder(model.config),
    }


def check_seen(environment: str, teacher: ServedModelConfig, prompts: Sequence[Prompt]) -> None:
    """Raise ValueError if prompts have images that a part of the run would not see.

    Environments with reset and step get the images. Programs ask the gateway, which takes text
    alone.
    """
    if not any(prompt.images for prompt in prompts):
        return
    has_videos = any(image.clip is not None for p in prompts for image in p.images)
    if has_videos and environment:
        raise ValueError(
            f"agents.environment={environment} with prompts that have videos, which"
            " environments do not get: leave it out, or give frames as `images`"
        )
    for is_used, option in (
        (is_program(environment), f"agents.environment={environment}"),
        (teacher.is_used, f"teacher.path={teacher.path or teacher.url}"),
    ):
        if is_used:
            raise ValueError(
                f"{option} with prompts that have images: it would read their placeholders alone;"
                " leave it out, or remove the images"
            )


def _encode(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], generation_prompt: bool
) -> list[int]:
    ids: Any = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=generation_prompt, return_dict=False
    )
    return ids
