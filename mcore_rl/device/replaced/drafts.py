"""Patches of SGLang in engines that speculate, with and without a GPU."""

from mcore_rl.device.replaced.entry import Patch, Scope, Times

DRAFTS: tuple[Patch, ...] = (
    Patch(
        "mcore_rl.rollout.drafts:tell_drafts_apart",
        ("sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get",),
        by="drafts of n-grams that are the same behind the same tokens by others",
        reason="SGLang fills a tree with drafts of token 0 behind its root, and its kernel adds up"
        " their probabilities",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`rollout.speculate` other than ngram",
        opt_in=True,
        required="token 0 would be drawn several times too often",
        test="tests/scenarios/device/test_sglang_on_cpu.py"
        "::test_sglang_on_cpu[check_tell_drafts_apart]",
    ),
    Patch(
        "mcore_rl.rollout.drafts:count_drafts",
        (
            "sglang.srt.managers.schedule_batch.Req.update_spec_correct_drafts_histogram",
            *(
                "sglang.srt.managers.scheduler_components.output_streamer"
                f".SchedulerOutputStreamer.{name}"
                for name in (
                    *("has_additional_customized_info", "build_additional_customized_info"),
                )
            ),
        ),
        by="the count of a request's accepted drafts by one for each version of weights",
        reason="SGLang counts them for a request, whatever weights it was drawn with",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`rollout.speculate=none`, the default",
        opt_in=True,
        test="tests/scenarios/rollout/test_drafts.py::test_each_version_counts_its_own_passes",
    ),
    Patch(
        "mcore_rl.rollout.draft_switch:offer_no_drafts",
        ("sglang.srt.speculative.adaptive_spec_params.DEFAULT_ADAPTIVE_CONFIG",),
        by="the numbers of drafts that SGLang chooses between by that of the recipe, and none",
        reason="SGLang reads such numbers from a file, which each node would need",
        scope=Scope.BOTH,
        runs=Times.APART,
        switch="`rollout.speculate` other than mtp, or `rollout.speculate_when` other than faster",
        opt_in=True,
        test="tests/scenarios/weight_sync/test_draft_sync.py"
        "::test_an_engine_guesses_where_that_is_faster",
    ),
    Patch(
        "mcore_rl.rollout.draft_switch:draft_when_faster",
        (
            "sglang.srt.speculative.eagle_worker_v2.AdaptiveSpeculativeParams",
            "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation",
        ),
        by="the choice of a number of drafts by what is accepted by one by measured speed; without"
        " CUDA graphs, a pass that verifies trees of no drafts by one that decodes",
        reason="SGLang knows neither what a pass costs nor when weights change, and verifying costs"
        " more than decoding",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`rollout.speculate` other than mtp, or `rollout.speculate_when` other than faster",
        opt_in=True,
        test="tests/scenarios/weight_sync/test_draft_sync.py"
        "::test_an_engine_guesses_where_that_is_faster",
    ),
    Patch(
        "mcore_rl.rollout.ngram_switch:guess_when_faster",
        tuple(
            f"sglang.srt.speculative.ngram_worker.NGRAMWorker.{name}"
            for name in ("forward_batch_generation", "on_verify_complete_cpu")
        ),
        by="without CUDA graphs, passes that verify drafts of n-grams by ones that decode, where"
        " that was measured to be faster",
        reason="SGLang guesses with n-grams in every pass",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`rollout.speculate` other than ngram, or `rollout.speculate_when` other than"
        " faster",
        opt_in=True,
        test="tests/scenarios/rollout/test_drafts.py::test_an_engine_guesses_where_that_is_faster",
    ),
    Patch(
        "mcore_rl.rollout.drafts:show_draft_model",
        ("sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head",),
        by="a served model by one that names its draft model",
        reason="SGLang gives a weight loader one of the two at a time, and weight sync commits both"
        " together",
        scope=Scope.BOTH,
        runs=Times.APART,
        switch="`rollout.speculate` other than mtp",
        opt_in=True,
        required="no link could be made",
        test="tests/scenarios/weight_sync/test_draft_sync.py::test_guesses_follow_the_policy",
    ),
)
