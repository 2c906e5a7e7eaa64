"""Gives SGLang each version of an adapter as another one, in each scheduler process of an engine.

    request for "policy"  --> SGLang's adapter policy@7.1, the newest
    install of version 8  --> policy@8.2; waiting requests --> policy@8.2; policy@7.1 is unloaded

SGLang keeps prefixes of its cache apart by the name of the adapter, so those of an older version
are never found again. Between two steps, with generation paused, all requests wait: those that had
begun go on with the new version, as in a sync of weights.
"""

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_rl.process.errors import describe_error
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weights.hf.config import parse_hf_config

_log = logging.getLogger(__name__)
SET_UP = "mcore_rl.weight_sync.adapter.serving.serve_adapters"
"""Import path of what a scheduler calls before it begins, for servers that serve adapters."""
Install = Callable[[str, int, Mapping[str, Any], dict[str, Tensor]], None]
"""AdapterServer.install of a rank's process."""


class AdapterServer:
    """The adapters of this process's scheduler, by the names that requests give."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._newest: dict[str, str] = {}
        """SGLang's own name of the newest version, by an adapter's name."""
        self._num_installed = 0

    def begin(self, scheduler: Any) -> None:
        """Serve adapters by SGLang's `scheduler`, which has none yet."""
        self._scheduler = scheduler
        self._newest.clear()
        _log.info("buffers of adapters: %d bytes", self._count_buffer_bytes())

    def find(self, name: str) -> str | None:
        """Return SGLang's name of the newest version; None: no version was installed."""
        return self._newest.get(name)

    def install(
        self, name: str, version: int, config: Mapping[str, Any], factors: dict[str, Tensor]
    ) -> None:
        """Have requests for adapter `name` answered with `version`, those that wait included.

        config, factors   as make_engine_config and make_engine_factors return them
        Raises TransferError, and changes nothing, if SGLang does not take it.
        """
        if self._scheduler is None:
            raise TransferError(
                f"this engine was started without adapters, and is to serve {name!r}: start it"
                " with train.lora.sync=adapter"
            )
        old = self._newest.get(name)
        assert old not in self._list_running(), f"requests run with {old}: pause generation first"
        self._num_installed += 1
        new = f"{name}@{version}.{self._num_installed}"
        self._load(new, config, factors)
        self._newest[name] = new
        if old is not None:
            self._move_waiting(old, new)
            self._unload(old)

    def _count_buffer_bytes(self) -> int:
        pool = self._manager.memory_pool
        buffers = (*pool.A_buffer.values(), *pool.B_buffer.values())
        return sum(layer.nbytes for layers in buffers for layer in layers)

    @property
    def _manager(self) -> Any:
        return self._scheduler.tp_worker.model_runner.lora_manager

    def _load(self, new: str, config: Mapping[str, Any], factors: dict[str, Tensor]) -> None:
        registry: Any = import_module("sglang.srt.lora.lora_registry")
        ref = registry.LoRARef(lora_id=new, lora_name=new, lora_path=new, pinned=False)
        manager = self._manager
        result = manager.load_lora_adapter_from_tensors(ref, factors, dict(config))
        error = None if result.success else result.error_message
        if error is None:
            try:
                manager.fetch_new_loras({new})  # Into its buffers, where shapes must fit.
            except (AssertionError, KeyError, RuntimeError, ValueError) as failure:
                error = describe_error(failure)
        if error is not None:
            self._unload(new)
            raise TransferError(f"SGLang does not take adapter {new}: {error}")

    def _unload(self, name: str) -> None:
        manager = self._manager
        registry: Any = import_module("sglang.srt.lora.lora_registry")
        result = manager.unload_lora_adapter(registry.LoRARef(lora_id=name, lora_name=name))
        assert result.success, result.error_message

    def _list_running(self) -> set[str | None]:
        scheduler = self._scheduler
        batches = (scheduler.running_batch, scheduler.last_batch)
        return {req.lora_id for batch in batches if batch is not None for req in batch.reqs}

    def _move_waiting(self, old: str, new: str) -> None:
        scheduler = self._scheduler
        for req in (*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue):
            if req.lora_id == old:
                req.lora_id = new
                req.extra_key = req.extra_key.removesuffix(old) + new


SERVER = AdapterServer()
"""The process's only one, as it has one scheduler."""


def serve_adapters(folders: Mapping[str, str], model_path: str) -> None:
    """Have this process's scheduler know adapters by their names, whatever their version.

    folders      of adapters in PEFT's format that it serves from the start, by name
    model_path   directory of the weights below them
    """
    scheduler: Any = import_module("sglang.srt.managers.scheduler").Scheduler
    begin, handle = scheduler.__init__, scheduler.handle_generate_request

    def begin_and_remember(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        SERVER.begin(self)
        if folders:
            # Engines without files do without the packages that read them.
            from mcore_rl.weights.lora.served_files import read_engine_adapter

            hf_config = parse_hf_config(Path(model_path))
            for name, folder in folders.items():
                SERVER.install(name, 0, *read_engine_adapter(Path(folder), hf_config))

    def handle_by_name(self: Any, recv_req: Any, *, mm_input_error: str | None = None) -> None:
        name = recv_req.lora_id
        if name is not None:
            recv_req.lora_id = SERVER.find(name)
            if recv_req.lora_id is None:
                mm_input_error = f"adapter {name!r} has no version yet: sync the engine first"
        handle(self, recv_req, mm_input_error=mm_input_error)

    scheduler.__init__ = begin_and_remember
    scheduler.handle_generate_request = handle_by_name
