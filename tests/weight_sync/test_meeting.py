"""Ranks of a link meet: each tells its facts once, and all get one roster."""

import torch

from mcore_rl.weight_sync.link_end import await_roster, describe_rank, publish_facts
from mcore_rl.weight_sync.roster import read_machine_id
from mcore_rl.weight_sync.verify import list_sum_kinds
from tests.support.link_ends import HOST, make_link, open_ends, run_ranks


def test_all_ranks_get_one_roster_and_are_introduced_once() -> None:
    store, link = make_link(num_senders=2, num_receivers=2)
    ends = open_ends(link)
    for end in ends:
        publish_facts(end)
    met = run_ranks([lambda end=end: await_roster(end) for end in ends])
    roster = met[0].roster
    assert roster is not None and all(end.roster == roster for end in met)
    assert roster.hosts.expand() == (0, 0, 0, 0)
    assert roster.met[0] == describe_rank(HOST, is_sender=True)
    assert roster.met[3] == describe_rank(HOST, is_sender=False)
    num_keys = store.num_keys
    publish_facts(met[0])
    assert await_roster(met[0]) is met[0]
    assert store.num_keys == num_keys


def test_a_rank_describes_its_machine_and_device() -> None:
    facts = describe_rank(torch.device("cpu"), is_sender=False)
    assert facts.machine == read_machine_id() and facts.gpu == "" and facts.readable_gpus == ()
    assert list(facts.sums) == list(list_sum_kinds(HOST))
    assert not facts.writes and facts.memory == ""
