"""Errors with a remedy: packages that are not installed, and misspelled names."""

import difflib
import importlib
import re
from collections.abc import Iterable
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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the known (dotted) name that is meant, or "": the same last part, its initials, or similar letters."""
    known = list(known)
    group, _, name = word.rpartition(".")
    beside = [other for other in known if other.rpartition(".")[0] == group]
    name = name.lstrip("-")
    initials = "".join(part[:1] for part in re.split("[-_]", name))
    ends = [(other, other.rpartition(".")[2].lstrip("-")) for other in (*beside, *known)]
    meant = [other for wanted in (name, initials) for other, end in ends if end == wanted]
    meant = meant or difflib.get_close_matches(word, beside if group else [], n=1, cutoff=0.7)
    meant = meant or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {meant[0]!r}?" if meant else ""
