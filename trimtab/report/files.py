"""The numbers of the page as files: findings.json, cells.csv, curves.csv, fits.csv. Each is replaced atomically.

Spreadsheets interpret a cell that begins with = + - @ as a formula, also in a name from an untrusted file. Such text
gets a leading apostrophe, which spreadsheets hide. Numbers stay numbers.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trimtab.analysis.findings import Curve, Findings, Result, clean
from trimtab.report.sentences import critical_words, forecast_words, notes_words, status_words
from trimtab.report.verdict import verdict_words
from trimtab.runs.files import replace_bytes

NAMES = {
    "findings.json": "everything, as JSON",
    "cells.csv": "a row per run",
    "curves.csv": "a row per arm, size and learning rate",
    "fits.csv": "a row per fitted line, with its back-test and forecast",
}
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_NO_COLUMN = {"evaluations", "losses", "logits", "logz", "spikes", "versions", "folder"}
_BY_RATE = ("loss", "low", "high", "seeds", "broken", "spikes", "loss_ratio", "logit_max", "grad_rms")


def write_data(findings: Findings, folder: Path) -> None:
    # Without indents: most of it are curves of hundreds of points, and indenting takes longer than all the rest.
    replace_text(folder / "findings.json", json.dumps(to_json(findings), allow_nan=False))
    for name, rows_of in (("cells.csv", rows_of_cells), ("curves.csv", rows_of_curves), ("fits.csv", rows_of_fits)):
        replace_text(folder / name, to_csv(rows_of(findings)))


def to_json(findings: Findings) -> dict[str, Any]:
    """All numbers, with the sentences of the page: verdict, notes, and why."""
    data: dict[str, Any] = clean(findings)
    for row, result in zip(data["results"], findings.results, strict=True):
        row["why"] = status_words(result)
    for row, forecast in zip(data["forecasts"], findings.forecasts, strict=True):
        row["why"] = forecast_words(forecast)
    data["critical"]["why"] = critical_words(findings.critical)
    return data | {"notes": notes_words(findings), "verdict": verdict_words(findings)}


def rows_of_cells(findings: Findings) -> list[dict[str, Any]]:
    """A row per cell."""
    rows = []
    for result in findings.results:
        row = {item.name: getattr(result, item.name) for item in fields(Result) if item.name not in _NO_COLUMN}
        versions = " ".join(f"{name} {version}" for name, version in result.versions.items())
        row |= {"why": status_words(result), "spikes": len(result.spikes), "versions": versions}
        rows.append(clean(row | {"folder": str(result.folder)}))
    return rows


def rows_of_curves(findings: Findings) -> list[dict[str, Any]]:
    """A row per curve and learning rate."""
    alone = [item.name for item in fields(Curve) if item.name not in {*_BY_RATE, "lrs", "missing", "window"}]
    return [
        clean({name: getattr(curve, name) for name in alone} | {"lr": lr} | {n: getattr(curve, n)[i] for n in _BY_RATE})
        for curve in findings.curves
        for i, lr in enumerate(curve.lrs)
    ]


def rows_of_fits(findings: Findings) -> list[dict[str, Any]]:
    """A row per fit, with its back-test and forecast."""
    forecasts = {(x.study, x.arm, x.lr, x.signal): x for x in findings.forecasts}
    rows = []
    for fit in findings.fits:
        found = forecasts.get((fit.study, fit.arm, fit.lr, fit.signal))
        rows.append(
            {"study": fit.study, "arm": fit.arm, "lr": fit.lr, "signal": fit.signal, "degree": fit.degree}
            | {"coefficients": _spaced(fit.coefficients), "params": _spaced(fit.params), "values": _spaced(fit.values)}
            | {"spread": fit.spread}
            | {f"backtest_{n}": getattr(fit.backtest, n, None) for n in ("params", "predicted", "measured", "factor")}
            | {name: getattr(found, name, None) for name in ("fails_at", "low", "high", "seen", "decades")}
            | {"why": forecast_words(found) if found is not None else None}
        )
    return [clean(row) for row in rows]


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    if rows:
        writer.writeheader()
    writer.writerows({key: _safe(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def replace_text(path: Path, text: str) -> None:
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))  # file names may contain bytes that are not UTF-8


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _spaced(values: Sequence[float]) -> str:
    text = " ".join(f"{value:.9g}" for value in values)
    return f" {text}" if text.startswith("-") else text  # a space prevents a list of numbers from being a formula
