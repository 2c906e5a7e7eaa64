"""Stage "step": the training loop on one device, with a stand-in engine in a second process.

Sampling, rewards, advantages, log-probs, optimizer step and weight sync are those of a run; only
SGLang and Ray are missing. The stand-in runs transformers: it samples, scores, and takes weights as
an engine's rank does, over the real link. On a GPU the weights go through memory that both
processes share.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DriftConfig,
    EvalConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from mcore_rl.device import device, has_cuda, has_transformer_engine
from mcore_rl.device.setup import use_torch_modules_on_cuda
from mcore_rl.loops.roles import TokenTrainer
from mcore_rl.process.errors import describe_error
from mcore_rl.process.process_state import wait_killed
from mcore_rl.tools.doctor.check import Check, Figures, Stage, expect, find_own_folder
from mcore_rl.tools.doctor.lone_rank import LoneRank, qwen3_moe
from mcore_rl.tools.doctor.sync_checks import GPU_BUCKET_MIB
from mcore_rl.types import (
    LogprobOptions,
    Prompt,
    Sample,
    StepStats,
    StoredBatch,
    StoredSample,
    TokenScores,
    TrainBatch,
    VersionSpan,
    WeightVersion,
)
from mcore_rl.types.scores import Scores
from mcore_rl.weight_sync.receiver import WeightReceiver
from mcore_rl.weight_sync.wire import Action, Command, Link, Report
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import ModelFlops

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class StandInEngine:
    """The process of one engine; `close` ends it. Calls raise what its process raises."""

    def __init__(self, folder: Path, dtype: str, timeout_s: float, stores: LocalStores) -> None:
        """Build the model of `folder`'s config.json with random weights; `stores` keep samples."""
        self._stores = stores
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
    ) -> list[StoredSample]:
        """Return `num_samples` responses to each prompt; implements roles.Generator."""
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
        return self._stores.keep(samples)

    def note_lost(self, num_samples: int) -> None:
        raise AssertionError(f"{num_samples} samples of this process are lost")

    def take_num_lost(self) -> int:
        return 0

    def measure_engines(self) -> dict[str, float]:
        """Return nothing: nobody looks how long this engine waits."""
        return {}

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


STEPS = 10
LEARNING_RATE: Mapping[bool, float] = {True: 1e-3, False: 1e-2}
"""By whether there is a GPU, whose model is larger."""
TIMEOUT_S = 120.0
LEAST_AGREEMENT: Mapping[bool, float] = {True: 0.1, False: 1e-4}
"""Mean |difference| of log-probs in nats, by whether there is a GPU, where it is in bfloat16."""


class LocalRank:
    """The only rank of a trainer in this process; implements run.roles.trainer.RankCalls."""

    def __init__(self, rank: LoneRank, algorithm: AlgorithmConfig) -> None:
        self._actor = rank.actor
        self._loss = make_policy_loss(algorithm)

    def compute_logprobs(
        self, per_dp: Sequence[Sequence[TrainBatch]], options: LogprobOptions
    ) -> list[list[TokenScores]]:
        """Return the scores of the only data-parallel coordinate."""
        scores = self._actor.compute_logprobs(per_dp[0], options)
        assert scores is not None, "the only rank owns the output"
        return [scores]

    def train_step(
        self, per_dp: Sequence[Sequence[TrainBatch]], *, temperature: float, num_tokens: int
    ) -> StepStats:
        """Take a step on the micro-batches of the only coordinate."""
        stats = self._actor.train_step(
            per_dp[0], self._loss, temperature=temperature, num_tokens=num_tokens
        )
        assert stats is not None, "the only rank owns the output"
        return stats

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Begin a checkpoint."""
        self._actor.save(Path(folder), extra)

    def finish_save(self) -> None:
        """Wait for it."""
        self._actor.finish_save()


class StandInSync:
    """Sends the rank's weights to the stand-in engine; implements roles.WeightSync."""

    def __init__(
        self, rank: LoneRank, engine: StandInEngine, trainer: TokenTrainer, stores: LocalStores
    ) -> None:
        """Link both; `stores` have the samples of probes."""
        from mcore_rl.weight_sync.link_store import LinkStore
        from mcore_rl.weight_sync.sender import WeightSender
        from mcore_rl.weight_sync.wire import Link

        self._engine = engine
        self._trainer = trainer
        self._stores = stores
        self.gb_per_s = 0.0
        """Rate of the last sync."""
        self._sender = WeightSender(*rank.actor.select_served_layout(), 0)
        self._store = LinkStore.serve("127.0.0.1", TIMEOUT_S)
        bucket_bytes = GPU_BUCKET_MIB << 20 if has_cuda() else 1 << 16
        self._link = Link(
            *("engine", "127.0.0.1", self._store.port, self._store.key),
            *(1, 1, bucket_bytes, TIMEOUT_S),
        )
        self._store.keep(self._link)
        engine.begin("connect", self._link)
        for report in (self._sender.connect(self._link), engine.finish()):
            expect(report.error is None, f"{report.rank}: {report.error}")

    def sync(self, version: WeightVersion, probe: StoredBatch) -> Mapping[str, float]:
        """Bring the engine to `version`; both must agree on the first sequences of `probe`."""
        from mcore_rl.batches.stored_batch import select_stored

        return self.sync_first(version, self._stores.assemble(select_stored(probe, range(2))))

    def sync_first(self, version: WeightVersion, probe: TrainBatch) -> Mapping[str, float]:
        """Do as `sync` before there are samples."""
        self._engine.begin("receive", self._link, version)
        sent = self._sender.send(version, ["engine"], TIMEOUT_S)["engine"]
        received = self._engine.finish()
        for report in (sent, received):
            expect(report.error is None, f"{report.rank}: {report.error}")
        difference = self._difference(probe)
        limit = LEAST_AGREEMENT[has_cuda()]
        expect(difference < limit, f"version {version}: log-probs differ by {difference}")
        self.gb_per_s = received.num_bytes / 1e9 / max(received.seconds, 1e-9)
        return {"sync/parity_diff": difference}

    def _difference(self, probe: TrainBatch) -> float:
        from mcore_rl.batches.batch import select, split_by_lens
        from mcore_rl.run.roles.parity_tolerance import EngineDifference

        few = select(probe, range(2))
        options = LogprobOptions(temperature=1.0)
        ours = split_by_lens(self._trainer.compute_logprobs(few, options).logprobs_T, few.lens_N)
        sequences = [ids.tolist() for ids in split_by_lens(few.token_ids_T, few.lens_N)]
        wanted = [own.cpu()[1:] for own in ours]
        masks = [torch.ones(len(own), dtype=torch.bool) for own in wanted]
        return EngineDifference.measure(wanted, self._engine.score(sequences), masks).mean


class Rows:
    """A log that keeps the metrics of each step, also in a file; implements roles.Log."""

    def __init__(self, file: Path) -> None:
        self.by_step: dict[int, dict[str, float]] = {}
        self._file = file

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add to the metrics of a step."""
        self.by_step.setdefault(step, {}).update(metrics)
        with self._file.open("a") as file:
            print(json.dumps({"step": step, **metrics}), file=file)

    def log_samples(
        self, step: int, samples: Sequence[StoredSample], scores: Scores, split: str = "train"
    ) -> None:
        """Drop the samples."""


def count_even_tokens(samples: Sequence[Sample]) -> Scores:
    """Return a reward that a random model can learn within a few steps."""
    shares = [[token % 2 == 0 for token in sample.response_ids] for sample in samples]
    return Scores([sum(share) / len(share) for share in shares])


def _prompts(vocab_size: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for index in range(8):
        ids = torch.randint(4, vocab_size, (8 + index,), generator=generator)
        prompts.append(Prompt(index, tuple(ids.tolist()), (), "random", None))
    return prompts


def pack_as_a_run(model_path: str, parallel: ParallelConfig, train: TrainConfig) -> Any:
    """Return the run.roles.trainer.Packing of a run: by the work of sequences, not their tokens."""
    from mcore_rl.run.roles.trainer import Packing

    return Packing.from_config(parallel, train, ModelFlops.from_facts(ModelFacts.read(model_path)))


def _config(rank: LoneRank) -> Config:
    return replace(
        rank.recipe,
        run=RunConfig(steps=STEPS),
        rollout=RolloutConfig(
            prompts_per_step=8, samples_per_prompt=8, max_response_len=MAX_NEW_TOKENS
        ),
        drift=DriftConfig(routed_experts=False),
        eval=EvalConfig(every_steps=0),
        checkpoint=CheckpointConfig(every_steps=0, asynchronous=False),
    )


def check_grpo() -> Figures:
    """Ten steps of GRPO: engine and trainer agree after each, and the reward rises."""
    from mcore_rl.data.source import ShuffledStream
    from mcore_rl.logs.run_folder import RunFolder
    from mcore_rl.loops.rl import train
    from mcore_rl.loops.roles import Roles
    from mcore_rl.run.roles.advantages import StoredAdvantages
    from mcore_rl.run.roles.local_trainer import LocalTrainer
    from mcore_rl.run.roles.trainer import PackedTokenTrainer

    if not has_transformer_engine():
        use_torch_modules_on_cuda()
    folder = find_own_folder()
    log = Rows(folder / "metrics.jsonl")
    optimizer = OptimizerConfig(lr=LEARNING_RATE[has_cuda()])
    rank = LoneRank(folder / "model", qwen3_moe(), optimizer=optimizer)
    config = _config(rank)
    stores = LocalStores()
    trainer = PackedTokenTrainer(
        LocalRank(rank, config.algorithm),
        RunFolder(folder / "run"),
        packing=pack_as_a_run(config.model.path, config.parallel, config.train),
        temperature=1.0,
        checkpoint=config.checkpoint,
    )
    prompts = _prompts(qwen3_moe()["vocab_size"])
    with closing(StandInEngine(folder / "model", config.model.dtype, TIMEOUT_S, stores)) as engine:
        weights = StandInSync(rank, engine, trainer, stores)
        first = weights.sync_first(WeightVersion(0), rank.batch)
        roles = Roles(
            prompts=ShuffledStream(prompts, 0),
            held_out=[],
            generator=engine,
            reward=lambda samples: count_even_tokens(stores.samples(samples)),
            advantages=StoredAdvantages(
                Advantages(config.algorithm), stores.apply, has_teacher=False
            ),
            trainer=LocalTrainer(trainer, stores),
            weights=weights,
            log=log,
            on_tokens=stores.apply,
        )
        train(config, roles)
    return {**_figures(log, first), "sync_gb_per_s": round(weights.gb_per_s, 2)}


def _figures(log: Rows, first: Mapping[str, float]) -> Figures:
    rows = [log.by_step[step] for step in range(1, STEPS + 1)]
    drift = max(row["logprob_diff/mean"] for row in rows)
    expect(drift < LEAST_AGREEMENT[has_cuda()], f"samples' log-probs differ by {drift}")
    rewards = [row["reward/mean"] for row in rows]
    expect(rewards[-1] > rewards[0], f"rewards {rewards}")
    return {
        "reward_first": round(rewards[0], 3),
        "reward_last": round(rewards[-1], 3),
        "logprob_diff": drift,
        "parity_diff": max(first["sync/parity_diff"], *(row["sync/parity_diff"] for row in rows)),
        "train_s": round(rows[-1]["time/train"], 3),
    }


STEP = Stage(
    "step",
    "steps of GRPO with a stand-in engine",
    (
        Check(
            "GRPO",
            check_grpo,
            deadline_s=400,
            modules=("megatron", "zlib_ng", "transformers", "omegaconf", "rich"),
        ),
    ),
)
