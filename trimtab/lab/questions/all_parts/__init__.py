"""The four papers together."""

from trimtab.lab.questions.all_parts import (
    together,
    together_edge,
    together_memory,
    together_pairs,
)

QUESTIONS = tuple(
    module.QUESTION
    for module in (
        together,
        together_edge,
        together_memory,
        together_pairs,
    )
)
