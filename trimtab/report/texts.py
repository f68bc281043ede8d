"""The fixed texts of the page, by section: the word in the menu, the title, the lead, and the text if it is empty."""

from dataclasses import dataclass

from trimtab.analysis.thresholds import MARGIN
from trimtab.runs.folder import SIGNALS


@dataclass(frozen=True)
class Words:
    menu: str
    title: str
    lead: str = ""
    missing: str = ""


WORDS = {
    "learning-rates": Words(
        "Learning rates",
        "Loss against learning rate",
        "Validation loss at the end of training for every learning rate. A wide, flat minimum means that the learning "
        f"rate does not need to be exact. A learning rate fails if its loss is more than {MARGIN} nats, and more than "
        "seeds explain, above the best loss of that size, or above that of a smaller model at the same learning rate.",
        "No run has a validation loss yet. One finished run is enough for a curve.",
    ),
    "edges": Words(
        "Edge of stability",
        "Edge of stability against size",
        "The learning rate above which training fails, for each size, and its trend. It usually falls as models grow; "
        "where it falls below the learning rate of your recipe, the recipe fails.",
        "An edge of stability needs finished runs at two or more learning rates of one arm and size.",
    ),
    "sensitivity": Words(
        "Sensitivity",
        "Sensitivity against size",
        "The mean loss over three decades of learning rates, minus the lowest loss. 0 means that all learning rates "
        "are equally good. The part below the best learning rate is that of runs that learn too slowly, and more steps "
        "lower it. The part above is that of unstable runs.",
        "Sensitivity needs finished runs at two or more learning rates of one arm and size.",
    ),
    "logits": Words(
        "Attention logits",
        "Attention logits against size",
        "Large attention logits make the softmax nearly one-hot, and training fails. Attention logits grow with the "
        "size and the learning rate, so a fit over the sizes forecasts where they reach the critical value.",
        f"No run has attention logits in its {SIGNALS}, so there is no forecast. Set `watch.every` above 0.",
    ),
    "gradients": Words(
        "Gradients",
        "Gradients against ε",
        "Adam divides by the gradient RMS plus ε. Gradients shrink as models grow. When they are as small as ε, the "
        "updates shrink too. A smaller ε avoids it.",
        f"No run has gradient norms in its {SIGNALS}, so they cannot be compared with ε. Set `watch.every` above 0.",
    ),
    "training": Words(
        "Training",
        "Training loss",
        "The training loss of every run. Triangles mark loss spikes. Losses above the chart are cut off; double-click "
        "to show all.",
        "No run has logged a training loss yet.",
    ),
    "runs": Words("All runs", "All runs", missing="There are no runs yet."),
    "made": Words("Reproduce", "How to reproduce this page"),
}
ABOVE_BEST = "Above best: the loss minus the lowest loss of the same arm and size. Its mean is the sensitivity."
NO_PANEL = "No finished run has these data yet."
NO_SCRIPT = "The charts need JavaScript, which is disabled here. All numbers are in the tables and files below."
