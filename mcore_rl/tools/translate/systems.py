"""The systems whose options are translated: how each is read, and what makes a recipe of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.tools.translate.hydra import read_options
from mcore_rl.tools.translate.nemo_files import read_nemo_rl
from mcore_rl.tools.translate.nemo_rl import translate_nemo_rl
from mcore_rl.tools.translate.slime import translate_slime
from mcore_rl.tools.translate.slime_script import read_slime
from mcore_rl.tools.translate.translation import ForeignOptions, Translation
from mcore_rl.tools.translate.verl import translate_verl


@dataclass(frozen=True)
class TranslatedSystem:
    """Another system for RL post-training.

    read        arguments of `mcore-rl translate` -> its options
    translate   its options -> those of a recipe
    """

    title: str
    read: Callable[[Sequence[str]], ForeignOptions]
    translate: Callable[[ForeignOptions], Translation]


SYSTEMS: Mapping[str, TranslatedSystem] = {
    "verl": TranslatedSystem("verl", read_options, translate_verl),
    "slime": TranslatedSystem("slime", read_slime, translate_slime),
    "nemo-rl": TranslatedSystem("NeMo-RL", read_nemo_rl, translate_nemo_rl),
}
