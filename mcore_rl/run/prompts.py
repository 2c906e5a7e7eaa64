"""Loads the prompts of a recipe whole, or opens them as a stream."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from mcore_rl.config import (
    AdapterConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    RewardConfig,
    ServedModelConfig,
)
from mcore_rl.config.tree import with_settings
from mcore_rl.data.columns import Columns
from mcore_rl.data.epochs import count_steps
from mcore_rl.data.files import data_files
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.source import ShuffledStream
from mcore_rl.data.streamed.mixed import MixedPrompts
from mcore_rl.data.streamed.open import is_streamed, open_prompts
from mcore_rl.data.tokenization import token_cache_dir
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.loops.evaluation import Correctness
from mcore_rl.rollout.adapters import BASE
from mcore_rl.run.images import check_seen, image_prompts, model_with_images
from mcore_rl.run.roles.turns import TurnPrompts
from mcore_rl.types import Prompt


def set_steps(config: Config) -> Config:
    """Return the recipe with the run.steps that its run.epochs make, if it has any."""
    if config.run.epochs is None:
        return config
    steps = count_steps(config.run.epochs, config.data.train, config.rollout.prompts_per_step)
    return with_settings(config, {"run.steps": steps, "run.epochs": None})


@dataclass(frozen=True)
class TrainPrompts:
    """A run's stream of prompts, and some of its prompts, which the stream still yields."""

    stream: ShuffledStream[Prompt] | MixedPrompts | TurnPrompts
    first: Sequence[Prompt]


@dataclass(frozen=True)
class PromptReader:
    """Reads the prompts of a recipe.

    environment, teacher   agents.environment and the teacher, which may not see images
    adapters               several that take turns, each with prompts of its own
    """

    model: ModelConfig
    data: DataConfig
    evaluation: EvalConfig
    reward: RewardConfig
    environment: str
    teacher: ServedModelConfig
    seed: int
    tokenizer: PreTrainedTokenizerBase
    adapters: Sequence[AdapterConfig] = ()

    @staticmethod
    def make(config: Config, tokenizer: PreTrainedTokenizerBase) -> "PromptReader":
        return PromptReader(
            config.model,
            config.data,
            config.eval,
            config.reward,
            config.agents.environment,
            config.teacher,
            config.run.seed,
            tokenizer,
            config.train.lora.adapters if config.train.lora.rank else (),
        )

    def open_train(self, num_first: int) -> TrainPrompts:
        """Return the prompts that the recipe trains on.

        Raises ValueError naming the option or the file if one cannot be used.
        """
        if self.adapters:
            return self._open_turns()
        if is_streamed(self.data):
            stream = self._open_stream()
            return TrainPrompts(stream, stream.first(num_first))
        prompts = self.load(self.data.train)
        return TrainPrompts(ShuffledStream(prompts, self.seed, self.data.shuffle), prompts)

    def _open_turns(self) -> TrainPrompts:
        """Return the prompts of adapters that take turns, loaded whole."""
        by_adapter = {own.name: self.load(own.data) for own in self.adapters}
        streams = {
            name: ShuffledStream(prompts, self.seed, self.data.shuffle)
            for name, prompts in by_adapter.items()
        }
        num_rows = [len(prompts) for prompts in by_adapter.values()]
        return TrainPrompts(TurnPrompts(streams, num_rows), by_adapter[self.adapters[0].name])

    def take_first(self, count: int) -> list[Prompt]:
        """Return `count` prompts of the recipe, 0: all. Raises ValueError as `open_train` does, and
        if all are wanted of prompts that are streamed.
        """
        if not is_streamed(self.data):
            return self.load(self.data.train)[: count or None]
        if not count:
            raise ValueError(
                "dpo.prompts=0 asks for all prompts, but they are streamed (data.stream_above): set"
                " dpo.prompts to a number"
            )
        stream = self._open_stream()
        with closing(stream):
            return stream.take(count)

    def load_held_out(self) -> list[Prompt]:
        """Return the prompts of evaluations, if any. Raises ValueError as `load` does.

        Those of eval.data come first; indices count on over the sets. Each of several adapters
        answers a set of its own name, the weights below factors those of eval.sets that ask them.
        """
        held_out: list[Prompt] = []
        asked = {each.name: BASE for each in self.evaluation.sets if each.model == "base"}
        asked |= {own.name: own.name for own in self.adapters}
        named = [("", self.evaluation.data)]
        named += [(held_out_set.name, [held_out_set.path]) for held_out_set in self.evaluation.sets]
        named += [(own.name, own.eval) for own in self.adapters]
        for name, files in named:
            num_before = len(held_out)
            own = {"set_name": name, "adapter": asked.get(name, "")}
            held_out += [
                replace(prompt, index=num_before + i, **own) if name else prompt
                for i, prompt in enumerate(self.load(files)[: self.evaluation.max_prompts])
            ]
        return held_out

    def load(self, paths: Sequence[str]) -> list[Prompt]:
        """Return the prompts of files, folders and globs, if any. Raises ValueError as data_files
        and load_prompts do.
        """
        if not paths:
            return []
        data = self.data
        max_len = data.max_prompt_len
        cache_dir = token_cache_dir(data.cache_dir)
        images = image_prompts(self.model.path, data, self.tokenizer, max_len)
        files = data_files(paths)
        how = max_len, data.overlong, cache_dir, images, Columns.make(data.columns)
        prompts = load_prompts(files, self.tokenizer, *how)
        check_seen(self.environment, self.teacher, prompts)
        return prompts

    def _open_stream(self) -> MixedPrompts:
        path = self.model.path
        make_tokenizer = partial(load_tokenizer, path, "model.path", self.model.trust_remote_code)
        if model_with_images(path) is not None:
            raise ValueError(
                "prompts are streamed (data.sources, data.curriculum or data.stream_above="
                f"{self.data.stream_above}), and model.path={path} sees images, which are not"
                " streamed: name all prompts in data.train, and raise data.stream_above"
            )
        are_right = Correctness.from_config(self.evaluation, self.reward).are_correct
        return open_prompts(self.data, self.seed, make_tokenizer, are_right)
