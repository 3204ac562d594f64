"""The JSON record of a finished prompt: what --json prints and --output keeps."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinygpt.outputs import RequestOutput

# How every record begins: by this an interrupted run's last, half-written record is told from foreign text.
BEGINNING = '{"id": '


def record_line(record_id: str | int | None, output: "RequestOutput") -> str:
    """One line of JSON: id, then RequestOutput's fields by their names, with times in seconds since arrival."""
    metrics = output.metrics
    times = {
        "time_to_first_token": round(metrics.first_token - metrics.arrival, 6),
        "time_to_finish": round(metrics.finished - metrics.arrival, 6),
    }
    return json.dumps({"id": record_id, **asdict(output), "metrics": times}, ensure_ascii=False)
