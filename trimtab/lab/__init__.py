"""MANY RUNS: studies, and the sweep that runs them. `trimtab lab` also analyses the runs and writes the page.

study = default_study()                                     study.py, sizes.py, interventions.py, questions/, budget.py
sweep(study, "runs/lab")                                    sweep.py, extend.py, executors/, store.py, table.py
findings = read(["runs/lab"])                               trimtab.analysis
write_report(findings, Path("runs/lab/report.html"))        trimtab.report
prediction_words(predict_size(findings, 1e9, lr=0.01))
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
