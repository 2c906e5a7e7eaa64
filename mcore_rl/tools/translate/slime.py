"""Converts options of slime 0.3.1, Megatron and SGLang into a recipe.

Data, sampling, rewards and the run itself are converted here. The last table lists options that a
recipe does without, and why.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.config.upstream.owned import TRANSFORMER_RULES
from mcore_rl.tools.translate.slime_speculation import translate_mtp_loss, translate_speculation
from mcore_rl.tools.translate.slime_training import (
    first_given,
    translate_algorithm,
    translate_critic,
    translate_engines,
    translate_layout,
    translate_model,
    translate_optimizer,
    translate_step,
)
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    Translation,
    account,
    list_differing,
    longest_prefix,
    translate_flags,
    translate_renamed,
    translate_switched,
)

CONFIG = "config.json in model.path says what the model is"
OWN_LOOP = "Megatron's training script reads it, and its loop is not used"
ITS_DATA = "Megatron's own data sets are not used: data.train"
ITS_CHECKPOINTS = "checkpoints have their own format, and everything that a run continues from"
ITS_INFERENCE = "SGLang generates"
NO_DROPOUT = "there is no dropout"
TRACKING = "metrics.jsonl has all numbers; log.* chooses trackers"
DEBUGGING = "samples.jsonl, metrics.jsonl and the report have samples and numbers"
PROFILING = "profile.*"
SLICES = "weights travel in slices: sync.bucket_mib"
ROUTER = "requests go to engines by the run's own balance: rollout.migration_gap"
HEALTH = "engines are watched: rollout.restarts and rollout.request_timeout_s"
RESTARTS = "a job that is told to end saves first (docs/launch.md)"
ALWAYS = "it is how Megatron ranks always run here"


def _map(reason: str, *names: str) -> dict[str, str]:
    """Return {option: reason}; names with underscores alone stand for options with dashes."""
    spelled = [name if "-" in name else name.replace("_", "-") for name in names]
    return {f"--{name}": reason for name in spelled}


OF_SLIME: Mapping[str, str] = {
    **_map("model.path has it: reward, data and SGLang read it there", "model-name"),
    **_map("Megatron trains", "train-backend", "distributed-backend", "spec"),
    **_map("read for layers of linear attention only", "qwen-gdn-backend"),
    **_map(SLICES, "update-weight-", "custom-update-weight-post-write-path"),
    **_map("train.optimizer has what a rank holds", "release-train", "loss-mask-type"),
    **_map("log-probs are computed in chunks", "recompute-loss-function"),
    **_map("micro-batches are those of training", "log-probs-max-tokens-per-gpu"),
    **_map("read with use-dynamic-batch-size only", "max-tokens-per-gpu"),
    **_map("micro-batches are always balanced", "balance-"),
    **_map("micro-batches are counted in tokens", "use-dynamic-batch-size", "micro-batch-size"),
    **_map("sequences are packed without padding", "data-pad-size-multiplier"),
    **_map("sequences are split over ranks in one way", "allgather-cp"),
    **_map("prompts are messages, and the template is always applied", "apply-chat-template"),
    **_map("tokens are never decoded and encoded again", "rollout-skip-special-tokens"),
    **_map("run.seed seeds all", "rollout-seed"),
    **_map("files are mapped", "rollout-data-transport"),
    **_map("the policy is always evaluated before the first step", "skip-eval-before-train"),
    **_map("the reference is model.path", "ref-load", "ref-ckpt-step"),
    **_map("the trainer keeps its memory without --colocate", "no-offload-train"),
    **_map("a run continues from run.dir", "load"),
    **_map(ITS_CHECKPOINTS, "no-save-", "no-load-", "async-save", "save-hf", "finetune"),
    **_map("read with --advantage-estimator ppo only", "value-clip", "num-critic-only-steps"),
    **_map("read with --advantage-estimator ppo only", "lambd"),
    **_map("read with --advantage-estimator ppo and reinforce_plus_plus only", "gamma"),
    **_map("read with --use-tis only", "tis-"),
    **_map("read with --use-opsm only", "opsm-delta"),
    **_map("read with --use-opd only", "opd-"),
    **_map("told with --lora-rank", "lora-", "target-modules"),
    **_map("names come from a table per family", "megatron-to-hf-mode"),
    **_map("sequences are packed without padding", "qkv-format"),
    **_map("read with --use-kl-loss only", "kl-loss-"),
    **_map("REINFORCE++ always normalizes advantages", "normalize-advantages"),
    **_map("read with grpo, gspo and cispo only", "disable-grpo-std-normalization"),
    **_map("entropy and differences of log-probs are always measured", "use-rollout-entropy"),
    **_map("entropy and differences of log-probs are always measured", "get-mismatch-metrics"),
    **_map("read with sglang's router", "use-distributed-post", "http-proxy"),
    **_map("GPUs of a node are counted at start: plan.ranks_per_host", "num-gpus-per-node"),
    **_map("engines on the trainer's GPUs always release their memory", "offload-rollout"),
    **_map(HEALTH, "use-fault-tolerance", "rollout-health-check-"),
    **_map(TRACKING, "wandb-", "disable-wandb-random-suffix", "log-", "tb-", "no-log-"),
    **_map(TRACKING, "disable-log-", "tensorboard-", "logging-level", "timing-log-"),
    **_map(TRACKING, "custom-rollout-log-function-path", "one-logger-", "no-one-logger"),
    **_map(TRACKING, "custom-eval-rollout-log-function-path", "app-tag-run-"),
    **_map(DEBUGGING, "save-debug-", "dump-details", "load-debug-rollout-data-subsample"),
    **_map("weights that arrive are always checked", "check-weight-update-equal"),
    **_map(PROFILING, "memory-snapshot-", "memory-recorder", "record-memory-history"),
    **_map(PROFILING, "profile-target", "profile-ranks", "profile-step-"),
    **_map("read by a rollout of slime's plugins only", "rollout-buffer-url"),
    **_map("read by a rollout of slime's plugins only", "fetch-trajectory-retry-times"),
    **_map("read by a rollout of slime's plugins only", "min-batch-collection-ratio"),
    **_map("read by a rollout of slime's plugins only", "rollout-task-type"),
    **_map("Megatron is not patched", "custom-megatron-"),
    **_map("read by slime's own tests", "ci-"),
    **_map(ROUTER, "router-", "sglang-router-"),
    **_map("rollout.attention_dp", "sglang-enable-dp-attention"),
    **_map("read with --enable-mtp-training only", "mtp-loss-"),
    **_map(CONFIG, "mtp-", "padded-vocab-size"),
}
OF_MEGATRON: Mapping[str, str] = {
    **_map(CONFIG, "group-query-attention", "swiglu", "squared-relu", "quick-geglu", "openai-"),
    **_map(CONFIG, "max-position-embeddings", "position-embedding-type", "no-position-embedding"),
    **_map(CONFIG, "relative-attention-", "use-rotary-position-embeddings", "rotary-"),
    **_map(CONFIG, "use-rope-scaling", "rope-scaling-factor", "vocab-"),
    **_map(CONFIG, "num-experts", "norm-epsilon", "apply-layernorm-1p", "disable-bias-linear"),
    **_map(CONFIG, "add-qkv-bias", "num-layers", "mscale", "hybrid-", "linear-attention-"),
    **_map(CONFIG, "make-vocab-size-divisible-by", "encoder-num-layers", "decoder-num-layers"),
    **_map(CONFIG, "heterogeneous-", "use-gated-attention", "post-self-attn-", "post-mlp-"),
    **_map(CONFIG, "moe-shared-expert-", "moe-latent-size", "moe-ffn-hidden-size"),
    **_map(CONFIG, "untie-embeddings-and-output-weights", "disable-mamba-mem-eff-path"),
    **_map(CONFIG, "no-rope-freq", "init-method-", "no-initialization", "enable-experimental"),
    **_map("weights are loaded from model.path", "pretrained-checkpoint", "moe-use-upcycling"),
    **_map("weights are loaded from model.path", "moe-upcycling-", "init-model-with-meta-device"),
    **_map("weights are loaded from model.path", "use-cpu-initialization"),
    **_map("model.dtype", "bf16", "fp16-lm-cross-entropy", "fp16", "loss-scale", "initial-loss-"),
    **_map("model.dtype", "min-loss-scale", "loss-scale-window", "hysteresis", "no-fp8-"),
    **_map(NO_DROPOUT, "attention-dropout", "hidden-dropout"),
    **_map("the tokenizer is that of model.path", "tokenizer-", "legacy-tokenizer", "tiktoken-"),
    **_map("model.trust_remote_code", "trust-remote-code"),
    **_map(ITS_DATA, "data-", "split", "train-data-path", "valid-data-path", "test-data-path"),
    **_map(ITS_DATA, "per-split-", "per-dataset-", "dataloader-", "no-mmap-", "mock-data"),
    **_map(ITS_DATA, "mask-", "short-seq-prob", "num-workers", "reset-", "eod-mask-loss"),
    **_map(ITS_DATA, "num-dataset-builder-threads", "fim-"),
    **_map(ITS_DATA, "no-create-attention-mask-in-dataloader", "sft-tokenizer-prompt-format"),
    **_map(ITS_DATA, "object-storage-cache-path", "mid-level-dataset-surplus", "merge-file"),
    **_map(ITS_DATA, "allow-ambiguous-pad-tokens", "phase-transition-", "sample-rate", "sft"),
    **_map(ITS_DATA, "full-validation", "multiple-validation-sets", "no-data-sharding"),
    **_map("sequences are packed, of any length", "seq-length", "encoder-seq-", "decoder-seq-"),
    **_map(OWN_LOOP, "train-", "eval-iters", "skip-train", "exit-", "batch-size", "rampup-"),
    **_map(OWN_LOOP, "decrease-batch-size-", "manual-gc", "no-manual-gc-", "disable-manual-gc-"),
    **_map(OWN_LOOP, "iterations-to-skip", "lr-decay-samples", "lr-warmup-samples", "lr-wsd-"),
    **_map(
        OWN_LOOP, "override-opt_param-scheduler", "use-checkpoint-", "start-weight-decay", "warmup"
    ),
    **_map(OWN_LOOP, "override-opt-param-scheduler", "manual-gc-interval"),
    **_map(OWN_LOOP, "no-weight-decay-cond-type", "no-barrier-with-level-1-timing"),
    **_map(OWN_LOOP, "end-weight-decay", "weight-decay-incr-style", "lr-warmup-init", "wsd-"),
    **_map(OWN_LOOP, "wd-incr-steps", "lr-decay-steps", "lr-warmup-steps", "head-lr-mult"),
    **_map(OWN_LOOP, "apply-wd-", "decoupled-", "start-", "yaml-cfg"),
    **_map(OWN_LOOP, "check-for-spiky-loss", "check-weight-hash-", "result-rejected-", "rerun-"),
    **_map(OWN_LOOP, "error-injection-", "perform-rl-step", "rl-", "grpo-", "langrl-"),
    **_map(OWN_LOOP, "refit-method", "dump-param-", "empty-unused-memory-level"),
    **_map(OWN_LOOP, "te-rng-tracker", "data-parallel-random-init", "inference-rng-tracker"),
    **_map(RESTARTS, "inprocess-", "ft-", "enable-ft-", "calc-ft-", "adlr-", "max-tokens-to-oom"),
    **_map(RESTARTS, "run-workload-inspector-server", "straggler-", "disable-straggler-"),
    **_map(ITS_CHECKPOINTS, "ckpt-", "use-dist-ckpt", "dist-ckpt-", "distrib-optim-"),
    **_map(ITS_CHECKPOINTS, "no-ckpt-", "disable-ckpt-", "auto-detect-ckpt-", "replication"),
    **_map(ITS_CHECKPOINTS, "replication-", "save-retain-interval"),
    **_map(ITS_CHECKPOINTS, "non-persistent-", "persistent-save-interval", "save-wgrads-"),
    **_map(ITS_CHECKPOINTS, "save-dgrads-", "load-main-params-", "use-mp-args-", "no-use-"),
    **_map(ITS_CHECKPOINTS, "disable-use-tokenizer-", "no-strict-", "disable-strict-"),
    **_map(ITS_CHECKPOINTS, "use-persistent-ckpt-worker", "exit-on-missing-checkpoint"),
    **_map(ITS_CHECKPOINTS, "disable-msc"),
    **_map(ITS_INFERENCE, "inference-", "use-legacy-static-engine", "decode-only-cuda-graphs"),
    **_map(ITS_INFERENCE, "nccl_all_reduce_for_prefill", "enable-chunked-prefill"),
    **_map(ITS_INFERENCE, "disable-chunked-prefill", "moe-pad-experts-for-cuda-graph-"),
    **_map("it is for models that no recipe trains", "output-bert-", "bert-", "ict-", "titles-"),
    **_map("it is for models that no recipe trains", "biencoder-", "query-in-block-", "use-one-"),
    **_map("it is for models that no recipe trains", "evidence-", "retriever-", "block-data-"),
    **_map("it is for models that no recipe trains", "embedding-", "indexer-", "num-classes"),
    **_map("it is for models that no recipe trains", "img-", "num-channels", "patch-dim"),
    **_map("it is for models that no recipe trains", "classes-fraction", "vision-", "swin-"),
    **_map("it is for models that no recipe trains", "iter-per-epoch", "dino-"),
    **_map(ALWAYS, "sequence-parallel", "use-distributed-optimizer", "use-mcore-models"),
    **_map(ALWAYS, "use-flash-attn", "transformer-impl", "moe-grouped-gemm", "onnx-safe"),
    **_map(ALWAYS, "disable-jit-fuser", "no-scatter-gather-tensors-", "distributed-timeout-"),
    **_map(ALWAYS, "disable-gloo-process-groups", "local-rank", "lazy-mpu-init"),
    **_map(ALWAYS, "nccl_communicator_", "use-tp-pp-dp-mapping", "fake-process-group"),
    **_map(ALWAYS, "no-align-grad-reduce", "no-overlap-p2p-communication"),
    **_map(ALWAYS, "overlap-p2p-communication-warmup-flush", "te-precision-config-file"),
    **_map(ALWAYS, "fallback-to-eager-attn", "kitchen-"),
    **_map("train.ddp.bucket_size", "ddp-num-buckets"),
    **_map("each matrix is made orthogonal as a whole", "muon-tp-mode"),
    **_map("queries, keys and values are made orthogonal apart", "muon-no-split-qkv"),
    **_map("read with --optimizer muon only", "muon-"),
    **_map("deprecated there", "checkpoint-activations", "model-parallel-size"),
    **_map("megatron-core has it no more", "moe-extended-tp", "moe-use-legacy-grouped-gemm"),
    **_map("megatron-core has it no more", "no-async-tensor-model-parallel-allreduce"),
    **_map("megatron-core has it no more", "disable-async-tensor-model-parallel-allreduce"),
    **_map("read with --tp-comm-overlap only", "tp-comm-overlap-cfg"),
    **_map("read with --recompute-granularity only", "recompute-"),
    **_map("read with another kind of sharding", "torch-fsdp2-", "enable-full-sharding-in-hsdp"),
    **_map(ALWAYS, "use-sharp", "sharp-enabled-group", "create-all-gather-group"),
    **_map(ALWAYS, "high-priority-stream-groups", "use-legacy-models", "deterministic-mode"),
    **_map("every sampled token is trained on", "moe-token-drop-policy"),
    **_map("losses are always summed over tokens", "calculate-per-token-"),
}


def reason_of(name: str) -> str | None:
    """Return why an option is not needed, or None."""
    table = {**OF_MEGATRON, **OF_SLIME}
    reason = table.get(name) or longest_prefix(
        {prefix: why for prefix, why in table.items() if prefix.endswith("-")}, name
    )
    if reason is not None:
        return reason
    refusal = TRANSFORMER_RULES.refusal(name.removeprefix("--").replace("-", "_"))
    return CONFIG if refusal == TRANSFORMER_RULES.refused["num_layers"] else None


REWARDS = {
    "deepscaler": "math",
    "dapo": "math",
    "math": "math",
    "gpqa": "multiple_choice",
}
"""Rewards of slime, and the file under recipes/rewards/ that judges the same answers."""
UNEQUAL_REWARDS = (
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
)
ROLLOUTS = {
    "slime.rollout.sglang_rollout.generate_rollout": "",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": "async",
}
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
OWN_ENVIRONMENT = "write it as an environment or a program of its own (docs/agents.md)"
OWN_TOOLS = "tools come from agents.environment, for all prompts alike (docs/agents.md)"
OWN_REWARD = "write it as a reward, reward.path, or for whole batches (docs/rewards.md)"
GREEDY = "held-out answers are greedy; those of eval.samples are drawn with rollout.top_k"
ENGINES_RUN = "a recipe starts its own engines"
WITHOUT_COUNTERPART: Mapping[str, tuple[Any, str]] = {
    "--tool-key": ("tools", OWN_TOOLS),
    "--eval-tool-key": (None, OWN_TOOLS),
    "--apply-chat-template-kwargs": ({}, "change the template in model.path, or agents.template"),
    "--disable-rollout-global-dataset": (False, "set data.train: prompts come from files"),
    "--data-source-path": (
        "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        "write its rows to a file (docs/data.md)",
    ),
    "--custom-generate-function-path": (None, OWN_ENVIRONMENT),
    "--eval-function-path": (None, OWN_ENVIRONMENT),
    "--eval-config": (None, "set eval.data, a list of files"),
    "--eval-top-k": (None, GREEDY),
    "--eval-max-prompt-len": (None, "held-out prompts have data.max_prompt_len, too"),
    "--eval-max-context-len": (None, "held-out answers have the lengths of training"),
    "--eval-min-new-tokens": (None, "held-out answers may be as short as they are"),
    "--eval-reward-key": (None, "eval.correct_part names the number of the reward that counts"),
    "--rollout-stop": (None, "a response ends with its stop token; put it into model.path"),
    "--rollout-stop-token-ids": (
        None,
        "list them in generation_config.json of model.path, as eos_token_id",
    ),
    "--partial-rollout": (
        False,
        "rollout.mode=async with rollout.partial=continue goes on with unfinished responses",
    ),
    "--buffer-filter-path": (None, "rollout.mode=async with rollout.stale chooses among samples"),
    "--rollout-sample-filter-path": (None, "rollout.dynamic_sampling leaves out equal rewards"),
    "--rollout-sample-hook-path": (None, OWN_ENVIRONMENT),
    "--rollout-all-samples-process-path": (None, OWN_ENVIRONMENT),
    "--rollout-data-postprocess-path": (None, OWN_ENVIRONMENT),
    "--custom-convert-samples-to-train-data-path": (None, OWN_ENVIRONMENT),
    "--custom-reward-post-process-path": (None, OWN_REWARD),
    "--custom-rm-path": (None, OWN_REWARD),
    "--reward-key": (None, "a reward's number `score` is trained on (docs/rewards.md)"),
    "--group-rm": (False, OWN_REWARD),
    "--rm-url": (None, "ask it in a reward of your own, reward.path, or set reward_model.url"),
    "--update-weights-interval": (1, "weights are synced before each step: rollout.max_staleness"),
    "--rollout-external-engine-addrs": (None, ENGINES_RUN),
    "--prefill-num-servers": (None, "an engine prefills and decodes in one server"),
    "--sglang-config": (None, "all engines are alike: rollout.engines, tp and rollout.sglang"),
    "--sglang-router-ip": (None, ENGINES_RUN),
    "--debug-rollout-only": (False, "`mcore-rl eval` samples without training"),
    "--debug-train-only": (False, "`mcore-rl sft` and `mcore-rl dpo` train without engines"),
    "--load-debug-rollout-data": (None, "samples are always drawn from engines"),
    "--load-forge-rollout-data": (None, "samples are always drawn from engines"),
    "--custom-config-path": (None, "give its options on the command line"),
    "--start-rollout-id": (None, "a run continues after its newest checkpoint"),
    "--ckpt-step": (None, "a run continues from its newest checkpoint"),
    "--wandb-mode": (None, "set the variable WANDB_MODE"),
    "--wandb-host": (None, "set the variable WANDB_BASE_URL"),
    "--wandb-team": (None, "set the variable WANDB_ENTITY"),
    "--wandb-dir": (None, "set the variable WANDB_DIR"),
    "--train-env-vars": ({}, "set variables where the run is started"),
}


def translate_data(options: ForeignOptions) -> Found:
    train = options.take_list("--prompt-data")
    yield RecipeLine("data.train", train, ("--prompt-data",))
    yield from _translate_columns(options)
    yield from translate_renamed(options, {"--rollout-shuffle": ("data.shuffle", False)})
    longest = options.take("--rollout-max-prompt-len", None)
    context = options.take("--rollout-max-context-len", None)
    answer = options.take("--rollout-max-response-len", None)
    if longest is not None:
        yield RecipeLine("data.max_prompt_len", longest, ("--rollout-max-prompt-len",))
    elif context is not None and answer is not None and context > answer:
        sources = ("--rollout-max-context-len", "--rollout-max-response-len")
        yield RecipeLine("data.max_prompt_len", context - answer, sources)
    else:
        advice = "there it has no bound, here longer prompts are dropped: set data.max_prompt_len"
        names = "--rollout-max-prompt-len, --rollout-max-context-len"
        yield Decision(names, context, advice)
    if answer is not None:
        yield RecipeLine("rollout.max_response_len", answer, ("--rollout-max-response-len",))
    else:
        yield Decision("--rollout-max-response-len", None, "set rollout.max_response_len")
    yield from _translate_held_out(options)


KEYS = {
    "--input-key": ("prompt", "input", "prompt"),
    "--label-key": ("answer", "label", "label"),
    "--metadata-key": ("extra_info", "metadata", "metadata"),
}
"""Option that names a column -> (name in data.columns, default of slime, default of the preset)."""


def _translate_columns(options: ForeignOptions) -> Found:
    """Yield the names of columns; training and held-out files have the same ones here."""
    yield RecipeLine("data.columns.preset", "slime")
    for theirs, (ours, default, of_preset) in KEYS.items():
        name = options.take(theirs, default)
        if name != of_preset:
            yield RecipeLine(f"data.columns.{ours}", name, (theirs,))
        of_eval = theirs.replace("--", "--eval-")
        held_out = options.take(of_eval, None)
        if held_out not in (None, name):
            advice = f"held-out files have the columns of training: name theirs {name}, too"
            yield Decision(of_eval, held_out, advice)
    if not options.take("--label-key", ""):
        yield Decision("--label-key", None, "each row needs an answer: set data.columns.answer")
    kinds: Any = options.take("--multimodal-keys", {})
    for kind, name in kinds.items() if isinstance(kinds, dict) else ():
        if kind in ("image", "video"):
            yield RecipeLine(f"data.columns.{kind}s", name, ("--multimodal-keys",))
        else:
            advice = "prompts have images and videos (docs/vision.md)"
            yield Decision("--multimodal-keys", {kind: name}, advice)
    if not isinstance(kinds, dict):
        yield Decision("--multimodal-keys", kinds, "set data.columns.images and videos")


def _translate_held_out(options: ForeignOptions) -> Found:
    """Yield the held-out files, which are given as pairs of a name and a path."""
    words = options.take_list("--eval-prompt-data")
    files = words[1::2] if len(words) > 1 else words
    # slime cuts a file by a suffix in brackets.
    plain = [file.split("@[")[0] for file in files]
    if len(words) > 1:
        sets = [{"name": n, "path": f} for n, f in zip(words[::2], plain, strict=False)]
        yield RecipeLine("eval.sets", sets, ("--eval-prompt-data",))
    else:
        yield RecipeLine("eval.data", plain, ("--eval-prompt-data",))
    for file in set(files) - set(plain):
        yield Decision("--eval-prompt-data", file, "cut the file, or set eval.max_prompts")
    every = options.take("--eval-interval", None)
    yield RecipeLine("eval.every_steps", every or 0, ("--eval-interval",))
    number = options.take("--n-samples-per-eval-prompt", 1)
    if number > 1:
        yield RecipeLine("eval.pass_k", number, ("--n-samples-per-eval-prompt",))
    given = {name: options.take(f"--eval-{name}", None) for name in ("temperature", "top-p")}
    sampled = {name: value for name, value in given.items() if value}
    if sampled:
        yield RecipeLine("eval.samples", number, ("--n-samples-per-eval-prompt",))
    for name, value in sampled.items():
        yield RecipeLine(f"eval.{name.replace('-', '_')}", value, (f"--eval-{name}",))
    yield from translate_renamed(
        options, {"--eval-max-response-len": ("eval.max_response_len", None)}
    )


def translate_sampling(options: ForeignOptions) -> Found:
    table: dict[str, tuple[str, Any]] = {
        "--n-samples-per-prompt": ("rollout.samples_per_prompt", 1),
        "--rollout-temperature": ("rollout.temperature", None),
        "--rollout-top-p": ("rollout.top_p", None),
        "--rollout-top-k": ("rollout.top_k", None),
    }
    yield from translate_renamed(options, table)
    path = options.take("--rollout-function-path", next(iter(ROLLOUTS)))
    mode = ROLLOUTS.get(path, "")
    sources = ("--rollout-function-path",) if mode else ()
    mode = mode or ("one_step_off" if options.config_name == "train_async.py" else "sync")
    if options.take("--colocate", False) and mode != "sync":
        advice = "engines on the trainer's GPUs take turns with it: rollout.mode is sync"
        yield Decision("--rollout-function-path, --colocate", path, advice)
    else:
        yield RecipeLine("rollout.mode", mode, sources)
    if path == SFT_ROLLOUT:
        yield Decision("--rollout-function-path", path, "`mcore-rl sft` trains on answers")
    elif path not in ROLLOUTS:
        yield Decision("--rollout-function-path", path, OWN_ENVIRONMENT)
    yield from _dynamic(options)


def _dynamic(options: ForeignOptions) -> Found:
    kept = options.take("--dynamic-sampling-filter-path", None)
    drawn = options.take("--over-sampling-batch-size", None)
    prompts = options.take("--rollout-batch-size", None)
    if kept in UNEQUAL_REWARDS:
        yield RecipeLine("rollout.dynamic_sampling", True, ("--dynamic-sampling-filter-path",))
        if drawn and prompts and drawn > prompts:
            sources = ("--over-sampling-batch-size", "--rollout-batch-size")
            yield RecipeLine("rollout.oversampling", drawn / prompts, sources)
        elif drawn and not prompts:
            yield Decision("--over-sampling-batch-size", drawn, "set rollout.oversampling")
    elif kept is not None:
        advice = "rollout.dynamic_sampling leaves out groups of equal rewards, and no others"
        yield Decision("--dynamic-sampling-filter-path", kept, advice)
    if kept not in UNEQUAL_REWARDS and drawn and drawn != prompts:
        advice = "rollout.mode=async goes on without waiting for the last responses"
        yield Decision("--over-sampling-batch-size", drawn, advice)


def translate_reward(options: ForeignOptions) -> Found:
    kind = options.take("--rm-type", None)
    plain = kind.removeprefix("boxed_") if isinstance(kind, str) else None
    if plain in REWARDS:
        path = f"recipes/rewards/{REWARDS[plain]}.py"
        yield RecipeLine("reward.path", path, ("--rm-type",))
    else:
        advice = "set reward.path, such as recipes/rewards/math.py (docs/rewards.md)"
        yield Decision("--rm-type", kind, advice)
    yield from list_differing(options, WITHOUT_COUNTERPART)


def translate_run(options: ForeignOptions) -> Found:
    """Yield steps, saves, folder and trackers."""
    folder = options.take("--save", None)
    yield RecipeLine("run.dir", str(folder or "runs/slime").rstrip("/"), ("--save",))
    steps = options.take("--num-rollout", None)
    epochs = options.take("--num-epoch", None)
    if steps is not None:
        yield RecipeLine("run.steps", steps, ("--num-rollout",))
    elif epochs is not None:
        yield RecipeLine("run.epochs", float(epochs), ("--num-epoch",))
    every = options.take("--save-interval", None)
    yield RecipeLine("checkpoint.every_steps", every or 0, ("--save-interval",))
    if every:
        advice = "all checkpoints are kept there, here the newest: set checkpoint.keep"
        kept = options.take("--save-retain-interval", None)
        yield Decision("--save-retain-interval", kept, advice)
    name, seed = first_given(options, ("--seed", "--rollout-seed"), 1234)
    yield RecipeLine("run.seed", seed, (name,))
    minutes = options.take("--distributed-timeout-minutes", 10)
    if minutes != 10:
        yield RecipeLine("run.call_timeout_s", 60.0 * minutes, ("--distributed-timeout-minutes",))
    yield from _trackers(options)


def _trackers(options: ForeignOptions) -> Found:
    names = ("--use-wandb", "--wandb-project")
    yield from translate_switched(options, *names, "log.wandb_project", "slime")
    yield from translate_renamed(options, {"--use-tensorboard": ("log.tensorboard", False)})
    switches = ("--profile", "--use-pytorch-profiler")
    if [name for name in switches if options.take(name, False)]:
        first = options.take("--profile-step-start", 10)
        steps = list(range(first, options.take("--profile-step-end", 12)))
        sources = (*switches, "--profile-step-start", "--profile-step-end")
        yield RecipeLine("profile.steps", steps, sources)


def translate_slime(options: ForeignOptions) -> Translation:
    """Return the options of a recipe that does what slime does with `options`."""
    return account(options, _translate(options), reason_of)


def _translate(options: ForeignOptions) -> Found:
    yield from translate_run(options)
    yield from translate_model(options)
    yield from translate_layout(options)
    yield from translate_step(options)
    yield from translate_optimizer(options)
    yield from translate_data(options)
    yield from translate_engines(options)
    yield from translate_mtp_loss(options)
    yield from translate_speculation(options)
    yield from translate_sampling(options)
    yield from translate_algorithm(options)
    yield from translate_critic(options)
    yield from translate_reward(options)
    yield from translate_flags(options, reason_of)
