"""Measures the search index: build, queries, memory, and whether it finds what it shall.

Passages have words drawn by rank as Zipf has it; among them are those of a generated encyclopedia,
whose questions give recall@3: both passages of a question are among the three best of the queries
that ask for them. At a smaller size the same words go through the index and through the package
bm25s as it comes, SQLite's FTS5 and Tantivy. Each number comes from a process of its own. The last
line is JSON.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mcore_rl.services.search.build import build_index
from mcore_rl.services.search.index import PassageIndex
from mcore_rl.services.search.layout import IndexOptions, read_lines
from mcore_rl.services.search.methods import words_of
from mcore_rl.tasks.search_questions import make_encyclopedia, query_of, split_questions
from search_rivals import RIVALS, install_tantivy

DEADLINE_S = 7200.0
VOCABULARY = 200_000
MEAN_LEN = 60
"""Words of a passage, on average."""
QUERY_LEN = 6
TOPK = 3
BATCH = 10_000


def main() -> None:
    args = parse_arguments()
    if args.measure:
        print(json.dumps(MEASURES[args.measure](args)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        results = {"passages": args.passages, **at_size(args, Path(temporary), args.passages)}
    if args.rivals:
        results |= {"rival_passages": args.rival_passages, "rivals": compare(args)}
    print(json.dumps(results))
    if results["recall_at_3"] < 0.95:
        sys.exit(f"recall@3 is {results['recall_at_3']:.3f}, below 0.95")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument(
        "--rivals", nargs="*", choices=tuple(RIVALS), default=tuple(RIVALS), help="other engines"
    )
    parser.add_argument("--rival-passages", type=int, default=100_000, help="of the comparison")
    parser.add_argument("--seconds", type=float, default=10.0, help="of queries")
    parser.add_argument("--shard-len", type=int, default=IndexOptions.shard_len)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=tuple(MEASURES), help=argparse.SUPPRESS)
    return parser.parse_args()


def at_size(args: argparse.Namespace, folder: Path, num_passages: int) -> dict[str, Any]:
    began_s = time.monotonic()
    write_corpus(folder / "corpus.jsonl", num_passages)
    print(f"{num_passages:,} passages are written after {time.monotonic() - began_s:.0f} s")
    results = {name: run(args, name, folder) for name in ("build", "query")}
    for name, numbers in results.items():
        print(f"{name}: {numbers}")
    return {**results["build"], **results["query"]}


def compare(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the figures of this index and of the others, over the same passages and queries."""
    if "tantivy" in args.rivals:
        install_tantivy()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        figures = {"ours": at_size(args, folder, args.rival_passages)}
        for name in args.rivals:
            figures[name] = run(args, name, folder)
            print(f"{name}: {figures[name]}")
    kept = ("build_s", "build_peak_mib", "queries_per_s", "recall_at_3")
    return {name: {kind: found[kind] for kind in kept} for name, found in figures.items()}


def run(args: argparse.Namespace, measure: str, folder: Path) -> dict[str, Any]:
    command = [
        *(sys.executable, __file__, "--measure", measure, "--folder", str(folder)),
        *("--seconds", str(args.seconds), "--shard-len", str(args.shard_len)),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    if done.returncode:
        sys.exit(f"{measure} ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def random_passages(num: int, seed: int) -> Iterator[list[str]]:
    """Yield the words of passages."""
    rng = np.random.default_rng(seed)
    words = np.array([f"w{i:x}" for i in range(VOCABULARY)])
    weights = 1.0 / np.arange(1, VOCABULARY + 1)
    shares = np.cumsum(weights / weights.sum())
    for start in range(0, num, BATCH):
        lengths = rng.integers(MEAN_LEN // 2, MEAN_LEN * 3 // 2, min(BATCH, num - start))
        ranks = np.searchsorted(shares, rng.random(lengths.sum())).clip(max=VOCABULARY - 1)
        drawn = words[ranks].tolist()
        stop = 0
        for length in lengths.tolist():
            yield drawn[stop : stop + length]
            stop += length


def write_corpus(path: Path, num_passages: int) -> None:
    """Write random passages, and spread those of the encyclopedia over them."""
    known = make_encyclopedia(seed=0).passages()
    every = max(num_passages // len(known), 1)
    with path.open("w") as file:
        for i, words in enumerate(random_passages(num_passages, seed=0)):
            if i % every == 0 and known:
                file.write(json.dumps(known.pop()) + "\n")
            file.write(json.dumps({"id": i, "contents": f"{words[0]}\n{' '.join(words)}"}) + "\n")
        file.writelines(json.dumps(row) + "\n" for row in known)


def measure_build(args: argparse.Namespace) -> dict[str, Any]:
    began_s = time.monotonic()
    options = IndexOptions(args.shard_len)
    build_index(args.folder / "corpus.jsonl", args.folder / "index", options, None)
    took_s = time.monotonic() - began_s
    files = [path for path in (args.folder / "index").rglob("*") if path.is_file()]
    return {
        "build_s": took_s,
        "build_peak_mib": peak_mib(),
        "index_mib": sum(path.stat().st_size for path in files) / 2**20,
    }


def measure_query(args: argparse.Namespace) -> dict[str, Any]:
    index = PassageIndex(args.folder / "index")

    def retrieve(query: str) -> list[Any]:
        return [hit.document["id"] for hit in index.retrieve([query], TOPK)[0]]

    return {
        "queries_per_s": count_queries(retrieve, args.seconds),
        "recall_at_3": recall(retrieve),
        "query_private_mib": psutil.Process().memory_full_info().uss / 2**20,
    }


def measure_rival(args: argparse.Namespace) -> dict[str, Any]:
    """Build and ask the engine that `--measure` names."""
    folder = args.folder / args.measure
    folder.mkdir()
    began_s = time.monotonic()
    ids: list[Any] = []

    def read_passages() -> Iterator[list[str]]:
        for line in read_lines(args.folder / "corpus.jsonl"):
            ids.append(line.row["id"])
            yield words_of(line.row["contents"])

    ask = RIVALS[args.measure](read_passages(), folder)
    build_s = time.monotonic() - began_s

    def retrieve(query: str) -> list[Any]:
        return [ids[number] for number in ask(words_of(query), TOPK)]

    return {
        "build_s": build_s,
        "build_peak_mib": peak_mib(),
        "queries_per_s": count_queries(retrieve, args.seconds),
        "recall_at_3": recall(retrieve),
    }


def count_queries(retrieve: Callable[[str], object], seconds: float) -> float:
    """Return the queries a second that `retrieve` answers, one after another."""
    queries = make_queries()
    for query in queries[:20]:
        retrieve(query)
    num_done, began_s = 0, time.monotonic()
    while (took_s := time.monotonic() - began_s) < seconds:
        retrieve(queries[num_done % len(queries)])
        num_done += 1
    return num_done / took_s


def make_queries() -> list[str]:
    """Return queries of words from passages that the corpus does not have."""
    rng = random.Random(1)
    return [
        " ".join(rng.sample(words, min(QUERY_LEN, len(words))))
        for words in random_passages(1000, seed=1)
    ]


def recall(retrieve: Callable[[str], list[Any]]) -> float:
    """Return the share of questions whose passages are both found."""
    book = make_encyclopedia(seed=0)
    questions = split_questions(book, random.Random(1))[1][:256]
    num_found = 0
    for question in questions:
        hops = book.hops(question)
        num_found += all(
            f"{person}/{kind}" in retrieve(query_of(kind, person)) for kind, person in hops
        )
    return num_found / len(questions)


def peak_mib() -> float:
    """Return the highest resident memory since this program began, not that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


MEASURES = {
    "build": measure_build,
    "query": measure_query,
    **dict.fromkeys(RIVALS, measure_rival),
}

if __name__ == "__main__":
    main()
