"""One request for a sample: the JSON body that an engine is sent, and its answer as a Sample.

The answer also tells, where it is asked to, which experts the engine's routers and which keys its
indexers chose.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pybase64
import torch
from torch import Tensor

from mcore_rl.rollout.drafts import read_counts, sum_counts
from mcore_rl.rollout.indexer_topk import IndexerTopkShape
from mcore_rl.types import Array, Prompt, Sample, VersionSpan, WeightVersion

_REMEDY = (
    "the engine serves another model than model.path says, or chose physical copies of experts"
    " (expert load balancing of engines must be off); drift.routed_experts=false does without,"
    " train.router_replay=engine cannot"
)


@dataclass(frozen=True)
class RoutedExpertsShape:
    """The shape that an answer must have.

    moe_layers   for each hidden layer of the model, whether it has experts; what engines report of
                 dense layers means nothing
    """

    moe_layers: tuple[bool, ...]
    top_k: int
    num_experts: int

    def decode(self, encoded: str | None, num_tokens: int, where: str) -> Tensor:
        """Return int16 [num_tokens, L, K], decoded from SGLang's base64 of int32.

        Raises ValueError naming `where`, token and layer if nothing was reported or no model with
        this shape can have chosen so.
        """
        if encoded is None:
            raise ValueError(f"{where}: the engine did not tell which experts it chose: {_REMEDY}")
        num_layers = len(self.moe_layers)
        flat = np.frombuffer(pybase64.b64decode(encoded), np.int32)
        if flat.size != num_tokens * num_layers * self.top_k:
            raise ValueError(
                f"{where}: the engine told of {flat.size} choices of experts, expected"
                f" {num_tokens} tokens * {num_layers} layers * {self.top_k} experts per token:"
                f" {_REMEDY}"
            )
        experts_TLK = flat.reshape(num_tokens, num_layers, self.top_k)
        self._check(experts_TLK, where)
        return torch.from_numpy(experts_TLK.astype(np.int16))

    def _check(self, experts_TLK: Array, where: str) -> None:
        """Raise ValueError unless each token went to distinct, existing experts in MoE layers."""
        wrong_TL = ((experts_TLK < 0) | (experts_TLK >= self.num_experts)).any(2)
        # Whole planes of small numbers are compared: pairs in rows of int32 take much longer.
        planes_KTL = np.ascontiguousarray(experts_TLK.astype(np.int16).transpose(2, 0, 1))
        for first_TL, second_TL in combinations(planes_KTL, 2):
            wrong_TL |= first_TL == second_TL
        wrong_TL &= np.array(self.moe_layers)
        if wrong_TL.any():
            token, layer = np.argwhere(wrong_TL)[0].tolist()
            experts = experts_TLK[token, layer].tolist()
            raise ValueError(
                f"{where}: experts {experts} of token {token} in layer {layer} are not"
                f" {self.top_k} different ones of 0 to {self.num_experts - 1}: {_REMEDY}"
            )


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn; temperature 0 is greedy, top_k -1 keeps the whole vocabulary.

    Log-probs are those of the distribution at this temperature, before top_p and top_k cut it. The
    seed counts only on engines that sample deterministically. `routed_experts` asks the engine to
    report which experts each token went to, `indexer_topk` which keys its indexers chose.
    """

    max_response_len: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    routed_experts: bool = False
    indexer_topk: bool = False


@dataclass
class EngineAffinity:
    """The engine that the requests for one prompt prefer, because it has cached the prompt.

    `num_requests` counts the prompt's requests; `engine` is of the client's own class, None at
    first.
    """

    num_requests: int
    engine: Any = None


@dataclass(frozen=True)
class Request:
    """Sample number `sample_index` of a prompt; the prompt's requests share one `affinity`.

    turn            number of an answer in an episode; the prompt's tokens are then its context
    stop            texts that end the response, besides the recipe's tokens
    experts_start   the first token whose experts and chosen keys are asked for
    rid             the name that the engine knows it by, to abort it alone; empty: the engine's own
    begun           what another engine has drawn of the response already, with its experts and
                    chosen keys where they are asked for
    adapter         what engines sample with, by their name; empty: the policy
    """

    prompt: Prompt
    sample_index: int
    affinity: EngineAffinity
    turn: int = 0
    stop: tuple[str, ...] = ()
    experts_start: int = 0
    rid: str = ""
    begun: Sample | None = None
    adapter: str = ""

    def __str__(self) -> str:
        source = self.prompt.data_source
        return f"prompt {self.prompt.index} of {source!r}, sample {self.sample_index},"


def make_body(
    request: Request, sampling: Sampling, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the JSON body for SGLang's /generate."""
    begun = request.begun.response_ids if request.begun else ()
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_response_len - len(begun),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(stop_token_ids),
    }
    if sampling.seed is not None:
        parameters["sampling_seed"] = sample_seed(
            sampling.seed, request.prompt.index, request.sample_index, request.turn
        )
    if request.stop:
        parameters["stop"] = list(request.stop)
    body: dict[str, Any] = {
        "input_ids": request.prompt.token_ids + begun,
        "sampling_params": parameters,
        "return_logprob": True,
        "return_routed_experts": sampling.routed_experts,
    }
    if sampling.indexer_topk:
        body["return_indexer_topk"] = True
    if sampling.routed_experts and _first_unknown(request):
        body["routed_experts_start_len"] = _first_unknown(request)
    if request.rid:
        body["rid"] = request.rid
    if request.adapter:
        body["lora_path"] = request.adapter
    return body


def sample_seed(seed: int, prompt_index: int, sample_index: int, turn: int = 0) -> int:
    """Return a seed in [0, 2**63) that differs between the samples of a run, and their turns."""
    key = f"{seed} {prompt_index} {sample_index}" + (f" {turn}" if turn else "")
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make_sample(
    request: Request,
    answer: Mapping[str, Any],
    decode: Callable[[Sequence[int]], str],
    experts_shape: RoutedExpertsShape | None,
    indexer_shape: IndexerTopkShape | None = None,
) -> Sample:
    """Return the Sample in SGLang's answer; a shape that is None leaves what has it out.

    What was begun elsewhere comes first, with its log-probs, versions, experts and chosen keys: the
    engine computes these tokens again, and what it chooses for them does not count. Raises
    ValueError if the engine reports choices that its model cannot have made.
    """
    meta = answer["meta_info"]
    begun = request.begun or _make_empty_sample(request)
    drawn_ids = tuple(answer["output_ids"])
    logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"])
    logprob_ids = tuple(entry[1] for entry in meta["output_token_logprobs"])
    assert logprob_ids == drawn_ids, f"{request} log-probs are of {logprob_ids}, not {drawn_ids}"
    response_ids = begun.response_ids + drawn_ids
    # The engine never runs the last response token, so that one went to no expert.
    num_run = len(request.prompt.token_ids) + len(response_ids) - 1
    where = str(request).rstrip(",")
    first = _first_unknown(request) if experts_shape or indexer_shape else 0
    routed_experts = indexer_topk = None
    if experts_shape is not None:
        told = experts_shape.decode(meta.get("routed_experts"), num_run - first, where)
        routed_experts = _join(begun.routed_experts, told)
    if indexer_shape is not None:  # SGLang tells of all tokens, whatever is asked for
        told = indexer_shape.decode(meta.get("indexer_topk"), num_run, where)
        indexer_topk = _join(begun.indexer_topk, told[first:])
    return Sample(
        prompt=request.prompt,
        sample_index=request.sample_index,
        response_ids=response_ids,
        logprobs=begun.logprobs + logprobs,
        finish_reason=meta["finish_reason"]["type"],
        versions=begun.versions + _read_versions(meta, begun.response_len),
        text=decode(response_ids),
        routed_experts=routed_experts,
        indexer_topk=indexer_topk,
        experts_start=request.experts_start,
        engines=begun.engines,
        drafts=sum_counts(begun.drafts, read_counts(meta)),
    )


def _read_versions(meta: Mapping[str, Any], num_begun: int) -> tuple[VersionSpan, ...]:
    """Return the versions that drew what follows `num_begun` response tokens."""
    return tuple(
        VersionSpan(
            num_begun + span["start"], num_begun + span["end"], WeightVersion(int(span["version"]))
        )
        for span in meta["weight_versions"]
    )


def _join(begun: Tensor | None, told: Tensor) -> Tensor:
    return told if begun is None else torch.cat([begun, told])


def _first_unknown(request: Request) -> int:
    """Return the first token of prompt and response whose choices no engine has reported."""
    begun = request.begun
    if begun is None:
        return request.experts_start
    told = begun.indexer_topk if begun.routed_experts is None else begun.routed_experts
    assert told is not None, f"{request} was begun without its experts"
    return request.experts_start + len(told)


def _make_empty_sample(request: Request) -> Sample:
    return Sample(request.prompt, request.sample_index, (), (), "", (), "")
