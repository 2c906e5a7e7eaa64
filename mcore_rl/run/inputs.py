"""What a command reads before it starts a process; wrong input is refused here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mcore_rl.algo.choice import needs_of
from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.policy_loss import TokenLoss, make_policy_loss
from mcore_rl.algo.requirements import check_algorithm
from mcore_rl.config import Config, DataConfig
from mcore_rl.config.recipe import require
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.source import ShuffledStream
from mcore_rl.data.token_cache import default_cache_dir
from mcore_rl.planning.checks import check_sizes
from mcore_rl.planning.models import read_critic, read_policy
from mcore_rl.players.canary import make_probe
from mcore_rl.rewards.model_scorers import JudgeScorer, ModelScorer, RewardModelScorer
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rollout.teacher import check_same_vocabulary
from mcore_rl.slices.families.routing import check_routing
from mcore_rl.slices.hf.carried import carried_tensors
from mcore_rl.slices.hf.facts import ModelFacts
from mcore_rl.slices.hf.files import open_hf_dir
from mcore_rl.types import Prompt, TrainBatch


@dataclass(frozen=True)
class TrainInputs:
    """What a training run is made of besides its processes."""

    policy: ModelFacts
    tokenizer: PreTrainedTokenizerBase
    prompts: ShuffledStream[Prompt]
    held_out: list[Prompt]
    scorer: Scorer
    loss: TokenLoss
    advantages: Advantages
    canary_probe: TrainBatch
    """Prompts that engines and trainer score at the first sync, before there are samples."""


def read_train_inputs(config: Config) -> TrainInputs:
    """ValueError naming the option if a file cannot be used, or a size or a model does not fit the rest."""
    check_algorithm(config)
    policy, tokenizer = open_policy(config, "data.train")
    check_routing(config.train, policy.config)
    prompts = load_split(config, config.data.train, tokenizer)
    held_out = load_split(config, config.eval.data, tokenizer)[: config.eval.max_prompts]
    inputs = TrainInputs(
        policy,
        tokenizer,
        ShuffledStream(prompts, config.run.seed, config.data.shuffle),
        held_out,
        make_scorer(config),
        make_policy_loss(config.algorithm),
        Advantages(config.algorithm, config.reward.part_weights, config.critic.gae_lambda),
        make_probe(held_out or prompts, config.canary.sequences),
    )
    if needs_of(config.algorithm).critic:
        check_critic(config, policy)
    check_sizes(config, policy)
    if config.teacher.path:
        check_teacher(config, tokenizer)
    return inputs


def open_policy(config: Config, *needed: str) -> tuple[ModelFacts, PreTrainedTokenizerBase]:
    """Return the facts about the policy's model, which are read here once, and its tokenizer.

    Raises ValueError if an option of `needed` is empty or the model directory does not fit the run.
    """
    require(config, *needed, "run.dir", "model.path")
    model = config.model
    policy = read_policy(config)
    if policy.has_value_head:
        raise ValueError(
            f"model.path={model.path}: {policy.architecture} gives values, not log-probs; a critic"
            " starts from it as critic.path"
        )
    if model.init == "hf":
        if not any(policy.path.glob("*.safetensors")):
            raise ValueError(
                f"model.path={model.path}: no *.safetensors there; model.init=random starts without"
            )
        open_hf_dir(policy)
        if carried := sorted(carried_tensors(policy.path, policy.config)):
            print(
                f"{len(carried)} tensors are not trained, but go into exports unchanged: {carried[0]}, ..."
            )
    try:
        tokenizer = AutoTokenizer.from_pretrained(policy.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path={model.path}: no tokenizer there that can be opened ({error}); one that is code"
            " beside the model (auto_map in tokenizer_config.json) is not run: save it as a tokenizer.json"
        ) from None
    return policy, tokenizer


def without_replay(config: Config, policy: ModelFacts) -> Config:
    """For sequences that no engine sampled: nobody knows their experts. ValueError: see check_routing."""
    train = replace(config.train, router_replay="none")
    check_routing(train, policy.config)
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


def check_critic(config: Config, policy: ModelFacts) -> None:
    """ValueError if the critic cannot start from what the recipe names, or not learn with the policy."""
    critic = read_critic(config, policy)
    if critic.vocab_size != policy.vocab_size:
        raise ValueError(
            f"critic.path={config.critic.path}: its vocabulary has {critic.vocab_size} tokens, that of"
            f" model.path={config.model.path} {policy.vocab_size}; take one with the same tokenizer"
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
