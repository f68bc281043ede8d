"""Numbers as people say them: "147 thousand parameters", "learning rates 0.03, 0.1 and 0.3", "2.4 times"."""

import math
from collections.abc import Sequence

_SCALES = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand"))


def say_count(value: float) -> str:
    """147456 is "147 thousand"; three digits, and none after the point but where there is one before it."""
    for scale, name in _SCALES:
        if value >= 0.9995 * scale:
            return f"{_three(value / scale)} {name}"
    return _three(value)


def say_number(value: float) -> str:
    """Plain where that is short, else a power of ten."""
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else "infinite"
    if value == 0 or 1e-4 <= abs(value) < 1e3:
        return f"{value:.3g}"
    return say_count(value) if 1e3 <= value < 1e15 else f"{value:.2g}"


def say_rate(lr: float) -> str:
    return f"{lr:.4g}"


def say_rates(lrs: Sequence[float]) -> str:
    return join([say_rate(lr) for lr in lrs])


def say_factor(value: float) -> str:
    return f"{value:.1f} times" if value < 100 else "over 100 times"


def say_decades(value: float) -> str:
    """How far beyond what was run: 0.5 decades is "3.2 times the largest size"."""
    if value < 2:
        return f"{10**value:.2g} times the largest size that was run"
    return f"{value:.1f} powers of ten beyond the largest size that was run"


def say_range(low: float | None, high: float | None) -> str:
    """The range of a count; an open end is said."""
    if low is None and high is None:
        return "no bounds can be given"
    if low is None:
        return f"at most {say_count(high or 0.0)}"
    return f"{say_count(low)} to {say_count(high)}" if high is not None else f"{say_count(low)} at the earliest"


def join(parts: Sequence[str], last: str = "and") -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}" if parts else "none"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
