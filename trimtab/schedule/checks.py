"""Checks of the fields of a schedule. Every message has the field, its value, and a value that would work."""

import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

LARGEST = 2**53  # of whole numbers: more than any run can count, and up to here floats and JavaScript are exact


def check_whole(owner: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool):
            finite = isinstance(value, float) and math.isfinite(value)
            near = min(max(round(value), least), LARGEST) if finite else least
            raise ValueError(f"{name}={value!r} is not a whole number; try {name}={near}")
        if value < least:
            raise ValueError(f"{name}={value} is too small; try {name}={least}")
        check_not_huge(name, value, least)


def check_not_huge(name: str, value: int, better: int) -> None:
    if value > LARGEST:
        raise ValueError(f"{name}={value} is more than any run can count; try {name}={better}")


def check_number(owner: Any, name: str, *, above: float | None = None, least: float | None = None) -> None:
    """Check that a field is a finite number, above `above` and at least `least`."""
    value = getattr(owner, name)
    # Compared and not `isfinite`, which raises OverflowError for a large int.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name}={value!r} is not a finite number; try {name}=1.0")
    if above is not None and value <= above:
        raise ValueError(f"{name}={value} must be above {above:g}; try {name}={abs(value) or 1.0}")
    if least is not None and value < least:
        raise ValueError(f"{name}={value} must be at least {least:g}; try {name}={least}")


def check_choice(owner: Any, name: str, literal: Any) -> None:
    value = getattr(owner, name)
    if value not in get_args(literal):
        choices = " or ".join(repr(choice) for choice in get_args(literal))
        raise ValueError(f"{name}={value!r} is not known; try {choices}")


def check_rising(name: str, values: Sequence[int]) -> None:
    """Check that values are strictly rising whole numbers from 1."""
    wrong = [value for value in values if not isinstance(value, int) or isinstance(value, bool) or value < 1]
    if wrong:
        raise ValueError(f"{name}={tuple(values)} holds {wrong[0]!r}; every entry is a whole number from 1")
    if any(a >= b for a, b in pairwise(values)):
        raise ValueError(f"{name}={tuple(values)} must rise; try {name}={tuple(sorted(set(values)))}")
    if values and values[-1] > LARGEST:
        raise ValueError(f"{name}={tuple(values)} holds {values[-1]}, more than any run can count; try 1024")


def check_clock(name: str, value: int, least: int = 0) -> None:
    if value < least:
        raise ValueError(f"{name}={value} is before the start of a run; the first is {least}")
