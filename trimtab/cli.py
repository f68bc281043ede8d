"""Words a person typed, turned into one call.

    trimtab train RECIPE [--out DIR] [--optim.lr 1e-2 ...]      train, or go on where a run was stopped:
    trimtab resume DIR
    trimtab eval DIR, trimtab sample DIR                        what it is worth, and what it says
    trimtab recipes, trimtab schedule RECIPE                    what there is, and what it will do
    trimtab doctor                                              is this installation well?

Nothing heavy is imported before it is needed: --help must answer at once.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

VERBS: dict[str, tuple[str, Callable[[list[str]], int]]] = {}
BAD_INPUT, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143


def main(words: Sequence[str] | None = None) -> NoReturn:
    """The `trimtab` command."""
    given = list(sys.argv[1:] if words is None else words)
    if not given or given[0] in ("-h", "--help"):
        print(_help())
        sys.exit(0 if given else BAD_INPUT)
    verb, *rest = given
    if verb not in VERBS:
        _refuse(f"unknown command {verb!r}{_did_you_mean(verb, VERBS)} `trimtab --help` lists them")
    sys.exit(VERBS[verb][1](rest))


def _verb(name: str, summary: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    def register(function: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        VERBS[name] = summary, function
        return function

    return register


def _help() -> str:
    lines = ["usage: trimtab COMMAND ...", "", "Stable, low-precision, memory-lean Transformer training.", ""]
    lines += [f"  {name:10} {summary}" for name, (summary, _) in VERBS.items()]
    return "\n".join([*lines, "", "`trimtab COMMAND --help` says what a command takes."])


def _refuse(message: str) -> NoReturn:
    """One clear line, and nothing done."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def _did_you_mean(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f". Did you mean {close[0]!r}?" if close else "."


def _parse(function: Callable[..., int], words: list[str], name: str) -> int:
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
        _refuse(_unboxed(complaint.getvalue()))


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
            _refuse(f"unrecognized option {word.split('=')[0]}{hint}")


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


def _guarded(call: Callable[[], Any]) -> Any:
    """Bad input ends in one line and exit code 2, what went wrong on the way in one line and 1; our own mistakes keep
    their traceback."""
    from trimtab.train import CheckpointError, ProcessLost, RunError

    try:
        return call()
    except (ValueError, RunError, CheckpointError, ImportError, PermissionError) as error:
        _refuse(str(error))
    except (OSError, ProcessLost) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        print("error: interrupted, and nothing was saved", file=sys.stderr)
        sys.exit(INTERRUPTED)


# --- Runs


@_verb("train", "train a recipe: trimtab train gpt-tiny --optim.lr 1e-2")
def _train(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: trimtab train RECIPE [--out DIR] [--FIELD VALUE ...]\n")
        print(_list_recipes())
        print("\n`trimtab train RECIPE --help` lists every field of a recipe.")
        return 0 if words else BAD_INPUT
    if words[0].startswith("-"):
        _refuse(f"the recipe comes first: trimtab train RECIPE {words[0]} ...")
    config, rest = _recipe(words[0]), words[1:]
    out, rest = _take(rest, "--out")
    config = _override(config, rest, f"trimtab train {words[0]}")
    folder = Path(out) if out is not None else _free_folder(Path("runs"), words[0])
    from trimtab.train import train

    return _report(_guarded(lambda: train(config, folder)), folder)


@_verb("resume", "go on with a run: trimtab resume runs/gpt-tiny")
def _resume(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: trimtab resume DIR [--step N] [--force] [--FIELD VALUE ...]\n")
        print("Goes on from the last checkpoint, or from that of step N. A changed field is refused without --force.")
        return 0 if words else BAD_INPUT
    folder, rest = Path(words[0]), words[1:]
    step, rest = _take(rest, "--step")
    force, rest = "--force" in rest, [word for word in rest if word != "--force"]
    from trimtab.train import RunLog, resume

    config, _ = _guarded(lambda: RunLog(folder).read_config())
    config = _override(config, rest, f"trimtab resume {folder}")
    if step is not None and not step.isdecimal():
        _refuse(f"--step needs the number of a step, got {step!r}")
    number = None if step is None else int(step)
    return _report(_guarded(lambda: resume(folder, config, step=number, force=force)), folder)


@_verb("eval", "validation loss of a run at full length; zero-shot accuracy of a CLIP")
def _eval(words: list[str]) -> int:
    def eval_(folder: Path, /, step: int | None = None, batches: int = 32) -> int:
        """Score a run.

        Args:
            folder: of the run
            step: of the checkpoint; the last one if left out, -1 for the best
            batches: how many of the validation set
        """
        from trimtab.train import evaluate

        for name, value in _guarded(lambda: evaluate(folder, step=step, batches=batches)).items():
            print(f"{name:16} {value:.4f}" if isinstance(value, float) else f"{name:16} {value}")
        return 0

    return _parse(eval_, words, "eval")


@_verb("sample", "text from a trained GPT")
def _sample(words: list[str]) -> int:
    def sample_(
        folder: Path,
        /,
        prompt: str = "",
        tokens: int = 300,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
        step: int | None = None,
    ) -> int:
        """Let a GPT write.

        Args:
            folder: of the run
            prompt: what it goes on from
            tokens: how many
            temperature: 0 takes the likeliest token every time
            top_k: draw among this many
            seed: of the drawing
            step: of the checkpoint; the last one if left out, -1 for the best
        """
        from trimtab.train import sample

        write = partial(sample, folder, prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k)
        print(_guarded(lambda: write(seed=seed, step=step)))
        return 0

    return _parse(sample_, words, "sample")


# --- What happens in a run


@_verb("watch", "a running or finished run on the terminal: loss, signals by layer, alarms")
def _watch(words: list[str]) -> int:
    def watch_(folder: Path, /, once: bool = False) -> int:
        """Show a run until it ends, or Ctrl-C.

        Args:
            folder: of the run
            once: print it as it is now, and leave
        """
        from trimtab.watch.view import show

        _guarded(lambda: show(folder, once=once))
        return 0

    return _parse(watch_, words, "watch")


@_verb("explain", "what went wrong in a run, in words, with the evidence")
def _explain(words: list[str]) -> int:
    def explain_(folder: Path, /) -> int:
        """Say what went wrong in a run, when, and where first.

        Args:
            folder: of the run
        """
        from trimtab.watch.explain import explain

        print(_guarded(lambda: explain(folder)))
        return 0

    return _parse(explain_, words, "explain")


# --- What there is


@_verb("recipes", "the runs that have a name")
def _recipes(words: list[str]) -> int:
    def recipes_() -> int:
        """List the runs that have a name."""
        print(_list_recipes())
        return 0

    return _parse(recipes_, words, "recipes")


@_verb("schedule", "what a recipe will do: learning rate, length and batch over the run")
def _schedule(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: trimtab schedule RECIPE [--svg FILE] [--FIELD VALUE ...]")
        return 0 if words else BAD_INPUT
    svg, rest = _take(words[1:], "--svg")
    config = _override(_recipe(words[0]), rest, f"trimtab schedule {words[0]}")
    from trimtab.train.plan import draw_plan

    picture = _guarded(lambda: draw_plan(config))
    print(picture.text)
    if svg is not None:
        _guarded(lambda: Path(svg).write_text(picture.svg))
        print(f"wrote {svg}")
    return 0


@_verb("doctor", "which kernel serves each op here and why, and whether all are well")
def _doctor(words: list[str]) -> int:
    return _parse(doctor, words, "doctor")


def doctor() -> int:
    """Say which kernel serves each op on this machine and why, and check every one of them.

    Exits with 1 if something expected is broken.
    """
    from rich.console import Console
    from rich.table import Table

    from trimtab.ops.doctor import examine

    report = examine()
    console = Console()
    machine = Table("machine", "", box=None, pad_edge=False)
    for name, value in report.machine.items():
        machine.add_row(name, value)
    served = Table("op", "device", "served by", "because", box=None, pad_edge=False)
    for row in report.served:
        served.add_row(row.op, row.device, row.backend, row.reason)
    console.print(machine, "", served, "")
    for line in report.missing:
        console.print(f"[yellow]missing[/] {line}", highlight=False)
    for line in report.broken:
        console.print(f"[red]broken[/] {line}", highlight=False)
    if not report.broken:
        console.print("[green]well[/] every op agrees with its reference", highlight=False)
    return 1 if report.broken else 0


# --- Words


def _recipe(name: str) -> Any:
    from trimtab.recipes import RECIPES

    if name not in RECIPES:
        _refuse(f"unknown recipe {name!r}{_did_you_mean(name, RECIPES)} There are {', '.join(RECIPES)}")
    return RECIPES[name]()


def _list_recipes() -> str:
    # Read, not imported: importing a recipe imports torch, and a list should not take seconds.
    source = ast.parse((Path(__file__).parent / "recipes.py").read_text())
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


def _take(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """An option that is ours and no field of a config."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{option}=") else [word])]
    if option not in words:
        return None, words
    i = words.index(option)
    if i + 1 == len(words):
        _refuse(f"{option} needs a value")
    return words[i + 1], words[:i] + words[i + 2 :]


def _override(config: Any, words: list[str], prog: str) -> Any:
    """A recipe with fields changed by dotted options, typed and checked."""
    if not words:
        return config
    import tyro

    _check_options(words, list(_options(config)))
    plain = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    return _guarded(lambda: _tyro(type(config), _followed(config, words), prog, default=config, config=plain))


def _options(config: Any, prefix: str = "--") -> Iterator[str]:
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), prefix + item.name.replace("_", "-")
        yield from _options(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]


def _followed(config: Any, words: list[str]) -> list[str]:
    """Where batch or context are given, the schedule that ends there goes with them, unless it is given too."""
    batch, seqlen = config.schedule.batch, config.schedule.seqlen
    new, _ = _take(words, "--batch")
    if new is not None and batch.start == batch.end and not any(word.startswith("--schedule.batch") for word in words):
        words = [*words, "--schedule.batch.start", new, "--schedule.batch.end", new]
    new, _ = _take(words, "--model.context")
    if new is not None and not any(word.startswith("--schedule.seqlen.end") for word in words):
        words = [*words, "--schedule.seqlen.end", new]
        if seqlen.start == seqlen.end and not any(word.startswith("--schedule.seqlen.start") for word in words):
            words = [*words, "--schedule.seqlen.start", new]
    return words


def _free_folder(parent: Path, name: str) -> Path:
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def _report(result: dict[str, Any], folder: Path) -> int:
    loss = "none" if result["validation_loss"] is None else f"{result['validation_loss']:.4f}"
    clocks = f"{result['step']} steps, {result['tokens']:,} tokens, {result['seconds']:.0f} s"
    lines = [f"{result['why']}: {clocks}, best validation loss {loss}"]
    if "compilations" in result:
        most = result["most_compilations"]
        lines.append(f"torch.compile: {result['compilations']} compilations, at most {most} expected")
    if os.environ.get("RANK", "0") == "0":  # torchrun's: one of many processes is enough to say it
        print("\n".join([*lines, f"the run is in {folder}"]))
    return {"done": 0, "interrupted": INTERRUPTED, "terminated": TERMINATED}.get(result["why"], FAILED)


if __name__ == "__main__":
    main()
