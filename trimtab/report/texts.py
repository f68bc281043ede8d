"""What the page says by itself, section by section: the word in the menu, the title, the lead, and what is missing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    menu: str
    title: str
    lead: str = ""
    missing: str = ""


SECTIONS = {
    "learning-rates": Section(
        "Learning rates",
        "Loss against learning rate",
        "Validation loss after training, for every learning rate that was tried. A wide, flat valley forgives a wrong "
        "choice.",
        "No run has ended with a validation loss yet, so there is no curve to draw. It takes one finished run.",
    ),
    "sensitivity": Section(
        "Sensitivity",
        "Sensitivity against size",
        "How much loss a wrong learning rate costs on average, over three decades of learning rates: 0 means that any "
        "will do. What grows with the size here will be worse in a larger model.",
        "Sensitivity needs finished runs at two or more learning rates of one arm and size; there are none yet.",
    ),
    "logits": Section(
        "Attention logits",
        "Attention logits against size",
        "Large logits turn attention into a hard choice, and training fails. They grow with the size and the learning "
        "rate, smoothly enough to see a failure coming while models are still fine.",
        "No run has attention logits in its signals.jsonl, so nothing can be foretold from them. "
        "They are watched where `watch.every` is above 0.",
    ),
    "gradients": Section(
        "Gradients",
        "Gradients against ε",
        "Adam divides by the size of the gradient plus ε. Gradients shrink as models grow; once they are as small as "
        "ε, so are the updates. A smaller ε cures it.",
        "No run has gradient sizes in its signals.jsonl, so they cannot be compared with ε. "
        "They are watched where `watch.every` is above 0.",
    ),
    "training": Section(
        "Training",
        "Training, step by step",
        "The loss of every run while it trained. Triangles mark spikes. What rises above the chart has left it; a "
        "double click shows all.",
        "No run has logged a training loss yet.",
    ),
    "runs": Section("Every run", "Every run", missing="There are no runs yet."),
    "made": Section("How it was made", "How this page was made"),
}
ABOVE_BEST = "Above best: what a run adds to the sensitivity of its curve, before the mean is taken."
NO_PANEL = "No finished run shows this yet."
NO_SCRIPT = "The charts need JavaScript, which is switched off here. Every number is in the tables and files below."
