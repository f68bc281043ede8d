"""A known law in run folders is recovered: the fit, the critical value, the size that fails, within the ranges."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis import runs
from tests.analysis.runs import ARMS, CRITICAL, Numbers, grid, logit_at, planted, write_study
from trimtab.analysis.findings import Critical, Findings, Fit, Forecast, HeldOut, measure, read
from trimtab.analysis.fits import crossing, polynomial, shrink
from trimtab.analysis.forecasts import first_failure
from trimtab.analysis.predict import join_odds, predict_size
from trimtab.analysis.thresholds import CRITICAL_LOGIT, HORIZON
from trimtab.lab.study import Arm, Cell
from trimtab.report import prediction_json, prediction_words
from trimtab.report.sentences import critical_words, forecast_words, held_out_words, notes_words


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


def test_refits_cover_seeds_sizes_the_form_and_the_snapshot(law: Findings) -> None:
    assert len(fit_of(law, 0.1).refits) == 2 + 4 + 2 + 2


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
    tests = [fit.backtest for fit in law.fits if (fit.arm, fit.signal) == ("plain", "logit_max")]
    assert len(tests) == 4
    assert max(test.factor for test in tests if test is not None) < 1.3


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


def test_without_failures_the_critical_value_is_unknown(tmp_path: Path) -> None:
    critical = critical_with(tmp_path, {0.01: 10.0, 0.1: 20.0}, {0.01: 2.0, 0.1: 2.05})
    assert (critical.value, critical.measured) == (CRITICAL_LOGIT, False)
    assert critical.reason == "none failed"
    assert "the paper's value" in critical_words(critical)
    assert "unknown here, because no run failed, and not used" in critical_words(critical)


def test_without_separation_the_critical_value_is_unknown(tmp_path: Path) -> None:
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


def test_an_arm_that_learned_nothing_does_not_move_the_critical_value(tmp_path: Path) -> None:
    def numbers(cell: Cell) -> Numbers:
        return planted(cell) if cell.arm == "plain" else Numbers(why="diverged", logit=1.0)

    study = grid(lrs=(0.01, 0.1, 0.3), arms=(ARMS[0], Arm("broken")), seeds=(0,))
    critical = read([write_study(tmp_path, study, numbers)]).critical
    assert critical.low < CRITICAL < critical.high


# --- Forecasts


def test_the_size_that_fails_is_inside_the_stated_range(law: Findings) -> None:
    forecast = forecast_of(law, 0.03)
    assert forecast.fails_at is not None
    assert forecast.low is not None
    assert forecast.high is not None
    assert forecast.low <= runs.fails_at(0.03) <= forecast.high
    assert forecast.decades == pytest.approx(math.log10(forecast.fails_at / 147_456))
    assert "the largest size that was run" in forecast_words(forecast)


@pytest.mark.parametrize(("lr", "size"), [(0.1, 147_456), (0.3, 6144)])
def test_what_has_failed_already_is_seen_not_predicted(law: Findings, lr: float, size: int) -> None:
    forecast = forecast_of(law, lr)
    assert (forecast.seen, forecast.fails_at, forecast.decades) == (True, size, 0.0)


def test_two_sizes_are_too_few_for_a_fit(tmp_path: Path) -> None:
    study = grid(sizes=("2x16", "2x32"), lrs=(0.01, 0.1, 0.3), seeds=(0,))
    findings = read([write_study(tmp_path, study)])
    assert forecast_of(findings, 0.01).fails_at is None
    assert "needs 3 sizes, there are 2" in forecast_words(forecast_of(findings, 0.01))
    assert any("with 3 sizes" in note and "there are 2" in note for note in notes_words(findings))
    assert predict_size(findings, 1e5, 0.01).rates[0].sign("logits").silence == "few sizes"


def test_what_lies_beyond_the_horizon_is_not_claimed(tmp_path: Path) -> None:
    findings = read([write_study(tmp_path, grid(lrs=(1e-4, 0.01, 0.1, 0.3), seeds=(0,)))])
    forecast = forecast_of(findings, 1e-4)
    assert (forecast.fails_at, forecast.high) == (None, None)
    assert "does not reach" in forecast_words(forecast)
    assert "within 25 times the largest size" in forecast_words(forecast)


def test_only_sizes_up_to_the_largest_can_have_failed(tmp_path: Path) -> None:
    """If only the smallest size fails, larger ones that ran well are not said to fail."""
    study = grid(lrs=(0.01, 0.1), seeds=(0,), arms=ARMS[:1])

    def numbers(cell: Cell) -> Numbers:
        return Numbers(loss=4.0 if cell.size == "2x16" and cell.lr == 0.1 else 2.0, logit=3.0)

    findings = read([write_study(tmp_path, study, numbers)])
    assert first_failure(findings.curves, "planted", "plain", 0.1) is None
    assert predict_size(findings, 147_456, 0.1).outcome == "holds"


def test_a_crossing_is_where_the_fit_reaches_the_level(law: Findings) -> None:
    fit = fit_of(law, 0.03)
    at = crossing(fit, 300.0)
    assert at is not None
    assert fit.predict(at)[0] == pytest.approx(300.0, rel=1e-6)
    assert crossing(fit, 1e30) is None
    assert crossing(fit, 1e-3) == fit.params[-1]


# --- Gradients and eps


@pytest.mark.parametrize(("rms", "left"), [(1e-7, 0.91), (1e-8, 0.50), (1e-9, 0.09)])
def test_eps_shrinks_an_update_as_in_the_paper(rms: float, left: float) -> None:
    assert shrink(rms, 1e-8) == pytest.approx(left, abs=0.005)


def test_the_size_at_which_gradients_come_near_eps_is_found(tmp_path: Path) -> None:
    study = grid(lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0, 1))

    def numbers(cell: Cell) -> Numbers:
        return Numbers(grad_rms=0.2 / runs.params_of(cell.config))  # 1e-7 = 10 eps at 2 million

    findings = read([write_study(tmp_path, study, numbers)])
    forecast = forecast_of(findings, 0.1, "grad_rms")
    assert forecast.fails_at == pytest.approx(2e6, rel=1e-3)
    assert forecast.low is not None
    assert forecast.low <= 2.001e6
    rate = predict_size(findings, 2e7, 0.1).rates[0]
    assert rate.update_left == pytest.approx(0.5, abs=0.01)
    assert rate.sign("eps").probability == pytest.approx(0.999)
    near = predict_size(findings, 2e5, 0.1)
    assert not any("Adam's ε" in line for line in prediction_words(near))


# --- One size


def test_one_size_and_learning_rate_are_judged(law: Findings) -> None:
    """The law reaches the critical value at 1M parameters for 0.03, and at 16M for 0.01."""
    fails, holds = predict_size(law, 3.5e6, 0.03), predict_size(law, 5e5, 0.01)
    assert (fails.outcome, holds.outcome) == ("fails", "holds")
    assert prediction_words(fails)[0] == "At 3.5M parameters plain fails at learning rate 0.03."
    assert prediction_words(holds)[0] == "At 500k parameters plain holds at learning rate 0.01."
    assert "probability of failure" in prediction_words(fails)[1]


def test_a_size_that_was_run_has_its_measured_outcome(law: Findings) -> None:
    rates = predict_size(law, 147_456).rates
    assert [rate.reason for rate in rates] == ["observed"] * 4
    assert [rate.outcome for rate in rates] == ["holds", "holds", "fails", "fails"]
    assert "it was run at this size and failed" in prediction_words(predict_size(law, 147_456, 0.3))[1]


def test_beyond_the_horizon_it_cannot_tell(law: Findings) -> None:
    prediction = predict_size(law, 147_456 * 10 ** (HORIZON + 0.1), 0.01)
    assert (prediction.outcome, prediction.rates[0].reason) == ("cannot tell", "too far")
    assert "forecasts were tested up to 25 times" in prediction_words(prediction)[1]
    assert prediction.edge is None


def test_all_learning_rates_are_judged_when_none_is_given(law: Findings) -> None:
    prediction = predict_size(law, 2.5e6)
    assert [rate.lr for rate in prediction.rates] == [0.01, 0.03, 0.1, 0.3]
    chances = [rate.probability for rate in prediction.rates]
    assert chances == sorted(chances)
    assert prediction.rates[0].outcome != "fails"
    assert [rate.outcome for rate in prediction.rates[2:]] == ["fails", "fails"]
    assert len([line for line in prediction_words(prediction) if line.startswith("Learning rate")]) == 4


def test_bounded_logits_say_nothing(law: Findings) -> None:
    prediction = predict_size(law, 1e6, 0.1, arm="steadied")
    assert prediction.rates[0].sign("logits").silence == "bounded"
    assert prediction.rates[0].probability == pytest.approx(prediction.rates[0].sign("edge").probability)


def test_a_learning_rate_between_two_of_the_grid_lies_between_them(law: Findings) -> None:
    rates = [predict_size(law, 1e5, lr).rates[0] for lr in (0.01, 0.017, 0.03)]
    low, middle, high = (rate.sign("logits").value for rate in rates)
    assert low < middle < high
    assert middle == pytest.approx(logit_at(1e5, 0.017), rel=0.1)
    assert rates[0].probability <= rates[1].probability <= rates[2].probability


def test_a_learning_rate_far_outside_the_grid_is_not_guessed(law: Findings) -> None:
    prediction = predict_size(law, 1e6, 1e-6)
    assert (prediction.outcome, prediction.rates[0].reason) == ("cannot tell", "outside grid")


def test_a_grid_that_ends_at_the_best_learning_rate_cannot_tell(law: Findings) -> None:
    """The runs above the best learning rate left out must not turn "fails" into "holds"."""
    short = measure([result for result in law.results if result.lr <= 0.01 or result.arm != "plain"])
    assert short.critical.reason in ("none failed", "no logits")
    rate = predict_size(short, 1e6, 0.01).rates[0]
    assert (rate.outcome, rate.reason) == ("cannot tell", "open grid")


@given(st.lists(st.tuples(st.floats(0.01, 0.99), st.floats(0.1, 1)), min_size=1, max_size=3))
def test_joined_probabilities_lie_between_their_parts(chances: list[tuple[float, float]]) -> None:
    parts = [chance for chance, _ in chances]
    assert min(parts) - 1e-9 <= join_odds(chances) <= max(parts) + 1e-9
    assert join_odds(chances) == pytest.approx(1 - join_odds([(1 - x, weight) for x, weight in chances]))


def test_signs_that_disagree_are_reported(tmp_path: Path) -> None:
    """Losses fail at the same learning rate at every size, logits reach the critical value above the largest."""
    study = grid(sizes=("1x16", "1x64", "4x128"), lrs=(0.01, 0.03, 0.1, 0.3, 1.0), arms=ARMS[:1], seeds=(0,))

    def numbers(cell: Cell) -> Numbers:
        params = runs.params_of(cell.config)
        logit = {1.0: 1e4, 0.3: 1e3 * (params / 786_432) ** 0.1}.get(cell.lr, 100 * cell.lr * (params / 786_432) ** 2)
        return Numbers(loss=2.0 + 0.001 * cell.lr if cell.lr < 1 else 4.0, logit=logit)

    findings = read([write_study(tmp_path, study, numbers)])
    rates = [rate for rate in predict_size(findings, 1.5e7).rates if rate.disagree]
    assert rates
    words = prediction_words(predict_size(findings, 1.5e7, rates[0].lr))
    assert any("the signs disagree" in line for line in words)


def test_the_largest_size_is_forecast_from_the_smaller_ones(law: Findings) -> None:
    rows = [row for row in law.held_out if row.arm == "plain"]
    assert [(row.params, row.lr, row.failed) for row in rows] == [
        (147_456, 0.01, False), (147_456, 0.03, False), (147_456, 0.1, True), (147_456, 0.3, True)
    ]  # fmt: skip
    assert all(row.right is not False for row in rows)
    assert any(line.startswith("Check: the forecast of the largest size") for line in prediction_words(
        predict_size(law, 1e6), law.held_out
    ))  # fmt: skip


def test_a_check_without_a_firm_verdict_says_so() -> None:
    row = HeldOut(study="a", arm="plain", params=1, lr=0.1, probability=0.5, outcome="cannot tell", failed=True)
    assert held_out_words([row, row]).endswith("from the smaller ones cannot tell at any of 2 learning rates")


def test_two_sizes_cannot_be_checked_by_themselves(tmp_path: Path) -> None:
    assert read([write_study(tmp_path, grid(sizes=("2x16", "2x32"), lrs=(0.01, 0.1), seeds=(0,)))]).held_out == ()


def test_a_prediction_is_json(law: Findings) -> None:
    data = json.loads(json.dumps(prediction_json(predict_size(law, 1e9, 1e-6)), allow_nan=False))
    assert data["rates"][0]["signs"][0]["name"] == "edge"
    assert data["outcome"] == "cannot tell"
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
