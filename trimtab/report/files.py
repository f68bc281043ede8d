"""The numbers of the page as files: findings.json, cells.csv, curves.csv, fits.csv. Whole or not there.

A spreadsheet takes a cell that begins with = + - @ for a formula, also in a name that a stranger chose; such text gets
an apostrophe in front, which spreadsheets hide. Numbers stay numbers.
"""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.analysis.findings import Findings, clean, rows_of_cells, rows_of_curves
from trimtab.runs.files import replace_bytes

NAMES = {
    "findings.json": "everything, as JSON",
    "cells.csv": "a row per run",
    "curves.csv": "a row per arm, size and learning rate",
    "fits.csv": "a row per fitted line, with its back-test and forecast",
}
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def write_data(findings: Findings, folder: Path) -> None:
    # Without indents: most of it are curves of hundreds of points, and indenting takes longer than all the rest.
    replace_text(folder / "findings.json", json.dumps(findings.to_json(), allow_nan=False))
    replace_text(folder / "cells.csv", to_csv(rows_of_cells(findings)))
    replace_text(folder / "curves.csv", to_csv(rows_of_curves(findings)))
    replace_text(folder / "fits.csv", to_csv(rows_of_fits(findings)))


def rows_of_fits(findings: Findings) -> list[dict[str, Any]]:
    """A table of all fits, each with what it says of larger models."""
    ahead = {(x.study, x.arm, x.lr, x.signal): x for x in findings.forecasts}
    rows = []
    for fit in findings.fits:
        found = ahead.get((fit.study, fit.arm, fit.lr, fit.signal))
        test = fit.backtest
        rows.append(
            {"study": fit.study, "arm": fit.arm, "lr": fit.lr, "signal": fit.signal, "degree": fit.degree}
            | {"coefficients": _spaced(fit.coefficients), "params": _spaced(fit.params), "values": _spaced(fit.values)}
            | {"spread": fit.spread}
            | {f"backtest_{name}": getattr(test, name, None) for name in ("params", "predicted", "measured", "factor")}
            | {name: getattr(found, name, None) for name in ("fails_at", "low", "high", "seen", "decades", "why")}
        )
    return [{key: clean(value) for key, value in row.items()} for row in rows]


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    names = list(rows[0]) if rows else []
    writer = csv.DictWriter(out, names, lineterminator="\n")
    if rows:
        writer.writeheader()
    writer.writerows({key: _safe(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def replace_text(path: Path, text: str) -> None:
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))  # names of files may hold bytes that are no text


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _spaced(values: Sequence[float]) -> str:
    text = " ".join(f"{value:.9g}" for value in values)
    return f" {text}" if text.startswith("-") else text  # a space keeps a list of numbers from being a formula
