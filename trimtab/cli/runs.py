"""Commands for one run."""

import os
import sys
from pathlib import Path
from typing import Any, Literal

from trimtab.cli.options import configure, exit_code, local, override, refuse
from trimtab.screen import printable


def train(recipe: str, /, *, out: Path | None = None, fields: tuple[str, ...] = ()) -> int:
    """Train a recipe, with any field changed: trimtab train gpt-tiny --optim.lr 1e-2

    Args:
        out: folder of the run; default: a new one in runs/
    """
    config = configure(recipe, fields, "train")
    from trimtab.train import train

    return report_end(train(config, local(out) if out else Path("runs") / recipe, numbered=out is None))


def resume(
    folder: Path,
    /,
    *,
    step: int | None = None,
    force: bool = False,
    trust: str | None = None,
    fields: tuple[str, ...] = (),
) -> int:
    """Continue a run from its last checkpoint: trimtab resume runs/gpt-tiny

    A run that is complete is left as it is, unless a step or a changed field is given.

    Args:
        step: continue from the checkpoint of this step; later steps are removed. 0: from the start
        force: allow changed fields that change the result, changed data, and a log with lost lines
        trust: the code package.file:function of a user-defined model, which is run
    """
    from trimtab.train import resume
    from trimtab.train.config import load_config

    config = override(load_config(local(folder), trust=trust)[0], fields, f"trimtab resume {folder}")
    return report_end(resume(folder, config, step=step, force=force))


def evaluate(
    folder: Path,
    /,
    *,
    step: int | None = None,
    batches: int = 32,
    force: bool = False,
    trust: str | None = None,
    tasks: tuple[str, ...] = (),
    task_folder: Path | None = None,
    examples: int | None = None,
    shots: int | None = None,
) -> int:
    """Validation loss of a run at full length; zero-shot accuracy of a CLIP; tasks for language models.

    Args:
        step: of the checkpoint; default: the last one, -1: the best
        batches: number of validation batches
        force: evaluate also on data that has changed since the training
        trust: the code package.file:function of a user-defined model, which is run
        tasks: of lm-evaluation-harness, in place of the validation loss: lambada_openai, piqa ...
        task_folder: a folder with more tasks, in its YAML format
        examples: of each task, at most
        shots: solved examples in front of each question
    """
    if tasks:
        return _run_tasks(folder, step, trust, tasks, folder=task_folder, examples=examples, shots=shots)
    from trimtab.train import evaluate

    for name, value in evaluate(folder, step=step, batches=batches, force=force, trust=trust).items():
        print(f"{name:16} {value:.4f}" if isinstance(value, float) else f"{name:16} {value}")
    return 0


def _run_tasks(run: Path, step: int | None, trust: str | None, tasks: tuple[str, ...], **options: Any) -> int:
    from trimtab.hints import load_extra

    load_extra("lm_eval", extra="eval", purpose="--tasks")
    from trimtab.hosts.lm_eval import LanguageModel, run_tasks
    from trimtab.nn import GPT
    from trimtab.runs import RunError
    from trimtab.train import load_run, load_tokenizer

    config, model, chosen = load_run(local(run), step, trust=trust)
    tokenizer = load_tokenizer(run, config)
    if tokenizer is None or not isinstance(model, GPT):
        raise RunError(f"{run} holds no language model, so it has no such tasks; try `trimtab eval {run}`")
    print(f"{'step':16} {chosen}")
    try:
        found = run_tasks(LanguageModel(model, tokenizer), tasks, **options)
    except ValueError as error:
        raise RunError(str(error)) from None
    for name, metrics in found.items():
        for metric, value in metrics.items():
            print(f"{name:32} {metric:20} {value:.4f}")
    return 0


def sample(
    folder: Path,
    /,
    *,
    prompt: str = "",
    tokens: int = 300,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    step: int | None = None,
    trust: str | None = None,
) -> int:
    """Generate text with a trained GPT.

    Args:
        prompt: text to continue
        tokens: number of tokens to generate
        temperature: 0 always takes the most likely token
        top_k: sample among this many tokens
        seed: of the random numbers
        step: of the checkpoint; default: the last one, -1: the best
        trust: the code package.file:function of a user-defined model, which is run
    """
    from trimtab.train import sample

    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed, "step": step, "trust": trust}
    text = sample(folder, prompt=prompt, tokens=tokens, **options)
    # A model can write any byte; on a terminal, control characters are escaped.
    print("\n".join(map(printable, text.split("\n"))) if sys.stdout.isatty() else text)
    return 0


def export(
    folder: Path,
    /,
    *,
    to: Literal["hf", "safetensors", "onnx"],
    out: Path | None = None,
    step: int | None = None,
    trust: str | None = None,
) -> int:
    """Write a trained model in another library's format: trimtab export runs/gpt-tiny --to hf

    Args:
        to: hf opens in transformers; safetensors are plain weights; onnx runs in onnxruntime
        out: a new folder; default: the name of the run and of the format, here
        step: of the checkpoint; default: the last one, -1: the best
        trust: the code package.file:function of a user-defined model, which is run
    """
    from trimtab.hosts.export import export
    from trimtab.train import load_run, load_tokenizer

    out = local(out) if out else Path(f"{folder.resolve().name}-{to}")
    config, model, chosen = load_run(local(folder), step, trust=trust)
    tokenizer = load_tokenizer(folder, config) if to == "hf" else None
    said = export(model, out, to, tokenizer=tokenizer)
    print("\n".join([f"step {chosen} of {folder} is in {out}", *said]))
    return 0


def watch(folder: Path, /, *, once: bool = False) -> int:
    """Show a running or finished run on the terminal: loss, signals by layer, alarms.

    Args:
        once: print the current state and exit
    """
    from trimtab.report.live import show

    show(folder, once=once)
    return 0


def explain(folder: Path, /) -> int:
    """Explain what went wrong in a run, when and in which layer first, with the evidence."""
    from trimtab.report.explain import explain

    print(explain(folder))
    return 0


def analyze(folders: tuple[Path, ...], /) -> int:
    """Loss spikes and what came before them, loss ratios, and their correlation with Adam's variance, of finished runs.

    Args:
        folders: of runs
    """
    from trimtab.report.explain import analyze_words

    if not folders:
        refuse("trimtab analyze needs the folder of a run: trimtab analyze runs/gpt-tiny")
    print("\n\n".join(analyze_words(folder) for folder in folders))
    return 0


def report_end(result: dict[str, Any]) -> int:
    """Print how a run ended; return the exit code."""
    loss = "none" if result["validation_loss"] is None else f"{result['validation_loss']:.4f}"
    clocks = f"{result['step']} steps, {result['tokens']:,} tokens, {result['seconds']:.0f} s"
    lines = [f"{result['why']}: {clocks}, best validation loss {loss}"]
    if "compilations" in result:
        most = result["most_compilations"]
        lines.append(f"torch.compile: {result['compilations']} compilations, at most {most} expected")
    if os.environ.get("RANK", "0") == "0":  # of torchrun: only the first process prints
        print("\n".join([*lines, f"the run is in {result['folder']}"]))
    return exit_code(result["why"])
