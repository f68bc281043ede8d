"""What people see: the page of a study, its verdict, notes and predictions, and the explanation of one run.

All sentences, charts and HTML are here, made from `trimtab.analysis` alone.

    page       render: sections, from charts, growth, training (figures) and tables, by templates/page.html
    verdict    the verdict in sentences; sentences: single facts; explain: one run; numbers: numbers as text
    files      the page's numbers as findings.json, cells.csv, curves.csv and fits.csv
    live       a running training on the terminal

Colours are in style.css only: a chart names a colour (`--ink`) and page.js inserts its value, so that one chart serves
a light page, a dark one and a printed one.
"""

from trimtab.report.page import check_page, load_drawing, write_report
from trimtab.report.sentences import notes_words, prediction_json, prediction_words
from trimtab.report.verdict import verdict_words

__all__ = [
    "check_page",
    "load_drawing",
    "notes_words",
    "prediction_json",
    "prediction_words",
    "verdict_words",
    "write_report",
]
