"""Says what the controller knows of a group's samples, whose tokens stay in their store.

samples of a prompt  --describe_group-->  GroupFacts  --refer_to_samples-->  StoredSamples
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice

from mcore_rl.batches.episodes import metrics_of
from mcore_rl.batches.shared_prefixes import find_sharing, first_of
from mcore_rl.types import GroupLease, Prompt, RowFacts, Sample, StoredSample, VersionSpan


@dataclass(frozen=True)
class GroupFacts:
    """A group that was sampled: an entry per sample, without its tokens.

    episode_rows, metrics   empty, unless the samples are episodes
    """

    group: int
    response_lens: tuple[int, ...]
    finish_reasons: tuple[str, ...]
    versions: tuple[tuple[VersionSpan, ...], ...]
    has_experts: bool
    episode_rows: tuple[tuple[RowFacts, ...], ...] = ()
    metrics: tuple[Mapping[str, float], ...] = ()
    has_indexer_topk: bool = False
    engines: tuple[tuple[int, ...], ...] = ()


def describe_group(group: int, samples: Sequence[Sample]) -> GroupFacts:
    """Return what the controller needs to know of the samples of one prompt."""
    return GroupFacts(
        group=group,
        response_lens=tuple(sample.response_len for sample in samples),
        finish_reasons=tuple(sample.finish_reason for sample in samples),
        versions=tuple(sample.versions for sample in samples),
        has_experts=_have(samples, "routed_experts"),
        episode_rows=_episode_rows(samples),
        metrics=tuple(metrics_of(s.episode) for s in samples if s.episode is not None),
        has_indexer_topk=_have(samples, "indexer_topk"),
        engines=tuple(sample.engines for sample in samples),
    )


def _have(samples: Sequence[Sample], name: str) -> bool:
    """Return whether all samples, or all rows of episodes, have what engines report as `name`."""
    owners = chain.from_iterable((s,) if s.episode is None else s.episode.rows for s in samples)
    return all(getattr(owner, name) is not None for owner in owners)


def _episode_rows(samples: Sequence[Sample]) -> tuple[tuple[RowFacts, ...], ...]:
    """Return the facts of each episode's rows, numbered through the group; () of other samples."""
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    rows = [row for episode in episodes for row in episode.rows]
    # Placeholders of unlike images are alike, and no model with images shares beginnings.
    known = [row.token_ids[: 0 if row.images else None] for row in rows]
    sharing = find_sharing(known, [first_of(row.is_trained) for row in rows])
    facts = map(
        RowFacts,
        count(),
        [len(row.token_ids) for row in rows],
        [row.num_trained for row in rows],
        sharing.parents,
        sharing.starts,
        [len(row.images) for row in rows],
    )
    return tuple(tuple(islice(facts, len(episode.rows))) for episode in episodes)


def refer_to_samples(prompt: Prompt, lease: GroupLease, facts: GroupFacts) -> list[StoredSample]:
    """Return the samples of a group by reference; their store keeps the group at `lease`."""
    rows = list(zip(facts.response_lens, facts.finish_reasons, facts.versions, strict=True))
    episode_rows = facts.episode_rows or ((),) * len(rows)
    metrics = facts.metrics or ({},) * len(rows)
    engines = facts.engines or ((),) * len(rows)
    return [
        StoredSample(
            *(prompt, i, *row, facts.has_experts, lease, episode_rows[i], metrics[i]),
            has_indexer_topk=facts.has_indexer_topk,
            engines=engines[i],
        )
        for i, row in enumerate(rows)
    ]
