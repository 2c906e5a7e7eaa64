"""Fills the templates of this package, and writes YAML."""

import shlex
from pathlib import Path
from typing import Any

import jinja2
import yaml

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """The text of a template in templates/; the filter `quote` quotes a value for a shell."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(template).render(**values)


def dump_yaml(*trees: object) -> str:
    """Documents of YAML, in the order of their keys; texts of several lines stay readable."""
    return yaml.dump_all(
        trees, Dumper=_Dumper, sort_keys=False, width=100, explicit_start=len(trees) > 1
    )


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
