"""One run: train it, go on with it, score it, let it write, look at it."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.cli.words import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    TERMINATED,
    find_recipe,
    free_folder,
    guarded,
    list_recipes,
    override,
    parse,
    refuse,
    take,
    verb,
)


@verb("train", "train a recipe: trimtab train gpt-tiny --optim.lr 1e-2")
def _train(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: trimtab train RECIPE [--out DIR] [--FIELD VALUE ...]\n")
        print(list_recipes())
        print("\n`trimtab train RECIPE --help` lists every field of a recipe.")
        return 0 if words else BAD_INPUT
    if words[0].startswith("-"):
        refuse(f"the recipe comes first: trimtab train RECIPE {words[0]} ...")
    config, rest = find_recipe(words[0]), words[1:]
    out, rest = take(rest, "--out")
    config = override(config, rest, f"trimtab train {words[0]}")
    folder = Path(out) if out is not None else free_folder(Path("runs"), words[0])
    from trimtab.train import train

    return report_end(guarded(lambda: train(config, folder)), folder)


@verb("resume", "go on with a run: trimtab resume runs/gpt-tiny")
def _resume(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: trimtab resume DIR [--step N] [--force] [--FIELD VALUE ...]\n")
        print("Goes on from the last checkpoint, or from that of step N. A changed field is refused without --force.")
        return 0 if words else BAD_INPUT
    folder, rest = Path(words[0]), words[1:]
    step, rest = take(rest, "--step")
    force, rest = "--force" in rest, [word for word in rest if word != "--force"]
    from trimtab.train import resume
    from trimtab.train.config import load_config

    config, _ = guarded(lambda: load_config(folder))
    config = override(config, rest, f"trimtab resume {folder}")
    if step is not None and not step.isdecimal():
        refuse(f"--step needs the number of a step, got {step!r}")
    number = None if step is None else int(step)
    return report_end(guarded(lambda: resume(folder, config, step=number, force=force)), folder)


@verb("eval", "validation loss of a run at full length; zero-shot accuracy of a CLIP")
def _eval(words: list[str]) -> int:
    def eval_(folder: Path, /, step: int | None = None, batches: int = 32) -> int:
        """Score a run.

        Args:
            folder: of the run
            step: of the checkpoint; the last one if left out, -1 for the best
            batches: how many of the validation set
        """
        from trimtab.train import evaluate

        for name, value in guarded(lambda: evaluate(folder, step=step, batches=batches)).items():
            print(f"{name:16} {value:.4f}" if isinstance(value, float) else f"{name:16} {value}")
        return 0

    return parse(eval_, words, "eval")


@verb("sample", "text from a trained GPT")
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
        print(guarded(lambda: write(seed=seed, step=step)))
        return 0

    return parse(sample_, words, "sample")


# --- What happens in a run


@verb("watch", "a running or finished run on the terminal: loss, signals by layer, alarms")
def _watch(words: list[str]) -> int:
    def watch_(folder: Path, /, once: bool = False) -> int:
        """Show a run until it ends, or Ctrl-C.

        Args:
            folder: of the run
            once: print it as it is now, and leave
        """
        from trimtab.report.live import show

        guarded(lambda: show(folder, once=once))
        return 0

    return parse(watch_, words, "watch")


@verb("explain", "what went wrong in a run, in words, with the evidence")
def _explain(words: list[str]) -> int:
    def explain_(folder: Path, /) -> int:
        """Say what went wrong in a run, when, and where first.

        Args:
            folder: of the run
        """
        from trimtab.report.explain import explain

        print(guarded(lambda: explain(folder)))
        return 0

    return parse(explain_, words, "explain")


def report_end(result: dict[str, Any], folder: Path) -> int:
    loss = "none" if result["validation_loss"] is None else f"{result['validation_loss']:.4f}"
    clocks = f"{result['step']} steps, {result['tokens']:,} tokens, {result['seconds']:.0f} s"
    lines = [f"{result['why']}: {clocks}, best validation loss {loss}"]
    if "compilations" in result:
        most = result["most_compilations"]
        lines.append(f"torch.compile: {result['compilations']} compilations, at most {most} expected")
    if os.environ.get("RANK", "0") == "0":  # torchrun's: one of many processes is enough to say it
        print("\n".join([*lines, f"the run is in {folder}"]))
    return {"done": 0, "interrupted": INTERRUPTED, "terminated": TERMINATED}.get(result["why"], FAILED)
