"""The options that both environments with a search share, and the search itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.agents.environments.search_rewards import SCORES
from mcore_rl.process.server_keys import read_search_url, read_secret, split_key
from mcore_rl.services.search.client import SearchClient
from mcore_rl.services.search.layout import Hit, split_title

PASSAGE = "Doc {rank}(Title: {title}) {text}\n"
"""As Search-R1 shows passages, so that its models read what they were trained on."""


@dataclass(frozen=True)
class SearchOptions:
    """Where a search goes, and what is shown of its results.

    url          of a server's /retrieve; empty: of the search server that the run starts
    key_file     file with the server's key; empty: it needs none, or it stands in the url
    topk         passages of a search
    deadline_s   for a search; a server that is away or busy is asked again until then
    passage      how a passage is shown: {rank}, {title}, {text}, {contents}
    passage_len  characters of a passage; 0: any number
    """

    url: str = ""
    key_file: str = ""
    topk: int = 3
    deadline_s: float = 60.0
    passage: str = PASSAGE
    passage_len: int = 0

    def __post_init__(self) -> None:
        self.client()
        if self.topk < 1 or self.passage_len < 0:
            raise ValueError(
                f"topk is {self.topk}, passage_len {self.passage_len}: at least 1 and 0"
            )
        _check_format("passage", self.passage, _passage_fields(Hit({"contents": ""}, 0.0), 1))

    def client(self) -> SearchClient:
        """Return the client of the server; ValueError if none is named, or its key is not there."""
        url = self.url or read_search_url()
        if not url:
            raise ValueError(
                "url is empty, and the run starts no search server: give the /retrieve of one that"
                " runs, or have the run start one (search.index=<folder>)"
            )
        address, key = split_key(url)
        if self.key_file:
            key = read_key(self.key_file)
        return SearchClient(address, key, self.deadline_s)


def check_score(score: str) -> None:
    """Raise ValueError if there is no such score."""
    if score not in SCORES:
        raise ValueError(f"score is {score!r}: one of {', '.join(SCORES)}")


def _check_format(option: str, text: str, fields: dict[str, object]) -> None:
    try:
        text.format(**fields)
    except (KeyError, IndexError, ValueError) as error:
        names = ", ".join(f"{{{name}}}" for name in fields)
        raise ValueError(
            f"{option} is {text!r}, which cannot be filled ({error!r}): it may have {names}"
        ) from None


def check_information(text: str) -> None:
    """Raise ValueError if a text around results cannot be filled with them."""
    _check_format("information", text, {"passages": ""})
    if "{passages}" not in text:
        raise ValueError(f"information is {text!r}: it needs {{passages}}, where the results go")


def read_key(path: str) -> str:
    """Return the key in a file. Raises ValueError if it cannot be read, or others may read it."""
    return read_secret(Path(path), f"key_file is {path!r}")


class Searcher:
    """Searches for an episode, and counts."""

    def __init__(self, options: SearchOptions) -> None:
        self._options = options
        self._client = options.client()
        self.num_searches = 0
        self.num_empty = 0

    def show(self, query: str) -> str:
        """Search, and return the passages as the policy sees them.

        Raises SearchUnavailableError if the server does not answer in time.
        """
        options = self._options
        hits = self._client.retrieve([query], options.topk)[0]
        self.num_searches += 1
        self.num_empty += not hits
        return show_passages(hits, options.passage, options.passage_len)

    @property
    def metrics(self) -> dict[str, float]:
        """Searches so far, and those that found nothing."""
        return {"searches": float(self.num_searches), "searches_empty": float(self.num_empty)}


def show_passages(hits: Sequence[Hit], passage: str, passage_len: int = 0) -> str:
    """Return the text of hits, each in the form `passage`; see SearchOptions."""
    shown = []
    for rank, hit in enumerate(hits, start=1):
        fields = _passage_fields(hit, rank)
        if passage_len:
            fields["text"] = str(fields["text"])[:passage_len]
            fields["contents"] = str(fields["contents"])[:passage_len]
        shown.append(passage.format(**fields))
    return "".join(shown).strip()


def _passage_fields(hit: Hit, rank: int) -> dict[str, object]:
    title, text = split_title(hit.document)
    contents = hit.document.get("contents", "")
    return {"rank": rank, "title": title, "text": text, "contents": contents}
