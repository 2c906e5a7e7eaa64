"""Responses decode as the tokenizer does, in processes without transformers."""

import pickle
import random
import subprocess
import sys
from pathlib import Path

from mcore_rl.data.decoding import CODE, make_decode
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.tasks.arithmetic import make_tokenizer
from tests.data.test_tokenizer import write_tokenizer_that_is_code


def test_texts_are_the_tokenizers() -> None:
    tokenizer = make_tokenizer()
    decode = make_decode(tokenizer)
    generator = random.Random(0)
    for _ in range(50):
        ids = [generator.randrange(len(tokenizer)) for _ in range(generator.randint(0, 12))]
        assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_process_that_decodes_does_not_import_transformers(tmp_path: Path) -> None:
    file = tmp_path / "decode.pickle"
    tokenizer = make_tokenizer()
    file.write_bytes(pickle.dumps(make_decode(tokenizer)))
    ids = tokenizer("Jon has 18 books")["input_ids"]
    code = (
        "import pickle, sys; decode = pickle.load(open(sys.argv[1], 'rb'));"
        f" print(decode({ids})); print('transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines() == [tokenizer.decode(ids, skip_special_tokens=True), "False"]


def test_a_tokenizer_that_is_code_is_opened_anew_in_each_process(tmp_path: Path) -> None:
    """Its class has a module that transformers makes, and no other process can import."""
    write_tokenizer_that_is_code(tmp_path)
    tokenizer = load_tokenizer(tmp_path, "model.path", trust_remote_code=True)
    assert type(tokenizer).__module__.startswith(CODE)
    file = tmp_path / "decode.pickle"
    file.write_bytes(pickle.dumps(make_decode(tokenizer)))
    ids = tokenizer("Jon has 18 books")["input_ids"]
    code = f"import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))({ids}))"
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines() == [tokenizer.decode(ids, skip_special_tokens=True)]


def test_a_tokenizer_with_a_text_of_its_own_is_used_itself() -> None:
    tokenizer = make_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer("Jon has 18 books .")["input_ids"]
    assert make_decode(tokenizer)(ids) == tokenizer.decode(ids, skip_special_tokens=True)
