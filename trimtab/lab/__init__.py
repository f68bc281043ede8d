"""MANY RUNS: a study, its sweep, what the runs say together, and the page about it. `trimtab lab` is all of it.

study = default_study()                             study.py, sizes.py, interventions.py, questions/
sweep(study, "runs/lab")                            sweep.py, executors/, store.py, table.py
findings = read(["runs/lab"])                       results.py, measure.py, fits.py, forecasts.py, verdict.py
write_report(findings, Path("runs/lab/report.html"))        report/
prediction_words(predict_size(findings, 1e9, lr=0.01))      predict.py, report/sentences.py
"""

from trimtab.analysis.findings import Findings, read
from trimtab.analysis.predict import predict_size
from trimtab.lab.study import Arm, Cell, Study, default_study, quick_study
from trimtab.lab.study_file import read_study
from trimtab.lab.sweep import sweep
from trimtab.report import prediction_words, verdict_words, write_report

__all__ = [
    "Arm",
    "Cell",
    "Findings",
    "Study",
    "default_study",
    "predict_size",
    "prediction_words",
    "quick_study",
    "read",
    "read_study",
    "sweep",
    "verdict_words",
    "write_report",
]
