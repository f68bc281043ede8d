"""Which runs there are: every cell of a study, or every run below a folder, each as a `Result`, and notes on the whole.

    a study       DIR/study.json names the cells; one without a folder is missing, failures.jsonl says which failed
    loose runs    a run folder, or a folder with run folders in it; arms are what their configs do not share

Notes tell what is missing, and where runs are mixed that should not be compared: other data, another number of steps,
another version.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.analysis.findings import Result, Source
from trimtab.analysis.results import Place, as_mapping, read_json, read_result
from trimtab.runs import RunError
from trimtab.runs.reader import Lines

Read = tuple[Source, list[Result], list[str]]
# What makes a size, or is a cell's own, or changes nothing that is computed.
_NOT_AN_ARM: tuple[str, ...] = (
    "optim.lr",
    "seed",
    "model.depth",
    "model.width",
    "model.heads",
    "schedule.lr.floor",
    "threads",
    "keep",
)
_NOT_AN_ARM += ("eval_every", "eval_batches", "checkpoint_every", "log_every", "tensorboard", "data.cache", "watch.")


def read_folders(folders: Sequence[Path]) -> tuple[list[Source], list[Result], list[str]]:
    """Everything below these folders: studies, results in the order of the studies, and notes."""
    sources: list[Source] = []
    results: list[Result] = []
    notes: list[str] = []
    for folder in _unique(folders):
        found = list(_find(folder))
        if not found:
            what = "holds no study and no run" if folder.is_dir() else "is not a folder"
            notes.append(f"{folder} {what}: there is neither a study.json nor a run's config.json in it")
        loose = [path for path in found if not (path / "study.json").exists()]
        for path in [path for path in found if path not in loose]:
            _add(_read_study(path, {source.name for source in sources}), sources, results, notes)
        if loose:
            _add(_read_loose(folder, loose, {source.name for source in sources}), sources, results, notes)
    if not sources:
        raise RunError("; ".join(notes) or "no folder was given; try the folder that `trimtab lab` wrote to")
    return sources, results, notes + _notes(results)


def _add(read: Read, sources: list[Source], results: list[Result], notes: list[str]) -> None:
    source, found, said = read
    sources.append(replace(source, cells=len(found), finished=sum(result.finished for result in found)))
    results += found
    notes += said


def _unique(folders: Sequence[Path]) -> list[Path]:
    seen: dict[Path, Path] = {}
    for folder in folders:
        seen.setdefault(folder.resolve(), folder)
    return list(seen.values())


def _find(folder: Path) -> Iterator[Path]:
    """Studies and run folders at or below; what lies inside of one belongs to it."""
    for where, inner, files in os.walk(folder):
        if "study.json" in files or "config.json" in files or "log.jsonl" in files:
            inner.clear()
            yield Path(where)
        inner.sort()


# --- Studies


def _read_study(folder: Path, taken: set[str]) -> Read:
    data = read_json(folder / "study.json")
    cells = data.get("cells") if data is not None else None
    if data is None or not isinstance(cells, list):
        inside = [path for name in _subfolders(folder) for path in _find(folder / name)]
        source, results, notes = _read_loose(folder, inside, taken)
        return source, results, [f"{folder / 'study.json'} cannot be read, so its runs are taken as they are", *notes]
    source = Source(
        name=_free(str(data.get("name") or folder.name), taken, folder),
        folder=folder,
        question=str(data.get("question") or ""),
        subject=str(data.get("subject") or ""),
        data=data,
    )
    failures = _failures(folder)
    places = [place for cell in cells if (place := _place(cell, folder, source.name)) is not None]
    notes = [f"{len(cells) - len(places)} cells of {folder / 'study.json'} cannot be read"]
    results = [_read_cell(place, failures.get(place.name)) for place in places]
    return source, _fill_params(results), notes if len(places) < len(cells) else []


def _place(cell: Any, folder: Path, study: str) -> Place | None:
    try:
        path = folder / str(cell.get("folder") or Path("cells") / cell["name"])
        name, lr, seed = str(cell["name"]), float(cell["lr"]), int(cell["seed"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return Place(path, name, study, str(cell.get("size", "")), str(cell.get("arm", "")), lr, seed)


def _failures(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The last failure of each cell."""
    try:
        return {str(line.get("cell")): line for line in Lines(folder / "failures.jsonl").read()}
    except OSError:
        return {}


def _read_cell(place: Place, failure: Mapping[str, Any] | None) -> Result:
    result = read_result(place)
    if failure is None or result.finished or _went_on(place.folder, failure.get("time")):
        return result
    return replace(result, status="failed", why=str(failure.get("error", "no reason was written"))[:500])


def _went_on(folder: Path, failed: Any) -> bool:
    """Whether the cell has been tried again since, and is running."""
    try:
        return isinstance(failed, int | float) and (folder / "log.jsonl").stat().st_mtime > failed + 1
    except OSError:
        return False


def _fill_params(results: list[Result]) -> list[Result]:
    """A cell that was not run has the size of its neighbours."""
    known = {(result.size): result for result in results if result.params is not None}
    return [
        replace(result, params=other.params, depth=other.depth, width=other.width)
        if result.params is None and (other := known.get(result.size)) is not None
        else result
        for result in results
    ]


# --- Loose runs


def _read_loose(folder: Path, paths: Sequence[Path], taken: set[str]) -> Read:
    name = _free(folder.resolve().name or str(folder), taken, folder)
    arms = _name_arms(paths)
    results = []
    for path in paths:
        label = str(path.relative_to(folder)) if path != folder else name
        results.append(read_result(Place(path, label, name, arm=arms[path])))
    return Source(name=name, folder=folder), results, []


def _name_arms(paths: Sequence[Path]) -> dict[Path, str]:
    """Runs that share all but size, learning rate and seed are one arm, named by what sets it apart from others."""
    configs = {
        path: dict(_flatten(as_mapping((read_json(path / "config.json") or {}).get("config")))) for path in paths
    }
    keys = sorted({key for config in configs.values() for key in config if not key.startswith(_NOT_AN_ARM)})
    apart = [key for key in keys if len({str(config.get(key)) for config in configs.values()}) > 1]
    short = {key: key.rpartition(".")[2] for key in apart}
    if len(set(short.values())) < len(short):
        short = {key: key for key in apart}
    named = {
        path: ", ".join(f"{short[key]}={config[key]}" for key in apart if key in config)
        for path, config in configs.items()
    }
    return {path: name or "runs" for path, name in named.items()}


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# --- Notes


def _notes(results: Sequence[Result]) -> list[str]:
    notes = []
    for status, words in (
        ("failed", "failed"),
        ("missing", "not run"),
        ("running", "not finished"),
        ("unreadable", "not readable"),
    ):
        those = [result for result in results if result.status == status]
        if those:
            shown = "; ".join(f"{result.name}: {result.why}" for result in those[:3])
            more = f"; and {len(those) - 3} more" if len(those) > 3 else ""
            notes.append(f"{len(those)} of {len(results)} cells {words} ({shown}{more})")
    stopped = sum(result.status == "stopped" for result in results)
    if stopped:
        notes.append(f"{stopped} of {len(results)} cells were stopped early and count as having learned nothing")
    if sum(result.broken for result in results):
        count = sum(result.broken > 0 for result in results)
        notes.append(f"{count} runs have lines that cannot be read, {sum(r.broken for r in results)} in all; left out")
    return notes + _mixed(results)


def _mixed(results: Sequence[Result]) -> list[str]:
    """Runs that should not be compared, or not without knowing."""
    there = [result for result in results if result.planned]
    kinds = {
        "corpora (sha256)": Counter(result.sha256[:12] for result in there if result.sha256),
        "kinds of model": Counter(result.kind for result in there if result.kind),
        "lengths in steps": Counter(str(result.planned) for result in there),
        "versions of trimtab": Counter(result.versions.get("trimtab", "") for result in there if result.versions),
        "versions of torch": Counter(result.versions.get("torch", "") for result in there if result.versions),
    }
    notes = []
    for what, counts in kinds.items():
        if len(counts) > 1:
            shown = ", ".join(f"{value}: {count} runs" for value, count in counts.most_common(4))
            notes.append(f"runs of {len(counts)} {what} are mixed ({shown}); their losses may not be comparable")
    return notes


# --- Names and places


def _subfolders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def _free(name: str, taken: set[str], folder: Path) -> str:
    """Two studies of one name are told apart by where they are."""
    return name if name not in taken else f"{name} ({folder})"
