"""Spikes, chance, correlations and loss ratios: published numbers, known values, and logs with gaps."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.analysis.one_run import (
    ANY,
    Course,
    Evaluation,
    analyze,
    binomial_tail,
    correlations,
    first_spikes,
    lead_times,
    loss_ratios,
    pearson,
)
from trimtab.analysis.spikes import (
    SpikeRules,
    chance_rate,
    deviates,
    explain_spikes,
    find_peak,
    loss_spans,
    loss_spikes,
    merge,
    rms_spikes,
    running_range,
)
from trimtab.report.explain import analysis_words, lead_time_words
from trimtab.runs import Run, RunFolder, read_run

RULES = SpikeRules(ignore=0, window=20)


def noise(count: int, level: float = 2.0) -> np.ndarray:
    return level + 0.01 * np.random.default_rng(0).standard_normal(count)


# --- Chance


def test_28_of_30_at_one_percent_is_4e_54():
    assert binomial_tail(28, 30, 0.01) == pytest.approx(4.27e-54, rel=1e-2)


@pytest.mark.parametrize(
    ("hits", "tries", "rate"), [(1, 1, 0.3), (3, 10, 0.5), (7, 9, 0.2), (40, 400, 0.05), (9, 9, 0.9)]
)
def test_the_binomial_tail_is_the_sum_of_its_terms(hits, tries, rate):
    terms = [math.comb(tries, k) * rate**k * (1 - rate) ** (tries - k) for k in range(hits, tries + 1)]
    assert binomial_tail(hits, tries, rate) == pytest.approx(math.fsum(terms), rel=1e-12)


def test_the_binomial_tail_at_its_ends():
    assert binomial_tail(0, 5, 0.1) == 1
    assert binomial_tail(0, 0, math.nan) == 1
    assert binomial_tail(6, 5, 0.1) == 0
    assert math.isnan(binomial_tail(1, 5, math.nan))


def test_pearson_of_a_small_series_by_hand():
    found = pearson([1, 2, 3, 4, 5], [2, 1, 4, 3, 5])
    assert found.r == pytest.approx(0.8, rel=1e-12)
    assert found.p == pytest.approx(0.10408803866182788, rel=1e-12)  # Student's t of 4 / √3 with 3 degrees of freedom
    assert found.pairs == 5


def test_a_correlation_of_two_slow_series_is_compared_with_shifts_of_them():
    """Slow series that have nothing in common often correlate, and p for independent steps calls that certain."""
    generator = np.random.default_rng(0)
    slow = np.exp(-np.arange(200) / 10)
    pairs = [[np.convolve(x, slow, "valid") for x in generator.normal(size=(2, 600))] for _ in range(200)]
    found = [pearson(*pair) for pair in pairs]
    assert np.mean([one.p < 0.01 for one in found]) > 0.3
    assert 0.02 < np.mean([one.shifted < 0.05 for one in found]) < 0.12
    x, y = pairs[0]
    assert pearson(x, x + y).shifted < 0.01
    as_they_are = np.corrcoef(x, y)[0, 1]
    shifts = [np.corrcoef(np.roll(x, k), y)[0, 1] for k in range(len(x) // 10, len(x) - len(x) // 10 + 1)]
    expected = (1 + sum(r >= as_they_are for r in shifts)) / (1 + len(shifts))
    assert pearson(x, y).shifted == pytest.approx(expected)


def test_pearson_takes_the_places_where_both_are_finite():
    found = pearson([1, 2, math.nan, 4, math.inf, 3], [3, 5, 1, 9, 2, 7])
    assert found.r == pytest.approx(1)
    assert found.pairs == 4


@pytest.mark.parametrize(("x", "y"), [([1, 1, 1, 1], [1, 2, 3, 4]), ([0.1] * 9, range(9)), ([1, 2], [1, 2]), ([], [])])
def test_what_does_not_vary_has_no_correlation(x, y):
    assert math.isnan(pearson(x, y).r)
    assert math.isnan(pearson(x, y).p)


def test_pearson_survives_values_whose_squares_overflow():
    assert pearson(np.arange(5) * 1e200, np.arange(5)).r == pytest.approx(1)


# --- Spikes


def test_76_rms_spikes_in_60_thousand_steps_explain_one_percent_by_chance():
    steps = np.arange(1, 61_001)  # of which the first thousand do not count
    spikes = np.linspace(2000, 59_000, 76).astype(int)
    assert chance_rate(spikes, steps) == pytest.approx(76 * 8 / 60_000, rel=1e-12)
    assert f"{chance_rate(spikes, steps):.2%}" == "1.01%"


def test_leads_that_overlap_count_once_for_chance():
    assert chance_rate([10, 12], range(1, 101), RULES) == pytest.approx(10 / 100)
    assert math.isnan(chance_rate([10], [], RULES))


def test_rms_spikes_begin_at_2_3_and_close_ones_are_one():
    rms = np.ones(100)
    rms[[9, 15, 25, 60]] = (2.3, 5, 2.4, 2.29)
    rms[80] = np.nan
    rms[90] = np.inf
    assert rms_spikes(range(1, 101), rms, RULES) == [10, 91]
    assert rms_spikes(range(1, 101), rms, SpikeRules(ignore=10)) == [16, 91]


def test_a_gap_of_ten_joins_and_of_eleven_does_not():
    assert merge([5, 15, 26], 10) == [5, 26]
    assert merge([], 10) == []


@pytest.mark.parametrize(("second", "spikes"), [(69, [60]), (70, []), (None, [])])
def test_a_loss_spike_needs_two_deviations_inside_ten_steps(second, spikes):
    losses = noise(100)
    losses[59] = 3.0
    if second is not None:
        losses[second - 1] = 9.0  # high enough, though the first is in its running mean
    assert loss_spikes(range(1, 101), losses, RULES) == spikes


def test_the_deviation_is_measured_in_deviations_of_the_steps_before():
    losses = noise(60)
    mean, deviation = losses[20:40].mean(), losses[20:40].std()
    for factor, expected in ((3.19, False), (3.21, True)):
        losses[40] = mean + factor * deviation
        assert deviates(losses, RULES)[40] == expected
    assert running_range(losses, 20)[0][40] == pytest.approx(mean)


def test_running_ranges_are_the_plain_ones_over_many_rows():
    losses = np.random.default_rng(3).standard_normal(9000)
    mean, deviation = running_range(losses, 50)
    for place in (25, 49, 50, 4145, 4146, 4147, 8999):
        before = losses[max(0, place - 50) : place]
        assert (mean[place], deviation[place]) == (pytest.approx(before.mean()), pytest.approx(before.std()))
    assert np.isnan(mean[:25]).all()
    assert np.isfinite(mean[25:]).all()


def test_losses_that_are_all_alike_do_not_deviate():
    assert not deviates([0.1] * 200, RULES).any()
    assert not deviates([], RULES).any()


def test_a_loss_that_is_not_finite_is_a_spike_and_later_spikes_are_found():
    losses = noise(200)
    losses[[50, 51]] = np.nan, np.inf
    losses[[150, 152]] = 4.0
    assert loss_spikes(range(1, 201), losses, RULES) == [51, 151]
    assert loss_spikes(range(1, 41), np.full(40, np.nan), RULES) == [1]


def test_the_peak_of_a_spike_may_come_long_after_its_onset():
    losses = noise(400)
    losses[299:330] = np.geomspace(2.1, 9, 31)  # deviates all the way up
    losses[330:340] = np.linspace(8, 2, 10)
    (span,) = loss_spans(range(1, 401), losses, SpikeRules(ignore=0))
    assert span[0] == 300
    assert 325 <= span[1] <= 335
    assert find_peak(range(1, 401), losses, span) == (330, pytest.approx(9))
    losses[310] = np.nan
    assert find_peak(range(1, 401), losses, span)[0] == 311


@pytest.mark.parametrize(("early", "cause"), [(100, None), (99, 99), (92, 92), (91, None)])
def test_an_rms_spike_explains_the_eight_steps_after_it(early, cause):
    assert explain_spikes([100], [early], RULES) == [cause]


def test_rules_refuse_what_has_no_meaning():
    with pytest.raises(ValueError, match="window"):
        SpikeRules(window=1)
    with pytest.raises(ValueError, match="lead"):
        SpikeRules(lead=(8, 1))
    assert SpikeRules().fitted(100_000) == SpikeRules()
    assert SpikeRules().fitted(400) == SpikeRules(ignore=20, window=40)


# --- Loss ratios


def test_loss_ratios_of_the_published_example():
    found = loss_ratios([10, 8, 6, 6.6, 5, 9, 4.5])
    assert found.ratios.tolist() == pytest.approx([1, 0.8, 0.75, 1.1, 5 / 6, 1.8, 0.9])
    assert (found.above(1.2), found.highest) == (1, pytest.approx(1.8))


def test_a_loss_that_is_not_finite_counts_in_every_bucket_and_is_never_the_best():
    found = loss_ratios([math.nan, 4.0, -math.inf, 2.0, math.inf, 3.0])
    assert found.ratios.tolist() == [math.inf, 1.0, math.inf, 0.5, math.inf, 1.5]
    assert [found.above(limit) for limit in (1.1, 1.2, 1.5)] == [4, 4, 3]
    assert loss_ratios([]).highest == 1


# --- Run folders


def write_run(folder, losses, tensors, **more):
    """`tensors`: name -> RMS_t per step."""
    folder.mkdir(exist_ok=True)
    with (folder / "log.jsonl").open("w") as log, (folder / "signals.jsonl").open("w") as signals:
        for i, loss in enumerate(losses):
            value = loss if math.isfinite(loss) else None
            print(json.dumps({"step": i + 1, "loss": value, "grad_norm": 1.0}), file=log)
            rms = {name: {"rms": values[i] if math.isfinite(values[i]) else None} for name, values in tensors.items()}
            totals = {name: values[i] for name, values in more.items()}
            print(json.dumps({"step": i + 1, "loss": value, "tensors": rms, "totals": totals}), file=signals)
    return folder


@pytest.fixture
def spiky(tmp_path):
    """Two loss spikes, predicted by `conv1` 5 steps before, one by `mlp` 2 steps before; `mlp` has a false alarm."""
    losses, conv1, mlp = noise(1000), np.ones(1000), np.ones(1000)
    losses[[299, 301, 699, 700]] = 4.0
    conv1[[294, 694]] = 3.0
    mlp[[297, 500]] = 2.5
    mlp[400] = np.nan
    return write_run(tmp_path / "run", losses, {"conv1": conv1, "mlp": mlp, "quiet": np.ones(1000)}, var_l1=losses)


def test_the_lead_time_table_counts_spikes_predictions_and_false_alarms(spiky):
    rules = SpikeRules(ignore=100)
    rows = {row.name: row for row in lead_times(read_run(spiky), rules)}
    assert list(rows) == [ANY, "conv1", "mlp"]
    conv1, mlp, together = rows["conv1"], rows["mlp"], rows[ANY]
    assert (conv1.explained, conv1.leads, conv1.false_alarms) == (2, [5, 5], 0)
    assert (mlp.explained, mlp.leads, mlp.false_alarms) == (1, [2], 1)
    assert together.rms_spikes == [295, 298, 501, 695]
    assert (together.explained, together.leads, together.false_alarms) == (2, [5, 5], 1)
    assert conv1.chance == pytest.approx(16 / 900)
    assert conv1.p == pytest.approx((16 / 900) ** 2)
    assert "2 of 2 loss spikes predicted, 5 steps before" in lead_time_words(conv1)


def test_the_tensor_that_spiked_first_is_named(spiky):
    first, second = first_spikes(read_run(spiky), SpikeRules(ignore=100))
    assert (first.step, first.peak, first.lead) == (300, (300, 4.0), 5)
    assert first.size == pytest.approx(2, rel=0.01)
    assert first.tensors == [("conv1", 295, 3.0), ("mlp", 298, 2.5)]
    assert first.usual[0] == pytest.approx(2.0, abs=0.01)
    assert second.tensors == [("conv1", 695, 3.0)]


def test_a_tensor_that_spikes_between_onset_and_peak_is_named_with_no_lead(tmp_path):
    losses, rms = noise(400), np.ones(400)
    losses[299:303] = 2.2, 2.5, 9.0, 4.0
    rms[[299, 301]] = 2.5, 8.0
    (spike,) = first_spikes(
        read_run(write_run(tmp_path, losses, {"w": rms, "late": np.roll(rms, 5)})), SpikeRules(ignore=0)
    )
    assert (spike.step, spike.peak) == (300, (302, 9.0))
    assert (spike.tensors, spike.lead) == ([("w", 300, 2.5)], 0)


def test_the_course_of_the_variance_has_its_peak_and_its_highest_value_early_in_the_run():
    found = Course(np.array([2, 4, 6, 20]), np.array([1.0, 3.0, 2.0, 9.0]))
    assert (found.peak, found.highest(), found.highest(0.25), found.highest(0.01)) == (20, 9.0, 3.0, 1.0)


def test_an_analysis_says_when_a_loss_was_reached(spiky):
    found = replace(analyze(spiky), evaluations=[Evaluation(0, 0, 5.0), Evaluation(64, 1, 3.0), Evaluation(128, 2, 2)])
    assert found.reaches(3.5) == Evaluation(64, 1, 3.0)
    assert found.reaches(1.0) is None


def test_correlations_pair_the_loss_ratio_with_the_second_moments(spiky):
    found = correlations(read_run(spiky))
    assert list(found) == ["var_l1"]  # var_max was not logged
    assert found["var_l1"].r > 0.99
    assert found["var_l1"].p < 1e-100
    assert found["var_l1"].pairs == 1000


def test_the_whole_analysis_reads_as_text(spiky):
    text = analysis_words(analyze(spiky))
    for part in (
        "any tensor: 2 of 2",
        "loss spike at 300: 4 at 300",
        "conv1 3.00 at 295",
        "loss ratio: ",
        "var_l1: Pearson 0.99",
    ):
        assert part in text


def test_a_log_without_signals_is_analysed_by_its_largest_rms(tmp_path):
    losses = noise(400)
    losses[[299, 300]] = 4.0
    lines = [json.dumps({"step": i + 1, "loss": x, "rms_max": 9.0 if i == 296 else 1.0}) for i, x in enumerate(losses)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    found = analyze(tmp_path)
    assert [row.name for row in found.lead_times] == [ANY, "rms_max"]
    assert found.lead_times[0].leads == [3]
    assert found.correlations == {}


def test_a_log_with_nothing_but_losses_is_analysed(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": null}\n')
    found = analyze(tmp_path)
    assert found.lead_times[0].rms_spikes == []
    assert found.ratios.ratios.tolist() == [1, math.inf]


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_numbers_in_a_log_make_the_analysis_fail(pairs):
    run = Run(RunFolder(Path()))
    for step, (loss, rms) in enumerate(pairs, start=1):
        run.log.add(step, [("loss", loss)])
        run.signals.add(step, [("tensors/w/rms", rms), ("totals/var_l1", rms)])
    found = analyze(run, SpikeRules(ignore=0, window=4))
    assert len(found.ratios.ratios) == len(pairs)
    assert 0 <= found.lead_times[0].explained <= len(found.lead_times[0].loss_spikes)
    assert analysis_words(found)
