"""SIGNALS: statistics of one step, spike and drift detection, alarms; usable from any loop.

    watch = Watch(model, optimizer)
    ...
    for alarm in watch.step(loss): print(alarm)

watch.py ties it together; signals.py, totals.py and taps.py measure, events.py judges, actions.py acts.
"""

from trimtab.watch.actions import Actions
from trimtab.watch.events import Alarm, Rules
from trimtab.watch.watch import Watch

__all__ = ["Actions", "Alarm", "Rules", "Watch"]
