"""The facts of a patch: which names of other packages it replaces, where, why, and until when."""

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """Where a patch is applied."""

    CPU = "CPU"
    BOTH = "CPU and GPU"
    GPU = "GPU"


class Times(StrEnum):
    """When what a patch puts in place runs on a GPU."""

    NEVER = "never"
    APART = "at a start, a save or an end"
    IN_STEPS = "in every step"


@dataclass(frozen=True)
class Patch:
    """A function of ours that assigns to names of other packages.

    where     its module and name, "mcore_rl.cpu.megatron_patches:alias_rng"; no name for the
              lines of a module itself
    names     the foreign names, dotted; what an instance gets stands under its class
    by        what is replaced by what, in words
    reason    why upstream's own does not do
    scope     where it is applied
    on_gpu    what runs there on a GPU; for patches of a CPU alone
    runs      when it runs on a GPU; for the others
    switch    the option, variable or choice without which it is not applied or does nothing;
              "" for none
    opt_in    by default it is not applied on a GPU, or does nothing there
    measured  where the document of results has it on a GPU; "" for not yet
    required  why a run on a GPU would be wrong without it; "" if it would only be slower
    test      the test that shows that it is still needed, or that it does what it says
    """

    where: str
    names: tuple[str, ...]
    by: str
    reason: str
    scope: Scope = Scope.CPU
    on_gpu: str = ""
    runs: Times = Times.NEVER
    switch: str = ""
    opt_in: bool = False
    measured: str = ""
    required: str = ""
    test: str = ""

    @property
    def function(self) -> str:
        """Return the name of the function that replaces, or of the module if its lines do."""
        module, _, function = self.where.partition(":")
        return function or module
