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
from trimtab.analysis.results import read_result
from trimtab.runs import Failure, Lines, RunError, RunFolder, read_json
from trimtab.runs.folder import CELLS, CONFIG, FAILURES, STUDY, is_run
from trimtab.runs.records import as_text

Read = tuple[Source, list[Result], list[Note]]
# Config values that make a size, differ by cell, or do not change what is computed.
_NOT_AN_ARM = (
    *("optim.lr", "seed", "model.depth", "model.width", "model.heads", "schedule.lr.floor", "threads", "keep"),
    *("eval_every", "eval_batches", "checkpoint_every", "log_every", "data.cache", "watch."),
    *("tensorboard", "wandb", "mlflow"),
)


def read_folders(folders: Sequence[Path]) -> tuple[list[Source], list[Result], list[Note]]:
    """Everything at or below these folders: studies, results in the order of the studies, and notes."""
    sources, results, notes, names = list[Source](), list[Result](), list[Note](), set[str]()
    for folder in {os.path.realpath(folder): folder for folder in folders}.values():
        found = list(_find(folder))
        if not found:
            notes.append(Note(kind="no runs" if folder.is_dir() else "not a folder", where=str(folder)))
        studies = [path for path in found if (path / STUDY).exists()]
        reads = [_read_study(path, names) for path in studies]
        if loose := [path for path in found if path not in studies]:
            reads.append(_read_loose(folder, loose, names))
            lost = {path for run in loose for path in run.parents if path.name == CELLS and path.is_relative_to(folder)}
            notes += [
                Note(kind="bad study", where=str(path.with_name(STUDY))) for path in sorted(lost) if path != folder
            ]
        for source, cells, remarks in reads:
            sources.append(replace(source, cells=len(cells), finished=sum(result.finished for result in cells)))
            results += cells
            notes += remarks
    if not sources:
        empty = f"holds no study and no run: there is no {STUDY} and no {CONFIG} in it"
        problems = [f"{note.where} {'is not a folder' if note.kind == 'not a folder' else empty}" for note in notes]
        raise RunError("; ".join(problems) or "no folder was given; try the folder that `trimtab lab` wrote to")
    return sources, results, notes


def _find(folder: Path) -> Iterator[Path]:
    """Studies and run folders at or below; what is inside of one belongs to it."""
    for where, inner, files in os.walk(folder):
        if STUDY in files or is_run(files):
            inner.clear()
            yield Path(where)
        inner.sort()


# --- Studies


def _read_study(folder: Path, names: set[str]) -> Read:
    data = read_json(folder / STUDY)
    cells = data.get("cells") if data is not None else None
    if data is None or not isinstance(cells, list):
        inside = [path for child in sorted(folder.iterdir()) if child.is_dir() for path in _find(child)]
        source, results, notes = _read_loose(folder, inside, names)
        return source, results, [Note(kind="bad study", where=str(folder / STUDY)), *notes]
    name = _unique(as_text(data.get("name")) or folder.name, folder, names)
    question, subject = (as_text(data.get(key)) for key in ("question", "subject"))
    source = Source(name=name, folder=folder, question=question, subject=subject, data=data)
    try:
        lines = [Failure.from_json(line) for line in Lines(folder / FAILURES).read()]
    except OSError:
        lines = []
    failures = {failure.cell: failure for failure in lines}  # the last of each cell
    planned = [result for cell in cells if (result := _planned(cell, folder, name)) is not None]
    results = [_read_cell(result, failures.get(result.name)) for result in planned]
    bad = len(cells) - len(planned)
    return source, _fill_params(results), [Note(kind="bad cells", where=str(folder / STUDY), count=bad)] * bool(bad)


def _planned(cell: Any, folder: Path, study: str) -> Result | None:
    try:
        name, size, arm = as_text(cell["name"]), as_text(cell.get("size")) or "?", as_text(cell.get("arm"))
        inner, lr, seed = Path(cell.get("folder") or f"{CELLS}/{cell['name']}"), float(cell["lr"]), int(cell["seed"])
        root = os.path.realpath(folder)
        outside = os.path.commonpath([root, os.path.realpath(folder / inner)]) != root  # through a link, or ..
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    if outside:
        return None
    extra = cell.get("extra") is True
    return Result(folder=folder / inner, name=name, study=study, size=size, arm=arm, lr=lr, seed=seed, extra=extra)


def _read_cell(planned: Result, failure: Failure | None) -> Result:
    result = read_result(planned)
    if failure is None or result.finished:
        return result
    try:
        restarted = RunFolder(result.folder).log.stat().st_mtime > failure.time + 1
    except OSError:
        restarted = False
    return result if restarted else replace(result, status=Status.FAILED, why=failure.error[:500])


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


def _read_loose(folder: Path, paths: Sequence[Path], names: set[str]) -> Read:
    study, results = _unique(os.path.basename(os.path.realpath(folder)) or str(folder), folder, names), []
    for path, arm in _name_arms(paths).items():
        name = str(path.relative_to(folder)) if path != folder else study
        results.append(read_result(Result(folder=path, name=name, study=study, arm=arm)))
    return Source(name=study, folder=folder), results, []


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


def _unique(name: str, folder: Path, names: set[str]) -> str:
    """Studies of the same name are distinguished by their folders."""
    name = name if name not in names else f"{name} ({folder})"
    names.add(name)
    return name
