"""Makes SGLang's HTTP calls for a weight sync; a failed call raises EngineCallError.

SGLang calls a weight sync a weight update; methods and paths keep its names.
"""

import base64
import pickle
from collections.abc import Collection
from typing import Any

import aiohttp
from torch import Tensor

from mcore_rl.process.errors import describe_error
from mcore_rl.weight_sync.wire import COMMAND_NAME
from mcore_rl.weights.layouts.sglang_models import SGLangSizes

LOADER = "mcore_rl.weight_sync.receiver.load"
"""The custom weight loader that engines must be started with (--custom-weight-loader)."""
WEIGHTS = "weights"
KV_CACHE = "kv_cache"
GRAPHS = "cuda_graph"
"""SGLang's names of the memory that an engine can release."""


class EngineCallError(RuntimeError):
    """A call of an engine failed, or the engine could not be reached; the message names both."""


class RefusedError(EngineCallError):
    """The engine answered that it refuses the request."""


class EngineControl:
    """The HTTP API of the engine at `url`.

    Its weights may change only while generation is paused or no request is in flight.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self.url = url

    async def read_parallel_sizes(self) -> SGLangSizes:
        """Return the sizes of this one engine; EngineCallError if it was started without LOADER."""
        info = await self._call("GET", "/server_info", None)
        loaders = info.get("custom_weight_loader") or []
        if LOADER not in loaders:
            raise EngineCallError(
                f"engine {self.url} has custom weight loaders {loaders}, needs {LOADER}"
            )
        return SGLangSizes(
            1, info["tp_size"], info["ep_size"], info["pp_size"], info["attn_dp_size"]
        )

    async def pause(self) -> None:
        """Stop generating; keep requests in flight, but not the KV cache of the old weights."""
        await self._post("/pause_generation", mode="retract")

    async def resume(self) -> None:
        await self._post("/continue_generation")

    async def begin_update(self) -> None:
        """Begin a weight update; first end an earlier update that never ended."""
        try:
            await self._post("/begin_weight_update", selector="all")
        except RefusedError:
            await self.end_update()
            await self._post("/begin_weight_update", selector="all")

    async def end_update(self) -> None:
        await self._post("/end_weight_update")

    async def run_loader(self, command_u8: Tensor, tp_size: int, *, flush_cache: bool) -> None:
        """Pass `command_u8` to the weight loader of every rank; return when all are done.

        The loader gets the served model, and finds its draft model there.
        """
        payload = base64.b64encode(pickle.dumps([(COMMAND_NAME, command_u8)])).decode()
        await self._post(
            "/update_weights_from_tensor",
            serialized_named_tensors=[payload] * tp_size,
            load_format=LOADER,
            selector="target",
            flush_cache=flush_cache,
        )

    async def commit(self, version: int) -> None:
        """Label all tokens sampled from now on with `version`."""
        await self._post(
            "/update_weight_version", new_version=str(version), abort_all_requests=False
        )

    async def wait_idle(self, timeout_s: float) -> None:
        """Return once no request is left, with the KV cache flushed."""
        await self._call("POST", f"/flush_cache?timeout={timeout_s:g}", None, answers_json=False)

    async def release(self, kinds: Collection[str]) -> None:
        """Release the GPU memory of `kinds` (WEIGHTS, KV_CACHE, GRAPHS) and lose its contents.

        The engine must be idle and hold that memory; otherwise SGLang's schedulers exit.
        """
        await self._post("/release_memory_occupation", tags=sorted(kinds))

    async def occupy(self, kinds: Collection[str]) -> None:
        """Take back released memory; its contents are undefined."""
        await self._post("/resume_memory_occupation", tags=sorted(kinds))

    async def _post(self, path: str, **body: Any) -> None:
        answer = await self._call("POST", path, body)
        if not answer.get("success", True):
            raise RefusedError(f"engine {self.url} refused {path}: {answer.get('message')}")

    async def _call(
        self, method: str, path: str, body: Any, *, answers_json: bool = True
    ) -> dict[str, Any]:
        try:
            async with self._http.request(method, self.url + path, json=body) as response:
                is_json = response.content_type == "application/json"
                answer = await response.json() if is_json else await response.text()
                has_verdict = isinstance(answer, dict) and "success" in answer
                if (answers_json and not is_json) or (not response.ok and not has_verdict):
                    raise EngineCallError(
                        f"engine {self.url} answered {path} with {response.status}: {answer!r:.300}"
                    )
        except TimeoutError as error:
            waited = f"within {self._http.timeout.total} s"
            raise EngineCallError(f"engine {self.url} did not answer {path} {waited}") from error
        except aiohttp.ClientError as error:
            raise EngineCallError(
                f"engine {self.url} failed in {path}: {describe_error(error)}"
            ) from error
        return answer if isinstance(answer, dict) else {}
