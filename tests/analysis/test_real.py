"""Verdicts on real runs (tests/analysis/real.py), where earlier versions of the lab were wrong."""

import pytest

from tests.analysis.real import load
from trimtab.analysis.findings import Findings, measure
from trimtab.analysis.predict import Recipe, predict_size
from trimtab.report import verdict_words
from trimtab.report.sentences import prediction_words

SMALL = 150_000  # parameters of the largest size before the forecast


def outcomes(trained: Findings, name: str) -> list[tuple[str, str]]:
    """(forecast from the small sizes, measured) for every learning rate of the two large ones."""
    known, arm = Recipe(load(name, most_params=SMALL), "forecasts", name), trained.results[0].arm
    large = [curve for curve in trained.curves if (curve.params or 0) > SMALL]
    truth = Recipe(trained, "forecasts", arm)
    pairs = [(curve.params or 0, lr) for curve in large for lr in curve.lrs]
    return [(known.rate(size, lr).outcome, truth.rate(size, lr).outcome) for size, lr in pairs]


@pytest.mark.parametrize("name", ["plain", "steadied"])
def test_firm_forecasts_of_786k_and_3m_were_right(name: str) -> None:
    found = outcomes(load(name), name)
    assert len(found) == 10
    firm = [(said, seen) for said, seen in found if said != "cannot tell"]
    assert len(firm) >= 7
    assert all(said == seen for said, seen in firm)


def test_a_learning_rate_that_failed_when_it_was_trained_is_not_called_fine() -> None:
    """786k parameters at 0.03: the loss was 2.16 to 2.22 against 1.985 at 0.01."""
    found = predict_size(load("default"), 786_432, 0.03)
    assert found.outcome != "holds"
    assert found.rates[0].probability > 0.6
    assert found.edge is not None
    assert found.edge[0] < 0.03


def test_leaving_out_the_learning_rates_that_fail_gives_no_all_clear() -> None:
    short = load("default", most_lr=0.03)
    assert short.critical.reason == "none failed"
    for size in (786_432, 1e9):
        assert predict_size(short, size, 0.03).outcome == "cannot tell"
    headline = verdict_words(short)[0]
    assert "the highest learning rate that was run, 0.03, so its edge of stability is unknown" in headline
    assert not any("1e4" in line or "10,000" in line for line in prediction_words(predict_size(short, 786_432, 0.03)))


def test_a_billion_parameters_are_beyond_what_was_tested() -> None:
    found = predict_size(load("default"), 1e9, 0.1)
    assert (found.outcome, found.rates[0].reason) == ("cannot tell", "too far")


def test_sensitivity_falls_with_size_only_by_its_slow_part() -> None:
    curves = [curve for curve in load("default").curves if curve.arm == "plain"]
    assert [curve.sensitivity for curve in curves] == sorted((curve.sensitivity for curve in curves), reverse=True)
    assert [curve.unstable for curve in curves] == sorted(curve.unstable for curve in curves)
    assert all(0.39 < curve.too_slow / curve.sensitivity < 0.85 for curve in curves)
    assert any("low learning rates dominate it at 6.14k" in line for line in verdict_words(load("default")))


def test_above_the_best_learning_rate_plain_is_far_more_sensitive() -> None:
    largest = next(x for x in load("default").comparisons if x.size == "3x64")
    assert largest.ratio == pytest.approx(1.7, abs=0.1)
    assert largest.unstable == pytest.approx(2.8, abs=0.2)


def test_the_edge_of_stability_falls_with_size() -> None:
    for arm in ("plain", "steadied"):
        edges = [curve.edge or 9 for curve in load("default").curves if curve.arm == arm]
        assert edges == sorted(edges, reverse=True)
    recipe = Recipe(load("plain"), "forecasts", "plain")
    assert recipe.trend is not None
    slope, spread = recipe.trend.slope
    assert -0.5 < slope < -0.2
    assert spread < 0.1


def test_with_qk_norm_the_failures_are_forecast_without_logits() -> None:
    rate = predict_size(load("steadied", most_params=SMALL), 786_432, 0.3).rates[0]
    assert (rate.outcome, rate.sign("logits").silence) == ("fails", "bounded")


def test_a_best_learning_rate_at_the_end_of_the_grid_is_in_the_verdict() -> None:
    words = verdict_words(load("default", least_lr=0.03))
    assert any("is best at 0.03, the lowest learning rate of the grid: --extend runs more" in line for line in words)


def test_one_size_has_a_wider_forecast_than_three() -> None:
    three, one = load("default"), load("default", sizes=("3x64",))
    ranges = [predict_size(findings, 786_432).edge for findings in (three, one)]
    widths = [edge[2] / edge[1] for edge in ranges if edge is not None]
    assert widths[0] < widths[1]


@pytest.mark.parametrize(
    "only", [{"sizes": ("2x16",)}, {"most_lr": 0.001}, {"arms": ("steadied",)}, {"sizes": ("none",)}]
)
def test_any_part_of_a_study_has_a_verdict(only: dict[str, object]) -> None:
    findings = load("default", **only)
    assert verdict_words(findings)
    if findings.results:
        assert prediction_words(predict_size(findings, 1e6))
    assert measure(()).curves == ()
