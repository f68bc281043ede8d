"""How often the forecasts of the lab are right, on recipes and sizes that are then really trained.

    python -m bench.forecasts --texts FOLDER         train what is missing, then write the report; two hours and more
    python -m bench.forecasts --only plain wide      some recipes
    python -m bench.forecasts --report               only the report, from docs/results/forecasts.json

Each recipe is trained at three sizes up to 154k parameters and seven learning rates, one seed each, and forecast at
about 786k and 3M. Then it is trained there, and the analysis decides which learning rates failed. Recipes, sizes,
learning rates and halves were fixed before the first run: the constants of the forecast
(trimtab/analysis/thresholds.py) are set on the half "set", and the bars are about the half "reported".

FOLDER has tinyshakespeare.txt and wikitext-2/train.txt; without it the two recipes that need them are left out.
Interrupted, the same command continues. The numbers of all runs are kept in docs/results/forecasts.json.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from bench.forecasts_report import RESULTS, load_results, save_results, write_report
from trimtab.analysis.folders import read_folders
from trimtab.lab.sizes import parse_size
from trimtab.lab.study import LRS, Arm, Study
from trimtab.lab.subjects import study_base
from trimtab.lab.sweep import sweep
from trimtab.train.config import RunConfig, with_values

STEPS = 500
TARGET_LRS = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
JOINT = ("2x16", "2x32", "3x64"), ("4x128", "6x208")
WIDE = ("2x16", "2x32", "2x80"), ("2x176", "2x352")
DEEP = ("2x16", "8x16", "12x32"), ("16x64", "28x96")
TEXTS = {"shakespeare": "tinyshakespeare.txt", "wikitext": "wikitext-2/train.txt"}


@dataclass(frozen=True)
class Recipe:
    name: str
    half: Literal["set", "reported"]
    switches: tuple[str, ...] = ()
    sizes: tuple[tuple[str, ...], tuple[str, ...]] = JOINT  # trained, and forecast
    subject: str = "gpt-lab"

    def base(self, texts: Path | None) -> RunConfig:
        values = {"eval_batches": 32, "watch.every": STEPS // 100}
        if self.name in TEXTS and texts is not None:
            values |= {"data.corpus": str(texts / TEXTS[self.name])}
        return with_values(study_base(self.subject, STEPS), values)

    def study(self, part: Literal["small", "large"], texts: Path | None = None) -> Study:
        return Study(
            name=f"{self.name}-{part}",
            question=f"Recipe {self.name}: which learning rates fail?",
            subject=self.subject,
            base=self.base(texts),
            sizes=tuple(parse_size(size) for size in self.sizes[part == "large"]),
            lrs=LRS if part == "small" else TARGET_LRS,
            arms=(Arm(self.name, self.switches),),
            seeds=(0,),
        )


RECIPES = (
    Recipe("plain", "set"),
    Recipe("steadied", "reported", ("qk-norm", "z-loss")),
    Recipe("wide", "set", sizes=WIDE),
    Recipe("deep", "reported", sizes=DEEP),
    Recipe("warmup-1%", "set", ("warmup=0.01",)),
    Recipe("warmup-25%", "reported", ("warmup=0.25",)),
    Recipe("shakespeare", "set"),
    Recipe("wikitext", "reported"),
    Recipe("qk-norm", "set", ("qk-norm",)),
    Recipe("other-gpt", "reported", subject="bench.other_gpt:build"),
    Recipe("no-decay", "set", ("weight-decay=0",)),
    Recipe("decay-3x", "reported", ("weight-decay=3x",)),
    Recipe("beta2-0.999", "set", ("beta2=0.999",)),
    Recipe("z-loss", "reported", ("z-loss",)),
)


def main(
    only: tuple[str, ...] = (), texts: Path | None = None, out: Path = Path("runs/forecasts"), report: bool = False
) -> None:
    """Train, forecast, compare.

    Args:
        only: names of recipes; default: all
        texts: folder of the texts that two recipes need
        out: folder of the runs
        report: train nothing
    """
    for recipe in RECIPES if not report else ():
        if (not only or recipe.name in only) and (recipe.name not in TEXTS or texts is not None):
            for part in ("small", "large"):
                sweep(recipe.study(part, texts), out / recipe.name / part)
            collect(recipe, out)
    write_report({recipe.name: recipe.half for recipe in RECIPES})


def collect(recipe: Recipe, out: Path) -> None:
    """Keep the numbers of the runs of a recipe."""
    results = read_folders([out / recipe.name / part for part in ("small", "large")])[1]
    there = load_results() if RESULTS.is_file() else {}
    there[recipe.name] = [replace(result, study="forecasts") for result in results if result.finished]
    save_results({name: there[name] for name in [x.name for x in RECIPES] if name in there})


if __name__ == "__main__":
    tyro.cli(main)
