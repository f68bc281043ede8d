"""The verdict in sentences, and every note."""

import re
from pathlib import Path

import pytest

from tests.analysis.runs import ARMS, Numbers, grid, params_of, planted, write_failures, write_study
from trimtab.analysis.findings import Findings, Note, read
from trimtab.lab.study import Arm, Cell
from trimtab.report import notes_words, verdict_words
from trimtab.report.numbers import beyond
from trimtab.report.sentences import note_words


@pytest.fixture(scope="module")
def law(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return read([write_study(tmp_path_factory.mktemp("law"), grid())])


def has(findings: Findings, *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in verdict_words(findings))


def test_the_headline_has_the_outcome_of_every_arm(law: Findings) -> None:
    headline = verdict_words(law)[0]
    assert re.match(
        r"Plain fails above learning rate 0\.03\d at 147k parameters and, by forecast, above 0\.0\d+ \(.*\) at 1\.5M; "
        r"steadied \(qk-norm, z-loss=1e-4\) holds up to learning rate 0\.3 at 147k parameters",
        headline,
    )


def test_edges_of_every_size_and_their_trend_are_in_the_verdict(law: Findings) -> None:
    assert has(law, "plain: edge of stability 0.1", "at 6.14k, 24.6k and 147k parameters; it falls by a factor of ")
    assert has(
        law, "steadied: edge of stability above 0.3, above 0.3 and above 0.3 at 6.14k, 24.6k and 147k parameters."
    )


def test_arms_are_compared_at_the_largest_size_with_a_range(law: Findings) -> None:
    (comparison,) = [c for c in law.comparisons if c.size == "3x64"]
    assert comparison.low is not None
    assert comparison.low <= comparison.ratio
    assert has(law, f"plain is {comparison.ratio:.1f} times as sensitive", "as steadied", "over seeds")
    assert has(law, f"above the best learning rate {comparison.unstable:.1f} times")


def test_cause_effect_check_and_next_size_are_in_the_verdict(law: Findings) -> None:
    assert has(law, "signal in the 8 failed runs of plain", "attention logits above the critical value in 8 runs")
    assert has(law, "With steadied no learning rate that was run fails at 147k parameters.")
    assert has(law, "Check: the forecast of the largest size from the smaller ones is right at")
    assert has(law, "The forecast is tested by training 4x128 (786k)", "add it to the sizes of the study")


def test_the_next_size_is_a_command_for_the_studies_of_the_lab(tmp_path: Path) -> None:
    findings = read([write_study(tmp_path, grid(name="quick", lrs=(0.01, 0.1), seeds=(0,)))])
    assert has(findings, f": trimtab lab --quick --sizes 2x16 2x32 3x64 4x128 --out {tmp_path}")


def test_a_complete_study_has_no_notes(law: Findings) -> None:
    assert law.notes == ()
    assert not has(law, "have no result")


def test_one_seed_is_noted(tmp_path: Path) -> None:
    findings = read([write_study(tmp_path, grid(lrs=(0.01, 0.1), seeds=(0,)))])
    assert has(findings, "one seed, so random variation is unknown")
    assert any("only 1 seed, so random" in note for note in notes_words(findings))


def test_missing_cells_are_counted(tmp_path: Path) -> None:
    study = grid(lrs=(0.01, 0.1), seeds=(0,))
    write_study(tmp_path, study, lambda cell: None if cell.lr == 0.1 and cell.arm == "plain" else planted(cell))
    write_failures(tmp_path, [(study.cells()[1].name, "out of memory")])
    findings = read([tmp_path])
    assert has(findings, "3 of 12 cells have no result")
    assert any("out of memory" in note for note in notes_words(findings))


def test_a_sensitivity_over_fewer_learning_rates_is_not_set_against_one_over_all(tmp_path: Path) -> None:
    study = grid(lrs=(0.01, 0.03, 0.1), seeds=(0,))
    write_study(tmp_path, study, lambda cell: None if cell.lr == 0.1 and cell.arm == "steadied" else planted(cell))
    findings = read([tmp_path])
    assert has(findings, "as sensitive to the learning rate as steadied", "over the learning rates that both have")
    assert not has(findings, "steadied: sensitivity")


def test_different_windows_are_both_given(tmp_path: Path) -> None:
    losses = {"plain": (2.0, 2.1, 2.2, 4.0), "steadied": (4.0, 2.2, 2.1, 2.0)}
    lrs = (1e-4, 1e-3, 1e-2, 1.0)
    study = grid(sizes=("2x16",), lrs=lrs, seeds=(0,))
    findings = read([write_study(tmp_path, study, lambda c: Numbers(loss=losses[c.arm][lrs.index(c.lr)]))])
    assert has(findings, "over learning rates 0.0001–0.01 for plain and learning rates 0.001–1 for steadied")


def test_a_stable_recipe_holds_up_to_the_highest_learning_rate(tmp_path: Path) -> None:
    study = grid(sizes=("3x64",), lrs=(0.001, 0.01, 0.1), arms=ARMS[1:], seeds=(0,))
    losses = {0.001: 2.3, 0.01: 2.0, 0.1: 2.05}
    findings = read([write_study(tmp_path, study, lambda cell: Numbers(loss=losses[cell.lr]))])
    assert verdict_words(findings)[0] == (
        "Steadied (qk-norm, z-loss=1e-4) holds up to learning rate 0.1 at 147k parameters."
    )
    assert not has(findings, "First abnormal signal")


def test_a_recipe_that_learns_nothing_is_not_called_robust(tmp_path: Path) -> None:
    study = grid(sizes=("2x16",), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,))
    findings = read([write_study(tmp_path, study, lambda _: Numbers(why="diverged"))])
    assert (findings.curves[0].sensitivity, findings.curves[0].failing_lr) == (0.0, 0.01)
    assert verdict_words(findings)[0] == "Plain learns nothing at any learning rate at 6.14k parameters."
    assert any("the sensitivity is not meaningful" in note for note in notes_words(findings))


def test_an_arm_without_an_effect_is_reported(tmp_path: Path) -> None:
    study = grid(lrs=(0.01, 0.1), arms=(Arm("plain"), Arm("z-loss", ("z-loss=1e-4",))), seeds=(0,))
    findings = read([write_study(tmp_path, study, lambda cell: Numbers(loss=2.0 if cell.lr < 0.1 else 4.0))])
    assert has(findings, "z-loss does not raise the lowest failing learning rate.")


def test_other_causes_are_named(tmp_path: Path) -> None:
    def numbers(cell: Cell) -> Numbers:
        if cell.lr < 0.1:
            return Numbers(loss=2.0)
        return Numbers(loss=4.0, grad_rms=1e-8, spikes=(200,))

    study = grid(sizes=("2x16",), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,), steps=400)
    assert has(read([write_study(tmp_path, study, numbers)]), "First abnormal signal", "a loss spike in 1 run.")


def test_gradients_near_eps_are_a_warning_for_rates_that_hold(tmp_path: Path) -> None:
    def numbers(cell: Cell) -> Numbers:
        return Numbers(grad_rms=0.02 / params_of(cell.config), loss=2.0 if cell.lr < 1 else 4.0)

    findings = read([write_study(tmp_path, grid(lrs=(0.001, 0.01, 1.0), seeds=(0,)), numbers)])
    assert has(findings, "plain at 1.47M parameters: learning rate 0.001: the gradient RMS, 1.36e-8", "Adam's ε")
    assert not has(findings, "learning rate 1: the gradient RMS")


def test_several_studies_are_distinguished_by_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_study(tmp_path / name, grid(sizes=("2x16",), lrs=(0.01, 0.1), seeds=(0,), name=name))
    findings = read([tmp_path / "one", tmp_path / "two"])
    assert verdict_words(findings)[0].startswith("one: ")
    assert has(findings, "two: ")


def test_no_finished_run_quotes_the_first_failure(tmp_path: Path) -> None:
    study = grid(sizes=("2x16",), lrs=(0.01,), arms=ARMS[:1], seeds=(0,))
    write_study(tmp_path, study, lambda _: None)
    write_failures(tmp_path, [(study.cells()[0].name, "ImportError: no module named mine")])
    findings = read([tmp_path])
    assert verdict_words(findings)[0] == "No run has finished, so there are no results yet (1 cell: 1 failed)."
    assert verdict_words(findings)[-1].startswith("Start the study again")
    assert has(findings, "ImportError: no module named mine")


def test_no_sentence_has_markup_or_missing_values(law: Findings) -> None:
    for line in (*verdict_words(law), *notes_words(law)):
        assert not set("*`_#<>|") & set(line.replace("qk_norm", ""))
        assert "nan" not in line.split()
        assert "None" not in line


def test_distances_are_factors_or_powers_of_ten() -> None:
    assert beyond(1.0) == "10 times the largest size that was run"
    assert beyond(3.5) == "3.5 powers of ten beyond the largest size that was run"


EVERY_NOTE = [
    (Note(kind="no runs", where="a"), "a holds no study and no run"),
    (Note(kind="bad study", where="a"), "a cannot be read, so its runs are read without it"),
    (Note(kind="bad cells", where="a", count=2), "2 cells of a cannot be read"),
    (Note(kind="missing", count=5, of=9, items=("a", "b", "c")), "5 of 9 cells were not run (a; b; c; 2 more)"),
    (Note(kind="stopped", count=5, of=9), "5 of 9 cells were stopped early"),
    (Note(kind="broken lines", count=1, of=2), "2 in all"),
    (
        Note(kind="mixed", where="versions", count=2, items=("1: 3 runs", "2: 4 runs")),
        "2 different versions (1: 3 runs, ",
    ),
    (Note(kind="missing rates", where="a", count=2, of=4, items=("0.1", "1")), "2 of 4 learning rates; no run has"),
    (Note(kind="one rate", where="a", count=1), "needs two learning rates, there is 1"),
    (Note(kind="few seeds", count=1, of=2), "for some cells there is only 1 seed"),
    (Note(kind="no logits", where="a"), "no attention logits were logged"),
    (Note(kind="no params", items=("a", "b")), "in no fit: a and b"),
]


@pytest.mark.parametrize(("note", "words"), EVERY_NOTE)
def test_every_note_has_a_sentence(note: Note, words: str) -> None:
    assert words in note_words(note)
