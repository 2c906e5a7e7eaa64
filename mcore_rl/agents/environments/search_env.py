"""Lets a policy search before it answers, by tags in its text or by calling a tool.

search_tags   policy        <search> query </search>
              environment   <information> passages </information>
              policy        <answer> text </answer>, which ends the episode
search_tool   policy        calls the tool; its answer without a call ends the episode

The first pair of tags in an answer counts. An episode with tags is worth the score of its answer,
`format_score` for a wrong one, less the penalties.

Answers are scored by exact match or F1 after both sides are normalized as by Search-R1
(verl/utils/reward_score/qa_em.py) and SQuAD: lower case, no punctuation, no articles, single
spaces.
"""

import asyncio
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.agents.environments.environment import (
    Message,
    Start,
    Step,
    Tool,
    ToolUnavailableError,
    add_text,
    join_texts,
)
from mcore_rl.agents.environments.tools_env import ToolCalls, ToolEpisode, ToolOutcome, call_either
from mcore_rl.process.server_keys import read_search_url, read_secret, split_key
from mcore_rl.services.search.client import MOST_QUERY_LEN, SearchClient
from mcore_rl.services.search.layout import Hit, split_title

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


PASSAGE = "Doc {rank}(Title: {title}) {text}\n"
"""As Search-R1 shows passages, so that its models read what they were trained on."""
INSTRUCTIONS = """\
You may search before you answer: write <search> query </search>, and you are told what was found \
between <information> and </information>. Search as often as you need. Give the final answer, and \
nothing but it, as <answer> text </answer>."""
TOLD_INVALID = (
    "Nothing was done: write one <search> query </search>, or <answer> text </answer> to finish."
)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search for passages about a topic.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what the passages shall be about"}
            },
            "required": ["query"],
        },
    },
}


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation and articles, with single spaces."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def match_exactly(answer: str, truth: str) -> float:
    """Return 1 if the answer is the truth, else 0."""
    return float(normalize(answer) == normalize(truth))


def contains(answer: str, truth: str) -> float:
    """Return 1 if the truth stands somewhere in the answer, else 0."""
    return float(normalize(truth) in normalize(answer))


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of the words' precision and recall, from 0 to 1."""
    said = Counter(normalize(answer).split())
    wanted = Counter(normalize(truth).split())
    num_shared = (said & wanted).total()
    if not num_shared:
        return float(said == wanted)
    return 2 * num_shared / (said.total() + wanted.total())


SCORES: Mapping[str, Callable[[str, str], float]] = {
    "em": match_exactly,
    "f1": f1,
    "contains": contains,
}


def find_best_score(score: str, answer: str, ground_truth: Any) -> float:
    """Return the score of an answer against the best of its truths; 0 if there is none.

    `ground_truth` is a text, a list of them, or {"target": either}, as Search-R1's files have it.
    """
    return max((SCORES[score](answer, truth) for truth in read_truths(ground_truth)), default=0.0)


def read_truths(ground_truth: Any) -> list[str]:
    """Return the right answers of a task."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target")
    if ground_truth is None:
        return []
    if isinstance(ground_truth, str | int | float):
        return [str(ground_truth)]
    return [str(truth) for truth in ground_truth]


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


@dataclass(frozen=True)
class SearchTagsOptions(SearchOptions):
    """How episodes go and what they are worth; url and passages as in SearchOptions.

    instructions     said after the task's messages
    information      what the policy is told after a search, around {passages}
    shows_passages   false: {passages} stay empty, to see what a policy can do without them
    role             who says it to the policy: user or tool
    max_searches     a further one ends the episode; 0: any number
    max_invalid      invalid answers that are told of it; the next ends the episode. An answer is
                     invalid without a pair of tags, or with a query that is too long to be asked
    told_invalid     what they are told
    score            em, f1 or contains
    format_score     of an answer that is wrong
    invalid_penalty  for each invalid answer
    rest_penalty     for each answer with text after its pair of tags
    """

    instructions: str = INSTRUCTIONS
    information: str = "\n\n<information>{passages}</information>\n\n"
    shows_passages: bool = True
    role: str = "user"
    max_searches: int = 0
    max_invalid: int = 2
    told_invalid: str = TOLD_INVALID
    score: str = "em"
    format_score: float = 0.0
    invalid_penalty: float = 0.0
    rest_penalty: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_score(self.score)
        check_information(self.information)
        if self.role not in ("user", "tool"):
            raise ValueError(f"role is {self.role!r}: user or tool")
        if self.max_searches < 0 or self.max_invalid < 0:
            raise ValueError(
                f"max_searches is {self.max_searches}, max_invalid {self.max_invalid}: at least 0"
            )
        for name in ("invalid_penalty", "rest_penalty"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: at least 0, as it is subtracted"
                )


@dataclass(frozen=True)
class Action:
    """The wish of a policy: search, answer, or nothing that can be done (empty kind).

    has_rest   whether text follows the pair of tags
    """

    kind: str
    content: str = ""
    has_rest: bool = False


def find_action(text: str) -> Action:
    """Return the action of an answer: its first pair of tags.

    A query of more than MOST_QUERY_LEN characters, which the server would refuse, is no action.
    """
    found = _ACTION.search(text)
    if found is None or (found[1] == "search" and len(found[2].strip()) > MOST_QUERY_LEN):
        return Action("")
    return Action(found[1], found[2].strip(), bool(text[found.end() :].strip()))


class SearchTagsEnvironment:
    """One episode; its methods run in a thread of their own, where they may wait for the server."""

    def __init__(self, options: SearchTagsOptions) -> None:
        self._options = options
        self._searcher = Searcher(options)
        self._truth: Any = None
        self._num_invalid = 0
        self._num_rests = 0

    def reset(self, task: Mapping[str, Any]) -> Start:
        self._truth = task.get("ground_truth")
        return Start(add_text(task.get("messages") or (), self._options.instructions))

    def step(self, message: Message) -> Step:
        """Search, or end the episode. Raises SearchUnavailableError if the server stays away."""
        options = self._options
        action = find_action(join_texts(message))
        penalty = options.rest_penalty if action.has_rest else 0.0
        self._num_rests += action.has_rest
        if action.kind == "answer":
            score = find_best_score(options.score, action.content, self._truth)
            reward = score if score else options.format_score
            metrics = {**self._metrics(), "right": float(score == 1.0)}
            return Step(reward=reward - penalty, done=True, metrics=metrics)
        if action.kind == "search":
            if self._searcher.num_searches == options.max_searches > 0:
                return Step([], -penalty, True, self._metrics(), "max_turns")
            return self._tell(self._information(action.content), -penalty)
        self._num_invalid += 1
        if self._num_invalid > options.max_invalid:
            return Step([], -options.invalid_penalty, True, self._metrics(), "parse_error")
        return self._tell(options.told_invalid, -options.invalid_penalty)

    def close(self) -> None:
        pass

    def _information(self, query: str) -> str:
        passages = self._searcher.show(query)
        shown = passages if self._options.shows_passages else ""
        return self._options.information.format(passages=shown)

    def _tell(self, text: str, reward: float) -> Step:
        message = {"role": self._options.role, "content": text}
        return Step([message], reward, metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        return {
            **self._searcher.metrics,
            "invalid": float(self._num_invalid),
            "rests": float(self._num_rests),
        }


@dataclass(frozen=True)
class SearchToolOptions(SearchOptions):
    """How episodes go and what they are worth; url and passages as in SearchOptions.

    instructions   said after the task's messages
    score          em, f1 or contains, of what stands in <answer> tags, or of the whole last answer
    format_score   of an answer that is wrong
    max_turns      answers at most; 0: any number
    """

    instructions: str = ""
    score: str = "em"
    format_score: float = 0.0
    max_turns: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_score(self.score)
        if self.max_turns < 0:
            raise ValueError(f"max_turns is {self.max_turns}: at least 0")


class SearchToolEnvironment:
    """One episode with the tool `search`."""

    def __init__(self, options: SearchToolOptions) -> None:
        self._options = options
        self._searcher = Searcher(options)
        # The client ends a call by its own deadline; that of _call is for what it cannot see.
        calls = ToolCalls(self._call, ["search"], options.deadline_s + 10.0, most_len=0)
        self._episode = ToolEpisode(calls, [TOOL], options.max_turns, reward="")
        self._truth: Any = None

    async def reset(self, task: Mapping[str, Any]) -> Start:
        self._truth = task.get("ground_truth")
        return self._episode.start(task, self._options.instructions)

    async def step(self, message: Message) -> Step:
        """Search, or end the episode. SearchUnavailableError or ToolUnavailableError: no answer."""
        step = await self._episode.step(message)
        metrics = {**step.metrics, **self._searcher.metrics}
        if not step.done or step.end_reason:
            return Step(step.messages, step.reward, step.done, metrics, step.end_reason)
        text = join_texts(message)
        action = find_action(text)
        answer = action.content if action.kind == "answer" else text
        score = find_best_score(self._options.score, answer, self._truth)
        metrics["right"] = float(score == 1.0)
        return Step([], score if score else self._options.format_score, True, metrics)

    async def close(self) -> None:
        pass

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        if not isinstance(arguments.get("query"), str) or set(arguments) != {"query"}:
            return ToolOutcome("Error: search takes one text, query", failed=True)
        if (query_len := len(arguments["query"])) > MOST_QUERY_LEN:
            text = f"Error: query has {query_len} characters, at most {MOST_QUERY_LEN} are allowed"
            return ToolOutcome(text, failed=True)
        try:
            async with asyncio.timeout(self._options.deadline_s + 5.0):
                return ToolOutcome(await call_either(self._searcher.show, arguments["query"]))
        except (ValueError, TimeoutError) as error:  # refused, no passages, or no end
            raise ToolUnavailableError(f"the search gives no passages: {error}") from error
