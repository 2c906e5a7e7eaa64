"""Patches of SGLang in engines, with and without a GPU."""

from mcore_rl.device.replaced.drafts import DRAFTS
from mcore_rl.device.replaced.entry import Patch, Scope, Times

_OTHER_MODEL = "a model of another family"
_SERVED_ADAPTER = (
    "tests/scenarios/weight_sync/test_adapter_versions.py"
    "::test_versions_of_an_adapter_reach_requests_in_flight_and_no_older_prefix"
)

ENGINES: tuple[Patch, ...] = (
    Patch(
        "mcore_rl.rollout.scheduler_setup:compute_prompts_once",
        ("sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class",),
        by="SGLang's rule of admission by one that holds samples back while another computes their"
        " prompt",
        reason="samples of a prompt are admitted together, and each would compute all of it",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`rollout.share_prompts=false`, the default with GPUs",
        opt_in=True,
        test="tests/rollout/test_shared_prompts.py"
        "::test_samples_wait_for_the_one_that_computes_their_prompt",
    ),
    Patch(
        "mcore_rl.rollout.scheduler_setup:keep_first_experts",
        (
            "sglang.srt.managers.schedule_batch.release_req",
            "sglang.srt.managers.scheduler_components.batch_result_processor"
            ".SchedulerBatchResultProcessor._maybe_collect_routed_experts",
        ),
        by="the experts that a request reports by those of the pass that drew each token",
        reason="a request that was retracted reports the experts of a later pass",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`drift.routed_experts=false` with `train.router_replay` other than engine",
        required="experts of later weights would be replayed",
        test="tests/scenarios/rollout/test_first_experts.py"
        "::test_tokens_keep_the_experts_that_drew_them",
    ),
    Patch(
        "mcore_rl.rollout.scheduler_setup:keep_first_keys",
        (
            "sglang.srt.managers.schedule_batch.release_req",
            "sglang.srt.managers.scheduler_components.batch_result_processor"
            ".SchedulerBatchResultProcessor._maybe_collect_indexer_topk",
        ),
        by="the chosen keys that a request reports by those of the pass that drew each token",
        reason="a request that was retracted reports the keys of a later pass",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`drift.indexer_topk=false`, the default",
        opt_in=True,
        required="keys that later weights chose would be replayed",
        test="tests/scenarios/rollout/test_first_keys.py"
        "::test_tokens_keep_the_keys_that_were_chosen_as_they_were_drawn",
    ),
    Patch(
        "mcore_rl.rollout.scheduler_setup:tell_versions_of_parts",
        (
            "sglang.srt.managers.scheduler_components.output_streamer"
            "._GenerationStreamAccumulator.accept",
        ),
        by="parts of an answer without the versions of the weights that drew them by parts with"
        " them",
        reason="SGLang tells the versions of a whole answer alone, and the engine may be lost"
        " before it is whole",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`rollout.stream_every=0`",
        required="what a lost engine had drawn could not go on elsewhere",
        test="tests/scenarios/rollout/test_lost_engine.py"
        "::test_another_engine_goes_on_with_the_tokens_of_a_killed_one",
    ),
    Patch(
        "mcore_rl.rollout.image_identity:tell_grids_apart",
        ("sglang.srt.managers.schedule_batch.MultimodalDataItem.set_pad_value",),
        by="the hash of an image by one of its patches and its grid",
        reason="SGLang hashes the patches alone, and images of one color may have the same",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="a model without images",
        required="an image would get what the tower made of another one with the same patches",
        test="tests/scenarios/rollout/test_images.py::test_three_programs_agree",
    ),
    *DRAFTS,
    Patch(
        "mcore_rl.rollout.mamba_decay:keep_logarithms",
        (
            "sglang.srt.layers.attention.mamba.mamba.composed_weight_loader",
            "sglang.srt.layers.attention.mamba.mamba.MambaMixer2.__init__",
            "sglang.srt.layers.attention.mamba.mamba.MambaMixer2.A",
        ),
        by="the parameter with the decay of a Mamba-2 layer by one with the decay's logarithm, of"
        " which the layer computes the decay as it runs",
        reason="SGLang computes the decay as it loads, so that the parameter is not what a trainer"
        " rank holds and sends",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch=_OTHER_MODEL,
        required="a weight sync would put logarithms where SGLang reads decays",
        test="tests/scenarios/rollout/test_sglang_layouts.py"
        "::test_every_rank_loads_what_the_rule_says",
    ),
    Patch(
        "mcore_rl.rollout.packed_experts:keep_words_in_order",
        (
            "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"
            ".CompressedTensorsWNA16TritonMoE",
        ),
        by="the parameters of experts in INT4 by ones whose bytes are in the order of files from"
        " the beginning",
        reason="SGLang loads their transpose, puts it in order once it has loaded, and can load"
        " nothing after that",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`rollout.quantization=none`, the default",
        opt_in=True,
        required="a weight sync would not find where a slice belongs",
        test="tests/scenarios/weight_sync/test_int4_sync.py"
        "::test_experts_are_those_of_a_checkpoint_quantized_from_a_gather",
    ),
    Patch(
        "mcore_rl.weight_sync.adapter.serving:serve_adapters",
        (
            "sglang.srt.managers.scheduler.Scheduler.__init__",
            "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
        ),
        by="the adapter that a request names by the newest version of it",
        reason="each version is an adapter of its own to SGLang, and requests name none of them",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`train.lora.sync` other than adapter",
        opt_in=True,
        required="requests would be answered with an older version, or find its prefixes",
        test=_SERVED_ADAPTER,
    ),
    Patch(
        "mcore_rl.rollout.adapters:serve_by_name",
        (
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_lora",
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_and_resolve_lora",
            "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._resolve_lora_path",
        ),
        by="the list of adapters by the names that a recipe or a command gives them, and what a"
        " request gets that names none by the recipe's adapter",
        reason="SGLang learns names as it reads files of adapters, and answers such requests with"
        " the weights alone",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`train.lora.sync` other than adapter",
        opt_in=True,
        required="samples would be drawn by the weights below the factors",
        test=_SERVED_ADAPTER,
    ),
    Patch(
        "mcore_rl.rollout.scheduler_setup:set_schedulers_up",
        ("sglang.srt.entrypoints.http_server.launch_server",),
        by="the function that starts SGLang's server by the same with another scheduler process",
        reason="the ones above are to be applied in processes that SGLang spawns, whose output is"
        " to follow its file when that is rotated",
        scope=Scope.BOTH,
        runs=Times.APART,
        test="tests/rollout/test_scheduler_setup.py"
        "::test_a_scheduler_is_set_up_in_order_and_gets_sglangs_arguments",
    ),
    Patch(
        "mcore_rl.rollout.server:load_package",
        ("sglang.srt.models.registry.ModelRegistry.models",),
        by="SGLang's classes for reward models of Qwen, Kimi-VL and GLM-4.5V by"
        " `rollout/reward_heads` and `rollout/vision_models`",
        reason="SGLang computes them otherwise than their authors, and the trainer, do",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch=_OTHER_MODEL,
        required="scores and log-probs would not be those of the trainer",
        test="tests/rollout/test_server.py::test_our_classes_serve_the_models_that_need_them",
    ),
    Patch(
        "mcore_rl.rollout.server:leave_freezing_to_the_starter",
        ("sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup",),
        by="the request to freeze objects that SGLang sends to itself by nothing;"
        " `rollout/engine.py` sends it once the server is healthy",
        reason="SGLang sends it before it listens where it does not warm up, and waits in vain",
        scope=Scope.BOTH,
        runs=Times.APART,
    ),
)
