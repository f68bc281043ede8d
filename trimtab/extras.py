"""Packages that only some corpora need, and what to say when one is not here."""

import importlib
from typing import Any


class MissingExtra(ImportError, ValueError):
    """A package of an extra is missing. Also a ValueError: what was asked for cannot be had on this machine."""


def load_extra(package: str, *, extra: str, purpose: str) -> Any:
    """Import a package of an extra, or say how to get it.

    Imported by name because type stubs are not on every machine either, and because `import trimtab.data` must stay
    quick for those who only read text.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs the package {package.split('.')[0]} ({error}); pip install 'trimtab[{extra}]'"
        ) from None
