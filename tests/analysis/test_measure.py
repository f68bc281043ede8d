"""Sensitivity is the paper's, whatever the order, the offset or the number of broken runs."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.runs import ARMS, FIRST, Numbers, grid, write_run, write_study
from trimtab.analysis import measure
from trimtab.analysis.findings import Findings, Note, read
from trimtab.lab.study import Cell

LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
GOLDEN = [3.2, 3.0, 2.9, 2.85, 2.9, 7.0, math.nan]
losses_ = st.lists(st.floats(0.5, 9.0), min_size=2, max_size=9)
first_ = st.floats(4.0, 7.0)


def read_losses(folder: Path, losses: dict[tuple[float, int], float], first: float = FIRST) -> Findings:
    """Findings of one size and arm with these final losses by learning rate and seed."""
    seeds = sorted({seed for _, seed in losses})
    study = grid(sizes=("2x16",), lrs=sorted({lr for lr, _ in losses}), arms=ARMS[:1], seeds=seeds)
    return read([write_study(folder, study, lambda cell: Numbers(loss=losses[cell.lr, cell.seed], first=first))])


def test_sensitivity_is_the_golden_value_of_the_paper_s_rule() -> None:
    assert measure.sensitivity(GOLDEN, 5.99) == pytest.approx(0.982857, abs=1e-6)


def test_a_study_on_disk_has_the_golden_sensitivity(tmp_path: Path) -> None:
    losses = {(lr, 0): loss for lr, loss in zip(LRS, GOLDEN, strict=True)}
    (curve,) = read_losses(tmp_path, losses, first=5.99).curves
    assert curve.sensitivity == pytest.approx(0.982857, abs=1e-6)
    assert (curve.best_lr, curve.failing_lr, curve.broken) == (1e-2, 0.1, (0, 0, 0, 0, 0, 0, 1))


@given(losses_, first_, st.floats(-3.0, 3.0))
def test_a_constant_on_all_losses_changes_nothing(losses: list[float], first: float, shift: float) -> None:
    moved = measure.sensitivity([loss + shift for loss in losses], first + shift)
    assert moved == pytest.approx(measure.sensitivity(losses, first), abs=1e-9)


@given(st.permutations(list(zip(LRS, GOLDEN, strict=True))))
def test_the_order_of_learning_rates_does_not_matter(pairs: list[tuple[float, float]]) -> None:
    lrs, losses = zip(*pairs, strict=True)
    value, window = measure.best_window(lrs, losses, 5.99)
    assert value == pytest.approx(0.982857, abs=1e-6)
    assert window == (3e-4, 3e-1)


@given(losses_, first_, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 8))
def test_a_loss_that_is_not_finite_counts_as_the_first(
    losses: list[float], first: float, bad: float, place: int
) -> None:
    place %= len(losses)
    broken, same = [*losses], [*losses]
    broken[place], same[place] = bad, first
    assert measure.sensitivity(broken, first) == measure.sensitivity(same, first)


@given(losses_, first_)
def test_sensitivity_is_neither_negative_nor_above_what_training_can_gain(losses: list[float], first: float) -> None:
    value = measure.sensitivity(losses, first)
    assert -1e-12 <= value <= max(first - min(losses), 0.0) + 1e-12


def test_a_model_that_learns_nothing_scores_zero() -> None:
    assert measure.sensitivity([7.0, math.nan, 9.0], 5.0) == 0.0


def test_of_a_grid_longer_than_three_decades_the_best_window_counts() -> None:
    lrs = (1e-4, *LRS)
    losses = [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 6.0]
    value, window = measure.best_window(lrs, losses, 6.0)
    assert (value, window) == (0.0, (1e-4, 1e-1))
    assert measure.best_window(lrs, losses[::-1], 6.0)[1] == (3e-4, 3e-1)
    assert measure.best_window(LRS, losses[1:], 6.0)[0] == pytest.approx(3 / 7)


def test_seeds_give_a_range_that_holds_the_value_and_one_seed_gives_none(tmp_path: Path) -> None:
    one = {(0.01, 0): 2.0, (0.1, 0): 3.0}
    (curve,) = read_losses(tmp_path / "one", one).curves
    assert (curve.sensitivity, curve.sensitivity_low, curve.sensitivity_high) == (0.5, None, None)
    (curve,) = read_losses(tmp_path / "two", {**one, (0.01, 1): 2.0, (0.1, 1): 2.4}).curves
    assert curve.sensitivity == pytest.approx(0.35)
    assert (curve.sensitivity_low, curve.sensitivity_high) == (pytest.approx(0.2), pytest.approx(0.5))
    assert (curve.low, curve.high, curve.seeds) == ((2.0, 2.4), (2.0, 3.0), (2, 2))


def test_slow_learning_is_not_failing(tmp_path: Path) -> None:
    losses = {(0.001, 0): 4.5, (0.01, 0): 2.0, (0.1, 0): 2.2, (0.3, 0): 2.6}
    (curve,) = read_losses(tmp_path, losses, first=6.0).curves
    assert curve.failing_lr == 0.3  # 15 % of the 4 nats that training gains; 0.1 loses 5 %


@pytest.mark.parametrize(
    ("losses", "first", "failing"),
    [
        ((2.003, 1.961, 2.584, 2.868), 5.5, 0.1),  # 147 thousand weights as they are
        ((1.964, 1.913, 1.944, 2.041), 5.5, None),  # and steadied
        ((2.342, 2.220, 2.211, 2.814), 5.8, 0.3),  # 6 thousand weights as they are
        ((2.277, 2.163, 2.188, 2.386), 5.8, None),  # and steadied
    ],
)
def test_measured_runs_fail_as_they_are_and_not_when_steadied(
    tmp_path: Path, losses: tuple[float, ...], first: float, failing: float | None
) -> None:
    by_rate = {(lr, 0): loss for lr, loss in zip((0.01, 0.03, 0.1, 0.3), losses, strict=True)}
    assert read_losses(tmp_path, by_rate, first=first).curves[0].failing_lr == failing


def test_a_stopped_run_scores_the_first_loss(tmp_path: Path) -> None:
    study = grid(sizes=("2x16",), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,))

    def numbers(cell: Cell) -> Numbers:
        stopped = cell.lr == 0.1
        return Numbers(loss=2.0, first=6.0, why="diverged" if stopped else "done")

    findings = read([write_study(tmp_path, study, numbers)])
    assert [result.status for result in findings.results] == ["done", "stopped"]
    (curve,) = findings.curves
    assert (curve.loss, curve.sensitivity, curve.failing_lr) == ((2.0, 6.0), 2.0, 0.1)


def test_a_study_without_the_loss_before_training_says_so(tmp_path: Path) -> None:
    study = grid(sizes=("2x16",), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,))
    write_study(tmp_path, study, lambda _: Numbers())
    for path in tmp_path.rglob("events.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    findings = read([tmp_path])
    assert math.isnan(findings.curves[0].sensitivity)
    assert Note(kind="no first loss", where="plain at 2x16") in findings.notes


def test_ratios_are_over_the_learning_rates_that_both_arms_have(tmp_path: Path) -> None:
    study = grid(sizes=("2x16",), lrs=(0.01, 0.1, 0.3), seeds=(0, 1))
    losses = {("plain", 0.01): 2.0, ("plain", 0.1): 3.0, ("steadied", 0.01): 2.0, ("steadied", 0.1): 2.5}
    losses |= {("plain", 0.3): 5.0}

    def numbers(cell: Cell) -> Numbers | None:
        loss = losses.get((cell.arm, cell.lr))
        return None if loss is None else Numbers(loss=loss)

    findings = read([write_study(tmp_path, study, numbers)])
    (comparison,) = findings.comparisons
    assert (comparison.arm, comparison.other) == ("plain", "steadied")
    assert (comparison.ratio, comparison.low, comparison.high) == (2.0, 2.0, 2.0)
    assert Note(kind="missing rates", where="steadied at 2x16", count=2, of=3, items=("0.3",)) in findings.notes


def test_slopes_along_width_depth_and_both(tmp_path: Path) -> None:
    study = grid(sizes=("1x32", "4x32", "4x64"), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,))
    lost = {"1x32": 0.2, "4x32": 0.4, "4x64": 0.5}

    def numbers(cell: Cell) -> Numbers:
        return Numbers(loss=2.0 + (2 * lost[cell.size] if cell.lr == 0.1 else 0.0))

    slopes = {slope.along: slope for slope in read([write_study(tmp_path, study, numbers)]).slopes}
    decade = math.log10(4)
    assert slopes["depth"].value == pytest.approx(0.2 / decade)
    assert slopes["width"].value == pytest.approx(0.1 / decade)
    assert slopes["depth"].sizes == ("1x32", "4x32")
    assert set(slopes["both"].sizes) == {"1x32", "4x32", "4x64"}


def test_spikes_are_counted_per_run(tmp_path: Path) -> None:
    study = grid(sizes=("2x16",), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,), steps=300)
    spiky = (150, 220)

    def numbers(cell: Cell) -> Numbers:
        return Numbers(spikes=spiky if cell.lr == 0.1 else ())

    findings = read([write_study(tmp_path, study, numbers)])
    assert findings.curves[0].spikes == (0.0, 2.0)
    assert [step for step, _ in findings.results[1].spikes] == [150, 220]
    kept = {step for step, _ in findings.results[1].losses}
    assert {150, 220} <= kept


def test_one_learning_rate_has_no_sensitivity(tmp_path: Path) -> None:
    write_run(tmp_path / "run", grid().cells()[0].config)
    findings = read([tmp_path / "run"])
    assert math.isnan(findings.curves[0].sensitivity)
    assert [note.count for note in findings.notes if note.kind == "one rate"] == [1]
