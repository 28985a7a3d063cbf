"""Reading Horovod's timeline."""

import json
from pathlib import Path


def rows_of(timeline: Path) -> dict[str, list[str]]:
    """What happened in each row of the timeline, in order."""
    events = json.loads(timeline.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if "name" in event.get("args", {})}
    rows: dict[str, list[str]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "B":
            rows[names[event["pid"]]].append(event["name"])
    return rows
