"""What every settings class asks of its fields at birth; each error names class, field and value."""

from __future__ import annotations


def check(ok: bool, owner: object, field: str, rule: str) -> None:
    """Raise ValueError, which names the field, its value and the rule, unless `ok`."""
    if not ok:
        raise ValueError(f"{type(owner).__name__}.{field} = {getattr(owner, field)!r}: {rule}")


def positive(owner: object, *fields: str) -> None:
    """Raise ValueError for the first of the fields that is not above 0."""
    for field in fields:
        check(getattr(owner, field) > 0, owner, field, "must be above 0")


def one_of(owner: object, field: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless the field is one of the choices."""
    check(getattr(owner, field) in choices, owner, field, f"must be one of {', '.join(choices)}")
