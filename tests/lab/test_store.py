"""A sweep writes to any address that fsspec knows, a run is there whole or not at all, and readers get it back."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.lab.sweeps import SIZES, numbers, run_quietly, small_study
from trimtab.lab.executors.local import LocalExecutor
from trimtab.lab.store import connect, fetch, open_store, publish, push_run
from trimtab.runs import RunError

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
    with pytest.raises(RunError, match=r"holds cells/a/b/config.json and no study.json, so it is not ours"):
        fetch("memory://lab/two")
    open_store("memory://lab/two").local.mkdir(parents=True, exist_ok=True)
    (open_store("memory://lab/two").local / "study.json").write_text("{}")
    publish("memory://lab/two", "study.json")
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
        (store.local / "failures.jsonl").write_text(text)
        publish("memory://lab/four", "failures.jsonl")
        with monkeypatch.context() as patch:
            move_scratch(tmp_path, patch)
            assert (fetch("memory://lab/four") / "failures.jsonl").read_text() == text


def test_an_address_of_an_unknown_kind_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(RunError, match=r"nosuch://bucket cannot be used: Protocol not known: nosuch"):
        run_quietly(small_study(tmp_path), "nosuch://bucket")


# --- Addresses of others


def pack(path: Path, name: str, kind: str) -> str:
    """An archive with a study, a complete cell and a file of this name; returns its address."""
    files = {"study.json": "{}", "cells/a/result.json": "{}", name: "harm"}
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for each, text in files.items():
                archive.writestr(each, text)
    else:
        with tarfile.open(path, "w") as archive:
            for each, text in files.items():
                member = tarfile.TarInfo(each)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    return f"{kind}://::{path}"


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("name", ["cells/a/../../../../harm", "../harm", "cells/a/..\\..\\harm", "C:/harm"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, kind, name):
    url = pack(tmp_path / f"x.{kind}", name, kind)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"which leads out of its folder|cannot be used"):
        fetch(url)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_without_such_names_is_fetched(tmp_path, kind):
    folder = fetch(pack(tmp_path / f"x.{kind}", "cells/a/config.json", kind))
    assert (folder / "cells/a/config.json").read_text() == "harm"


def test_a_link_in_the_scratch_folder_is_not_followed(tmp_path):
    url = pack(tmp_path / "x.zip", "cells/a/config.json", "zip")
    outside = tmp_path / "outside"
    outside.mkdir()
    store = open_store(url)
    (store.local / "cells").mkdir(parents=True)
    (store.local / "cells" / "a").symlink_to(outside)
    with pytest.raises(RunError, match="is a link that leads out of"):
        fetch(url)
    assert list(outside.iterdir()) == []


def test_an_address_that_is_broken_is_one_line(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"not a zip")
    with pytest.raises(RunError, match=r"cannot be used: .*zip"):
        fetch(f"zip://::{tmp_path / 'x.zip'}")
