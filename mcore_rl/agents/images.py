"""Images in the messages of an environment: read once, then told by digest.

{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}      from outside
    --> decoded, measured  --> {"type": "image", "image": digest, "num_tokens": 9}
    --> template: one placeholder --> as many placeholders as the image takes tokens
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.chat.template import Format
from mcore_rl.agents.environments.environment import EpisodeError, make_image_part, read_image_bytes
from mcore_rl.agents.messages import Message, Tool
from mcore_rl.data.images.decode import decode, read_size
from mcore_rl.data.images.encoded import (
    BadImageError,
    EncodedImage,
    expand_placeholders,
    with_image_parts,
)
from mcore_rl.data.images.processor import ImageProcessor, digest_of
from mcore_rl.types import Prompt, PromptImage

PART = "image"
"""The type of parts that stand for images which have been read."""


@dataclass(frozen=True)
class ImageLimits:
    """Bounds of an image that an environment gives; see data.images.

    max_tokens   larger images are shrunk; 0: the processor's own limit
    """

    max_pixels: int
    max_bytes: int
    max_tokens: int = 0


@dataclass(frozen=True)
class Sight:
    """How a model sees the images that environments give.

    placeholder_id   the token that stands for a piece of an image
    marks            tokens by which engines find images in ids, the placeholder among them
    """

    processor: ImageProcessor
    placeholder_id: int
    limits: ImageLimits
    marks: frozenset[int]


class MessageImages:
    """The images of one episode's messages, by digest."""

    def __init__(self, sight: Sight | None, of_prompt: Sequence[PromptImage] = ()) -> None:
        """`sight` None: the model sees text alone, and images are refused.

        Images `of_prompt` stay as they were fitted into it.
        """
        self._sight = sight
        self._by_data = {image.data: image for image in of_prompt}
        self.by_digest: dict[str, PromptImage] = {}
        """Every image that was read."""

    async def read(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose images are told by digest; others are left as they are.

        Raises EpisodeError for an image that is none, is too large, or that the model cannot see.
        """
        read = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list | tuple):
                parts = [await self._read_part(part, message) for part in content]
                message = {**message, "content": parts}
            read.append(message)
        return read

    async def _read_part(self, part: Any, message: Message) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in (None, "text"):
            return part
        where = f"a message of the environment with role {message.get('role')!r}"
        if kind != "image_url":
            raise EpisodeError(
                f"{where} has a part of type {kind!r}: give text, or an image as"
                " {'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}"
            )
        if self._sight is None:
            raise EpisodeError(
                f"{where} has an image, but the model sees text alone: train a vision-language"
                " model (docs/vision.md), or describe it in words"
            )
        try:
            encoded = EncodedImage(read_image_bytes(part), f"an image in {where}")
            image = await asyncio.to_thread(self._image, encoded, self._sight)
        except BadImageError as error:
            raise EpisodeError(str(error)) from error
        except ValueError as error:
            raise EpisodeError(f"{where} has {error}") from error
        self.by_digest[image.digest] = image
        return {"type": PART, "image": image.digest, "num_tokens": image.num_tokens}

    def _image(self, encoded: EncodedImage, sight: Sight) -> PromptImage:
        """Return an image that can be decoded. Raises BadImageError for others."""
        if known := self._by_data.get(encoded.data):
            return known
        limits = sight.limits
        if len(encoded.data) > limits.max_bytes:
            raise BadImageError(
                f"{encoded.where} has {len(encoded.data)} bytes, {limits.max_bytes} are allowed"
                " (data.images.max_mib): shrink it"
            )
        size = read_size(encoded, limits.max_pixels)
        decode(encoded)
        most = min(sight.processor.most_tokens, limits.max_tokens or sight.processor.most_tokens)
        num_tokens = sight.processor.num_tokens(size, most)
        digest = digest_of(encoded.data, most)
        made = PromptImage(digest, encoded.data, num_tokens, most, encoded.where)
        self._by_data[encoded.data] = made
        return made


class SeeingFormat:
    """A chat format whose placeholders are expanded, once, to the tokens of their images."""

    def __init__(self, inner: Format, placeholder_id: int) -> None:
        self._inner = inner
        self._placeholder_id = placeholder_id

    def render_whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """See ChatFormat. Raises EpisodeError if the text itself has placeholders."""
        return self._expand(self._inner.render_whole(messages, tools), messages)

    def render_appended(
        self,
        history: Sequence[Message],
        answer_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> tuple[int, ...] | None:
        """See ChatFormat. Only the images of `new` are in the ids."""
        ids = self._inner.render_appended(history, answer_ids, new, tools)
        return None if ids is None else self._expand(ids, new)

    def _expand(self, ids: tuple[int, ...], messages: Sequence[Message]) -> tuple[int, ...]:
        counts = [part["num_tokens"] for part in list_image_parts(messages)]
        found = ids.count(self._placeholder_id)
        if found != len(counts):
            raise EpisodeError(
                f"{len(messages)} messages have {len(counts)} images, but as tokens they have"
                f" {found} placeholders (token {self._placeholder_id}): leave the placeholder out"
                " of texts, and take a chat template that renders images in every role"
            )
        return tuple(expand_placeholders(ids, self._placeholder_id, counts))


def list_image_parts(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts that stand for images which have been read, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") == PART:
                yield part


def make_prompt_messages(prompt: Prompt) -> tuple[Message, ...]:
    """Return a prompt's messages as environments get them: each `<image>` is a data: URL."""
    if not prompt.images:
        return prompt.messages
    where = f"prompt {prompt.index} of {prompt.data_source!r}"
    messages = with_image_parts(prompt.messages, len(prompt.images), where)
    images = iter(prompt.images)
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = [
                make_image_part(next(images).data) if part["type"] == PART else part
                for part in message["content"]
            ]
    return tuple(messages)
