"""Search engines beside which benchmarks/search.py measures ours: bm25s itself, SQLite, Tantivy.

Each gets the words that our index counts, so all search the same. An engine writes an index into a
folder, and answers a query with the numbers of the best passages.
"""

import sqlite3
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

from quiet_command import ROOT
from rival_packages import install_once, pip_install

Words = list[str]
Ask = Callable[[Words, int], list[int]]
"""(words of a query, how many passages) -> numbers of the best ones."""
_SITE = ROOT / "benchmarks" / ".search"


def build_bm25s(passages: Iterable[Words], folder: Path) -> Ask:
    """Use the package bm25s as its documentation does, in memory."""
    import bm25s

    index = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    index.index(list(passages), show_progress=False)

    def ask(words: Words, num: int) -> list[int]:
        known = [word for word in words if word in index.vocab_dict]
        if not known:
            return []
        found, _ = index.retrieve([known], k=num, show_progress=False, n_threads=0)
        return found[0].tolist()

    return ask


def build_sqlite(passages: Iterable[Words], folder: Path) -> Ask:
    """Use SQLite's FTS5 with its own BM25; passages that have any of the words are ranked."""
    database = sqlite3.connect(folder / "passages.sqlite")
    database.execute("create virtual table passages using fts5(words, content='', detail=full)")
    rows = ((i, " ".join(words)) for i, words in enumerate(passages))
    database.executemany("insert into passages(rowid, words) values (?, ?)", rows)
    database.execute("insert into passages(passages) values ('optimize')")
    database.commit()

    def ask(words: Words, num: int) -> list[int]:
        query = " OR ".join(f'"{word}"' for word in words)
        text = "select rowid from passages where passages match ? order by rank limit ?"
        return [row for (row,) in database.execute(text, (query, num))]

    return ask


def build_tantivy(passages: Iterable[Words], folder: Path) -> Ask:
    """Use Tantivy, an engine in Rust with Lucene's structure, on one thread."""
    sys.path.insert(0, str(_SITE))
    import tantivy  # pyright: ignore[reportMissingImports]

    schema = tantivy.SchemaBuilder()
    schema.add_text_field("words", tokenizer_name="whitespace", index_option="freq")
    schema.add_integer_field("number", stored=True)
    schema = schema.build()
    index = tantivy.Index(schema, path=str(folder))
    writer = index.writer(num_threads=1)
    for i, words in enumerate(passages):
        writer.add_document(tantivy.Document(words=" ".join(words), number=i))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    searcher = index.searcher()

    def ask(words: Words, num: int) -> list[int]:
        terms = (tantivy.Query.term_query(schema, "words", word) for word in words)
        query = tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])
        hits = searcher.search(query, num).hits
        return list(chain.from_iterable(searcher.doc(place)["number"] for _, place in hits))

    return ask


def install_tantivy() -> None:
    requirements = ROOT / "requirements" / "bench_search.txt"
    arguments = ["--upgrade", "--target", str(_SITE), "-r", str(requirements)]
    install_once(_SITE, requirements.read_text(), lambda: pip_install(sys.executable, *arguments))


RIVALS: dict[str, Callable[[Iterable[Words], Path], Ask]] = {
    "bm25s": build_bm25s,
    "sqlite": build_sqlite,
    "tantivy": build_tantivy,
}
