"""Sensitivity follows the paper for any order, offset and number of stopped runs; what fails follows docs/lab.md."""

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


@given(losses_, first_)
def test_the_two_parts_add_up_to_the_sensitivity(losses: list[float], first: float) -> None:
    scores = [min(loss, first) for loss in losses]
    lrs = [0.01 * 1.1**i for i in range(len(scores))]
    value, window = measure.best_window(lrs, scores, first)
    assert sum(measure.split_sensitivity(lrs, scores, window)) == pytest.approx(value, abs=1e-9)


def test_slow_learning_is_its_own_part_and_not_failing(tmp_path: Path) -> None:
    losses = {(0.001, 0): 4.5, (0.01, 0): 2.0, (0.1, 0): 2.05, (0.3, 0): 2.6}
    (curve,) = read_losses(tmp_path, losses, first=6.0).curves
    assert curve.failing_lr == 0.3
    assert (curve.too_slow, curve.unstable) == (pytest.approx(2.5 / 4), pytest.approx(0.65 / 4))


# --- What fails


@pytest.mark.parametrize(
    ("losses", "failing", "edge"),
    [  # trained, at 0.01, 0.03, 0.1 and 0.3
        ((2.003, 1.961, 2.584, 2.868), 0.1, 0.0365),  # 147k parameters as they are
        ((1.964, 1.913, 1.944, 2.041), 0.3, 0.2185),  # and steadied
        ((2.342, 2.220, 2.211, 2.814), 0.3, 0.1200),  # 6k parameters as they are
        ((2.277, 2.163, 2.188, 2.386), 0.3, 0.1516),  # and steadied
    ],
)
def test_the_edge_is_where_the_loss_crosses_the_margin(
    tmp_path: Path, losses: tuple[float, ...], failing: float, edge: float
) -> None:
    by_rate = {(lr, 0): loss for lr, loss in zip((0.01, 0.03, 0.1, 0.3), losses, strict=True)}
    (curve,) = read_losses(tmp_path, by_rate).curves
    assert curve.failing_lr == failing
    assert curve.edge == pytest.approx(edge, rel=1e-2)
    # With one seed the range is that of the two learning rates.
    assert (curve.edge_low, curve.edge_high) == (max(lr for lr in curve.lrs if lr < edge), failing)


def test_a_difference_that_seeds_explain_is_no_failure(tmp_path: Path) -> None:
    quiet = {(0.01, 0): 2.0, (0.01, 1): 2.02, (0.1, 0): 2.15, (0.1, 1): 2.17}
    assert read_losses(tmp_path / "quiet", quiet).curves[0].failing_lr == 0.1
    noisy = {(0.01, 0): 1.8, (0.01, 1): 2.22, (0.1, 0): 1.95, (0.1, 1): 2.37}
    (curve,) = read_losses(tmp_path / "noisy", noisy).curves
    assert curve.failing_lr is None
    assert curve.noise == pytest.approx(0.42 / math.sqrt(2))
    assert curve.limit[1] == pytest.approx(2 * curve.noise)  # two means of two seeds


def test_failing_cells_do_not_add_to_the_noise(tmp_path: Path) -> None:
    losses = {(0.01, 0): 2.0, (0.01, 1): 2.02, (0.1, 0): 2.2, (0.1, 1): 5.0}
    (curve,) = read_losses(tmp_path, losses).curves
    assert curve.noise == pytest.approx(0.02 / math.sqrt(2))
    assert curve.failing_lr == 0.1


def test_the_edge_has_a_range_over_seeds_also_where_a_seed_was_run_at_some_learning_rates_only(tmp_path: Path) -> None:
    losses = {(0.01, 0): 2.0, (0.1, 0): 2.05, (1.0, 0): 3.05, (0.1, 1): 2.09, (1.0, 1): 2.5}
    study = grid(sizes=("2x16",), lrs=(0.01, 0.1, 1.0), arms=ARMS[:1], seeds=(0, 1))

    def numbers(cell: Cell) -> Numbers | None:
        loss = losses.get((cell.lr, cell.seed))
        return None if loss is None else Numbers(loss=loss)

    (curve,) = read([write_study(tmp_path, study, numbers)]).curves
    assert curve.edge is not None
    assert curve.edge_low == pytest.approx(0.1 * 10 ** (0.01 / 0.41))
    assert curve.edge_high == pytest.approx(0.1 * 10 ** (0.05 / 1.0))
    assert curve.edge_low < curve.edge < curve.edge_high


def test_a_larger_model_that_is_worse_at_the_same_learning_rate_fails(tmp_path: Path) -> None:
    """Trained: 786k parameters at 0.03 had 2.12, and 147k had 1.954."""
    losses = {"3x64": (2.00, 1.954, 2.55), "4x128": (1.95, 1.93, 2.10)}
    study = grid(sizes=tuple(losses), lrs=(0.01, 0.03, 0.1), arms=ARMS[:1], seeds=(0,))
    at = study.lrs.index
    curves = read([write_study(tmp_path, study, lambda c: Numbers(loss=losses[c.size][at(c.lr)]))]).curves
    assert [curve.failing_lr for curve in curves] == [0.1, 0.1]
    losses["4x128"] = (2.15, 2.06, 2.08)  # within the margin of its own best, but 0.1 above the smaller model's
    curves = read([write_study(tmp_path / "worse", study, lambda c: Numbers(loss=losses[c.size][at(c.lr)]))]).curves
    assert curves[1].failing_lr == 0.03
    assert curves[1].edge == 0.03


def test_a_model_that_learns_nothing_fails_everywhere(tmp_path: Path) -> None:
    (curve,) = read_losses(tmp_path, {(0.01, 0): 5.9, (0.1, 0): 7.0}, first=5.8).curves
    assert not curve.learned
    assert (curve.failing_lr, curve.edge) == (0.01, None)


def test_a_stopped_run_scores_the_first_loss(tmp_path: Path) -> None:
    study = grid(sizes=("2x16",), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,))

    def numbers(cell: Cell) -> Numbers:
        stopped = cell.lr == 0.1
        return Numbers(loss=2.0, first=6.0, why="diverged" if stopped else "done")

    findings = read([write_study(tmp_path, study, numbers)])
    assert [result.status for result in findings.results] == ["done", "stopped"]
    (curve,) = findings.curves
    assert (curve.loss, curve.sensitivity, curve.failing_lr) == ((2.0, 6.0), 2.0, 0.1)


def test_a_study_without_the_loss_before_training_has_a_note(tmp_path: Path) -> None:
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
