"""One request for a sample: what an engine is asked, and its answer as a Sample."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.rollout.routed_experts import RoutedExpertsShape
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. temperature 0 is greedy, top_k -1 keeps the whole vocabulary.

    Log-probs are those of the distribution at this temperature before top_p and top_k cut it. The seed counts
    only on engines that sample deterministically. `routed_experts` asks which experts each token went to.
    """

    max_response_len: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    routed_experts: bool = False


@dataclass
class Group:
    """The samples of one prompt and the engine that they prefer, of whatever class the client has."""

    num_samples: int
    home: Any = None


@dataclass(frozen=True)
class Request:
    prompt: Prompt
    sample_index: int
    group: Group

    def __str__(self) -> str:
        return f"prompt {self.prompt.index} of {self.prompt.data_source!r}, sample {self.sample_index},"


def make_body(
    request: Request, sampling: Sampling, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """What SGLang's /generate is sent."""
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_response_len,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(stop_token_ids),
    }
    if sampling.seed is not None:
        parameters["sampling_seed"] = sample_seed(
            sampling.seed, request.prompt.index, request.sample_index
        )
    return {
        "input_ids": request.prompt.token_ids,
        "sampling_params": parameters,
        "return_logprob": True,
        "return_routed_experts": sampling.routed_experts,
    }


def sample_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """A seed in [0, 2**63) that differs between the samples of a run."""
    digest = hashlib.blake2b(
        f"{seed} {prompt_index} {sample_index}".encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> 1


def make_sample(
    request: Request,
    answer: Mapping[str, Any],
    decode: Callable[[Sequence[int]], str],
    experts_shape: RoutedExpertsShape | None,
) -> Sample:
    """ValueError where the engine told of experts that its model cannot have."""
    meta = answer["meta_info"]
    response_ids = tuple(answer["output_ids"])
    logprobs, logprob_ids = zip(
        *((entry[0], entry[1]) for entry in meta["output_token_logprobs"]), strict=True
    )
    assert logprob_ids == response_ids, (
        f"{request} log-probs are of {logprob_ids}, tokens are {response_ids}"
    )
    num_run = len(request.prompt.token_ids) + len(response_ids) - 1
    return Sample(
        prompt=request.prompt,
        sample_index=request.sample_index,
        response_ids=response_ids,
        logprobs=logprobs,
        finish_reason=meta["finish_reason"]["type"],
        versions=tuple(
            VersionSpan(span["start"], span["end"], WeightVersion(int(span["version"])))
            for span in meta["weight_versions"]
        ),
        text=decode(response_ids),
        routed_experts=experts_shape
        and experts_shape.decode(meta.get("routed_experts"), num_run, str(request).rstrip(",")),
    )
