"""A sweep writes to any address that fsspec knows, a run is there whole or not at all, and readers get it back."""

from pathlib import Path

import pytest

from tests.lab.sweeps import SIZES, numbers, run_quietly, small_study
from trimtab.lab.executors.local import LocalExecutor
from trimtab.lab.store import connect, fetch, open_store, publish, push_run

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def _scratch(tmp_path, monkeypatch):
    """Scratch folders in a place of the test's own, and an empty memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    memory = fsspec.filesystem("memory")
    if memory.exists("/lab"):
        memory.rm("/lab", recursive=True)


def write_run(folder: Path, **files: str) -> None:
    for name, text in {"config.json": "{}", "log.jsonl": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def move_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))


def test_a_path_goes_straight(tmp_path):
    for out in (tmp_path / "a", str(tmp_path / "a")):
        store = open_store(out)
        assert (store.local, store.url) == (tmp_path / "a", None)
        assert fetch(out) == tmp_path / "a"
        publish(out, "report.html")  # nothing to do, and no error


def test_a_sweep_into_an_address_can_be_read_on_another_machine(tmp_path, monkeypatch):
    study = small_study(tmp_path, sizes=SIZES[:1])
    summary = run_quietly(study, "memory://lab/one", LocalExecutor(2))
    assert (summary.done, summary.failed) == (2, [])
    here = numbers(study, fetch("memory://lab/one"))
    move_scratch(tmp_path, monkeypatch)
    there = fetch("memory://lab/one")
    assert there.is_relative_to(tmp_path / "another machine")
    assert numbers(study, there) == here
    assert not list(there.rglob("*.safetensors"))  # readers need no checkpoints
    again = run_quietly(study, "memory://lab/one", LocalExecutor(2))
    assert (again.done, again.reused) == (0, 2)


def test_result_json_is_copied_last_and_temporary_files_not_at_all(tmp_path, monkeypatch):
    order = []
    write_run(
        tmp_path / "run", **{"result.json": "{}", "zzz.jsonl": "", ".tmp-1": "", "checkpoints/a/state.json": "{}"}
    )
    fs, _ = connect("memory://lab")
    put = type(fs).put_file
    monkeypatch.setattr(
        type(fs), "put_file", lambda self, a, b, **k: (order.append(Path(a).name), put(self, a, b, **k))
    )
    push_run(tmp_path / "run", "memory://lab/run")
    assert order[-1] == "result.json"
    assert sorted(order) == ["config.json", "log.jsonl", "result.json", "state.json", "zzz.jsonl"]


def test_a_half_copied_cell_is_not_fetched(tmp_path):
    write_run(tmp_path / "half")
    push_run(tmp_path / "half", "memory://lab/two/cells/a/b")
    write_run(tmp_path / "whole", **{"result.json": "{}"})
    push_run(tmp_path / "whole", "memory://lab/two/cells/a/c")
    found = fetch("memory://lab/two")
    assert sorted(path.parent.name for path in found.rglob("config.json")) == ["c"]
    assert not open_store("memory://lab/two").has(Path("cells/a/b"))


def test_a_complete_cell_that_was_not_copied_is_copied_by_the_next_sweep(tmp_path):
    study = small_study(tmp_path, sizes=SIZES[:1], lrs=(0.01,))
    [cell] = study.cells()
    run_quietly(study, "memory://lab/three", LocalExecutor(1))
    fs, root = connect(f"memory://lab/three/{cell.folder}")
    fs.rm(root, recursive=True)
    assert run_quietly(study, "memory://lab/three", LocalExecutor(1)).reused == 1
    assert fs.exists(f"{root}/result.json")


def test_files_beside_the_cells_are_published_and_fetched_anew(tmp_path, monkeypatch):
    store = open_store("memory://lab/four")
    store.local.mkdir(parents=True)
    for text in ("old", "new"):  # of one size, so that only a look inside tells them apart
        (store.local / "report.html").write_text(text)
        publish("memory://lab/four", "report.html")
        with monkeypatch.context() as patch:
            move_scratch(tmp_path, patch)
            assert (fetch("memory://lab/four") / "report.html").read_text() == text


def test_an_address_of_an_unknown_kind_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"nosuch://bucket cannot be used: Protocol not known: nosuch"):
        run_quietly(small_study(tmp_path), "nosuch://bucket")
