"""Turns rows with images into token ids with expanded placeholders, and references to patches.

    row --> encoded images --> sizes by their headers --> tokens; too many? drop or shrink
        --> ids with placeholders, images by the hash of their content

Patches are made later, near the engines (node_patches.py). No prompt is cut inside an image.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.data.images.decode import decode, read_size
from mcore_rl.data.images.encoded import (
    BadImage,
    encoded_images,
    with_image_parts,
)
from mcore_rl.data.images.fitting import expanded, limit_that_fits
from mcore_rl.data.images.processor import ImageProcessor, digest_of
from mcore_rl.data.rows import Row, messages_of
from mcore_rl.types import PromptImage

Encode = Callable[[list[dict[str, Any]]], list[int]]
"""Chat messages -> token ids by the model's template, one placeholder for each image."""


@dataclass(frozen=True)
class ImageRules:
    """The rules for images that are unusual.

    max_prompt_len   tokens of a prompt, images included
    overlong         "filter" drops longer prompts and counts them; "shrink" makes their images
                     smaller, and drops prompts that do not fit even so; "error" refuses them
    bad              "error" refuses a row with an image that cannot be used, "skip" counts it
    max_pixels       pixels of an image, which are decoded at once
    max_bytes        bytes of an encoded image
    max_tokens       tokens of an image; larger ones are shrunk. 0: the processor's own limit
    verify           decode each image, so that damage behind its header is found here
    """

    max_prompt_len: int
    overlong: str = "filter"
    bad: str = "error"
    max_pixels: int = 64 << 20
    max_bytes: int = 64 << 20
    max_tokens: int = 0
    verify: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("overlong", ("filter", "shrink", "error")), ("bad", BAD)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {allowed}")


BAD = ("error", "skip")


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with its images.

    where       file and row
    token_ids   every placeholder stands as often as its image takes tokens
    images      in the order of the placeholders
    """

    where: str
    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...]


class ImagePrompts:
    """Makes prompts of rows, and counts the rows that it left out: `left_out` by reason."""

    def __init__(
        self,
        processor: ImageProcessor,
        encode: Encode,
        placeholder_id: int,
        rules: ImageRules,
        column: str = "prompt",
    ) -> None:
        """`column`: the messages of a row."""
        self._column = column
        self._most_tokens = min(processor.most_tokens, rules.max_tokens or processor.most_tokens)
        self._processor = processor
        self._encode = encode
        self._placeholder_id = placeholder_id
        self._rules = rules
        self.left_out: Counter[str] = Counter()
        """"overlong" and "bad" -> rows."""

    def prompts(self, rows: Iterable[tuple[str, Row]], folder: Path) -> Iterator[ImagePrompt]:
        """Yield the prompts of (place, row) pairs; `folder` is where paths of images begin.

        Raises BadImage, or ValueError for an overlong prompt, if the rules say so.
        """
        for where, row in rows:
            prompt = self.prompt(where, row, folder)
            if prompt is not None:
                yield prompt

    def prompt(self, where: str, row: Row, folder: Path) -> ImagePrompt | None:
        """Return the prompt of a row; None if it is left out."""
        try:
            return self._prompt(where, row, folder)
        except BadImage:
            if self._rules.bad == "error":
                raise
            self.left_out["bad"] += 1
            return None

    def _prompt(self, where: str, row: Row, folder: Path) -> ImagePrompt | None:
        rules = self._rules
        encoded = encoded_images(row, where, folder, max_bytes=rules.max_bytes)
        sizes = [read_size(image, rules.max_pixels) for image in encoded]
        ids = self._token_ids(messages_of(row, where, self._column), len(encoded), where)
        text_len = len(ids) - len(encoded)

        def num_tokens(image: int, limit: int) -> int:
            return self._processor.num_tokens(sizes[image], limit)

        most = self._most_tokens
        least = self._processor.least_tokens if rules.overlong == "shrink" else most
        budget = rules.max_prompt_len - text_len
        limit = limit_that_fits(num_tokens, len(encoded), budget, min(least, most), most)
        if limit is None:
            whole_len = text_len + sum(num_tokens(image, most) for image in range(len(encoded)))
            self._leave_out_overlong(where, whole_len, len(encoded))
            return None
        if rules.verify:
            for image in encoded:
                decode(image)
        images = tuple(
            PromptImage(
                digest_of(image.data, limit), image.data, num_tokens(k, limit), limit, image.where
            )
            for k, image in enumerate(encoded)
        )
        counts = [image.num_tokens for image in images]
        token_ids = tuple(expanded(ids, self._placeholder_id, counts))
        assert len(token_ids) <= rules.max_prompt_len, (where, counts)
        return ImagePrompt(where, token_ids, images)

    def _token_ids(
        self, messages: Iterable[Mapping[str, Any]], num_images: int, where: str
    ) -> list[int]:
        ids = list(self._encode(with_image_parts(list(messages), num_images, where)))
        found = ids.count(self._placeholder_id)
        if found != num_images:
            raise BadImage(
                f"{where} has {num_images} images, but its rendered prompt has {found} of the"
                f" model's placeholder (token {self._placeholder_id}): remove that token from the"
                " text, and take a chat template that renders images"
            )
        return ids

    def _leave_out_overlong(self, where: str, num_tokens: int, num_images: int) -> None:
        if self._rules.overlong == "error":
            raise ValueError(
                f"{where}: its prompt has {num_tokens} tokens with {num_images} images, at most"
                f" {self._rules.max_prompt_len} are allowed: raise the limit, or let overlong"
                " prompts be filtered or their images shrunk"
            )
        self.left_out["overlong"] += 1
