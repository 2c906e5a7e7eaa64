"""Converts slime's fine-tuning on given answers into a recipe for `mcore-rl sft`.

slime runs it as a rollout that samples nothing, by the options of its RL training.
"""

from mcore_rl.tools.translate.slime_run import OF_THE_RUN, translate_run
from mcore_rl.tools.translate.slime_speculation import translate_mtp_loss
from mcore_rl.tools.translate.slime_training import (
    SIZES,
    WITHOUT_COUNTERPART,
    count_mini_batches,
    translate_layout,
    translate_micro_batches,
    translate_model,
    translate_optimizer,
)
from mcore_rl.tools.translate.slime_unneeded import reason_of
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    list_differing,
    translate_flags,
)
from mcore_rl.tools.translate.tuning import (
    ALWAYS_SHUFFLED,
    LAST_ANSWER,
    MESSAGES,
    NO_EVALUATION,
    NO_SAMPLING,
    translate_passes,
)

SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
OF_TRAINING = {
    name: WITHOUT_COUNTERPART[name]
    for name in (
        *("--lora-rank", "--freeze-params-name-list", "--only-train-params-name-list"),
        *("--custom-model-provider-path", "--reset-optimizer-states", "--use-stateless-adam"),
    )
}
OF_RL = (
    *("--rollout-", "--sglang-", "--n-samples-", "--over-sampling-", "--dynamic-sampling-"),
    *("--custom-", "--rm-", "--group-rm", "--reward-key", "--label-key", "--metadata-key"),
    *("--advantage-", "--disable-compute-", "--normalize-", "--disable-grpo-", "--disable-rewards"),
    *("--eps-clip", "--kl-", "--use-kl-", "--entropy-coef", "--use-tis", "--tis-", "--use-opsm"),
    *("--use-rollout-", "--use-routing-replay", "--use-opd", "--opd-", "--ref-", "--gamma"),
    *("--lambd", "--value-clip", "--critic-", "--num-critic-", "--partial-rollout", "--update-"),
    *("--colocate", "--offload", "--no-offload", "--prefill-", "--debug-", "--load-debug-"),
    *("--buffer-filter-", "--data-source-path", "--disable-rollout-", "--keep-old-actor"),
    *("--mask-offpolicy-", "--get-mismatch-", "--use-unbiased-kl", "--use-dynamic-batch-size"),
    *("--megatron-config-path", "--load-forge-"),
)
"""How options begin that say how to sample, what to reward and what to learn from rewards."""


def is_sft(options: ForeignOptions) -> bool:
    """Return whether slime trains on given answers."""
    by_loss = options.take("--loss-type", "policy_loss") == "sft_loss"
    return options.take("--rollout-function-path", "") == SFT_ROLLOUT or by_loss


def reason_for_sft(name: str) -> str | None:
    """Return why fine-tuning does without an option, or None."""
    if name.startswith("--eval-"):
        return NO_EVALUATION
    return NO_SAMPLING if name.startswith(OF_RL) else reason_of(name)


def translate_sft(options: ForeignOptions) -> Found:
    """Yield the options of a recipe for `mcore-rl sft`."""
    yield from translate_run(options)
    yield from translate_model(options)
    yield from translate_layout(options)
    yield from translate_optimizer(options)
    yield from translate_micro_batches(options)
    yield from translate_mtp_loss(options)
    yield from _steps(options)
    yield from _conversations(options)
    yield from list_differing(options, {**OF_THE_RUN, **OF_TRAINING})
    yield from translate_flags(options, reason_for_sft)


def _steps(options: ForeignOptions) -> Found:
    size = options.take("--rollout-batch-size", 1) // count_mini_batches(options)
    size = options.take("--global-batch-size", max(size, 1))
    sources = ("--global-batch-size", "--rollout-batch-size", "--num-steps-per-rollout")
    yield RecipeLine("sft.batch_size", size, sources)
    rollouts = options.take("--num-rollout", None)
    epochs = options.take("--num-epoch", None)
    if rollouts is not None:
        steps = rollouts * count_mini_batches(options)
        yield RecipeLine("run.steps", steps, ("--num-rollout", *sources))
    elif epochs is not None:
        files = options.take_list("--prompt-data")
        yield from translate_passes(epochs, files, size, ("--num-epoch", "--prompt-data"))


def _conversations(options: ForeignOptions) -> Found:
    sources = ("--prompt-data", "--loss-type", "--rollout-function-path")
    yield RecipeLine("sft.data", options.take_list("--prompt-data"), sources)
    column = options.take("--input-key", "input")
    if column != "messages":
        yield Decision("--input-key", column, MESSAGES)
    tools = options.take("--tool-key", "tools")
    if "--tool-key" in options.given:
        yield Decision("--tool-key", tools, "write the tools into the system's message")
    kinds = options.take("--multimodal-keys", {})
    if kinds:
        advice = "images and videos are in the columns of data.columns (docs/vision.md)"
        yield Decision("--multimodal-keys", kinds, advice)
    if not options.take("--rollout-shuffle", False):
        yield Decision("--rollout-shuffle", None, ALWAYS_SHUFFLED)
    yield Decision("--loss-mask-type", options.take("--loss-mask-type", None), LAST_ANSWER)
    if not options.take("--calculate-per-token-loss", False):
        advice = "the loss is a mean over the answers' tokens, not first over each answer"
        yield Decision("--calculate-per-token-loss", None, advice)
    longest = options.take("--rollout-max-context-len", 0)
    tokens = options.take("--max-tokens-per-gpu", 0) * options.take(SIZES["cp"], 1)
    if longest or tokens:
        sources = ("--rollout-max-context-len",) if longest else ("--max-tokens-per-gpu",)
        yield RecipeLine("sft.max_len", longest or tokens, sources)
    if not longest:
        advice = "there conversations have no bound, here longer ones are dropped: sft.max_len"
        yield Decision("--rollout-max-context-len", None, advice)
