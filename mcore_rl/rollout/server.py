"""Entry point of an SGLang server: takes `sglang serve` arguments and serves HTTP.

Run as `python -P -m mcore_rl.rollout.server --parent-pid N [--keys-fd N] [--gpu-ids 2,3]
[--uncompiled] [--share-prompts | --share-prompts-on-cpu] [--adapters <slots>] <sglang
arguments>`. All processes of the server die with the process that started it. Without CUDA, import
stand-ins replace SGLang's CUDA-only dependencies, and SGLang is set up for the CPU.
"""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_rl.process.cores import THREADS
from mcore_rl.process.gc_pause import without_collector
from mcore_rl.process.log_files import follow_output, keep_output_lasting, rotate_output
from mcore_rl.process.network import bind_meetings_to_their_host
from mcore_rl.process.parent_death import die_with_parent
from mcore_rl.process.process_state import start_resource_tracker
from mcore_rl.process.server_keys import KEYS_FD, ServerKeys, read_keys
from mcore_rl.rollout import (
    draft_switch,
    drafts,
    image_request,
    mamba_decay,
    ngram_switch,
    packed_experts,
    speculation,
)
from mcore_rl.rollout.adapters import AdapterSlots, serve_by_name
from mcore_rl.rollout.engine_spec import (
    ADAPTERS,
    SHARE_PROMPTS,
    SHARE_PROMPTS_ON_CPU,
    UNCOMPILED,
)
from mcore_rl.rollout.image_identity import tell_grids_apart
from mcore_rl.rollout.image_outputs import choose_output
from mcore_rl.rollout.image_request import (
    NOT_HERE,
    check_placeholders,
    resolve_request,
    unpack_request,
)
from mcore_rl.rollout.request_fields import ModelBounds, check_request
from mcore_rl.rollout.request_gates import FieldGate, KeyGate
from mcore_rl.rollout.scheduler_setup import (
    SetUp,
    compute_prompts_once,
    keep_first_experts,
    keep_first_keys,
    set_schedulers_up,
    tell_versions_of_parts,
)
from mcore_rl.weights.hf import int4
from mcore_rl.weights.models.tower import merge_size, read_placeholder

OF_OURS = {
    "KimiVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
}
"""Architectures that SGLang computes otherwise than their authors: see rollout/vision_models."""
PACKAGES_OF_OURS = ("SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE")
"""Environment variables with the package of such models, and of their processors of images."""
WAYS_AROUND = ("grpc_port", "grpc_mode", "smg_grpc_mode", "encoder_only", "use_ray", "sidecar")
"""Fields of SGLang's ServerArgs that open other servers than the application."""
VARIABLES_AROUND = ("SGLANG_RUST_SERVER", "SGLANG_GRPC_PORT", "DUMPER_SERVER_PORT")
"""Environment variables that do the same."""


def tie_forks_to_parents() -> None:
    """Call die_with_parent in every process that this one forks, and in their forks, too."""
    forking_pid = 0

    def remember_parent() -> None:
        nonlocal forking_pid
        forking_pid = os.getpid()

    os.register_at_fork(before=remember_parent, after_in_child=lambda: die_with_parent(forking_pid))


def main(arguments: list[str]) -> None:
    """Serve until killed, in a process that has imported nothing yet."""
    if arguments[:1] == ["--parent-pid"]:
        die_with_parent(int(arguments[1]))
        arguments = arguments[2:]
    os.environ.setdefault(THREADS, "1")  # read when torch is imported
    serve(arguments)


def serve(arguments: list[str]) -> None:
    """Serve until killed. Imports come late: environment and stand-ins must be set before them."""
    keys: ServerKeys | None = None
    if arguments[:1] == [KEYS_FD]:
        keys = read_keys(int(arguments[1]))
        arguments = arguments[2:]
    gpu_ids: list[str] = []
    if arguments[:1] == ["--gpu-ids"]:
        gpu_ids = arguments[1].split(",")
        arguments = arguments[2:]
    compiled = arguments[:1] != [UNCOMPILED]
    arguments = arguments if compiled else arguments[1:]
    sharing = arguments[:1] if arguments[:1] in ([SHARE_PROMPTS], [SHARE_PROMPTS_ON_CPU]) else []
    arguments = arguments[len(sharing) :]
    slots = AdapterSlots.decode(arguments[1]) if arguments[:1] == [ADAPTERS] else None
    arguments = arguments if slots is None else arguments[2:]
    tie_forks_to_parents()
    keep_output_lasting()
    rotate_output()
    start_resource_tracker()

    package = use_our_classes(arguments)
    arguments, chooses = draft_switch.prepare_choice(import_sglang(arguments, gpu_ids, compiled))
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from mcore_rl.device import has_cuda

    load_plugins()
    leave_freezing_to_the_starter()
    bind_meetings_to_their_host()
    server_args = prepare_server_args(arguments)
    if package is not None:
        load_package(package)
    take_patches(server_args.model_path)
    shares = bool(sharing) and may_share_prompts(sharing[0], has_cuda())
    set_schedulers_up(
        [*list_set_ups(server_args, shares, chooses), *take_adapters(slots, server_args.model_path)]
    )
    limit_fields(server_args)
    if keys is not None:
        guard_server(server_args, keys)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def take_adapters(slots: AdapterSlots | None, model_path: str) -> list[SetUp]:
    """Have the server know adapters by name; return what each of its schedulers calls for them."""
    if slots is None:
        return []
    serve_by_name(slots.names, slots.default)
    module, _, name = slots.set_up.rpartition(".")
    return [partial(getattr(import_module(module), name), slots.folders, model_path)]


def list_set_ups(server_args: Any, shares_prompts: bool, chooses_passes: bool) -> list[SetUp]:
    """Return what each scheduler process calls before it begins; ValueError if that cannot be."""
    set_ups: list[SetUp] = [keep_output_lasting, follow_output]
    if server_args.incremental_streaming_output:
        set_ups.append(tell_versions_of_parts)
    if shares_prompts:
        set_ups.append(compute_prompts_once)
    if server_args.enable_return_routed_experts:
        set_ups.append(keep_first_experts)
    if server_args.enable_return_indexer_topk:
        set_ups.append(keep_first_keys)
    set_ups += list_draft_set_ups(server_args, chooses_passes)
    architectures = read_config(server_args.model_path).get("architectures") or ()
    overridden = json.loads(server_args.json_model_override_args)
    if int4.is_int4(overridden):
        set_ups.append(packed_experts.keep_words_in_order)
    if mamba_decay.ARCHITECTURES & set(architectures):
        set_ups.append(mamba_decay.keep_logarithms)
    return set_ups


def list_draft_set_ups(server_args: Any, chooses_passes: bool) -> list[SetUp]:
    """Return those of an engine that speculates; [] if it does not.

    chooses_passes   it does so in passes in which that is faster; ValueError if it cannot choose
    """
    algorithm = server_args.speculative_algorithm
    if algorithm is None:
        return []
    if algorithm == speculation.NGRAM:
        drafts.find_compilers()
        count = ngram_switch.guess_when_faster if chooses_passes else drafts.count_drafts
        return [count, drafts.tell_drafts_apart]
    count = drafts.count_drafts
    if chooses_passes:
        draft_switch.refuse_fixed(server_args)
        count = partial(draft_switch.draft_when_faster, server_args.speculative_num_steps)
    return [count, drafts.show_draft_model] if algorithm == speculation.MTP else [count]


def import_sglang(
    arguments: list[str], gpu_ids: Sequence[str] = (), compiled: bool = True
) -> list[str]:
    """Set this process up for its GPUs or the CPU, import SGLang, and return its arguments."""
    with without_collector():
        from mcore_rl.device import has_cuda
        from mcore_rl.device.sglang_setup import use_cpu, use_gpus

        if has_cuda():
            arguments = use_gpus(arguments, gpu_ids)
        else:
            arguments = use_cpu(arguments, compiled=compiled)
        import_module("sglang.launch_server")
        import_module("sglang.srt.entrypoints.http_server")
    return arguments


def may_share_prompts(flag: str, has_gpu: bool) -> bool:
    """Return whether one of the two flags has SGLang's rule of admission replaced.

    On a GPU the rule was not measured, so there a recipe has to ask for it.
    """
    return flag == SHARE_PROMPTS or not has_gpu


def leave_freezing_to_the_starter() -> None:
    """Have SGLang not ask itself to freeze its objects, which it does before it listens where it
    does not warm up; rollout/engine.py asks once the server is healthy.
    """
    http_server: Any = import_module("sglang.srt.entrypoints.http_server")
    assert callable(http_server._freeze_gc_after_server_warmup), "SGLang has another name for it"
    http_server._freeze_gc_after_server_warmup = lambda server_args: None


def load_package(package: str) -> None:
    """Have SGLang know the classes of a package, also where it was imported without it."""
    import_module(package)
    from sglang.srt.models.registry import ModelRegistry, import_model_classes

    ModelRegistry.models.update(import_model_classes(package))


def use_our_classes(arguments: list[str]) -> str | None:
    """Have SGLang load classes of ours in this process, which has not imported it yet.

    Returns their package, as `find_package` does.
    """
    package = find_package(arguments)
    if package is not None:
        os.environ.update(dict.fromkeys(PACKAGES_OF_OURS, package))
    return package


def find_package(arguments: list[str]) -> str | None:
    """Return the package whose classes SGLang loads in place of its own, if the model needs one."""
    if "--is-embedding" in arguments:
        return "mcore_rl.rollout.reward_heads"
    if "--model-path" not in arguments:
        return None
    config = read_config(arguments[arguments.index("--model-path") + 1])
    if OF_OURS & set(config.get("architectures") or ()):
        return "mcore_rl.rollout.vision_models"
    return None


def read_config(model_path: str) -> dict[str, Any]:
    """Return the parsed config.json of a model directory; {} without one."""
    config_file = Path(model_path, "config.json")
    return json.loads(config_file.read_text()) if config_file.is_file() else {}


def take_patches(model_path: str) -> None:
    """Add a route to SGLang's application for requests that bring the patches of their images, if
    the model sees images.
    """
    config = read_config(model_path)
    placeholder_id = read_placeholder(config)
    if placeholder_id is None or "vision_config" not in config:
        return
    merge = merge_size(config)
    start_id = config.get("vision_start_token_id")
    output = choose_output(config)
    tell_grids_apart()
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app, serve_generate_request
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def generate_images(request: Request) -> Any:
        data = await request.body()
        is_json = request.headers.get("content-type") == "application/json"
        try:
            body, images = resolve_request(data) if is_json else unpack_request(data)
            check_request("/generate", body, find_served_bounds())
            check_placeholders(body, images.grids_I3, placeholder_id, merge, start_id)
            asked = GenerateReqInput(**body, image_data=output(body, images))
        except FileNotFoundError as error:
            return JSONResponse({"error": f"no patches at {error}"}, status_code=NOT_HERE)
        except (KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return await serve_generate_request(asked, request)

    app.post(image_request.PATH)(generate_images)


def find_served_bounds() -> ModelBounds:
    """Return what the served model allows, once SGLang has read it."""
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    config: Any = manager.model_config
    names = tuple(manager.lora_registry.get_all_adapters())
    sizes = int(config.vocab_size), int(config.context_len)
    return ModelBounds(*sizes, names, manager.served_model_name)


def limit_fields(server_args: Any) -> None:
    """Put the gate that bounds fields of requests in front of SGLang's application."""
    from sglang.srt.entrypoints.http_server import app

    has_grammar = server_args.grammar_backend != "none" and not server_args.skip_tokenizer_init
    app.add_middleware(FieldGate, bounds=find_served_bounds, has_grammar=has_grammar)


def guard_server(server_args: Any, keys: ServerKeys) -> None:
    """Put the gate in front of SGLang's application; ValueError if requests could go around it.

    SGLang never learns the keys, so neither its log nor its answers can contain them.
    """
    from sglang.srt.entrypoints.http_server import app

    around = [name for name in WAYS_AROUND if getattr(server_args, name)]
    around += [name for name in VARIABLES_AROUND if os.environ.get(name)]
    if server_args.tokenizer_worker_num > 1:
        around.append("tokenizer_worker_num")
    if around:
        raise ValueError(
            f"{', '.join(around)}: SGLang would also take requests elsewhere than by HTTP in this"
            " process, where no key is asked for; leave it out"
        )
    app.add_middleware(KeyGate, keys=keys)


if __name__ == "__mp_main__":  # a process that multiprocessing spawned from this one
    die_with_parent(os.getppid())
    bind_meetings_to_their_host()
if __name__ == "__main__":
    main(sys.argv[1:])
