"""Options of the images in prompts."""

from dataclasses import dataclass
from typing import Literal

from mcore_rl.config.bounds import Options, bounded


@dataclass
class ImagesConfig(Options, group="data.images"):
    """Images and videos of prompts, for models with a vision tower (docs/vision.md)."""

    bad: Literal["error", "skip"] = "error"
    """A row with an image that cannot be used is refused, or left out and counted."""
    verify: bool = True
    """Decode every image at the start. Otherwise only headers are read, and an image with damage
    behind its header ends the run when its prompt is drawn."""
    shrink: bool = False
    """Shrink the images and videos of a prompt of more than data.max_prompt_len tokens until it
    fits; prompts that do not fit even so are dropped."""
    max_tokens: int = bounded(0, ge=0)
    """Tokens of an image, or of the frames that share a patch of a video; larger ones are shrunk.
    0: the limit of the model's processor."""
    max_pixels: int = bounded(64 << 20, ge=1)
    """Pixels of an image before it is shrunk; one with more cannot be used."""
    max_mib: int = bounded(64, ge=1)
    """Size of an encoded image; a larger one cannot be used."""
    cache_gib: float = bounded(1.0, gt=0)
    """Patches that each node with engines keeps in shared memory for engines and trainer ranks;
    those of other images are made again when they are needed."""
