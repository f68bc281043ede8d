"""LIVE SIGNALS of a running training, in any loop: measurements of every step, alarms, actions. Reads no files.

    watch = Watch(model, optimizer)
    ...
    for alarm in watch.step(loss): print(alarm)

watch.py: the public class; signals.py, totals.py, taps.py: measurements; events.py: alarm rules; actions.py: actions.
"""

from trimtab.watch.actions import Actions
from trimtab.watch.events import Alarm, Rules
from trimtab.watch.watch import Watch

__all__ = ["Actions", "Alarm", "Rules", "Watch"]
