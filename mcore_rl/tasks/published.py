"""Turns published data sets into prompt files: GSM8K, Geometry3K, APPS, TACO and LiveCodeBench.

A source of GSM8K (arXiv:2110.14168) and Geometry3K (arXiv:2105.04165, as hiyouga/geometry3k has it)
is a local folder, or the name of a data set on the Hugging Face hub; the others are files.

GSM8K           question, answer ("... #### 7"); conversations for fine-tuning are written, too
Geometry3K      images, problem ("<image>Find x."), answer
APPS, TACO      question, starter_code, input_output: JSON with inputs, outputs and maybe fn_name
LiveCodeBench   question_content, starter_code, metadata: JSON with func_name,
                public_test_cases, private_test_cases: JSON lists of input, output and testtype;
                private ones may be that JSON as a pickled text, compressed by zlib, in base64
"""

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.data.images.encoded import IMAGE
from mcore_rl.data.rows import Row, load_rows, prompt_row, require, write_parquet
from mcore_rl.rewards.code.calls import CALL_LANGUAGES
from mcore_rl.rewards.code.languages import PROGRAM_LANGUAGES, read_languages

PROGRAM_TASK = "Write a {name} program that reads standard input and prints the answer."
PYTHON_TASK = "Write the Python code of {function}. Complete this:\n```python\n{starter}\n```"
FUNCTION_TASK = (
    "Write the {name} function {function}. In Python it would begin like this:"
    "\n```python\n{starter}\n```"
)
"""Said after a problem; data sets have the beginnings of functions in Python alone."""
ANSWER_FORM = "Give the whole program as one ```{language} block."
MAX_TESTS_BYTES = 1 << 30
"""Bound of the unpacked tests of one LiveCodeBench row."""
GEOMETRY3K_INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."
GEOMETRY3K_SPLITS = (("train", "train"), ("validation", "validation"), ("test", "heldout"))
"""Split there -> name of the file here."""
GEOMETRY3K = "hiyouga/geometry3k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def prepare_code_files(sources: Sequence[str], out_file: Path, language: str = "python") -> None:
    """Write the problems of jsonl or parquet files as the prompt file `out_file`.

    language   of the programs to write, as the sandbox names it

    Rows without tests are left out and counted, and so are those that test a function in a language
    whose functions cannot be called. Raises ValueError naming the row that is malformed, or if no
    problem is left, and for an unknown language.
    """
    [language] = read_languages(language)
    rows: list[dict[str, Any]] = []
    num_untested = 0
    for where, row in load_rows(sources):
        problem = read_problem(row, where, language)
        if problem is None:
            num_untested += 1
            continue
        problem["extra_info"] |= {"split": out_file.stem, "index": len(rows)}
        rows.append(problem)
    if not rows:
        raise ValueError(
            f"{', '.join(sources)}: no problem with tests for programs in {language} in"
            f" {num_untested} rows"
        )
    write_parquet(rows, out_file)
    print(f"{len(rows)} problems in {out_file}, {num_untested} rows without tests left out")


def read_problem(row: Row, where: str, language: str = "python") -> dict[str, Any] | None:
    """Return a row in verl's columns, or None if it has no tests for programs in the language.

    Raises ValueError naming `where` if it is a row of none of the data sets, or malformed.
    """
    if "input_output" in row:
        return _read_apps(row, where, language)
    if "private_test_cases" in row:
        return _read_livecodebench(row, where, language)
    raise ValueError(
        f"{where}: neither a row of APPS or TACO, which has `input_output`, nor of LiveCodeBench,"
        f" which has `private_test_cases`; it has {', '.join(sorted(row))}"
    )


def _read_apps(row: Row, where: str, language: str) -> dict[str, Any] | None:
    if not row["input_output"]:
        return None
    tests = _read_json(row["input_output"], f"{where}, `input_output`")
    inputs, outputs = tests.get("inputs") or [], tests.get("outputs") or []
    if len(inputs) != len(outputs):
        raise ValueError(f"{where}: {len(inputs)} inputs and {len(outputs)} outputs")
    if not inputs:
        return None
    truth: dict[str, Any] = {"inputs": inputs, "outputs": outputs}
    function = tests.get("fn_name")
    if function:
        truth |= {"fn_name": function, "wrapped": all(map(_is_wrapped, outputs))}
    name = row.get("name") or row.get("problem_id") or row.get("url")
    question = require(row, "question", where)
    return _make_problem_row(row, question, truth, language, "apps", name)


def _is_wrapped(output: Any) -> bool:
    return isinstance(output, list) and len(output) == 1


def _read_livecodebench(row: Row, where: str, language: str) -> dict[str, Any] | None:
    public = _read_json(row.get("public_test_cases") or "[]", f"{where}, `public_test_cases`")
    private = _read_private_tests(row["private_test_cases"], f"{where}, `private_test_cases`")
    if not private:
        return None
    metadata = _read_json(row.get("metadata") or "{}", f"{where}, `metadata`")
    kinds = {case["testtype"] for case in [*public, *private]}
    if len(kinds) != 1 or not kinds <= {"stdin", "functional"}:
        raise ValueError(f"{where}: tests of kinds {sorted(kinds)}, not of stdin or functional")
    function = metadata.get("func_name") if kinds == {"functional"} else None
    if kinds == {"functional"} and not function:
        raise ValueError(f"{where}: functional tests, but `metadata` has no func_name")
    truth = _make_tests(private, function, where)
    if public:
        truth["public"] = _make_tests(public, function, where)
    if function:
        truth["fn_name"] = function
    question = require(row, "question_content", where)
    return _make_problem_row(
        row, question, truth, language, "livecodebench", row.get("question_id")
    )


def _make_tests(
    cases: Sequence[Mapping[str, Any]], function: str | None, where: str
) -> dict[str, Any]:
    """Return inputs and outputs; those of a function are JSON, an argument on each line."""
    if not function:
        return {"inputs": [c["input"] for c in cases], "outputs": [c["output"] for c in cases]}
    return {
        "inputs": [[_read_json(t, where) for t in c["input"].split("\n") if t] for c in cases],
        "outputs": [_read_json(c["output"], where) for c in cases],
    }


def _read_private_tests(text: str, where: str) -> list[dict[str, Any]]:
    """Return the tests in JSON, plain or packed. Raises ValueError if they are neither."""
    if not text or text.lstrip().startswith("["):
        return _read_json(text or "[]", where)
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_TESTS_BYTES)
        if not unpacker.eof:
            raise ValueError(f"{where}: cut short, or more than {MAX_TESTS_BYTES} bytes")
        content = _TextUnpickler(io.BytesIO(data)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, IndexError) as error:
        raise ValueError(f"{where}: neither JSON nor a packed text: {error}") from None
    if not isinstance(content, str):
        raise ValueError(f"{where}: packs {type(content).__name__}, not a text")
    return _read_json(content, where)


class _TextUnpickler(pickle.Unpickler):
    """Loads plain values alone: a pickle that names a function or class could run any code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it asks for the object {pid!r:.40}")


def _make_problem_row(
    row: Row, question: str, truth: Mapping[str, Any], language: str, kind: str, name: Any
) -> dict[str, Any] | None:
    function = truth.get("fn_name")
    if function and language not in CALL_LANGUAGES:
        return None
    if language != "python":
        truth = {**truth, "language": language}
    of_function = PYTHON_TASK if language == "python" else FUNCTION_TASK
    task = (of_function if function else PROGRAM_TASK).format(
        function=function,
        starter=row.get("starter_code") or f"def {function}(...):",
        name=PROGRAM_LANGUAGES[language],
    )
    content = f"{question.strip()}\n\n{task}\n{ANSWER_FORM.format(language=language)}"
    return {
        "prompt": [{"role": "user", "content": content}],
        "data_source": kind,
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {"name": str(name or ""), "difficulty": str(row.get("difficulty") or "")},
    }


def _read_json(text: Any, where: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}; it begins with {text[:60]!r}") from None


def source_folder(source: str, patterns: Sequence[str]) -> Path:
    """Return the folder `source`, or the copy of the hub's data set of this name.

    `patterns`: files to download. Raises ValueError if there is neither.
    """
    return Path(source) if Path(source).is_dir() else _download(source, patterns)


def files_of_split(folder: Path, split: str) -> list[str]:
    """Return the parquet and jsonl files with the split in their names, in order.

    Raises ValueError if there is none.
    """
    files = sorted(
        p for p in folder.rglob("*") if split in p.name and p.suffix in (".parquet", ".jsonl")
    )
    if not files:
        raise ValueError(f"{folder}: no .parquet or .jsonl file with {split!r} in its name")
    return [str(path) for path in files]


def _download(name: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        copy = snapshot_download(name, repo_type="dataset", allow_patterns=list(patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise ValueError(
            f"--source {name}: neither a local folder nor reachable on the hub"
            f" ({type(error).__name__}); download it elsewhere and give the folder"
        ) from None
    return Path(copy)


def prepare_geometry3k(source: str, out_dir: Path) -> None:
    """Write train.parquet, validation.parquet and heldout.parquet (its test split) to `out_dir`.

    source   folder with parquet or jsonl files whose names contain the splits, or the name of a
             dataset on the hub

    Raises ValueError naming the file and row of what is missing or malformed.
    """
    folder = source_folder(source, ["data/*", "*.parquet"])
    for split, name in GEOMETRY3K_SPLITS:
        rows = list(_make_geometry3k_rows(folder, split))
        write_parquet(rows, out_dir / f"{name}.parquet")
        print(f"{len(rows)} problems in {out_dir / f'{name}.parquet'}")


def _make_geometry3k_rows(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    files = files_of_split(folder, split)
    for i, (where, row) in enumerate(load_rows(files)):
        problem = require(row, "problem", where)
        answer = require(row, "answer", where)
        images = _read_images(row, where)
        num_named = problem.count(IMAGE)
        if num_named != len(images):
            raise ValueError(
                f"{where} has {len(images)} images, but its problem has {num_named} {IMAGE}"
            )
        made = prompt_row(f"{problem} {GEOMETRY3K_INSTRUCTION}", answer, GEOMETRY3K, split, i)
        yield {**made, "images": images}


def _read_images(row: Row, where: str) -> list[dict[str, bytes]]:
    """Return the encoded images of a row. Raises ValueError if one is not there as bytes."""
    images = require(row, "images", where)
    for number, image in enumerate(images):
        if not isinstance(image, dict) or not isinstance(image.get("bytes"), bytes):
            raise ValueError(f"{where}, image {number}: expected an object with `bytes`")
    return [{"bytes": image["bytes"]} for image in images]


def prepare_gsm8k(source: str, out_dir: Path) -> None:
    """Write train.parquet, heldout.parquet (its test split) and sft.parquet to `out_dir`.

    source   folder with parquet or jsonl files whose names contain "train" and "test", or the name
             of a dataset on the hub

    Raises ValueError naming what is missing or malformed.
    """
    folder = source_folder(source, ["main/*"])
    for split, name in (("train", "train"), ("test", "heldout")):
        rows = list(_read_gsm8k(folder, split))
        prompts = [
            prompt_row(
                f"{question} {GSM8K_INSTRUCTION}", final_answer(answer), "openai/gsm8k", split, i
            )
            for i, (question, answer) in enumerate(rows)
        ]
        write_parquet(prompts, out_dir / f"{name}.parquet")
        if split == "train":
            write_parquet([_make_conversation(*row) for row in rows], out_dir / "sft.parquet")
        print(f"{len(rows)} problems in {out_dir / f'{name}.parquet'}")


def final_answer(answer: str) -> str:
    """Return the number after "####", without thousands separators."""
    _, mark, final = answer.rpartition("####")
    if not mark:
        raise ValueError(f"a GSM8K answer without '####': {answer[-80:]!r}")
    return final.strip().replace(",", "")


def _make_conversation(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    content = f"{question} {GSM8K_INSTRUCTION}"
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    }


def _read_gsm8k(folder: Path, split: str) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) of a split. Raises ValueError if there is no file or a column is
    missing.
    """
    for where, row in load_rows(files_of_split(folder, split)):
        if not {"question", "answer"} <= row.keys():
            raise ValueError(f"{where}: expected `question` and `answer`, found {sorted(row)}")
        yield row["question"], row["answer"]
