"""Stand-ins for GPU packages that SGLang imports but does not use on CPU.

Every name can be imported from a stand-in. Lower-case names are stand-in modules that also work as
decorators; capitalized names are empty classes.
"""

import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any


class _ClassMeta(type):
    """Makes each attribute of a stand-in class its own dotted name, a str."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        value = f"{cls.__name__}.{name}"
        setattr(cls, name, value)
        return value


class StandinModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, _FINDER, is_package=True)

    def __getattr__(self, name: str) -> Any:
        value = _attribute(self.__name__, name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bare_decorator = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if bare_decorator else (lambda decorated: decorated)

    def __getitem__(self, item: object) -> "StandinModule":
        return self

    def __iter__(self) -> Iterator[Any]:
        """Without it, `x in standin` would call __getitem__ forever."""
        return iter(())


class _Finder:
    """Imports any submodule of the registered packages as a stand-in."""

    def __init__(self) -> None:
        self.roots: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root, _, submodule = fullname.partition(".")
        if root in self.roots and submodule:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules.get(spec.name) or StandinModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)


def _attribute(owner: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    full_name = f"{owner}.{name}"
    if not name[:1].isupper():
        return sys.modules.setdefault(full_name, StandinModule(full_name))
    ignore_subclass_options = classmethod(lambda cls, **options: None)
    return _ClassMeta(name, (), {"__module__": owner, "__init_subclass__": ignore_subclass_options})


def stand_in(namespace: dict[str, Any]) -> None:
    """Make the package with these globals() a stand-in for every name it does not define."""
    root = namespace["__name__"]
    _FINDER.roots.add(root)

    def __getattr__(name: str) -> Any:
        value = namespace[name] = _attribute(root, name)
        return value

    namespace["__getattr__"] = __getattr__
    namespace["__path__"] = []


def missing(name: str) -> Callable[..., Any]:
    """Return a function that raises NotImplementedError with its name when it is called."""

    def function(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} has no CPU implementation here")

    function.__name__ = name.rpartition(".")[2]
    return function
