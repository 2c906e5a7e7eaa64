"""The tokenizer of the benchmark of gateways.

It has byte pairs of this project's documents, Qwen3's tokens, and the chat template of
Qwen3-Instruct-2507.
"""

from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast

from agents_workload import answer_text

DOCUMENTS = Path(__file__).resolve().parent.parent / "docs"
TEMPLATE = "qwen3_instruct_2507.jinja"
STOP = "<|im_end|>"
SPECIAL = ("<|im_start|>", STOP, "<|endoftext|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCAB_SIZE = 8000


def write_tokenizer(folder: Path) -> list[int]:
    """Save the tokenizer, and return the tokens of the policy's answer with its stop token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(  # pyright: ignore[reportAttributeAccessIssue]
        add_prefix_space=False
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text() for path in sorted(DOCUMENTS.glob("*.md"))]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=STOP, clean_up_tokenization_spaces=False
    )
    for text in SPECIAL:
        fast.add_tokens(AddedToken(text, special=True), special_tokens=True)
    fast.add_tokens([AddedToken(text, special=False) for text in MARKERS])
    fast.chat_template = read_template()
    fast.save_pretrained(folder)
    return list(fast.encode(answer_text() + STOP))


def read_template() -> str:
    """Return the chat template, which the package trl ships; its code is not imported."""
    spec = find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the package trl is missing: pip install -r requirements/dev.txt")
    folder = Path(spec.submodule_search_locations[0])
    return (folder / "chat_templates" / TEMPLATE).read_text()
