"""Loads the prompts of a recipe whole, or opens them as a stream."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from mcore_rl.config import Config
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.source import ShuffledStream
from mcore_rl.data.streamed.mixed import MixedPrompts
from mcore_rl.data.streamed.open import data_files, is_streamed, open_prompts
from mcore_rl.data.tokenization import token_cache_dir
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.loops.evaluation import Correctness
from mcore_rl.run.images import check_seen, image_prompts, model_with_images
from mcore_rl.types import Prompt


@dataclass(frozen=True)
class TrainPrompts:
    """A run's stream of prompts, and some of its prompts, which the stream still yields."""

    stream: ShuffledStream[Prompt] | MixedPrompts
    first: Sequence[Prompt]


def train_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, num_first: int
) -> TrainPrompts:
    """Return the prompts that the recipe trains on.

    Raises ValueError naming the option or the file if one cannot be used.
    """
    if is_streamed(config.data):
        stream = _open(config)
        return TrainPrompts(stream, stream.first(num_first))
    prompts = load_split(config, config.data.train, tokenizer)
    stream = ShuffledStream(prompts, config.run.seed, config.data.shuffle)
    return TrainPrompts(stream, prompts)


def first_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Prompt]:
    """Return the first `count` prompts of the recipe; 0: all prompts.

    Raises ValueError as train_prompts does, and if all prompts of a stream are wanted.
    """
    if not is_streamed(config.data):
        prompts = load_split(config, config.data.train, tokenizer)
        return prompts[: count or None]
    if not count:
        raise ValueError(
            "dpo.prompts=0 asks for all prompts, but they are streamed (data.stream_above): set"
            " dpo.prompts to a number"
        )
    stream = _open(config)
    with closing(stream):
        return stream.take(count)


def load_split(
    config: Config, paths: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Return the prompts of files, folders and globs; none without paths.

    Raises ValueError as data_files and load_prompts do.
    """
    if not paths:
        return []
    data = config.data
    cache_dir = token_cache_dir(data.cache_dir)
    images = image_prompts(config.model.path, data, tokenizer, data.max_prompt_len)
    files = data_files(paths)
    prompts = load_prompts(files, tokenizer, data.max_prompt_len, data.overlong, cache_dir, images)
    check_seen(config.agents.environment, config.teacher, prompts)
    return prompts


def _open(config: Config) -> MixedPrompts:
    make_tokenizer = partial(
        load_tokenizer, config.model.path, "model.path", config.model.trust_remote_code
    )
    if model_with_images(config.model.path) is not None:
        raise ValueError(
            "prompts are streamed (data.sources, data.curriculum or data.stream_above="
            f"{config.data.stream_above}), and model.path={config.model.path} sees images, which"
            " are not streamed: name all prompts in data.train, and raise data.stream_above"
        )
    are_right = Correctness.from_config(config.eval, config.reward).are_correct
    return open_prompts(config.data, config.run.seed, make_tokenizer, are_right)
