"""A run on disk: file names, record types, end reasons, writer, reader, lock. The only room that knows a run folder."""
