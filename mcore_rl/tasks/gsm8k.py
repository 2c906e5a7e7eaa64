"""Turns GSM8K (arXiv:2110.14168), local or from the hub, into prompt and conversation files."""

from collections.abc import Iterator
from pathlib import Path

from mcore_rl.data.rows import load_rows, prompt_row, write_parquet
from mcore_rl.tasks.downloads import files_of_split, source_folder

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


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
