"""The verdict says what was run and no more."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.analysis.runs import ARMS, Numbers, grid, params_of, planted, write_failures, write_study
from trimtab.analysis.findings import Findings, read
from trimtab.analysis.words import join, say_count, say_decades, say_number, say_range
from trimtab.lab.study import Arm, Cell


@pytest.fixture(scope="module")
def law(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return read([write_study(tmp_path_factory.mktemp("law"), grid())])


def has(findings: Findings, *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in findings.verdict)


def test_the_headline_says_what_breaks_where_and_what_holds(law: Findings) -> None:
    assert law.verdict[0].startswith(
        "Plain breaks at learning rate 0.1 at 147 thousand parameters, and by the fit at 0.03"
    )
    assert "steadied (qk-norm, z-loss=1e-4) holds up to learning rate 0.3" in law.verdict[0]


def test_a_rate_that_breaks_every_size_is_no_matter_of_size(tmp_path: Path) -> None:
    study = grid(lrs=(0.01, 0.1, 1.0), arms=ARMS[1:], seeds=(0,))
    broken = write_study(tmp_path, study, lambda cell: replace(planted(cell), loss=4.0 if cell.lr == 1 else 2.0))
    assert read([broken]).verdict[0].endswith("holds up to learning rate 0.1 and breaks at 1 at every size.")


def test_arms_are_compared_at_the_largest_size_with_a_range(law: Findings) -> None:
    (comparison,) = [c for c in law.comparisons if c.size == "3x64"]
    assert comparison.low is not None
    assert comparison.low <= comparison.ratio
    assert has(law, f"plain is {comparison.ratio:.1f} times as sensitive", "as steadied", "over 2 seeds", "nats")


def test_cause_cure_prediction_and_back_test_are_said(law: Findings) -> None:
    assert has(law, "What breaks first in the 8 runs of plain", "attention logits above the critical value in 8")
    assert has(law, "no learning rate fails with steadied")
    assert has(law, "By the fit plain will fail at learning rate 0.03", "times the largest size that was run")
    assert has(law, "off by a factor of 1.0", "at worst")
    assert has(law, "The critical attention logit is")


def test_nothing_is_called_missing_in_a_whole_study(law: Findings) -> None:
    assert law.notes == ()
    assert not has(law, "not in this")


def test_one_seed_is_said(tmp_path: Path) -> None:
    findings = read([write_study(tmp_path, grid(lrs=(0.01, 0.1), seeds=(0,)))])
    assert has(findings, "one seed, so how much of it is chance is not known")
    assert has(findings, "There is one seed only")
    assert any("1 seed only" in note for note in findings.notes)


def test_missing_cells_are_counted(tmp_path: Path) -> None:
    study = grid(lrs=(0.01, 0.1), seeds=(0,))
    write_study(tmp_path, study, lambda cell: None if cell.lr == 0.1 and cell.arm == "plain" else planted(cell))
    write_failures(tmp_path, [(study.cells()[1].name, "out of memory")])
    findings = read([tmp_path])
    assert has(findings, "3 of 12 cells are not in this")
    assert any("out of memory" in note for note in findings.notes)


def test_a_sensitivity_over_fewer_learning_rates_is_not_set_against_one_over_all(tmp_path: Path) -> None:
    study = grid(lrs=(0.01, 0.03, 0.1), seeds=(0,))
    write_study(tmp_path, study, lambda cell: None if cell.lr == 0.1 and cell.arm == "steadied" else planted(cell))
    findings = read([tmp_path])
    assert has(findings, "as sensitive to its learning rate as steadied", "over the learning rates that both have")
    assert not has(findings, "nats of loss on average")
    assert not has(findings, "steadied: sensitivity")


def test_windows_that_differ_are_both_said(tmp_path: Path) -> None:
    losses = {"plain": (2.0, 2.1, 2.2, 4.0), "steadied": (4.0, 2.2, 2.1, 2.0)}
    lrs = (1e-4, 1e-3, 1e-2, 1.0)
    study = grid(sizes=("2x16",), lrs=lrs, seeds=(0,))
    findings = read([write_study(tmp_path, study, lambda c: Numbers(loss=losses[c.arm][lrs.index(c.lr)]))])
    assert has(findings, "over learning rates 0.0001 to 0.01 against", "over learning rates 0.001 to 1")


def test_a_recipe_that_holds_is_said_to_hold_as_far_as_it_was_run(tmp_path: Path) -> None:
    study = grid(lrs=(0.01, 0.1), arms=ARMS[1:], seeds=(0,))
    findings = read([write_study(tmp_path, study, lambda _: Numbers(loss=2.0))])
    assert findings.verdict[0] == (
        "Steadied (qk-norm, z-loss=1e-4) holds up to learning rate 0.1 at 147 thousand parameters."
    )
    assert not has(findings, "What breaks first")
    assert has(findings, "because no attention logits are known here") or has(findings, "critical", "paper")


def test_a_recipe_that_learns_nothing_is_not_called_robust(tmp_path: Path) -> None:
    study = grid(sizes=("2x16",), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,))
    findings = read([write_study(tmp_path, study, lambda _: Numbers(why="diverged"))])
    assert (findings.curves[0].sensitivity, findings.curves[0].failing_lr) == (0.0, 0.01)
    assert findings.verdict[0] == "Plain learns nothing at 6.14 thousand parameters, at any learning rate."
    assert any("its sensitivity says nothing" in note for note in findings.notes)


def test_an_arm_that_does_not_help_is_said_not_to(tmp_path: Path) -> None:
    study = grid(lrs=(0.01, 0.1), arms=(Arm("plain"), Arm("z-loss", ("z-loss=1e-4",))), seeds=(0,))
    findings = read([write_study(tmp_path, study, lambda cell: Numbers(loss=2.0 if cell.lr < 0.1 else 4.0))])
    assert has(findings, "It makes no difference with z-loss")


def test_other_causes_are_named(tmp_path: Path) -> None:
    def numbers(cell: Cell) -> Numbers:
        if cell.lr < 0.1:
            return Numbers(loss=2.0)
        return Numbers(loss=4.0, grad_rms=1e-8, spikes=(200,))

    study = grid(sizes=("2x16",), lrs=(0.01, 0.1), arms=ARMS[:1], seeds=(0,), steps=400)
    assert has(read([write_study(tmp_path, study, numbers)]), "What breaks first", "a spike of the loss in 1")


def test_gradients_near_eps_are_foretold_for_rates_that_do_not_fail(tmp_path: Path) -> None:
    def numbers(cell: Cell) -> Numbers:
        rms = {0.01: 40.0, 0.1: 4.0}[cell.lr] / params_of(cell.config)
        return Numbers(grad_rms=rms, loss=2.0 if cell.lr < 0.1 or cell.arm != "plain" else 4.0)

    findings = read([write_study(tmp_path, grid(lrs=(0.01, 0.1), seeds=(0,)), numbers)])
    assert has(findings, "Gradients of plain", "at learning rate 0.01 from about 400 million")
    assert has(findings, "Gradients of steadied", "at learning rate 0.1 from about 40 million")


def test_several_studies_are_told_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_study(tmp_path / name, grid(sizes=("2x16",), lrs=(0.01, 0.1), seeds=(0,), name=name))
    findings = read([tmp_path / "one", tmp_path / "two"])
    assert findings.verdict[0].startswith("one: ")
    assert has(findings, "two: ")


def test_no_finished_run_quotes_the_first_failure(tmp_path: Path) -> None:
    study = grid(sizes=("2x16",), lrs=(0.01,), arms=ARMS[:1], seeds=(0,))
    write_study(tmp_path, study, lambda _: None)
    write_failures(tmp_path, [(study.cells()[0].name, "ImportError: no module named mine")])
    findings = read([tmp_path])
    assert findings.verdict[0] == "No run has finished, so there is nothing to say yet: of 1 cell 1 failed."
    assert has(findings, "ImportError: no module named mine")


def test_no_sentence_has_marks_or_holes(law: Findings) -> None:
    for line in (*law.verdict, *law.notes):
        assert not set("*`_#<>|") & set(line.replace("qk_norm", ""))
        assert "nan" not in line.split()
        assert "None" not in line


def test_numbers_are_said_as_people_say_them() -> None:
    assert [say_count(x) for x in (950, 6144, 147_456, 999_999, 1e6, 2.43e9, 4.8e12)] == [
        "950",
        "6.14 thousand",
        "147 thousand",
        "1 million",
        "1 million",
        "2.43 billion",
        "4.8 trillion",
    ]
    assert [say_number(x) for x in (0, 0.000012, 0.5, 12.34, 75_000, 1e20, float("nan"), float("inf"))] == [
        "0",
        "1.2e-05",
        "0.5",
        "12.3",
        "75 thousand",
        "1e+20",
        "unknown",
        "infinite",
    ]
    assert say_decades(1.0) == "10 times the largest size that was run"
    assert say_decades(3.5) == "3.5 powers of ten beyond the largest size that was run"
    assert say_range(1e6, None) == "1 million at the earliest"
    assert say_range(None, None) == "no bounds can be given"
    assert join(["a", "b", "c"]) == "a, b and c"
