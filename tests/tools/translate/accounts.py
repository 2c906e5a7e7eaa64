"""Changes of another system's options, and what a translation says of each."""

from typing import Any

from mcore_rl.tools.translate.translation import AS_HERE, Translation


def changed(value: Any) -> Any:
    """Return another value than a default, which says something."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 or 2
    if isinstance(value, list):
        return ["other"]
    return {"other": 1} if isinstance(value, dict) else "other"


def values(translation: Translation) -> dict[str, Any]:
    return {line.key: line.value for line in translation.lines}


def decided(translation: Translation) -> set[str]:
    """Return the names of the options that are left to the user."""
    return {name for item in translation.decisions for name in item.source.split(", ")}


def told(translation: Translation) -> set[str]:
    """Return the names of all options that the translation accounts for.

    Those that ask for what is so here anyway are left out: a change has to be seen.
    """
    lines = {name for line in translation.lines for name in line.sources}
    unneeded = {item.source for item in translation.unneeded if item.reason != AS_HERE}
    return lines | decided(translation) | unneeded
