"""Numbers as people write them, and text that stays text.

Names, questions and error messages come from files that anybody may have written. There are four places they can go,
and each has one way in: `html` for the page and its attributes, `label` for charts (which read a little HTML of their
own), `script` for data inside a <script>, `link` for addresses.
"""

import json
import math
import os
from html import escape
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from trimtab.analysis.words import say_count

_UNKNOWN = "–"


def html(text: object) -> str:
    """Safe between tags and inside quoted attributes."""
    return escape(str(text), quote=True)


def label(text: object, longest: int = 60) -> str:
    """Safe in a chart, on one line. Plotly knows `&lt;` but not `&quot;`, so quotes stay as they are."""
    line = " ".join(str(text).split())
    return escape(line if len(line) <= longest else line[: longest - 1] + "…", quote=False)


def script(data: Any) -> str:
    """JSON that cannot end the <script> it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def link(path: PurePath) -> str:
    """A relative address. `./` in front, so that a folder called `javascript:` is a folder."""
    return html("./" + quote(os.fsencode(path.as_posix().removeprefix("./"))))


def relative(path: Path, folder: Path) -> PurePath | None:
    """The way from a folder to a file; None where there is none (another drive)."""
    try:
        return PurePath(os.path.relpath(path.absolute(), folder.absolute()))
    except ValueError:
        return None


def number(x: float | None, digits: int = 3) -> str:
    """0.0003, 1.91, 75,000, 1e-8: so many digits as matter, powers of ten only for the very small and very large."""
    if x is None or math.isnan(x):
        return _UNKNOWN
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    if x == 0:
        return "0"
    x = float(f"{x:.{digits}g}")
    if not 1e-5 <= abs(x) < 1e9:
        mantissa, power = f"{x:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return _signed(f"{mantissa}e{int(power)}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(x))))
    text = f"{x:,.{decimals}f}"
    return _signed(text.rstrip("0").rstrip(".") if "." in text else text)


def loss(x: float | None) -> str:
    """Losses are compared with one another, so all have the same decimals."""
    if x is None or not math.isfinite(x) or abs(x) >= 1000:
        return number(x)
    return _signed(f"{round(x, 3) + 0.0:.3f}")  # + 0.0: there is no minus zero


def count(x: float | None, digits: int = 3) -> str:
    """147 thousand, 1.2 million."""
    if x is None or not math.isfinite(x):
        return _UNKNOWN
    return say_count(float(f"{x:.{digits}g}"))


def tick(x: float) -> str:
    """`count` on two lines, for under an axis."""
    return count(x).replace(" ", "<br>")


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return _UNKNOWN
    if seconds < 100:
        return f"{number(seconds, 2)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{number(seconds / 3600, 2)} h"


def between(low: float | None, high: float | None, say: Any = number) -> str:
    """`1.2 to 3.4`, or nothing where both ends are unknown."""
    ends = [None if end is None or not math.isfinite(end) else end for end in (low, high)]
    if ends == [None, None]:
        return ""
    if ends[1] is None:
        return f"{say(ends[0])} or more"
    return f"up to {say(ends[1])}" if ends[0] is None else f"{say(ends[0])} to {say(ends[1])}"


def _signed(text: str) -> str:
    return text.replace("-", "−", 1) if text.startswith("-") else text
