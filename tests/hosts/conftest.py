"""One thread, as for runs."""

from tests.train.conftest import _one_thread

__all__ = ["_one_thread"]
