"""The runs in a folder: every cell of a study, or every run folder, each as a `Result`.

a study          its study file names the cells; a cell without a folder is missing
without a study  a run folder, or a folder of run folders; arms are named by what their configs do not share
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.analysis.findings import Note, Result, Source, Status
from trimtab.analysis.results import Place, read_result
from trimtab.runs import Failure, Lines, RunError, RunFolder, read_json
from trimtab.runs.folder import CELLS, CONFIG, FAILURES, STUDY, is_run

Read = tuple[Source, list[Result], list[Note]]
# Config values that make a size, differ by cell, or do not change what is computed.
_NOT_AN_ARM = (
    *("optim.lr", "seed", "model.depth", "model.width", "model.heads", "schedule.lr.floor", "threads", "keep"),
    *("eval_every", "eval_batches", "checkpoint_every", "log_every", "tensorboard", "data.cache", "watch."),
)


def read_folders(folders: Sequence[Path]) -> tuple[list[Source], list[Result], list[Note]]:
    """Everything at or below these folders: studies, results in the order of the studies, and notes."""
    sources, results, notes = list[Source](), list[Result](), list[Note]()
    for folder in {folder.resolve(): folder for folder in folders}.values():
        found = list(_find(folder))
        if not found:
            notes.append(Note(kind="no runs" if folder.is_dir() else "not a folder", where=str(folder)))
        loose = [path for path in found if not (path / STUDY).exists()]
        taken = {source.name for source in sources}
        reads = []
        for path in found:
            if path not in loose:
                reads.append(_read_study(path, taken))
                taken.add(reads[-1][0].name)
        if loose:
            reads.append(_read_loose(folder, loose, taken))
        for source, cells, said in reads:
            sources.append(replace(source, cells=len(cells), finished=sum(result.finished for result in cells)))
            results += cells
            notes += said
    if not sources:
        problems = [f"{note.where} {'is not a folder' if note.kind == 'not a folder' else _EMPTY}" for note in notes]
        raise RunError("; ".join(problems) or "no folder was given; try the folder that `trimtab lab` wrote to")
    return sources, results, notes


_EMPTY = f"holds no study and no run: there is no {STUDY} and no {CONFIG} in it"


def _find(folder: Path) -> Iterator[Path]:
    """Studies and run folders at or below; what is inside of one belongs to it."""
    for where, inner, files in os.walk(folder):
        if STUDY in files or is_run(files):
            inner.clear()
            yield Path(where)
        inner.sort()


# --- Studies


def _read_study(folder: Path, taken: set[str]) -> Read:
    data = read_json(folder / STUDY)
    cells = data.get("cells") if data is not None else None
    if data is None or not isinstance(cells, list):
        inside = [path for child in sorted(folder.iterdir()) if child.is_dir() for path in _find(child)]
        source, results, notes = _read_loose(folder, inside, taken)
        return source, results, [Note(kind="bad study", where=str(folder / STUDY)), *notes]
    name = _free(str(data.get("name") or folder.name), taken, folder)
    question, subject = (str(data.get(key) or "") for key in ("question", "subject"))
    source = Source(name=name, folder=folder, question=question, subject=subject, data=data)
    try:
        lines = [Failure.from_json(line) for line in Lines(folder / FAILURES).read()]
    except OSError:
        lines = []
    failures = {failure.cell: failure for failure in lines}  # the last of each cell
    places = [place for cell in cells if (place := _place(cell, folder, name)) is not None]
    results = [_read_cell(place, failures.get(place.name)) for place in places]
    bad = len(cells) - len(places)
    return source, _fill_params(results), [Note(kind="bad cells", where=str(folder / STUDY), count=bad)] * bool(bad)


def _place(cell: Any, folder: Path, study: str) -> Place | None:
    try:
        path = folder / str(cell.get("folder") or Path(CELLS) / cell["name"])
        name, lr, seed = str(cell["name"]), float(cell["lr"]), int(cell["seed"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return Place(path, name, study, size=str(cell.get("size", "")), arm=str(cell.get("arm", "")), lr=lr, seed=seed)


def _read_cell(place: Place, failure: Failure | None) -> Result:
    result = read_result(place)
    if failure is None or result.finished or _went_on(place.folder, failure.time):
        return result
    return replace(result, status=Status.FAILED, why=failure.error[:500])


def _went_on(folder: Path, failed: float) -> bool:
    """Whether the cell was started again after the failure, and is running."""
    try:
        return RunFolder(folder).log.stat().st_mtime > failed + 1
    except OSError:
        return False


def _fill_params(results: list[Result]) -> list[Result]:
    """A cell that was not run has the parameters of others of its size."""
    known = {result.size: result for result in results if result.params is not None}
    return [
        replace(result, params=other.params, depth=other.depth, width=other.width)
        if result.params is None and (other := known.get(result.size)) is not None
        else result
        for result in results
    ]


# --- Runs without a study


def _read_loose(folder: Path, paths: Sequence[Path], taken: set[str]) -> Read:
    name = _free(folder.resolve().name or str(folder), taken, folder)
    arms = _name_arms(paths)
    labels = {path: str(path.relative_to(folder)) if path != folder else name for path in paths}
    results = [read_result(Place(path, labels[path], name, arm=arms[path])) for path in paths]
    return Source(name=name, folder=folder), results, []


def _name_arms(paths: Sequence[Path]) -> dict[Path, str]:
    """Runs that differ only in size, learning rate and seed are one arm, named by what distinguishes it."""
    configs = {path: saved.values if (saved := RunFolder(path).read_config()) else {} for path in paths}
    keys = sorted({key for config in configs.values() for key in config if not key.startswith(_NOT_AN_ARM)})
    apart = [key for key in keys if len({str(config.get(key)) for config in configs.values()}) > 1]
    short = {key: key.rpartition(".")[2] for key in apart}
    if len(set(short.values())) < len(short):
        short = {key: key for key in apart}
    names = {p: ", ".join(f"{short[key]}={c[key]}" for key in apart if key in c) for p, c in configs.items()}
    return {path: name or "runs" for path, name in names.items()}


def _free(name: str, taken: set[str], folder: Path) -> str:
    """Studies of the same name are distinguished by their folders."""
    return name if name not in taken else f"{name} ({folder})"
