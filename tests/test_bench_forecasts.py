"""The benchmark of the forecasts: its recipes can be built, its report follows from the committed numbers."""

import math
from pathlib import Path

import pytest

from bench import forecasts_report
from bench.forecasts import RECIPES
from bench.forecasts_report import RESULTS, brier, constants, counts, load_results, rows_of, save_results
from trimtab.analysis import thresholds

ROOT = Path(__file__).parents[1]
HALVES = {recipe.name: recipe.half for recipe in RECIPES}


@pytest.fixture(scope="module")
def results():
    return load_results(ROOT / RESULTS)


def test_every_recipe_can_be_built_and_is_in_one_half():
    assert len(RECIPES) >= 10
    assert abs(sum(half == "set" for half in HALVES.values()) - len(RECIPES) / 2) <= 1
    for recipe in RECIPES:
        small, large = (recipe.study(part).cells() for part in ("small", "large"))
        assert (len(small), len(large)) == (21, 10)


def test_the_constants_of_the_forecast_are_those_of_the_half_set(results):
    found = constants({name: runs for name, runs in results.items() if HALVES[name] == "set"})
    for name in ("SLOPE", "SLOPE_SPREAD", "GAP", "EDGE_SPREAD"):
        assert getattr(thresholds, name) == pytest.approx(found[name], abs=0.026), name


def test_the_bars_hold_on_the_half_that_had_no_part_in_the_constants(results):
    rows = [row for name, runs in results.items() if HALVES[name] == "reported" for row in rows_of(name, "", runs)]
    for size, least in (("786k", 0.85), ("3M", 0.75)):
        right, wrong, _ = counts([row for row in rows if row.size == size])
        assert right / (right + wrong) >= least
    assert counts(rows)[2] <= len(rows) / 3
    assert brier(rows) < min(brier(rows, "same_edge"), brier(rows, "paper"))


def test_the_report_is_made_from_the_numbers(results, tmp_path, monkeypatch, capsys):
    for name in ("RESULTS", "PAGE", "PICTURE"):
        monkeypatch.setattr(forecasts_report, name, tmp_path / getattr(forecasts_report, name).name)
    two = {name: results[name] for name in ("plain", "wide", "steadied")}
    save_results(two, tmp_path / RESULTS.name)
    assert load_results(tmp_path / RESULTS.name).keys() == two.keys()
    monkeypatch.setattr(forecasts_report, "load_results", lambda: two)
    forecasts_report.write_report(HALVES)
    page = (tmp_path / "forecasts.md").read_text()
    assert "| steadied | reported | 0.18 |" in page
    assert (tmp_path / "forecasts.svg").read_text().startswith("<svg")
    assert "share of verdicts that cannot tell" in capsys.readouterr().out


def test_a_perfect_forecast_has_a_brier_score_of_zero(results):
    rows = rows_of("plain", "set", results["plain"])
    assert len(rows) == 10
    assert brier([type(row)(**vars(row) | {"probability": float(row.failed)}) for row in rows]) == 0
    assert math.isnan(brier([]))
