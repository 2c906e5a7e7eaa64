"""What a value must be; errors name the option, the value and the remedy."""


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name}={value}: must be greater than 0")
