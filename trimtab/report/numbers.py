"""Numbers and names as text: 147k parameters, learning rate 0.03, 2.4×, 17 min.

Names, questions and error messages come from files that anyone may have written. The templates escape what they insert.
Two places need escaping of their own: `label` for charts, which interpret some HTML, and `link` for addresses.
"""

import math
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path, PurePath
from urllib.parse import quote

UNKNOWN = "–"
_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def number(x: float | None, digits: int = 3) -> str:
    """0.0003, 1.91, 75,000, 1e-8: powers of ten only for very small and very large values."""
    if x is None or math.isnan(x):
        return UNKNOWN
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    if x == 0:
        return "0"
    x = float(f"{x:.{digits}g}")
    if not 1e-5 <= abs(x) < 1e9:
        mantissa, power = f"{x:.{digits - 1}e}".split("e")
        return _signed(f"{_trim(mantissa)}e{int(power)}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(x))))
    return _signed(_trim(f"{x:,.{decimals}f}"))


def loss(x: float | None) -> str:
    """Losses are compared with one another, so all have the same decimals."""
    if x is None or not math.isfinite(x) or abs(x) >= 1000:
        return number(x)
    return _signed(f"{round(x, 3) + 0.0:.3f}")  # + 0.0: no minus zero


def count(x: float | None, digits: int = 3) -> str:
    """512, 147k, 2.3M, 1.5B."""
    if x is None or not math.isfinite(x):
        return UNKNOWN
    x = float(f"{x:.{digits}g}")
    scale, letter = next(((scale, letter) for scale, letter in _SCALES if x >= scale), (1.0, ""))
    return number(x / scale) + letter


def params(x: float | None) -> str:
    return f"{count(x)} parameters"


def factor(x: float) -> str:
    return f"{x:.1f} times" if x < 100 else "more than 100 times"


def beyond(decades: float) -> str:
    """Distance of a size from the largest that was run."""
    if decades < 2:
        return f"{10**decades:.2g} times the largest size that was run"
    return f"{decades:.1f} powers of ten beyond the largest size that was run"


def between(low: float | None, high: float | None, text: Callable[[float], str] = number) -> str:
    """`1.2–3.4`, or an empty text if both ends are unknown."""
    known = [None if end is None or not math.isfinite(end) else text(end) for end in (low, high)]
    if known[0] is None:
        return "" if known[1] is None else f"at most {known[1]}"
    return f"at least {known[0]}" if known[1] is None else f"{known[0]}–{known[1]}"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 100:
        return f"{number(seconds, 2)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{number(seconds / 3600, 2)} h"


def join(parts: Sequence[str], last: str = "and") -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}" if parts else "none"


def join_rates(lrs: Sequence[float]) -> str:
    return join([number(lr) for lr in lrs])


def plural(amount: int, noun: str) -> str:
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def label(text: object, longest: int = 60) -> str:
    """Escaped for a chart, on one line. Plotly interprets `&lt;` but not `&quot;`, so quotes stay."""
    line = " ".join(str(text).split())
    return escape(line if len(line) <= longest else line[: longest - 1] + "…", quote=False)


def link(path: Path, folder: Path) -> str | None:
    """The address of a file relative to a folder; None if there is none (another drive).

    It starts with `./`, so that a folder called `javascript:` is a folder.
    """
    try:
        relative = PurePath(os.path.relpath(path.absolute(), folder.absolute()))
    except ValueError:
        return None
    return "./" + quote(os.fsencode(relative.as_posix()))


def _trim(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _signed(text: str) -> str:
    return text.replace("-", "−", 1) if text.startswith("-") else text
