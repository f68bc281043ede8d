"""The versions of other trainers that the tests run with."""

import re
import warnings
from importlib import metadata

# Oldest and newest tested. The tests of tests/hosts run with the newest; see docs/hosts.md for the oldest.
TESTED = {
    "transformers": ("5.0", "5.22"),
    "lightning": ("2.4", "2.6"),
    "lm_eval": ("0.4", "0.4"),
}


def check_version(package: str) -> None:
    """Refuse a version older than the tested ones, and warn of a newer one."""
    oldest, newest = TESTED[package]
    found = metadata.version(package)
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    if _numbers(found) < _numbers(oldest):
        raise ImportError(
            f"{package} {found} is older than what trimtab is tested with ({tested}); pip install '{package}>={oldest}'"
        )
    if _numbers(found)[: len(_numbers(newest))] > _numbers(newest):
        warnings.warn(
            f"{package} {found} is newer than what trimtab is tested with ({tested}); if something is wrong, try "
            f"pip install '{package}=={newest}.*'",
            stacklevel=3,
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version)[:3])
