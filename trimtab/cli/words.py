"""From words to values: options found or corrected, mistakes told in one line.

Nothing heavy is imported before it is needed: --help must answer at once.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

VERBS: dict[str, tuple[str, Callable[[list[str]], int]]] = {}
BAD_INPUT, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143


def verb(name: str, summary: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    def register(function: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        VERBS[name] = summary, function
        return function

    return register


def refuse(message: str) -> NoReturn:
    """One clear line, and nothing done."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def did_you_mean(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f". Did you mean {close[0]!r}?" if close else "."


def parse(function: Callable[..., int], words: list[str], name: str) -> int:
    """Let tyro read the words as the arguments of a function."""
    _check_options(words, ["--" + name.replace("_", "-") for name in inspect.signature(function).parameters])
    call = _tyro(function, words, f"trimtab {name}", wrap=True)
    return int(call())


def _tyro(target: Any, words: list[str], prog: str, *, wrap: bool = False, **options: Any) -> Any:
    """What tyro makes of the words; what it does not like, in one line. With `wrap`, a call for later."""
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            if wrap:
                # Parsed first and called afterwards: only the parsing has its complaints caught.
                return tyro.cli(_later(target), args=words, prog=prog, **options)
            return tyro.cli(target, args=words, prog=prog, **options)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        refuse(_unboxed(complaint.getvalue()))


def _later(function: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    @functools.wraps(function)
    def bind(*args: Any, **kwargs: Any) -> Callable[[], int]:
        return partial(function, *args, **kwargs)

    return bind


def _unboxed(text: str) -> str:
    """The first paragraph of a message that tyro drew a box around, or, where letters are ASCII, a line under."""
    lines = [line.strip("│ ") for line in text.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and not line.strip("─-╭╮╰╯")]
    first = 1 if text.startswith("╭") or not rules else rules[0] + 1  # after the title
    last = next((i for i in rules if i > first), len(lines))
    return re.sub(r"^Error parsing (\w*Run: )?", "", " ".join(lines[first:last]).strip()) or text.strip()


def _check_options(words: list[str], known: list[str]) -> None:
    """tyro names an unknown option; we also say which was meant."""
    for word in words:
        option = word.split("=")[0].replace("_", "-")
        if re.match("--[a-z]", option) and option not in (*known, "--help"):
            meant = _meant(option, known)
            hint = f". Did you mean {meant}?" if meant else "; --help lists them"
            refuse(f"unrecognized option {word.split('=')[0]}{hint}")


def _meant(option: str, known: list[str]) -> str | None:
    """The option that somebody meant: the same name in another place, initials spelled out, or letters mixed up."""
    place, _, name = option.rpartition(".")
    initials = "".join(part[:1] for part in name.removeprefix("--").split("-"))
    ends = {other: other.rpartition(".")[2].removeprefix("--") for other in known}
    for wanted in (name.removeprefix("--"), initials):
        same = [other for other in known if ends[other] == wanted]
        # Beside what was typed before anywhere else.
        if same:
            return next((other for other in same if other.rpartition(".")[0] == place), same[0])
    beside = [other for other in known if place and other.rpartition(".")[0] == place]
    close = difflib.get_close_matches(option, beside, n=1, cutoff=0.7) or difflib.get_close_matches(option, known, n=1)
    return close[0] if close else None


def guarded(call: Callable[[], Any]) -> Any:
    """Bad input ends in one line and exit code 2, what went wrong on the way in one line and 1; our own mistakes keep
    their traceback."""
    from trimtab.train import CheckpointError, ProcessLost, RunError

    try:
        return call()
    except (ValueError, RunError, CheckpointError, ImportError, PermissionError) as error:
        refuse(str(error))
    except (OSError, ProcessLost) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        print("error: interrupted, and nothing was saved", file=sys.stderr)
        sys.exit(INTERRUPTED)


# --- Recipes and their fields


def find_recipe(name: str) -> Any:
    """The config of a recipe, or of somebody's own model and data, given as module:function."""
    from trimtab.recipes import RECIPES

    if ":" in name:
        from trimtab.train.module import module_run

        return guarded(lambda: module_run(name))
    if name not in RECIPES:
        refuse(f"unknown recipe {name!r}{did_you_mean(name, RECIPES)} There are {', '.join(RECIPES)}")
    return RECIPES[name]()


def list_recipes() -> str:
    # Read, not imported: importing a recipe imports torch, and a list should not take seconds.
    source = ast.parse((Path(__file__).parent.parent / "recipes.py").read_text())
    functions = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef)}
    table = next(node.value for node in source.body if isinstance(node, ast.AnnAssign))
    assert isinstance(table, ast.Dict)
    lines = []
    for key, value in zip(table.keys, table.values, strict=True):
        assert isinstance(key, ast.Constant)
        assert isinstance(value, ast.Name)
        summary = (ast.get_docstring(functions[value.id]) or "").split("\n")[0]
        lines.append(f"  {key.value!s:14} {summary}")
    return "\n".join(lines)


def take(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """An option that is ours and no field of a config."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{option}=") else [word])]
    if option not in words:
        return None, words
    i = words.index(option)
    if i + 1 == len(words):
        refuse(f"{option} needs a value")
    return words[i + 1], words[:i] + words[i + 2 :]


def override(config: Any, words: list[str], prog: str) -> Any:
    """A recipe with fields changed by dotted options, typed and checked."""
    if not words:
        return config
    import tyro

    _check_options(words, list(options_of(config)))
    plain = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    return guarded(lambda: _tyro(type(config), words, prog, default=config, config=plain))


def options_of(config: Any, prefix: str = "--") -> Iterator[str]:
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), prefix + item.name.replace("_", "-")
        yield from options_of(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]


def free_folder(parent: Path, name: str) -> Path:
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder
