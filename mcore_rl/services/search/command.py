"""`mcore-rl search`: builds an index, serves it or a web search, and asks."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.process.server_keys import read_key_file
from mcore_rl.services.search.client import SearchClient
from mcore_rl.services.search.layout import (
    METHODS,
    EncoderOptions,
    Hit,
    IndexOptions,
    name_shard_folder,
    split_title,
)

if TYPE_CHECKING:
    from mcore_rl.services.search.index import Retriever
    from mcore_rl.services.search.methods import DenseShards


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Give the command its subcommands build, serve and query."""
    kinds = command.add_subparsers(required=True, metavar="kind")
    _add_build(kinds)
    _add_serve(kinds)
    _add_query(kinds)


def _add_build(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "index a corpus; a build that was interrupted goes on where it was"
    build = kinds.add_parser("build", help=text, description=text)
    build.add_argument(
        "--corpus", type=Path, required=True, help='JSON lines: {"id": ..., "contents": ...}'
    )
    build.add_argument("--out", type=Path, required=True, help="folder of the index")
    build.add_argument(
        "--shard-len",
        type=int,
        default=IndexOptions.shard_len,
        help="passages at a time; memory grows with it (%(default)s)",
    )
    dense = build.add_argument_group("vectors besides words (pip install faiss-cpu)")
    dense.add_argument("--encoder", default="", help="HuggingFace model; without, words only")
    dense.add_argument("--pooling", default="mean", help="mean or cls (%(default)s)")
    dense.add_argument("--max-len", type=int, default=256, help="tokens of a text (%(default)s)")
    dense.add_argument("--query-prefix", default="", help='such as "query: "')
    dense.add_argument("--passage-prefix", default="", help='such as "passage: "')
    build.set_defaults(run=run_build)


def _add_serve(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "answer POST /retrieve from an index, or from the web, until Ctrl-C"
    serve = kinds.add_parser("serve", help=text, description=text)
    _add_sources(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="0: any (%(default)s)")
    serve.add_argument(
        "--key-file", type=Path, help="file of mode 600 with the key that requests must bring"
    )
    serve.add_argument("--threads", type=int, default=4, help="requests at a time (%(default)s)")
    serve.add_argument(
        "--queue-len", type=int, default=256, help="requests at most; more get 429 (%(default)s)"
    )
    serve.add_argument("--deadline-s", type=float, default=60.0, help="of a request (%(default)s)")
    serve.add_argument("--topk", type=int, default=3, help="if a request says none (%(default)s)")
    serve.add_argument("--ask", default="", metavar="QUERY", help="ask this once the server is up")
    serve.add_argument("--once", action="store_true", help="stop after the answer")
    serve.set_defaults(run=run_serve)


def _add_query(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "print the best passages of an index, or of a server"
    query = kinds.add_parser("query", help=text, description=text)
    query.add_argument("query")
    _add_sources(query)
    query.add_argument("--url", default="", help="of a server's /retrieve, instead of an index")
    query.add_argument("--key-file", type=Path, help="file with the server's key")
    query.add_argument("--topk", type=int, default=3, help="passages (%(default)s)")
    query.add_argument("--json", action="store_true", help="one JSON object a passage")
    query.set_defaults(run=run_query)


def _add_sources(command: argparse.ArgumentParser) -> None:
    command.add_argument("--index", type=Path, help="folder of an index")
    command.add_argument("--method", choices=METHODS, default="bm25", help="(%(default)s)")
    command.add_argument("--verify", action="store_true", help="check every byte of the index")
    web = command.add_argument_group("the web instead of an index")
    web.add_argument("--web", default="", metavar="URL", help="service, or serper for serper.dev")
    web.add_argument("--web-key-file", type=Path, help="file of mode 600 with its key")
    web.add_argument("--web-results", default="organic", help="list of results (%(default)s)")
    web.add_argument("--record", type=Path, help="keep answers in this file, and use those there")
    web.add_argument("--replay", type=Path, help="answer from this file alone")


def run_build(args: argparse.Namespace) -> None:
    from mcore_rl.services.search.build import Encode, build_index
    from mcore_rl.services.search.methods import Encoder, build_dense, refuse_missing_faiss

    encoder = None
    encode: Encode | None = None
    if args.encoder:
        encoder = EncoderOptions(
            args.encoder, args.pooling, args.max_len, args.query_prefix, args.passage_prefix
        )
        refuse_missing_faiss()
        encode = partial(build_dense, Encoder(encoder))
    with _progress() as report:
        options = IndexOptions(args.shard_len, encoder)
        num_passages = build_index(args.corpus, args.out, options, encode, report)
    print(f"{num_passages} passages of {args.corpus} are indexed in {args.out}")


class _progress:
    """A progress bar over the bytes of the corpus, on stderr."""

    def __enter__(self) -> Callable[[int, int], None]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        self._bar = Progress(
            "indexing",
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("indexing", total=None)
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def run_serve(args: argparse.Namespace) -> None:
    from mcore_rl.services.search.server import ServerOptions, serve

    if args.once and not args.ask:
        raise ValueError("--once ends after the answer to a query: give --ask")
    options = ServerOptions(
        host=args.host,
        port=args.port,
        key=read_key_file(args.key_file) if args.key_file else "",
        threads=args.threads,
        queue_len=args.queue_len,
        deadline_s=args.deadline_s,
        topk=args.topk,
    )
    retriever = open_retriever(args)

    def announce(url: str) -> bool:
        size = f" over {retriever.num_passages} passages" if retriever.num_passages else ""
        print(f"serving {retriever.name}{size} at {url}", flush=True)
        if args.ask:
            client = SearchClient(url, options.key, options.deadline_s)
            show(client.retrieve([args.ask], args.topk)[0], as_json=False)
        return not args.once

    asyncio.run(serve(retriever, options, announce))


def run_query(args: argparse.Namespace) -> None:
    if args.url:
        key = read_key_file(args.key_file) if args.key_file else ""
        found = SearchClient(args.url, key).retrieve([args.query], args.topk)[0]
    else:
        found = open_retriever(args).retrieve([args.query], args.topk)[0]
    show(found, as_json=args.json)


def show(hits: Sequence[Hit], *, as_json: bool) -> None:
    """Print hits, the best first."""
    for rank, hit in enumerate(hits, start=1):
        if as_json:
            print(json.dumps({"document": hit.document, "score": hit.score}))
            continue
        title, text = split_title(hit.document)
        print(f"{rank}. {title} (id {hit.document.get('id')}, score {hit.score:.3f})\n   {text}")
    if not hits and not as_json:
        print("nothing was found", file=sys.stderr)


def open_retriever(args: argparse.Namespace) -> "Retriever":
    """Return the index or the web search that the arguments name.

    Raises ValueError if they name none or both, or if what they name cannot be opened.
    """
    is_web = bool(args.web or args.replay)
    if is_web == bool(args.index):
        raise ValueError("give --index, or --web or --replay for the web: one of them")
    if is_web:
        return _open_web(args)
    from mcore_rl.services.search.index import PassageIndex, verify

    if args.verify:
        verify(args.index)
    vectors = None if args.method == "bm25" else _open_vectors(args.index, args.method)
    return PassageIndex(args.index, args.method, vectors)


def _open_web(args: argparse.Namespace) -> "Retriever":
    from mcore_rl.services.search.replay import Recording, WebOptions, WebSearch

    if args.record and args.replay:
        raise ValueError("--record and --replay: give one of them")
    path = args.record or args.replay
    recording = Recording(path, "record" if args.record else "replay") if path else None
    url = WebOptions.url if args.web in ("", "serper") else args.web
    key = read_key_file(args.web_key_file) if args.web_key_file else ""
    return WebSearch(WebOptions(url=url, key=key, results=args.web_results), recording)


def _open_vectors(index: Path, method: str) -> "DenseShards":
    from mcore_rl.services.search.index import read_manifest, read_options
    from mcore_rl.services.search.methods import DenseShards, Encoder, refuse_missing_faiss

    encoder = read_options(index).encoder
    if encoder is None:
        raise ValueError(
            f"--method={method}: {index} was built without --encoder, so it has no vectors: use"
            " --method=bm25, or build another index with --encoder"
        )
    refuse_missing_faiss()
    num_shards = len(read_manifest(index)["shards"])
    folders = [name_shard_folder(index, i) / "dense" for i in range(num_shards)]
    return DenseShards(Encoder(encoder), folders)
