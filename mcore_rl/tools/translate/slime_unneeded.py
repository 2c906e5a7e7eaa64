"""Options of slime 0.3.1 and of Megatron's training script that a recipe does without, and why."""

from collections.abc import Mapping

from mcore_rl.config.upstream.owned_megatron import TRANSFORMER_RULES
from mcore_rl.tools.translate.translation import longest_prefix

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


def _with(reason: str, *names: str) -> dict[str, str]:
    """Return {option: reason}; names with underscores alone stand for options with dashes."""
    spelled = [name if "-" in name else name.replace("_", "-") for name in names]
    return {f"--{name}": reason for name in spelled}


OF_SLIME: Mapping[str, str] = {
    **_with("model.path has it: reward, data and SGLang read it there", "model-name"),
    **_with("Megatron trains", "train-backend", "distributed-backend", "spec"),
    **_with("read for layers of linear attention only", "qwen-gdn-backend"),
    **_with(SLICES, "update-weight-", "custom-update-weight-post-write-path"),
    **_with("train.optimizer has what a rank holds", "release-train", "loss-mask-type"),
    **_with("log-probs are computed in chunks", "recompute-loss-function"),
    **_with("micro-batches are those of training", "log-probs-max-tokens-per-gpu"),
    **_with("read with use-dynamic-batch-size only", "max-tokens-per-gpu"),
    **_with("micro-batches are always balanced", "balance-"),
    **_with("micro-batches are counted in tokens", "use-dynamic-batch-size", "micro-batch-size"),
    **_with("sequences are packed without padding", "data-pad-size-multiplier"),
    **_with("sequences are split over ranks in one way", "allgather-cp"),
    **_with("prompts are messages, and the template is always applied", "apply-chat-template"),
    **_with("tokens are never decoded and encoded again", "rollout-skip-special-tokens"),
    **_with("run.seed seeds all", "rollout-seed"),
    **_with("files are mapped", "rollout-data-transport"),
    **_with("the policy is always evaluated before the first step", "skip-eval-before-train"),
    **_with("the reference is model.path", "ref-load", "ref-ckpt-step"),
    **_with("the trainer keeps its memory without --colocate", "no-offload-train"),
    **_with("a run continues from run.dir", "load"),
    **_with(ITS_CHECKPOINTS, "no-save-", "no-load-", "async-save", "save-hf", "finetune"),
    **_with("read with --advantage-estimator ppo only", "value-clip", "num-critic-only-steps"),
    **_with("read with --advantage-estimator ppo only", "lambd"),
    **_with("read with --use-tis only", "tis-"),
    **_with("read with --use-opsm only", "opsm-delta"),
    **_with("read with --use-opd only", "opd-"),
    **_with("read with --use-kl-loss only", "kl-loss-"),
    **_with("REINFORCE++ always normalizes advantages", "normalize-advantages"),
    **_with("read with grpo, gspo and cispo only", "disable-grpo-std-normalization"),
    **_with("entropy and differences of log-probs are always measured", "use-rollout-entropy"),
    **_with("entropy and differences of log-probs are always measured", "get-mismatch-metrics"),
    **_with("read with sglang's router", "use-distributed-post", "http-proxy"),
    **_with("GPUs of a node are counted at start: plan.ranks_per_host", "num-gpus-per-node"),
    **_with("engines on the trainer's GPUs always release their memory", "offload-rollout"),
    **_with(HEALTH, "use-fault-tolerance", "rollout-health-check-"),
    **_with(TRACKING, "wandb-", "disable-wandb-random-suffix", "log-", "tb-", "no-log-"),
    **_with(TRACKING, "disable-log-", "tensorboard-", "logging-level", "timing-log-"),
    **_with(TRACKING, "custom-rollout-log-function-path", "one-logger-", "no-one-logger"),
    **_with(TRACKING, "custom-eval-rollout-log-function-path", "app-tag-run-"),
    **_with(DEBUGGING, "save-debug-", "dump-details", "load-debug-rollout-data-subsample"),
    **_with("weights that arrive are always checked", "check-weight-update-equal"),
    **_with(PROFILING, "memory-snapshot-", "memory-recorder", "record-memory-history"),
    **_with(PROFILING, "profile-target", "profile-ranks", "profile-step-"),
    **_with("read by a rollout of slime's plugins only", "rollout-buffer-url"),
    **_with("read by a rollout of slime's plugins only", "fetch-trajectory-retry-times"),
    **_with("read by a rollout of slime's plugins only", "min-batch-collection-ratio"),
    **_with("read by a rollout of slime's plugins only", "rollout-task-type"),
    **_with("Megatron is not patched", "custom-megatron-"),
    **_with("read by slime's own tests", "ci-"),
    **_with(ROUTER, "router-", "sglang-router-"),
    **_with("rollout.attention_dp", "sglang-enable-dp-attention"),
    **_with(CONFIG, "mtp-", "padded-vocab-size"),
}
OF_MEGATRON: Mapping[str, str] = {
    **_with(CONFIG, "group-query-attention", "swiglu", "squared-relu", "quick-geglu", "openai-"),
    **_with(CONFIG, "max-position-embeddings", "position-embedding-type", "no-position-embedding"),
    **_with(CONFIG, "relative-attention-", "use-rotary-position-embeddings", "rotary-"),
    **_with(CONFIG, "use-rope-scaling", "rope-scaling-factor", "vocab-"),
    **_with(CONFIG, "num-experts", "norm-epsilon", "apply-layernorm-1p", "disable-bias-linear"),
    **_with(CONFIG, "add-qkv-bias", "num-layers", "mscale", "hybrid-", "linear-attention-"),
    **_with(CONFIG, "make-vocab-size-divisible-by", "encoder-num-layers", "decoder-num-layers"),
    **_with(CONFIG, "heterogeneous-", "use-gated-attention", "post-self-attn-", "post-mlp-"),
    **_with(CONFIG, "moe-shared-expert-", "moe-latent-size", "moe-ffn-hidden-size"),
    **_with(CONFIG, "untie-embeddings-and-output-weights", "disable-mamba-mem-eff-path"),
    **_with(CONFIG, "no-rope-freq", "init-method-", "no-initialization", "enable-experimental"),
    **_with("weights are loaded from model.path", "pretrained-checkpoint", "moe-use-upcycling"),
    **_with("weights are loaded from model.path", "moe-upcycling-", "init-model-with-meta-device"),
    **_with("weights are loaded from model.path", "use-cpu-initialization"),
    **_with("model.dtype", "bf16", "fp16-lm-cross-entropy", "fp16", "loss-scale", "initial-loss-"),
    **_with("model.dtype", "min-loss-scale", "loss-scale-window", "hysteresis", "no-fp8-"),
    **_with(NO_DROPOUT, "attention-dropout", "hidden-dropout"),
    **_with("the tokenizer is that of model.path", "tokenizer-", "legacy-tokenizer", "tiktoken-"),
    **_with("model.trust_remote_code", "trust-remote-code"),
    **_with(ITS_DATA, "data-", "split", "train-data-path", "valid-data-path", "test-data-path"),
    **_with(ITS_DATA, "per-split-", "per-dataset-", "dataloader-", "no-mmap-", "mock-data"),
    **_with(ITS_DATA, "mask-", "short-seq-prob", "num-workers", "reset-", "eod-mask-loss"),
    **_with(ITS_DATA, "num-dataset-builder-threads", "fim-"),
    **_with(ITS_DATA, "no-create-attention-mask-in-dataloader", "sft-tokenizer-prompt-format"),
    **_with(ITS_DATA, "object-storage-cache-path", "mid-level-dataset-surplus", "merge-file"),
    **_with(ITS_DATA, "allow-ambiguous-pad-tokens", "phase-transition-", "sample-rate", "sft"),
    **_with(ITS_DATA, "full-validation", "multiple-validation-sets", "no-data-sharding"),
    **_with("sequences are packed, of any length", "seq-length", "encoder-seq-", "decoder-seq-"),
    **_with(OWN_LOOP, "train-", "eval-iters", "skip-train", "exit-", "batch-size", "rampup-"),
    **_with(OWN_LOOP, "decrease-batch-size-", "manual-gc", "no-manual-gc-", "disable-manual-gc-"),
    **_with(OWN_LOOP, "iterations-to-skip", "lr-decay-samples", "lr-warmup-samples", "lr-wsd-"),
    **_with(
        OWN_LOOP, "override-opt_param-scheduler", "use-checkpoint-", "start-weight-decay", "warmup"
    ),
    **_with(OWN_LOOP, "override-opt-param-scheduler", "manual-gc-interval"),
    **_with(OWN_LOOP, "no-weight-decay-cond-type", "no-barrier-with-level-1-timing"),
    **_with(OWN_LOOP, "end-weight-decay", "weight-decay-incr-style", "lr-warmup-init", "wsd-"),
    **_with(OWN_LOOP, "wd-incr-steps", "lr-decay-steps", "lr-warmup-steps", "head-lr-mult"),
    **_with(OWN_LOOP, "apply-wd-", "decoupled-", "start-", "yaml-cfg"),
    **_with(OWN_LOOP, "check-for-spiky-loss", "check-weight-hash-", "result-rejected-", "rerun-"),
    **_with(OWN_LOOP, "error-injection-", "perform-rl-step", "rl-", "grpo-", "langrl-"),
    **_with(OWN_LOOP, "refit-method", "dump-param-", "empty-unused-memory-level"),
    **_with(OWN_LOOP, "te-rng-tracker", "data-parallel-random-init", "inference-rng-tracker"),
    **_with(RESTARTS, "inprocess-", "ft-", "enable-ft-", "calc-ft-", "adlr-", "max-tokens-to-oom"),
    **_with(RESTARTS, "run-workload-inspector-server", "straggler-", "disable-straggler-"),
    **_with(ITS_CHECKPOINTS, "ckpt-", "use-dist-ckpt", "dist-ckpt-", "distrib-optim-"),
    **_with(ITS_CHECKPOINTS, "no-ckpt-", "disable-ckpt-", "auto-detect-ckpt-", "replication"),
    **_with(ITS_CHECKPOINTS, "replication-", "save-retain-interval"),
    **_with(ITS_CHECKPOINTS, "non-persistent-", "persistent-save-interval", "save-wgrads-"),
    **_with(ITS_CHECKPOINTS, "save-dgrads-", "load-main-params-", "use-mp-args-", "no-use-"),
    **_with(ITS_CHECKPOINTS, "disable-use-tokenizer-", "no-strict-", "disable-strict-"),
    **_with(ITS_CHECKPOINTS, "use-persistent-ckpt-worker", "exit-on-missing-checkpoint"),
    **_with(ITS_CHECKPOINTS, "disable-msc"),
    **_with(ITS_INFERENCE, "inference-", "use-legacy-static-engine", "decode-only-cuda-graphs"),
    **_with(ITS_INFERENCE, "nccl_all_reduce_for_prefill", "enable-chunked-prefill"),
    **_with(ITS_INFERENCE, "disable-chunked-prefill", "moe-pad-experts-for-cuda-graph-"),
    **_with("it is for models that no recipe trains", "output-bert-", "bert-", "ict-", "titles-"),
    **_with("it is for models that no recipe trains", "biencoder-", "query-in-block-", "use-one-"),
    **_with("it is for models that no recipe trains", "evidence-", "retriever-", "block-data-"),
    **_with("it is for models that no recipe trains", "embedding-", "indexer-", "num-classes"),
    **_with("it is for models that no recipe trains", "img-", "num-channels", "patch-dim"),
    **_with("it is for models that no recipe trains", "classes-fraction", "vision-", "swin-"),
    **_with("it is for models that no recipe trains", "iter-per-epoch", "dino-"),
    **_with(ALWAYS, "sequence-parallel", "use-distributed-optimizer", "use-mcore-models"),
    **_with(ALWAYS, "use-flash-attn", "transformer-impl", "moe-grouped-gemm", "onnx-safe"),
    **_with(ALWAYS, "disable-jit-fuser", "no-scatter-gather-tensors-", "distributed-timeout-"),
    **_with(ALWAYS, "disable-gloo-process-groups", "local-rank", "lazy-mpu-init"),
    **_with(ALWAYS, "nccl_communicator_", "use-tp-pp-dp-mapping", "fake-process-group"),
    **_with(ALWAYS, "no-align-grad-reduce", "no-overlap-p2p-communication"),
    **_with(ALWAYS, "overlap-p2p-communication-warmup-flush", "te-precision-config-file"),
    **_with(ALWAYS, "fallback-to-eager-attn", "kitchen-"),
    **_with("train.ddp.bucket_size", "ddp-num-buckets"),
    **_with("the optimizer is Adam", "muon-"),
    **_with("deprecated there", "checkpoint-activations", "model-parallel-size"),
    **_with("read with --tp-comm-overlap only", "tp-comm-overlap-cfg"),
    **_with("read with --recompute-granularity only", "recompute-"),
    **_with("read with another kind of sharding", "torch-fsdp2-", "enable-full-sharding-in-hsdp"),
    **_with(ALWAYS, "use-sharp", "sharp-enabled-group", "create-all-gather-group"),
    **_with(ALWAYS, "high-priority-stream-groups", "use-legacy-models", "deterministic-mode"),
    **_with("every sampled token is trained on", "moe-token-drop-policy"),
    **_with("losses are always summed over tokens", "calculate-per-token-"),
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
