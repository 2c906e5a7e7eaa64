"""List the files of tests/support in tests/README.md: `python -m tests.support.support_index`."""

import ast
import textwrap
from pathlib import Path

from tests.support.policy import ROOT, parse, python_files

README = Path("tests/README.md")
BEGIN = "<!-- made by python -m tests.support.support_index -->"
END = "<!-- end of list -->"


def list_support_files() -> str:
    """Return a line for each file: its name and its docstring's first sentence."""
    lines = []
    for path in python_files("tests"):
        if path.parts[1] == "support":
            paragraph = (ast.get_docstring(parse(path)) or "").split("\n\n")[0]
            sentence = " ".join(paragraph.split()).partition(". ")[0].rstrip(".:")
            entry = f"* `{path.name}`: {sentence}."
            lines.append(textwrap.fill(entry, 120, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


def replace_list(text: str, new: str) -> str:
    """Return the page with a new list between its two comments."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / README
    page.write_text(replace_list(page.read_text(), list_support_files()))
