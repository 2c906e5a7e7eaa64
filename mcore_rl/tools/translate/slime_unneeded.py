"""Lists options of slime 0.3.1 and Megatron that a recipe does without, and why."""

from collections.abc import Mapping

from mcore_rl.config.upstream.owned import TRANSFORMER_RULES
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
