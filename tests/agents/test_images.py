"""Images of messages are read once, and each row has those that its tokens show, in order."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.agents.environments.environment import EpisodeError, find_images, make_image_part
from mcore_rl.agents.images import (
    ImageLimits,
    MessageImages,
    SeeingFormat,
    Sight,
    list_image_parts,
    make_prompt_messages,
)
from mcore_rl.agents.messages import ChatRequest, EndReason, EpisodeEndedError, Message
from mcore_rl.agents.recorder import EpisodeLimits, EpisodeRecorder
from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.tasks.shapes import TOOL, ZOOM_CHAT_TEMPLATE, zoom_vocabulary
from mcore_rl.tasks.tiny_models import (
    IMAGE_START,
    IMAGE_TOKENS,
    PLACEHOLDER,
    SPECIAL_TOKENS,
    make_word_tokenizer,
)
from mcore_rl.types import Prompt, PromptImage, Row
from tests.support.odd_images import encode, noise, write_processor
from tests.support.stand_in_policy import PlainParser, StandInPolicy

VOCABULARY = [*SPECIAL_TOKENS, *IMAGE_TOKENS, TOOL, *zoom_vocabulary()]
TOKENIZER: Any = make_word_tokenizer(VOCABULARY, ZOOM_CHAT_TEMPLATE, (*IMAGE_TOKENS, TOOL))
PLACEHOLDER_ID = VOCABULARY.index(PLACEHOLDER)
MARKS = frozenset({PLACEHOLDER_ID, VOCABULARY.index(IMAGE_START)})
END_ID = VOCABULARY.index("<|end|>")
LIMITS = ImageLimits(max_pixels=10_000, max_bytes=100_000)
PICTURES = [encode(noise(16 + 8 * (n % 4), 16 + 8 * (n // 4), seed=n)) for n in range(8)]
few = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def sight(tmp_path_factory: pytest.TempPathFactory) -> Sight:
    folder = write_processor(tmp_path_factory.mktemp("processor"))
    return Sight(ImageProcessor(folder), PLACEHOLDER_ID, LIMITS, MARKS)


class Scene:
    """A recorder of a model that sees images, and a policy that says `texts`."""

    def __init__(self, sight: Sight, texts: list[str]) -> None:
        def encoded(text: str) -> list[int]:
            return TOKENIZER.encode(text, add_special_tokens=False)

        def decoded(ids: list[int]) -> str:
            return TOKENIZER.decode(ids, skip_special_tokens=True)

        self.images = MessageImages(sight)
        self.policy = StandInPolicy(texts, encoded, END_ID)
        chat = ChatFormat(TOKENIZER, [END_ID], reasoning="template", template_options={})
        self.recorder = EpisodeRecorder(
            SeeingFormat(chat, PLACEHOLDER_ID),
            PlainParser(decoded),
            self.policy,
            EpisodeLimits(100, 50, 10_000),
            self.images.by_digest,
            sight.marks,
        )

    def ask(self, *messages: Message) -> Message:
        async def asked() -> Message:
            read = await self.images.read(messages)
            return (await self.recorder.complete(ChatRequest(tuple(read)))).answer.message

        return asyncio.run(asked())


def said(role: str, *parts: str | int) -> Message:
    """Return a message of words and of pictures by number."""
    content = [
        make_image_part(PICTURES[part]) if isinstance(part, int) else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": role, "content": content}


def runs_of(ids: list[int]) -> list[int]:
    """Return the lengths of the runs of placeholders."""
    runs: list[int] = []
    before = -1
    for token in ids:
        if token == PLACEHOLDER_ID:
            runs = [*runs[:-1], runs[-1] + 1] if before == token else [*runs, 1]
        before = token
    return runs


def check_images(ids: list[int], images: tuple[PromptImage, ...]) -> None:
    assert runs_of(ids) == [image.num_tokens for image in images]


@few
@given(seed=st.integers(0, 10**6))
def test_any_driver_trains_what_was_seen(sight: Sight, seed: int) -> None:
    """It continues, retries, branches, rewrites history; each request and row shows its images."""
    chance = random.Random(seed)
    scene = Scene(sight, [f"crop {n % 4} red" for n in range(12)])
    talks: list[list[Message]] = []
    shown: list[list[int]] = []
    for _ in range(chance.randint(1, 10)):
        messages = list(chance.choice(talks)) if talks and chance.random() < 0.8 else []
        if messages and chance.random() < 0.2:
            messages = [messages[0], *messages[-2:]]
        if not messages or messages[-1]["role"] == "assistant":
            pictures = [chance.randrange(len(PICTURES)) for _ in range(chance.randint(0, 2))]
            role = chance.choice(["user", "tool"]) if messages else "user"
            messages.append(said(role, *pictures, "what is at"))
        answer = scene.ask(*messages)
        shown.append([PICTURES.index(data) for data in find_images(messages)])
        talks.append([*messages, answer])
        if chance.random() < 0.3:
            talks.append(messages)
    for request, numbers in zip(scene.policy.asked, shown, strict=True):
        check_images(list(request.context_ids), request.images)
        assert [image.data for image in request.images] == [PICTURES[n] for n in numbers]
    check_rows(scene)


def check_rows(scene: Scene) -> None:
    """Each answer is trained once, behind the tokens and images of its request."""
    rows = scene.recorder.finish(EndReason.DONE).rows
    seen = [_context(row, turn) for row in rows for turn in sorted(_turns(row))]
    asked = [(request.context_ids, request.images) for request in scene.policy.asked]
    assert sorted(seen, key=repr) == sorted(asked, key=repr)
    for row in rows:
        check_images(row.token_ids.tolist(), row.images)


def _turns(row: Row) -> set[int]:
    return set(row.turn_T[row.is_trained].tolist())


def _context(row: Row, turn: int) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    ids = tuple(row.token_ids[: row.turn_T.tolist().index(turn)].tolist())
    return ids, row.images[: len(runs_of(list(ids)))]


def test_a_piece_in_a_tool_turn_is_appended(sight: Sight) -> None:
    scene = Scene(sight, ["crop 1 2 2 3", "red"])
    question = said("user", 0, "what is at 1 2 ?")
    answer = scene.ask(question)
    scene.ask(question, answer, said("tool", 5))
    first, second = scene.policy.asked
    [row] = scene.recorder.finish(EndReason.DONE).rows
    assert second.context_ids[: len(first.context_ids)] == first.context_ids
    assert [image.data for image in row.images] == [PICTURES[0], PICTURES[5]]
    assert first.images == row.images[:1] and second.images == row.images


@pytest.mark.parametrize("mark", [PLACEHOLDER, IMAGE_START])
def test_a_policy_that_says_a_mark_says_nothing_more(sight: Sight, mark: str) -> None:
    scene = Scene(sight, [f"red {mark}", "blue"])
    question = said("user", 0, "what is at 1 2 ?")
    answer = scene.ask(question)
    with pytest.raises(EpisodeEndedError, match="parse_error: the policy said a token that marks"):
        scene.ask(question, answer, said("user", "what ?"))
    [row] = scene.recorder.finish(EndReason.PARSE_ERROR).rows
    assert len(row.images) == 1 and row.num_trained == 3


def read(sight: Sight | None, *messages: Message, images: Any = ()) -> list[Message]:
    return asyncio.run(MessageImages(sight, images).read(messages))


def test_a_picture_of_the_prompt_stays_as_it_was_fitted(sight: Sight) -> None:
    fitted = PromptImage("named", PICTURES[7], 4, 4, "row 0")
    messages = ({"role": "user", "content": "look <image> here"},)
    prompt = Prompt(0, (1,), messages, "unit", "", images=(fitted,))
    given_out = make_prompt_messages(prompt)
    assert find_images(given_out) == [PICTURES[7]]
    [message] = read(sight, *given_out, images=prompt.images)
    assert message["content"] == [
        {"type": "text", "text": "look "},
        {"type": "image", "image": "named", "num_tokens": 4},
        {"type": "text", "text": " here"},
    ]
    text = Prompt(0, (1,), messages, "unit", "")
    assert make_prompt_messages(text) == messages and read(sight, *messages) == list(messages)


def test_large_images_are_shrunk(sight: Sight) -> None:
    large = encode(noise(64, 64))
    limits = ImageLimits(10_000, 100_000, max_tokens=9)
    limited = Sight(sight.processor, PLACEHOLDER_ID, limits, MARKS)
    counts = []
    for way in (sight, limited):
        [message] = read(way, {"role": "tool", "content": [make_image_part(large)]})
        counts += [part["num_tokens"] for part in list_image_parts([message])]
    assert counts[0] > 9 >= counts[1] > 0


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,raw"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": "data:;base64,%%"}, "base64 is damaged"),
        ({"type": "input_audio"}, "a part of type 'input_audio'"),
        ({"type": "image", "image": "forged", "num_tokens": 1}, "a part of type 'image'"),
        (make_image_part(b"no picture"), "is none of BMP"),
        (make_image_part(PICTURES[0][:-40]), "is damaged"),
        (make_image_part(encode(noise(200, 100))), "has 200 x 100 pixels, 10000 are allowed"),
    ],
)
def test_what_is_no_image_ends_the_episode(sight: Sight, part: Any, message: str) -> None:
    with pytest.raises(EpisodeError, match=message):
        read(sight, {"role": "tool", "content": [part]})


def test_bytes_are_bounded(sight: Sight) -> None:
    limits = ImageLimits(10_000, max_bytes=10)
    tight = Sight(sight.processor, PLACEHOLDER_ID, limits, MARKS)
    with pytest.raises(EpisodeError, match=r"10 are allowed \(data.images.max_mib\)"):
        read(tight, said("tool", 0))


def test_a_model_of_text_refuses_images() -> None:
    with pytest.raises(EpisodeError, match="the model sees text alone"):
        read(None, said("tool", 0))


def test_placeholders_in_texts_are_refused(sight: Sight) -> None:
    scene = Scene(sight, ["red"])
    with pytest.raises(EpisodeError, match="have 0 images, but as tokens they have 1 placeholders"):
        scene.ask({"role": "user", "content": f"what {PLACEHOLDER}"})
