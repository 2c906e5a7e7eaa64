"""What a command reads before it starts a process; wrong input is refused here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mcore_rl.algo.choice import needs_of
from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.policy_loss import TokenLoss, make_policy_loss
from mcore_rl.algo.requirements import check_algorithm
from mcore_rl.config import Config, DataConfig, ModelConfig
from mcore_rl.config.recipe import require
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.source import ShuffledStream
from mcore_rl.data.token_cache import default_cache_dir
from mcore_rl.planning.checks import check_sizes
from mcore_rl.rewards.model_scorers import JudgeScorer, ModelScorer, RewardModelScorer
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rollout.teacher import check_same_vocabulary
from mcore_rl.slices.families.routing import check_routing
from mcore_rl.slices.families.value_head import has_value_head
from mcore_rl.slices.hf.carried import carried_tensors
from mcore_rl.slices.hf.config import read_hf_config
from mcore_rl.slices.hf.files import open_hf_dir
from mcore_rl.types import Prompt


@dataclass(frozen=True)
class TrainInputs:
    """What a training run is made of besides its processes."""

    tokenizer: PreTrainedTokenizerBase
    prompts: ShuffledStream[Prompt]
    held_out: list[Prompt]
    scorer: Scorer
    loss: TokenLoss
    advantages: Advantages


def read_train_inputs(config: Config) -> TrainInputs:
    """ValueError naming the option if a file cannot be used, or a size or a model does not fit the rest."""
    check_algorithm(config)
    tokenizer = open_tokenizer(config, "data.train")
    check_routing(config.train, read_hf_config(config.model.path))
    prompts = load_split(config, config.data.train, tokenizer)
    inputs = TrainInputs(
        tokenizer,
        ShuffledStream(prompts, config.run.seed, config.data.shuffle),
        load_split(config, config.eval.data, tokenizer)[: config.eval.max_prompts],
        make_scorer(config),
        make_policy_loss(config.algorithm),
        Advantages(config.algorithm, config.reward.part_weights, config.critic.gae_lambda),
    )
    if needs_of(config.algorithm).critic:
        check_critic(config)
    check_sizes(config)
    if config.teacher.path:
        check_teacher(config, tokenizer)
    return inputs


def open_tokenizer(config: Config, *needed: str) -> PreTrainedTokenizerBase:
    """The tokenizer; ValueError if a leaf of `needed` is empty or the model cannot be what the run needs."""
    require(config, *needed, "run.dir", "model.path")
    return _open_model(config.model)


def _open_model(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; ValueError if the directory cannot be what the run needs."""
    path = Path(model.path)
    try:
        hf_config = read_hf_config(path)
    except ValueError as error:
        raise ValueError(f"model.path={model.path}: {error}") from None
    if has_value_head(hf_config):
        raise ValueError(
            f"model.path={model.path}: {hf_config['architectures'][0]} gives values, not log-probs; a critic"
            " starts from it as critic.path"
        )
    if model.init == "hf":
        if not any(path.glob("*.safetensors")):
            raise ValueError(
                f"model.path={model.path}: no *.safetensors there; model.init=random starts without"
            )
        open_hf_dir(path)
        if carried := sorted(carried_tensors(path, hf_config)):
            print(
                f"{len(carried)} tensors are not trained, but go into exports unchanged: {carried[0]}, ..."
            )
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path={model.path}: no tokenizer there that can be opened ({error}); one that is code"
            " beside the model (auto_map in tokenizer_config.json) is not run: save it as a tokenizer.json"
        ) from None


def without_replay(config: Config) -> Config:
    """For sequences that no engine sampled: nobody knows their experts. ValueError: see check_routing."""
    train = replace(config.train, router_replay="none")
    check_routing(train, read_hf_config(config.model.path))
    return replace(config, train=train)


def load_split(
    config: Config, files: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Return the prompts of `files`, none if there are no files."""
    if not files:
        return []
    data = config.data
    return load_prompts(files, tokenizer, data.max_prompt_len, data.overlong, token_cache_dir(data))


def token_cache_dir(data: DataConfig) -> Path:
    """Return the folder that keeps token ids."""
    return Path(data.cache_dir) if data.cache_dir else default_cache_dir()


def make_scorer(config: Config) -> Scorer:
    questions: dict[str, ModelScorer] = {}
    if config.judge.is_used:
        questions["judge"] = JudgeScorer(config.reward.judge)
    if config.reward_model.is_used:
        questions["reward_model"] = RewardModelScorer(
            config.reward.model_tokenizer or config.reward_model.path
        )
    return Scorer(config.reward, config.rollout.max_response_len, questions)


def check_critic(config: Config) -> None:
    """ValueError if the critic cannot start from what the recipe names, or not learn with the policy."""
    path = config.critic.path or config.model.path
    try:
        of_critic, of_policy = read_hf_config(path), read_hf_config(config.model.path)
    except ValueError as error:
        raise ValueError(f"critic.path={path}: {error}") from None
    if of_critic["vocab_size"] != of_policy["vocab_size"]:
        raise ValueError(
            f"critic.path={path}: its vocabulary has {of_critic['vocab_size']} tokens, that of"
            f" model.path={config.model.path} {of_policy['vocab_size']}; take one with the same tokenizer"
        )


def check_teacher(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    path = config.teacher.path
    try:
        check_same_vocabulary(
            tokenizer, AutoTokenizer.from_pretrained(path), config.model.path, path
        )
    except OSError as error:
        raise ValueError(f"teacher.path={path}: no tokenizer there ({error})") from None


def check_no_trainer(config: Config) -> None:
    if config.rollout.quantization != "none":
        raise ValueError(
            f"rollout.quantization={config.rollout.quantization}: trainer ranks quantise, and an evaluation"
            " has none; use rollout.quantization=none"
        )
