"""Words a person typed, turned into one call.

lab.py      trimtab lab, report DIR, predict DIR, tune-seqlen RECIPE     many runs: will this recipe blow up?
runs.py     trimtab train RECIPE, resume DIR                             one run
            trimtab eval DIR, sample DIR, watch DIR, explain DIR         what it is worth, and what happened in it
about.py    trimtab recipes, schedule RECIPE, doctor                     what there is, and is it well?
"""

import sys
from collections.abc import Sequence
from typing import NoReturn

from trimtab.cli import about, lab, runs, words
from trimtab.cli.words import BAD_INPUT, VERBS, did_you_mean, refuse

__all__ = ["VERBS", "about", "lab", "main", "runs", "words"]


def main(words: Sequence[str] | None = None) -> NoReturn:
    """The `trimtab` command."""
    given = list(sys.argv[1:] if words is None else words)
    if not given or given[0] in ("-h", "--help"):
        print(_help())
        sys.exit(0 if given else BAD_INPUT)
    verb, *rest = given
    if verb not in VERBS:
        refuse(f"unknown command {verb!r}{did_you_mean(verb, VERBS)} `trimtab --help` lists them")
    sys.exit(VERBS[verb][1](rest))


def _help() -> str:
    lines = ["usage: trimtab COMMAND ...", "", "Stable, low-precision, memory-lean Transformer training.", ""]
    order = [lab.__name__, runs.__name__, about.__name__]
    verbs = sorted(VERBS.items(), key=lambda item: order.index(item[1][1].__module__))
    lines += [f"  {name:12} {summary}" for name, (summary, _) in verbs]
    return "\n".join([*lines, "", "`trimtab COMMAND --help` says what a command takes."])
