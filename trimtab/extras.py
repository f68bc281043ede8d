"""Optional packages: import one, or raise an error with the pip command that installs it."""

import importlib
from typing import Any


class MissingExtra(ImportError, ValueError):
    """A package of an extra is not installed. Also a ValueError: the given argument needs that package."""


def load_extra(package: str, *, extra: str, purpose: str) -> Any:
    """Import a package of an extra by name, when it is needed: `import trimtab` must stay fast."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs the package {package.split('.')[0]} ({error}); pip install 'trimtab[{extra}]'"
        ) from None
