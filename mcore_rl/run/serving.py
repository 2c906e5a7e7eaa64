"""Serves a checkpoint by SGLang's OpenAI-compatible API until Ctrl-C (mcore-rl serve)."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from mcore_rl.data.tokenizer import is_tokenizer_code
from mcore_rl.process.errors import describe_error
from mcore_rl.process.network import open_directly, refuse_open_door
from mcore_rl.process.server_keys import ServerKeys, read_key_file, user_headers
from mcore_rl.rollout.adapters import AdapterSlots
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.weight_sync.adapter.serving import SET_UP
from mcore_rl.weights.hf.config import parse_hf_config, with_text_settings
from mcore_rl.weights.lora.base import compute_base_sum
from mcore_rl.weights.lora.places import FIRST
from mcore_rl.weights.lora.served import list_served_modules
from mcore_rl.weights.lora.served_files import check_served
from mcore_rl.weights.models import refuse_unsupported
from mcore_rl.weights.models.settings import drop_quantization

Merge = Callable[[Path, Path, Path], object]
"""(Megatron checkpoint, HuggingFace directory that the run began from, directory to write)."""
_POLL_S = 0.5
_ANSWER_TIMEOUT_S = 120.0


def find_model(path: Path, source_hf: Path | None, merge: Merge) -> Path:
    """Return the HuggingFace directory to serve; a Megatron checkpoint is first merged into one.

    Raises ValueError if SGLang could not serve chats from it, or if a merge lacks `source_hf`.
    """
    if not (path / ".metadata").is_file():
        config = with_text_settings(parse_hf_config(path))
        refuse_unsupported(drop_quantization(config), path / "config.json")
        if not (path / "tokenizer_config.json").is_file():
            raise ValueError(
                f"{path} has no tokenizer_config.json: chats need the model's tokenizer"
            )
        return path
    merged = path.with_name(f"{path.name}_hf")
    if (merged / "config.json").is_file():
        return merged
    if source_hf is None:
        raise ValueError(
            f"{path} is a Megatron checkpoint: give --source-hf=<the directory its run began from>,"
            " which has config.json and tokenizer"
        )
    print(merge(path, source_hf, merged))
    return merged


def refuse_code(model: Path) -> None:
    """Raise ValueError if chats need a tokenizer that is Python code beside the model."""
    if is_tokenizer_code(model):
        raise ValueError(
            f"{model}: its tokenizer is Python code (auto_map in tokenizer_config.json); read the"
            " code, then give --trust-remote-code to run it"
        )


def make_slots(given: Sequence[str], model: Path, pp: int) -> AdapterSlots | None:
    """Return the adapters that "<name>=<directory>" name; None: there are none.

    Raises ValueError naming what cannot be served.
    """
    if not given:
        return None
    if pp > 1:
        raise ValueError(f"--adapter with --pp={pp}: engines load adapters with --pp=1 alone")
    folders: dict[str, str] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals or not name or name in folders:
            raise ValueError(f"--adapter={each}: give NAME=DIR, each name once")
        folders[name] = folder
    base, hf_config = compute_base_sum(model), parse_hf_config(model)
    adapters = [check_served(Path(each), base, hf_config, model) for each in folders.values()]
    names = {key[: -len(FIRST)] for adapter in adapters for key in adapter.shapes}
    rank = max(adapter.rank for adapter in adapters)
    return AdapterSlots(tuple(folders), rank, list_served_modules(names), SET_UP, folders=folders)


def make_serving_keys(key_file: Path | None, host: str) -> ServerKeys:
    """Return keys with the user key in `key_file`; without a file, requests need no key.

    Nobody gets the admin key, so nobody can change the weights. Raises ValueError without a file
    if other machines reach `host`.
    """
    admin = ServerKeys.make().admin
    if key_file is not None:
        return ServerKeys(read_key_file(key_file), admin)
    refuse_open_door(host, "use the model")
    return ServerKeys("", admin)


def run_server(spec: EngineSpec, question: str, once: bool, startup_timeout_s: float) -> None:
    """Serve until Ctrl-C, or with `once` until the question is answered.

    Raises RuntimeError with the end of the log if the server dies or does not start in time.
    """
    engine = EngineProcess(spec)
    try:
        engine.start()
        engine.wait_healthy(startup_timeout_s)
        print(f"{engine.url}/v1 serves {spec.model_path}; log {spec.log_path}", flush=True)
        if question:
            print(f"{question}\n{ask(engine, question)}", flush=True)
        while not once:
            if not engine.is_alive():
                raise RuntimeError(
                    f"{engine.name} died with status {engine.exit_status}; last"
                    f" lines:\n{engine.tail()}"
                )
            time.sleep(_POLL_S)
    except TimeoutError as error:
        raise RuntimeError(str(error) or describe_error(error)) from error
    finally:
        engine.stop()


def ask(engine: EngineProcess, question: str) -> str:
    """Return the answer to a chat completion at temperature 0; RuntimeError if there is none."""
    body = {
        "model": engine.spec.model_path,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 64,
    }
    request = urllib.request.Request(
        f"{engine.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **user_headers(engine.spec.keys)},
    )
    try:
        with open_directly(request, _ANSWER_TIMEOUT_S) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
    except (urllib.error.URLError, OSError, ValueError, KeyError, IndexError) as error:
        raise RuntimeError(f"{engine.name} answered no chat completion: {error}") from error
    if not answer:
        raise RuntimeError(
            f"{engine.name} answered a chat completion with nothing; log:\n{engine.tail()}"
        )
    return answer
