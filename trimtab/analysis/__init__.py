"""Numbers from run folders, of one run or of many. No sentences: those are in `trimtab.report`.

one run      spikes, one_run (lead times, loss ratios, correlations), problems (what went wrong)
many runs    folders --results--> Result --measure--> Curve --fits, forecasts--> Fit, Forecast --verdict--> StudyVerdict

`thresholds` has every threshold with its source.
"""

from trimtab.analysis.findings import Findings, read
from trimtab.analysis.predict import Prediction, predict_size

__all__ = ["Findings", "Prediction", "predict_size", "read"]
