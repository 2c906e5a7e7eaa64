"""Teaches layers for multi-token prediction (MTP) beside the policy (train.mtp_loss).

    decoder -> hidden states ----> output layer -> logits -> the policy's loss ---+
                    |                                                              +-> backward
                    +- detached -> MTP layers -> output layer, detached -> loss ---+

The loss is the cross-entropy of the tokens two and more ahead (DeepSeek-V3, arXiv:2412.19437,
equations 21 to 25), taken where the policy is trained on them. Hidden states, embedding and output
layer have no gradient of it, so the policy's is bit for bit that without MTP layers.

A draft is accepted by greedy decoding where the layer's best token is the policy's.

Axes: T local tokens, R those that are scored, H hidden size, V vocabulary of a tensor-parallel
rank, D MTP layers, M tokens of the whole micro-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor

from mcore_rl.device import device
from mcore_rl.train.logprobs import OutputRows, VocabParallelSoftmax, vocab_parallel_logprobs
from mcore_rl.train.mtp.ahead import DraftTargets, count_targets, find_draft_targets
from mcore_rl.train.packing import RankBatch
from mcore_rl.types import TrainBatch
from mcore_rl.weights.models.mtp import TRAINED
from mcore_rl.weights.models.table import HfConfig

READ_BY_LAYERS = (
    *("attention_mask", "padding_mask", "packed_seq_params"),
    *("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"),
)
"""Arguments of the decoder that MTP layers are given, too."""


class MtpLoss:
    """The MTP layers of a model in training; without any on this rank it takes part in sums."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        num_layers: int,
        coef: float,
        output_rows: OutputRows,
    ) -> None:
        """chunks        the model's, before DDP wraps them
        num_layers    MTP layers, which the last chunk has
        coef          weight of the loss (train.mtp_loss)
        output_rows   of these chunks
        """
        self._num_layers = num_layers
        self._coef = coef
        self._output_rows = output_rows
        self._first: Any = chunks[0] if chunks[0].pre_process else None
        self._last: Any = chunks[-1] if chunks[-1].post_process else None
        self._seen: tuple[Tensor, dict[str, Any]] | None = None
        self._is_learning = False
        self._counts_D = torch.zeros(num_layers, dtype=torch.float64, device=device())
        self._sums_D2 = torch.zeros(num_layers, 2, dtype=torch.float64, device=device())
        """Losses of each layer's predictions, and how many of these would be accepted."""
        self._embedding: Any = None
        """The embedding of tokens ahead, on the last stage while a step is open."""
        if self._last is not None:
            self._last.decoder.register_forward_hook(self._see, with_kwargs=True)

    @property
    def reach(self) -> int:
        """Return how far from a token the last layer predicts."""
        return self._num_layers + 1

    def name_targets(self, batch: TrainBatch, own: RankBatch) -> RankBatch:
        """Return a rank's part of a micro-batch with what MTP layers learn of it."""
        return replace(own, drafts=find_draft_targets(batch, own, self._num_layers))

    def begin(self, batches: Sequence[RankBatch]) -> None:
        """Open a step on these micro-batches; a collective over all ranks."""
        targets = [batch.drafts for batch in batches if batch.drafts is not None]
        assert len(targets) == len(batches), "a micro-batch without targets of MTP layers"
        counts = torch.tensor(count_targets(targets), dtype=torch.float64)
        self._counts_D = counts.to(device())
        dist.all_reduce(
            self._counts_D, group=ps.get_data_parallel_group(with_context_parallel=True)
        )
        self._sums_D2.zero_()
        self._bring_embedding()
        self._is_learning = True

    def learn(self, batch: RankBatch, logits_RV: Tensor, softmax: VocabParallelSoftmax) -> Tensor:
        """Return the loss on the micro-batch that the last chunk just ran on, a scalar.

        It is this rank's share of the step's loss, as the policy's is.

        logits_RV   the policy's, of RankBatch.scored_R
        softmax     of both
        """
        assert self._seen is not None and batch.drafts is not None, "no hidden states were seen"
        hidden_T1H, of_decoder = self._seen
        self._seen = None
        hidden_T1H = hidden_T1H.detach().requires_grad_()
        choices_M = self._list_choices(batch.drafts, logits_RV, softmax)
        loss = torch.zeros((), device=hidden_T1H.device)
        layers = zip(self._last.mtp.layers, batch.drafts.layers, strict=True)
        for number, (layer, ahead) in enumerate(layers):
            with torch.no_grad():
                ahead_T1H = self._embedding(ahead.inputs_T[None], None)
            hidden_T1H = layer(hidden_T1H, ahead_T1H, **of_decoder)
            draft_RV = self._score(hidden_T1H, ahead.rows_R)
            logprobs_R, _ = vocab_parallel_logprobs(draft_RV, ahead.labels_R, softmax)
            total = -torch.where(ahead.learns_R, logprobs_R, 0.0).sum()
            is_accepted_R = choose_tokens(draft_RV, softmax) == choices_M[ahead.targets_R]
            num_accepted = (is_accepted_R & ahead.learns_R).sum()
            self._sums_D2[number] += torch.stack([total.detach().double(), num_accepted.double()])
            loss = loss + total / self._counts_D[number].clamp(min=1).float()
        return loss * (self._coef / self._num_layers)

    def end(self) -> dict[str, float]:
        """Close the step and return its metrics, means over layers; a collective over all ranks."""
        self._is_learning = False
        self._embedding = None
        sums_D2 = self._sums_D2.clone()
        dist.all_reduce(sums_D2)
        # Tensor-parallel ranks compute the same.
        sums_D2 /= ps.get_tensor_model_parallel_world_size()
        loss, accepted = (sums_D2 / self._counts_D.clamp(min=1)[:, None]).mean(0).tolist()
        return {"mtp/loss": loss, "mtp/acceptance": accepted}

    def _see(self, _: Any, __: Any, given: dict[str, Any], hidden_T1H: Tensor) -> None:
        """Keep what the decoder gave and was given, if a step is open."""
        if self._is_learning and torch.is_grad_enabled():
            self._seen = hidden_T1H, {name: given.get(name) for name in READ_BY_LAYERS}

    def _score(self, hidden_T1H: Tensor, rows_R: Tensor) -> Tensor:
        """Return the logits of some tokens by the model's output layer, which gets no gradient."""
        weight = self._last.output_layer.weight
        if self._last.share_embeddings_and_output_weights:
            weight = self._last.shared_embedding_or_output_weight()
        with self._output_rows.choose(rows_R):
            logits_R1V, _ = self._last.output_layer(hidden_T1H, weight=weight.detach())
        return logits_R1V[:, 0]

    @torch.no_grad()
    def _list_choices(
        self, targets: DraftTargets, logits_RV: Tensor, softmax: VocabParallelSoftmax
    ) -> Tensor:
        """Return the policy's best token in place of each of the micro-batch, int64 [M].

        It is -1 where no rank has logits. Collective over context-parallel ranks.
        """
        nowhere = targets.num_tokens
        choices_M = torch.full((nowhere + 1,), -1, dtype=torch.int64, device=logits_RV.device)
        place_R = targets.scored_targets_R
        place_R = torch.where(place_R >= 0, place_R, nowhere)
        choices_M[place_R] = choose_tokens(logits_RV, softmax)
        group = ps.get_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(choices_M, op=dist.ReduceOp.MAX, group=group)
        return choices_M[:nowhere]

    @torch.no_grad()
    def _bring_embedding(self) -> None:
        """Make the embedding that MTP layers read: with several stages a copy of the first one's.

        A collective over the first and the last stage.
        """
        if self._first is not None:
            self._embedding = self._first.embedding
        elif self._last is not None:
            self._embedding = _make_embedding(self._last)
        if ps.get_pipeline_model_parallel_world_size() == 1 or self._embedding is None:
            return
        group = ps.get_embedding_group(check_initialized=False)
        weight = self._embedding.word_embeddings.weight.detach()
        dist.broadcast(weight, dist.get_process_group_ranks(group)[0], group=group)


@torch.no_grad()
def choose_tokens(logits_RV: Tensor, softmax: VocabParallelSoftmax) -> Tensor:
    """Return the token with the largest logit, int64 [R]; the lowest of several. A collective."""
    num_real = softmax.num_real(logits_RV.shape[-1])
    first = softmax.group.rank() * logits_RV.shape[-1]
    best_R = logits_RV.new_full(logits_RV.shape[:1], float("-inf"), dtype=torch.float64)
    token_R = torch.zeros_like(best_R)
    if num_real:
        own_R, column_R = logits_RV[:, :num_real].max(-1)
        best_R, token_R = own_R.double(), (column_R + first).double()
    if softmax.group.size() == 1:
        return token_R.long()
    both_2R = torch.stack([best_R, token_R])
    of_ranks = [torch.empty_like(both_2R) for _ in range(softmax.group.size())]
    dist.all_gather(of_ranks, both_2R, group=softmax.group)
    best_KR, token_KR = torch.stack(of_ranks, 1)
    return token_KR.gather(0, best_KR.argmax(0, keepdim=True))[0].long()


def _make_embedding(chunk: Any) -> LanguageModelEmbedding:
    """Return an embedding like that of the first stage, whose weights are to be filled."""
    made = LanguageModelEmbedding(
        config=chunk.config,
        vocab_size=chunk.vocab_size,
        max_sequence_length=chunk.max_sequence_length,
        position_embedding_type=chunk.position_embedding_type,
    )
    return made.cuda().requires_grad_(False)


def make_mtp_loss(
    chunks: Sequence[torch.nn.Module], hf_config: HfConfig, coef: float, output_rows: OutputRows
) -> MtpLoss | None:
    """Return the MTP layers of a model that is built from `hf_config`; None: none are trained."""
    num_layers = hf_config.get(TRAINED, 0)
    return MtpLoss(chunks, num_layers, coef, output_rows) if num_layers else None
