"""What the callbacks of all hosts log."""

from collections import Counter
from collections.abc import Sequence

from trimtab.watch import Alarm, Watch


def to_scalars(watch: Watch, alarms: Sequence[Alarm], *, tensors: bool) -> dict[str, float]:
    """Signals as "watch/<signal>", and the number of alarms so far as "alarms/<kind>".

    `tensors`: also those of every tensor and layer, as "watch/<signal>/<name>".
    """
    shown = {f"watch/{name}": x for name, x in watch.scalars().items() if tensors or "/" not in name}
    return shown | {f"alarms/{kind}": n for kind, n in Counter(alarm.kind for alarm in alarms).items()}
