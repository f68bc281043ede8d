"""A grid whose best learning rate is at its edge is extended, half a decade at a time, and only new cells are run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.analysis.runs import Numbers, grid, write_run
from tests.lab.sweeps import run_quietly
from tests.test_cli import call
from trimtab.lab.executors import Job, Outcome
from trimtab.lab.extend import EXTENSIONS, Edge, extend, extended, find_edges, is_extension
from trimtab.lab.study import LRS, Study
from trimtab.runs import RunError
from trimtab.train.config import from_json

BELOW, ABOVE = Edge("plain", "2x16", 1e-3, above=False), Edge("plain", "2x16", 1.0, above=True)


class Invented:
    """An executor that writes runs whose loss is lowest at one learning rate, which `best` gives by arm."""

    shared, slots = True, 2

    def __init__(self, best: dict[str, float]) -> None:
        self.best, self.jobs, self.ran = best, list[Job](), list[str]()

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def wait(self, timeout_s: float) -> list[Outcome]:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            config, arm = from_json(job.config), job.name.split("/")[1]
            lower, higher = sorted((config.optim.lr, self.best[arm]))
            write_run(Path(job.folder), config, Numbers(loss=1 + higher / lower / 1e4))
            self.ran.append(job.name)
        return [Outcome(job.name, "complete") for job in jobs]

    def close(self) -> None:
        self.jobs.clear()


def study_of(lrs: tuple[float, ...] = (0.01, 0.03, 0.1)) -> Study:
    return grid(sizes=("1x16",), lrs=lrs, seeds=(0,), steps=40)


# --- Grids


def test_one_half_decade_is_added_on_each_missing_side():
    assert extend(LRS, LRS, []) is None
    assert extend(LRS, LRS, [ABOVE]) == (*LRS, 3.0)
    assert extend(LRS, LRS, [BELOW, BELOW]) == (3e-4, *LRS)
    assert extend(LRS, (*LRS, 3.0), [replace(ABOVE, lr=3.0), BELOW]) == (3e-4, *LRS, 3.0, 10.0)


def test_three_per_side_are_the_most():
    longest = extended(LRS, below=0, above=EXTENSIONS)
    assert longest == (*LRS, 3.0, 10.0, 30.0)
    assert extend(LRS, longest, [replace(ABOVE, lr=30.0)]) is None
    assert extend(LRS, longest, [BELOW]) == (3e-4, *longest)


# The first draw of a process may be slow: another worker was loading a library.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=6, unique=True), st.integers(0, 4), st.integers(0, 4))
def test_an_extension_is_recognised_and_nothing_else_is(lrs, below, above):
    longer = extended(lrs, below=below, above=above)
    assert len({*longer}) == len(lrs) + below + above
    assert is_extension(longer, lrs) == (below <= EXTENSIONS and above <= EXTENSIONS)
    assert not is_extension((*longer, 1.234567 * max(longer)), lrs)


# --- Folders


def test_a_longer_grid_runs_only_the_new_cells_and_replaces_the_saved_study(tmp_path):
    study, best = study_of(), {"plain": 0.03, "steadied": 0.03}
    assert run_quietly(study, tmp_path / "out", Invented(best)).done == 6
    longer, executor = replace(study, lrs=(0.003, *study.lrs)), Invented(best)
    summary = run_quietly(longer, tmp_path / "out", executor)
    assert (summary.done, summary.reused, summary.study.lrs) == (2, 6, longer.lrs)
    assert {name.split("/")[2] for name in executor.ran} == {"lr-0.003"}
    saved = json.loads((tmp_path / "out" / "study.json").read_text())
    assert (saved["lrs"], len(saved["cells"])) == ([*longer.lrs], 8)
    # The first command continues the extended study.
    again = run_quietly(study, tmp_path / "out", Invented(best))
    assert (again.done, again.reused, again.study.lrs) == (0, 8, longer.lrs)


def test_fewer_learning_rates_that_no_extension_explains_are_another_study(tmp_path):
    best = {"plain": 0.03, "steadied": 0.03}
    run_quietly(study_of(), tmp_path / "out", Invented(best))
    for lrs in ((0.01, 0.1), (0.02,), (0.01, 0.03, 0.2)):
        with pytest.raises(RunError, match=r"holds another study: lrs is \[0.01, 0.03, 0.1\] there"):
            run_quietly(study_of(lrs), tmp_path / "out", Invented(best))


# --- The command


@pytest.fixture
def words(tmp_path, monkeypatch) -> tuple[str, ...]:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    path = tmp_path / "mine.toml"
    path.write_text(
        f'sizes = ["1x16"]\nlrs = [0.01, 0.03, 0.1]\nseeds = 1\nsteps = 20\n[set]\n"data.corpus" = '
        f'"{tmp_path / "text.txt"}"\n"data.cache" = "{tmp_path / "cache"}"\n'
    )
    return ("lab", "--config", str(path), "--out", str(tmp_path / "out"))


def use(monkeypatch: pytest.MonkeyPatch, **best: float) -> list[Invented]:
    made: list[Invented] = []

    def make(name: str, slots: int | None = None) -> Invented:
        made.append(Invented(best))
        return made[-1]

    monkeypatch.setattr("trimtab.lab.executors.make_executor", make)
    return made


def rates(out: Path) -> list[float]:
    return json.loads((out / "study.json").read_text())["lrs"]


def test_an_edge_is_reported_with_the_command_that_extends_the_grid(words, tmp_path, monkeypatch, capsys):
    use(monkeypatch, plain=1.0, steadied=0.03)
    code, told, _ = call(capsys, *words)
    assert code == 0
    edge = "the best learning rate is at the edge of the grid: plain at 1x16 (0.1, the highest)"
    assert f"{edge}; to extend it: trimtab {' '.join(words)} --extend\n" in told
    assert rates(tmp_path / "out") == [0.01, 0.03, 0.1]


def test_the_grid_is_extended_until_the_best_is_inside(words, tmp_path, monkeypatch, capsys):
    made = use(monkeypatch, plain=0.3, steadied=0.01)
    assert call(capsys, *words)[0] == 0
    code, told, _ = call(capsys, *words, "--extend")
    assert code == 0
    assert "the next learning rate: 0.003, 0.3" in told
    assert "edge of the grid" not in told.splitlines()[-1]
    assert rates(tmp_path / "out") == [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    ran = [name for executor in made for name in executor.ran]
    assert len(ran) == len({*ran}) == 12  # no cell twice
    assert call(capsys, *words, "--extend")[0] == call(capsys, *words)[0] == 0
    assert not any(executor.ran for executor in made[-2:])


def test_at_the_limit_the_edge_is_still_reported(words, tmp_path, monkeypatch, capsys):
    use(monkeypatch, plain=1e3, steadied=0.03)
    told = call(capsys, *words, "--extend")[1]
    assert told.endswith("plain at 1x16 (3, the highest); the limit of --extend is reached\n")
    assert rates(tmp_path / "out") == [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]


def test_the_same_command_continues_an_extension_that_was_interrupted(words, tmp_path, monkeypatch, capsys):
    made = use(monkeypatch, plain=1.0, steadied=0.03)
    assert call(capsys, *words)[0] == 0
    wait, times = Invented.wait, []

    def broken(self: Invented, timeout_s: float) -> list[Outcome]:
        times.append(1)
        if len(times) == 2:
            raise RunError("killed")
        return wait(self, timeout_s)

    monkeypatch.setattr(Invented, "wait", broken)
    assert call(capsys, *words, "--extend")[0] == 2
    assert rates(tmp_path / "out") == [0.01, 0.03, 0.1, 0.3, 1.0]
    monkeypatch.setattr(Invented, "wait", wait)
    assert call(capsys, *words, "--extend")[0] == 0
    assert rates(tmp_path / "out") == [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
    ran = [name for executor in made for name in executor.ran]
    assert len(ran) == len({*ran}) == 12


def test_a_single_learning_rate_has_no_edge(words, tmp_path, monkeypatch, capsys):
    use(monkeypatch, plain=1.0, steadied=0.03)
    assert "edge of the grid" not in call(capsys, *words, "--lrs", "0.03", "--extend")[1]
    assert find_edges([], [0.03]) == []
