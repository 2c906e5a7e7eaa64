"""An engine for machines where SGLang cannot be installed: transformers in a process of its own.

It samples, scores, and takes weights as an engine's rank does; the link is the real one.
"""

import re
from collections.abc import Iterable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcore_rl.device import device
from mcore_rl.loops.roles import KeepsSamples
from mcore_rl.process.errors import describe_error
from mcore_rl.process.process_state import wait_killed
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion
from mcore_rl.weight_sync.receiver import WeightReceiver
from mcore_rl.weight_sync.wire import Action, Command, Link, Report

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class StandInEngine(KeepsSamples):
    """The process of one engine; `close` ends it. Calls raise what its process raises."""

    def __init__(self, folder: Path, dtype: str, timeout_s: float) -> None:
        """Build the model of `folder`'s config.json with random weights."""
        context = get_context("spawn")
        self._timeout_s = timeout_s
        self._pipe, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child, str(folder), dtype), daemon=True
        )
        self._process.start()
        child.close()
        self._version = WeightVersion(-1)

    def begin(self, action: Action, link: Link, version: int | None = None) -> None:
        """Have the engine join the link, or receive a version; `finish` returns its report."""
        self._pipe.send(("handle", (Command(link, action, version),)))
        if version is not None:
            self._version = WeightVersion(version)

    def finish(self) -> Report:
        """Return the engine's report on what was begun last."""
        return self._answer()

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        *,
        greedy: bool,
        seed: int,
        for_eval: bool = False,
    ) -> list[Sample]:
        """Return `num_samples` responses to each prompt; plays roles.Generator."""
        assert not for_eval, "this policy is not evaluated"
        token_ids = [prompt.token_ids for prompt in prompts]
        self._pipe.send(("generate", (token_ids, num_samples, greedy, seed)))
        answers = self._answer()
        samples = []
        for prompt, responses in zip(prompts, answers, strict=True):
            for index, (ids, logprobs, is_over) in enumerate(responses):
                span = VersionSpan(0, len(ids), self._version)
                reason = "stop" if is_over else "length"
                samples.append(Sample(prompt, index, ids, logprobs, reason, (span,), str(ids)))
        return samples

    def idle_share(self) -> float:
        """Return 0: nobody looks how long this engine waits."""
        return 0.0

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs of each sequence's tokens but the first, at temperature 1."""
        self._pipe.send(("score", (sequences,)))
        return self._answer()

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        wait_killed(self._process, "the stand-in engine")

    def _answer(self) -> Any:
        if not self._pipe.poll(self._timeout_s):
            raise TimeoutError(f"the stand-in engine did not answer within {self._timeout_s:g} s")
        outcome, value = self._pipe.recv()
        if outcome == "raised":
            raise RuntimeError(f"the stand-in engine raised {value}")
        return value


def _serve(pipe: Connection, folder: str, dtype: str) -> None:
    torch.set_num_threads(1)
    engine = _Engine(folder, dtype)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("returned", getattr(engine, name)(*arguments)))
        except Exception as error:  # goes to the other process
            pipe.send(("raised", describe_error(error)))


MAX_NEW_TOKENS = 16


class _Engine:
    """The model in the engine's process."""

    def __init__(self, folder: str, dtype: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self._model = model.to(device()).eval().requires_grad_(False)
        self._parameters = dict(self._model.named_parameters())
        self._receiver = WeightReceiver()

    def handle(self, command: Command) -> Report:
        return self._receiver.handle(command, 0, self._load_weights, self._parameters)

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        load_weights(self._parameters, weights)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], num_samples: int, greedy: bool, seed: int
    ) -> list[list[tuple[tuple[int, ...], tuple[float, ...], bool]]]:
        """Return (token ids, log-probs, whether it ended by itself) by prompt and sample."""
        torch.manual_seed(seed)
        end = self._model.config.eos_token_id
        answers = []
        for prompt in prompts:
            output = self._model.generate(
                torch.tensor([list(prompt)] * num_samples, device=device()),
                do_sample=not greedy,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=MAX_NEW_TOKENS,
                output_logits=True,
                return_dict_in_generate=True,
            )
            tokens_NT = output.sequences[:, len(prompt) :].cpu()
            logits_NTV = torch.stack(output.logits, 1).float()
            logprobs_NT = logits_NTV.log_softmax(-1).cpu().gather(-1, tokens_NT[..., None])[..., 0]
            answers.append(
                [
                    _cut_at_end(tokens_T.tolist(), logprobs_T.tolist(), end)
                    for tokens_T, logprobs_T in zip(tokens_NT, logprobs_NT, strict=True)
                ]
            )
        return answers

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scored = []
        for sequence in sequences:
            tokens_T = torch.tensor(sequence, device=device())
            logits_TV = self._model(tokens_T[None]).logits[0, :-1].float()
            chosen_T = logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]
            scored.append(chosen_T.tolist())
        return scored


def load_weights(
    parameters: dict[str, nn.Parameter], weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Copy HF tensors into transformers' parameters, which stack the experts of a layer."""
    for name, tensor in weights:
        expert = EXPERT.fullmatch(name)
        if expert is None:
            parameters[name].data.copy_(tensor)
            continue
        module, number, projection = expert[1], int(expert[2]), expert[3]
        if projection == "down":
            parameters[f"{module}.down_proj"].data[number].copy_(tensor)
            continue
        rows = parameters[f"{module}.gate_up_proj"].data[number]
        half = len(rows) // 2
        rows.narrow(0, half if projection == "up" else 0, half).copy_(tensor)


def _cut_at_end(
    tokens: list[int], logprobs: list[float], end: int
) -> tuple[tuple[int, ...], tuple[float, ...], bool]:
    stop = tokens.index(end) + 1 if end in tokens else len(tokens)
    return tuple(tokens[:stop]), tuple(logprobs[:stop]), end in tokens
