"""A run on disk: file names, record types, end reasons, writer, reader, lock. Needs no torch.

`folder` has the names, `records` the types, `log` writes, `reader` reads, `files` replaces files atomically and locks.
"""

from trimtab.runs.files import RunError, lock_folder, read_json, replace_json
from trimtab.runs.folder import RunFolder, SavedConfig, read_lines
from trimtab.runs.log import RunLog
from trimtab.runs.reader import Lines, Run, Series, read_run
from trimtab.runs.records import AlarmRecord, Clock, End, Event, EventKind, Failure, Result, SignalRecord, StepRecord

__all__ = [
    "AlarmRecord",
    "Clock",
    "End",
    "Event",
    "EventKind",
    "Failure",
    "Lines",
    "Result",
    "Run",
    "RunError",
    "RunFolder",
    "RunLog",
    "SavedConfig",
    "Series",
    "SignalRecord",
    "StepRecord",
    "lock_folder",
    "read_json",
    "read_lines",
    "read_run",
    "replace_json",
]
