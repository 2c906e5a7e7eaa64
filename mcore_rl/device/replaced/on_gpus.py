"""Patches that a run with GPUs has: those of GPUs alone, and those of every machine."""

from mcore_rl.device.replaced.entry import Patch, Scope, Times

_CORE = "megatron.core"
_ON_A_GPU = "benchmarks.md#on-a-gpu"
_OTHER_MODEL = "a model of another family"

TRAINING: tuple[Patch, ...] = (
    Patch(
        "mcore_rl.device.training_patches:use_adam_in_parts",
        (f"{_CORE}.optimizer.Adam", f"{_CORE}.optimizer.distrib_optimizer.Adam"),
        by="Transformer Engine's Adam by one whose step updates 64 M elements at a time, and whose"
        " state is begun with the argument that megatron-core leaves out",
        reason="with moments in less than float32 a step copies all of them, 8 bytes per parameter,"
        " and the optimizer cannot be made",
        scope=Scope.GPU,
        runs=Times.IN_STEPS,
        switch="moments in float32, the default: the step is Transformer Engine's own",
        opt_in=True,
        measured=_ON_A_GPU,
        test="tests/device/test_adam_in_parts.py"
        "::test_megatron_begins_a_state_without_saying_what_remains_of_weights",
    ),
    Patch(
        "mcore_rl.train.model:_make_spec",
        (
            f"{_CORE}.transformer.moe.moe_layer.MoESubmodules.router",
            f"{_CORE}.transformer.spec_utils.ModuleSpec.module",
            f"{_CORE}.transformer.attention.SelfAttentionSubmodules.q_layernorm",
            f"{_CORE}.transformer.attention.SelfAttentionSubmodules.k_layernorm",
            f"{_CORE}.transformer.moe.experts.GroupedMLPSubmodules.linear_fc1",
        ),
        by="in megatron-core's layer specification, the router by one that takes given experts and"
        " weights tokens; for families that need it, the layer (Qwen3-VL), the norms of queries and"
        " keys (OLMoE, MiniMax-M2), latent attention by one without a norm of its queries"
        " (DeepSeek-V2-Lite, Moonlight) and the experts' first product (gpt-oss)."
        " The router alone ran in a model on a GPU",
        reason="replay of routing and balance losses over trained tokens have no option upstream,"
        " and neither have these families",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="a dense model of a family that megatron-core has",
        measured=_ON_A_GPU,
        required="balance losses would count padding, replay would do nothing, and those families"
        " would have other log-probs",
        test="tests/train/test_router.py::test_without_given_experts_the_best_are_taken",
    ),
    Patch(
        "mcore_rl.train.model:_make_spec",
        (f"{_CORE}.transformer.transformer_layer.TransformerLayerSubmodules.mlp",),
        by="the layer of experts by one that leaves counts of tokens on the device, and does not"
        " sort rows again where a rank has all experts",
        reason="megatron-core reads the counts in each layer, and sorts what is sorted",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`train.expert_gemm=separate`, the default",
        opt_in=True,
        test="tests/train/test_grouped_experts.py::test_a_rank_with_all_experts_reads_nothing_back",
    ),
    Patch(
        "mcore_rl.train.hybrid:_make_experts",
        (f"{_CORE}.transformer.moe.moe_layer.MoESubmodules.router",),
        by="in a hybrid model (Nemotron-3), the router by the one of other families",
        reason="replay of routing and balance losses over trained tokens have no option upstream",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch=_OTHER_MODEL,
        required="balance losses would count padding, and replay would do nothing",
        test="tests/train/test_router.py::test_without_given_experts_the_best_are_taken",
    ),
    Patch(
        "mcore_rl.train.grouped_experts:use_grouped_products",
        (
            f"{_CORE}.transformer.moe.moe_layer.MoESubmodules.experts",
            f"{_CORE}.transformer.moe.experts.GroupedMLPSubmodules.linear_fc1",
            f"{_CORE}.transformer.moe.experts.GroupedMLPSubmodules.linear_fc2",
        ),
        by="the experts by ones whose products are a launch each, by torch's grouped_mm",
        reason="Transformer Engine's grouped layer launches a product for each expert, and its op"
        " fuser has kernels for gated activations on Blackwell alone",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="`train.expert_gemm=separate`, the default",
        opt_in=True,
        test="tests/train/test_grouped_linear.py"
        "::test_products_and_gradients_are_those_of_each_expert",
    ),
    Patch(
        "mcore_rl.train.sparse.attention:_adapt_core",
        (
            f"{_CORE}.transformer.spec_utils.ModuleSpec.module",
            f"{_CORE}.transformer.experimental_attention_variant.dsa"
            ".DSAIndexerSubmodules.linear_weights_proj",
        ),
        by="sparse attention (DeepSeek-V3.2, GLM-5) by one that reads given keys, and the product"
        " that weighs an indexer's heads by one in float32",
        reason="megatron-core attends to the keys of its own indexer alone, and weighs heads in the"
        " model's dtype, transformers and SGLang in float32",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="a model without sparse attention",
        required="indexers would choose other keys than the engine's, and log-probs would differ",
        test="tests/train/sparse/test_indexer.py::test_heads_are_weighed_in_float32",
    ),
    Patch(
        "mcore_rl.train.model:_adapt_delta_net",
        (
            f"{_CORE}.transformer.spec_utils.ModuleSpec.module",
            f"{_CORE}.ssm.gated_delta_net.common.GatedDeltaNetSubmodules.out_norm",
        ),
        by="gated delta nets (Qwen3-Next, Qwen3.5) by ones whose decay is computed in float32, and"
        " the norm of their outputs by one that is multiplied with its weight, not 1 + weight",
        reason="megatron-core takes the exponential of `A_log` in the model's dtype, and has one"
        " kind of norm per model",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="a model without gated delta nets",
        required="the norm would have other outputs, and log-probs would not be the engine's",
        test="tests/train/test_delta_net.py::test_a_decay_is_computed_in_float32",
    ),
    Patch(
        "mcore_rl.train.model:_make_chunk",
        (
            f"{_CORE}.models.gpt.gpt_model.GPTModel.output_layer",
            f"{_CORE}.models.hybrid.hybrid_model.HybridModel.output_layer",
        ),
        by="the output layer of a critic by a head with one value per token",
        reason="megatron-core has no critic",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch="a recipe without a critic",
        opt_in=True,
        required="there would be no values",
        test="tests/train/test_model.py::test_a_value_head_is_never_tied",
    ),
    Patch(
        "mcore_rl.train.vision.tower:_make_transformers_tower",
        ("torch.nn.Module.rotary_pos_emb",),
        by="the rotary frequencies of transformers' vision towers by the same in float32",
        reason="a tower in bfloat16 would round them",
        scope=Scope.BOTH,
        runs=Times.IN_STEPS,
        switch=_OTHER_MODEL,
        required="positions of patches would be rounded, and log-probs would not be the engine's",
        test="tests/train/vision/test_tower.py::test_a_tower_keeps_its_frequencies_in_float32",
    ),
    Patch(
        "mcore_rl.train.optimizer:write_whole_parameters",
        (
            f"{_CORE}.optimizer.distrib_optimizer.DistributedOptimizer"
            ".sharded_param_state_fully_reshardable",
        ),
        by="the optimizer's state in a checkpoint by one in which the rank that owns a parameter"
        " writes it whole",
        reason="megatron-core gathers all states on every rank, and takes those behind a padded"
        " bucket from the wrong place",
        scope=Scope.BOTH,
        runs=Times.APART,
        required="tied embeddings over pipeline stages would resume with wrong moments",
        test="tests/train/test_optimizer_state.py"
        "::test_states_are_those_of_one_process_and_each_rank_writes_its_share",
    ),
    Patch(
        "mcore_rl.device.training_patches:keep_write_results_in_process",
        (f"{_CORE}.dist_checkpointing.strategies.filesystem_async._results_queue",),
        by="the manager process for results of checkpoint writes by a queue of this process",
        reason="the manager takes seconds to start and outlives a killed rank",
        scope=Scope.BOTH,
        runs=Times.APART,
        test="tests/device/test_checkpoint_io.py::test_results_stay_in_the_process",
    ),
)

EVERYWHERE: tuple[Patch, ...] = (
    Patch(
        "mcore_rl.device.setup:let_megatron_import",
        (
            "sys.modules.megatron.core.transformer.moe.ops.paged_stash",
            "sys.modules.emerging_optimizers.triton_kernels.syrk",
            "typing.override",
        ),
        by="the kernels of the paged stash and of Muon by empty modules, without Triton; before"
        " Python 3.12, a decorator by that of typing_extensions",
        reason="all of megatron-core imports them",
        scope=Scope.BOTH,
        runs=Times.APART,
        switch="Triton, which every torch with CUDA brings",
        opt_in=True,
        test="tests/device/test_setup.py::test_megatron_is_imported_without_triton",
    ),
    Patch(
        "mcore_rl.device.setup:keep_absl_from_the_root_logger",
        ("absl.logging.log",),
        by="absl's function that logs by one that leaves the root logger alone",
        reason="megatron-core's optimizers log when they are imported, and absl would let the root"
        " logger print all messages of the process",
        scope=Scope.BOTH,
        runs=Times.APART,
        required="messages would appear on the terminal as they are, secrets included",
        test="tests/device/test_setup.py::test_the_root_logger_is_left_alone",
    ),
    Patch(
        "mcore_rl.device.setup:keep_torch_pickles",
        ("torch.storage._load_from_bytes",),
        by="megatron-core's function in torch by torch's own",
        reason="its name would stand in each pickle of a tensor, and SGLang refuses it",
        scope=Scope.BOTH,
        runs=Times.APART,
        required="no command would reach an engine",
        test="tests/device/test_setup.py::test_tensors_are_pickled_as_torch_does",
    ),
    Patch(
        "mcore_rl.device.fused_gradients:give_megatron_fused_gradients",
        ("sys.modules.fused_weight_gradient_mlp_cuda",),
        by="apex's kernel that adds a weight's gradient to its sum by Transformer Engine's product,"
        " where apex is not installed",
        reason="megatron-core's own layers take it from apex, which nothing else here needs",
        scope=Scope.GPU,
        runs=Times.IN_STEPS,
        switch="apex, where it is installed",
        opt_in=True,
        required="each gradient would be written, read and added apart",
        test="tests/device/test_fused_gradients.py"
        "::test_megatrons_layers_add_their_gradients_by_it",
    ),
    Patch(
        "mcore_rl.device.deep_ep:give_megatron_deep_ep",
        ("sys.modules.deep_ep",),
        by="a DeepEP that cannot be imported by none",
        reason="its checks assert, which would end each rank that imports megatron-core",
        scope=Scope.BOTH,
        runs=Times.APART,
        switch="a DeepEP that can be imported, or none",
        opt_in=True,
        test="tests/device/test_upstream.py"
        "::test_a_deepep_that_cannot_be_imported_is_told_where_it_is_wanted",
    ),
    Patch(
        "mcore_rl.process.network:bind_meetings_to_their_host",
        ("torch.distributed.rendezvous._create_c10d_store",),
        by="the store at which torch's `tcp://` groups meet by one that listens at its own address"
        " only",
        reason="torch's listens on all interfaces, and asks nobody for a key",
        scope=Scope.BOTH,
        runs=Times.APART,
        required="whoever reaches the machine could read and write its values",
        test="tests/process/test_meeting_store.py::test_ranks_meet_and_listen_on_loopback_only",
    ),
    Patch(
        "mcore_rl.process.process_state:start_resource_tracker",
        (
            "multiprocessing.resource_tracker._resource_tracker._fd",
            "multiprocessing.resource_tracker._resource_tracker._pid",
        ),
        by="Python's resource tracker by one in a session of its own",
        reason="a SIGKILL to the process group would end it before it has emptied /dev/shm",
        scope=Scope.BOTH,
        runs=Times.APART,
        test="tests/process/test_shared_names.py::test_pythons_own_tracker_dies_with_the_group",
    ),
    Patch(
        "mcore_rl.data.tokenizer:import_auto_tokenizer",
        ("transformers.generation.GenerationMixin",),
        by="`GenerationMixin` by an empty class, while AutoTokenizer is imported",
        reason="the import of torch's compiler that comes with it takes a second of each process",
        scope=Scope.BOTH,
        runs=Times.APART,
        test="tests/data/test_tokenizer.py::test_a_tokenizer_comes_without_what_models_need",
    ),
    Patch(
        "mcore_rl.cluster.session:open_ray_session",
        ("ray._private.worker._worker_logs_enabled",),
        by="Ray's own report of a dead worker by none",
        reason="the error of the run names the rank and says why it died",
        scope=Scope.BOTH,
        runs=Times.APART,
    ),
    Patch(
        "mcore_rl.cluster.session:_keep_ray_on_loopback",
        ("ray._private.ray_constants.ENABLE_RAY_CLUSTER",),
        by="the machine's outward address of a Ray that a run starts by 127.0.0.1",
        reason="on Linux Ray's servers listen on all interfaces",
        scope=Scope.BOTH,
        runs=Times.APART,
        switch="`cluster.address`: a Ray that is there already",
        required="ports of a run on one machine would be open to the network",
        test="tests/e2e/test_doors.py::test_nothing_of_a_run_on_one_machine_listens_beyond_it",
    ),
    Patch(
        "mcore_rl.cluster.session:leave_processes_out",
        (
            "ray._private.node.Node.start_api_server",
            "ray._private.node.Node.start_log_monitor",
            "ray._private.node.Node.start_monitor",
            "ray._private.node.Node.start_raylet",
            "ray._private.utils.get_dashboard_dependency_error",
        ),
        by="dashboard, log monitor and autoscaler of a Ray that a run starts by nothing",
        reason="a run does not use them, and they keep a core busy for two seconds",
        scope=Scope.BOTH,
        runs=Times.APART,
        switch="`cluster.dashboard=true`",
        test="tests/cluster/test_local_ray.py::test_ray_is_as_before_afterwards",
    ),
    Patch(
        "mcore_rl.cluster.breakpoints:_stop_for_debugpy",
        ("builtins.breakpoint",),
        by="debugpy's `breakpoint()` by ours, once debugpy has put its own there",
        reason="debugpy's would not say where it waits, nor go on when nobody comes",
        scope=Scope.BOTH,
        runs=Times.APART,
        switch="code without `breakpoint()`, or `RAY_DEBUG=legacy`",
        opt_in=True,
        test="tests/e2e/test_debuggers.py::test_a_debug_adapter_attaches_where_the_dashboard_shows",
    ),
    Patch(
        "mcore_rl.agents.environments.verifiers_env:share_certificates",
        ("verifiers.v1.clients.eval.build_async_httpx",),
        by="a TLS context for each client of verifiers by one for all",
        reason="reading all certificates for each episode took most of a worker's time",
        scope=Scope.BOTH,
        runs=Times.APART,
        switch="another `agents.environment`",
        opt_in=True,
        test="tests/agents/environments/test_verifiers_env.py"
        "::test_an_episode_leaves_neither_connections_nor_certificates_in_its_worker",
    ),
)
