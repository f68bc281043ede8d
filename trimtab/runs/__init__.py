"""A run on disk: file names, record types, end reasons, writer, reader, lock. Needs no torch.

`folder` has the names, `records` the types, `log` writes, `reader` reads, `files` replaces files atomically and locks.
"""

from trimtab.runs.files import RunError, check_ours, claim_folder, lock_folder, read_json, replace_json, require_json
from trimtab.runs.folder import RunFolder, SavedConfig, read_lines
from trimtab.runs.log import RunLog
from trimtab.runs.reader import Lines, Run, Series, read_run
from trimtab.runs.records import (
    AlarmRecord,
    Clock,
    End,
    Event,
    EventKind,
    Failure,
    FileRecord,
    Result,
    SignalRecord,
    StepRecord,
)

__all__ = [
    "AlarmRecord",
    "Clock",
    "End",
    "Event",
    "EventKind",
    "Failure",
    "FileRecord",
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
    "check_ours",
    "claim_folder",
    "lock_folder",
    "read_json",
    "read_lines",
    "read_run",
    "replace_json",
    "require_json",
]
