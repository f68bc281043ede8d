"""A known law in run folders is recovered: the fit, the critical value, the size that fails, within the ranges."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis import runs
from tests.analysis.runs import ARMS, CRITICAL, Numbers, grid, logit_at, planted, write_study
from trimtab.analysis.findings import Critical, Findings, Fit, Forecast, read
from trimtab.analysis.fits import crossing, polynomial, shrink
from trimtab.analysis.predict import predict_size
from trimtab.analysis.thresholds import CRITICAL_LOGIT, HORIZON
from trimtab.lab.study import Cell
from trimtab.report import prediction_json, prediction_words
from trimtab.report.sentences import critical_words, forecast_words, notes_words


@pytest.fixture(scope="module")
def law(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """The planted law at four sizes."""
    sizes = ("2x16", "2x32", "2x48", "3x64")
    return read([write_study(tmp_path_factory.mktemp("law"), grid(sizes=sizes, lrs=(0.01, 0.03, 0.1, 0.3)))])


def fit_of(findings: Findings, lr: float, arm: str = "plain", signal: str = "logit_max") -> Fit:
    (fit,) = [f for f in findings.fits if (f.arm, f.lr, f.signal) == (arm, lr, signal)]
    return fit


def forecast_of(findings: Findings, lr: float, signal: str = "logit_max") -> Forecast:
    (forecast,) = [f for f in findings.forecasts if (f.arm, f.lr, f.signal) == ("plain", lr, signal)]
    return forecast


# --- Fits


@given(st.floats(-3, 3), st.floats(-2, 2), st.integers(2, 6))
def test_a_power_law_is_recovered_exactly(start: float, slope: float, sizes: int) -> None:
    params = [10.0 ** (4 + i / 2) for i in range(sizes)]
    *curved, found, _ = polynomial(params, [10**start * n**slope for n in params])
    assert found == pytest.approx(slope, abs=1e-4)
    assert curved == ([pytest.approx(0, abs=1e-5)] if sizes >= 4 else [])


@pytest.mark.parametrize("lr", [0.01, 0.03, 0.1, 0.3])
def test_the_planted_law_is_inside_the_range_of_the_fit(law: Findings, lr: float) -> None:
    fit = fit_of(law, lr)
    assert (fit.degree, len(fit.params)) == (2, 4)
    for params in (3e4, 147_456, 1e6):
        value, low, high = fit.predict(params)
        assert low <= logit_at(params, lr) <= high
        assert value == pytest.approx(logit_at(params, lr), rel=0.1)


def test_refits_are_one_per_seed_and_one_per_size(law: Findings) -> None:
    assert len(fit_of(law, 0.1).refits) == 2 + 4


def test_uncertainty_grows_with_distance(law: Findings) -> None:
    def width(params: float) -> float:
        _, low, high = fit_of(law, 0.03).predict(params)
        return high / low

    assert width(1.5e5) < width(1e7) < width(1e9)


def test_two_or_three_sizes_are_fitted_by_a_line(tmp_path: Path) -> None:
    for sizes in (("2x16", "3x64"), ("2x16", "2x32", "3x64")):
        findings = read([write_study(tmp_path / str(len(sizes)), grid(sizes=sizes, lrs=(0.01, 0.1), seeds=(0,)))])
        assert fit_of(findings, 0.1).degree == 1


def test_the_back_test_predicts_the_largest_from_the_smaller(tmp_path: Path) -> None:
    def numbers(cell: Cell) -> Numbers:
        return Numbers(logit={"1x16": 10.0, "1x32": 20.0, "1x64": 120.0}[cell.size])

    study = grid(sizes=("1x16", "1x32", "1x64"), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,))
    findings = read([write_study(tmp_path, study, numbers)])
    backtest = fit_of(findings, 0.1).backtest
    assert backtest is not None
    assert (backtest.params, backtest.predicted, backtest.measured) == (49_152, pytest.approx(40), pytest.approx(120))
    assert [fit.backtest.factor for fit in findings.fits if fit.signal == "logit_max"] == [pytest.approx(3.0)] * 2


def test_the_back_test_of_the_planted_law_is_close(law: Findings) -> None:
    factors = predict_size(law, 1e6).backtests
    assert len(factors) == 4
    assert factors[-1] < 1.3


# --- The critical value


def test_the_planted_critical_value_is_inside_the_estimate(law: Findings) -> None:
    critical = law.critical
    assert critical.measured
    assert critical.low < CRITICAL < critical.high
    assert critical.low < critical.value < critical.high


def critical_with(folder: Path, logits: dict[float, float], losses: dict[float, float]) -> Critical:
    study = grid(sizes=("2x16",), lrs=tuple(logits), arms=ARMS[:1], seeds=(0,))
    numbers = {lr: Numbers(logit=logits[lr], loss=losses[lr], first=6.0) for lr in logits}
    return read([write_study(folder, study, lambda cell: numbers[cell.lr])]).critical


def test_without_failures_the_paper_s_value_is_used(tmp_path: Path) -> None:
    critical = critical_with(tmp_path, {0.01: 10.0, 0.1: 20.0}, {0.01: 2.0, 0.1: 2.05})
    assert (critical.value, critical.measured) == (CRITICAL_LOGIT, False)
    assert critical.reason == "none failed"
    assert "because no run diverged here" in critical_words(critical)


def test_without_separation_the_paper_s_value_is_used(tmp_path: Path) -> None:
    logits = {0.01: 10.0, 0.03: 500.0, 0.1: 400.0, 0.3: 5.0, 1.0: 6.0}
    losses = {0.01: 2.0, 0.03: 2.05, 0.1: 2.05, 0.3: 4.0, 1.0: 4.0}
    critical = critical_with(tmp_path, logits, losses)
    assert (critical.value, critical.measured) == (CRITICAL_LOGIT, False)
    assert critical.reason == "not separated"
    assert "do not separate" in critical_words(critical)


def test_with_an_overlap_the_fewest_are_on_the_wrong_side(tmp_path: Path) -> None:
    logits = {0.003: 5.0, 0.01: 10.0, 0.03: 20.0, 0.05: 30.0, 0.07: 300.0, 0.1: 200.0, 0.3: 900.0, 1.0: 1000.0}
    losses = {0.003: 2.0, 0.01: 2.0, 0.03: 2.0, 0.05: 2.0, 0.07: 2.0, 0.1: 4.0, 0.3: 4.0, 1.0: 4.0}
    critical = critical_with(tmp_path, logits, losses)
    assert critical.measured
    assert 30 < critical.value < 200
    assert (critical.low, critical.high) == (pytest.approx(critical.value), pytest.approx(300.0))
    assert (critical.reason, critical.wrong) == ("overlap", 1)
    assert "1 on the wrong side" in critical_words(critical)


def test_runs_with_bounded_logits_do_not_move_the_critical_value(tmp_path: Path) -> None:
    def numbers(cell: Cell) -> Numbers:
        # The steadied arm fails with small logits, for another reason.
        return planted(cell) if cell.arm == "plain" else Numbers(loss=2.0 if cell.lr < 0.1 else 5.0, logit=4.0)

    critical = read([write_study(tmp_path, grid(lrs=(0.01, 0.1, 0.3), seeds=(0,)), numbers)]).critical
    assert critical.low < CRITICAL < critical.high


# --- Forecasts


@pytest.mark.parametrize("lr", [0.01, 0.03])
def test_the_size_that_fails_is_inside_the_stated_range(law: Findings, lr: float) -> None:
    forecast = forecast_of(law, lr)
    assert forecast.fails_at is not None
    assert forecast.low is not None
    assert forecast.high is not None
    assert forecast.low <= runs.fails_at(lr) <= forecast.high
    assert forecast.decades == pytest.approx(math.log10(forecast.fails_at / 147_456))
    assert "the largest size that was run" in forecast_words(forecast)


@pytest.mark.parametrize(("lr", "size"), [(0.1, 147_456), (0.3, 6144)])
def test_what_has_failed_already_is_seen_not_predicted(law: Findings, lr: float, size: int) -> None:
    forecast = forecast_of(law, lr)
    assert (forecast.seen, forecast.fails_at, forecast.decades) == (True, size, 0.0)


def test_two_sizes_are_too_few_for_a_forecast(tmp_path: Path) -> None:
    study = grid(sizes=("2x16", "2x32"), lrs=(0.01, 0.1), seeds=(0,))
    findings = read([write_study(tmp_path, study)])
    assert forecast_of(findings, 0.01).fails_at is None
    assert "needs 3 sizes, there are 2" in forecast_words(forecast_of(findings, 0.01))
    assert any("needs 3 sizes, there are 2" in note for note in notes_words(findings))
    prediction = predict_size(findings, 1e9, 0.01)
    assert prediction.outcome == "uncertain"
    assert "needs 3 sizes, there are 2" in prediction_words(prediction)[0]


def test_what_lies_beyond_the_horizon_is_not_claimed(tmp_path: Path) -> None:
    findings = read([write_study(tmp_path, grid(lrs=(1e-4, 0.1, 0.3), seeds=(0,)))])
    forecast = forecast_of(findings, 1e-4)
    assert (forecast.fails_at, forecast.high) == (None, None)
    assert "does not reach" in forecast_words(forecast)
    assert "within 4 powers of ten" in forecast_words(forecast)


def test_a_crossing_is_where_the_fit_reaches_the_level(law: Findings) -> None:
    fit = fit_of(law, 0.03)
    at = crossing(fit, 1000.0)
    assert at is not None
    assert fit.predict(at)[0] == pytest.approx(1000.0, rel=1e-6)
    assert crossing(fit, 1e30) is None
    assert crossing(fit, 1e-3) == fit.params[-1]


# --- Gradients and eps


@pytest.mark.parametrize(("rms", "left"), [(1e-7, 0.91), (1e-8, 0.50), (1e-9, 0.09)])
def test_eps_shrinks_an_update_as_in_the_paper(rms: float, left: float) -> None:
    assert shrink(rms, 1e-8) == pytest.approx(left, abs=0.005)


def test_the_size_at_which_gradients_come_near_eps_is_found(tmp_path: Path) -> None:
    study = grid(lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0, 1))

    def numbers(cell: Cell) -> Numbers:
        return Numbers(grad_rms=4.0 / runs.params_of(cell.config))  # 1e-7 = 10 eps at 40 million

    findings = read([write_study(tmp_path, study, numbers)])
    forecast = forecast_of(findings, 0.1, "grad_rms")
    assert forecast.fails_at == pytest.approx(4e7, rel=1e-3)
    assert forecast.low is not None
    assert forecast.low <= 4.001e7
    prediction = predict_size(findings, 4e8, 0.1)
    assert prediction.rates[0].update_left == pytest.approx(0.5, abs=0.01)
    assert "ε leaves 50% of the update" in prediction_words(prediction)[0]


# --- One size


def test_one_size_and_learning_rate_are_judged(law: Findings) -> None:
    fails, fine, near = predict_size(law, 1e7, 0.03), predict_size(law, 1e6, 0.01), predict_size(law, 1.4e6, 0.03)
    assert (fails.outcome, fine.outcome, near.outcome) == ("fails", "fine", "uncertain")
    assert prediction_words(fails)[0].startswith("At 10M parameters plain diverges at learning rate 0.03: ")
    assert "is stable at learning rate 0.01" in prediction_words(fine)[0]
    assert "too close" in prediction_words(near)[0]
    assert any("times the largest size" in line for line in prediction_words(fine))


def test_what_failed_small_fails_large(law: Findings) -> None:
    prediction = predict_size(law, 1e12, 0.3)
    assert prediction.outcome == "fails"
    assert "it diverged at 6.14k parameters" in prediction_words(prediction)[0]


def test_too_far_is_uncertain(law: Findings) -> None:
    prediction = predict_size(law, 147_456 * 10 ** (HORIZON + 0.5), 0.01)
    assert prediction.outcome == "uncertain"
    assert "too far for the fit" in prediction_words(prediction)[0]


def test_further_than_the_sizes_span_is_a_hint(law: Findings) -> None:
    near, far = predict_size(law, 1e6, 0.01), predict_size(law, 1e8, 0.01)
    assert (near.hint, far.hint) == (False, True)
    assert any("treat it as a hint" in line for line in prediction_words(far))
    assert not any("hint" in line for line in prediction_words(near))


def test_all_learning_rates_are_judged_when_none_is_given(law: Findings) -> None:
    prediction = predict_size(law, 1.4e6)
    assert [rate.outcome for rate in prediction.rates] == ["fine", "uncertain", "fails", "fails"]
    assert prediction.outcome == "fine"  # of 0.01, the best at the largest size
    assert prediction_words(prediction)[0] == (
        "At 1.4M parameters plain is stable at learning rate 0.01, is uncertain at learning rate 0.03 and diverges at "
        "learning rate 0.1 and 0.3."
    )


def test_another_arm_is_judged_by_its_own_fit(law: Findings) -> None:
    prediction = predict_size(law, 1e8, 0.3, arm="steadied")
    assert (prediction.arm, prediction.outcome) == ("steadied", "fine")


def test_a_learning_rate_between_two_of_the_grid_lies_between_them(law: Findings) -> None:
    low, middle, high = (predict_size(law, 1e5, lr).rates[0].logit for lr in (0.01, 0.017, 0.03))
    assert low < middle < high
    assert middle == pytest.approx(logit_at(1e5, 0.017), rel=0.1)


def test_a_learning_rate_beside_the_grid_is_not_guessed(law: Findings) -> None:
    prediction = predict_size(law, 1e6, 1e-6)
    assert prediction.outcome == "uncertain"
    assert "outside the grid, which has 0.01, 0.03, 0.1 and 0.3" in prediction_words(prediction)[0]


def test_a_prediction_is_json(law: Findings) -> None:
    data = json.loads(json.dumps(prediction_json(predict_size(law, 1e9, 1e-6)), allow_nan=False))
    assert data["rates"][0]["logit"] is None
    assert data["outcome"] == "uncertain"
    assert isinstance(data["words"], list)


@pytest.mark.parametrize(
    ("params", "lr", "arm", "words"),
    [
        (0, None, None, "params=0"),
        (math.nan, None, None, "params=nan"),
        (1e6, -1.0, None, "lr=-1.0"),
        (1e6, None, "no such", "'plain' or 'steadied'"),
    ],
)
def test_invalid_arguments_are_refused(
    law: Findings, params: float, lr: float | None, arm: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        predict_size(law, params, lr, arm)
