"""Read GPU recordings with the standard library only, as a script of a user who knows nothing but the format.

    python -I independent_reader.py SINGLE.json MULTI.json -> a summary, as JSON

It repeats the keys of both layouts and computes the aggregates itself, so that it shares no code with kmatrix.
"""

import json
import sys
from datetime import datetime

GPU = {"gpu_index", "gpu_name", "utilization", "memory_used", "memory_total", "power"}
TOTALS = {
    *("total_memory_used", "total_memory_total", "total_memory_percent", "average_utilization", "total_power"),
    *("max_temperature", "gpu_count"),
}


def require_keys(entry, keys):
    missing = keys - entry.keys()
    assert not missing, f"missing: {sorted(missing)}"
    return entry


def is_close(left, right):
    if left is None or right is None:
        return left is right
    return abs(left - right) <= 0.002 * max(1.0, abs(left))


def check_totals(entry):
    gpus, totals = entry["multi_gpu_data"], require_keys(entry["aggregate_stats"], TOTALS)
    alive = [gpu for gpu in gpus if gpu["memory_used"] is not None]
    used, total = (sum(gpu[key] for gpu in alive) for key in ("memory_used", "memory_total"))
    assert totals["gpu_count"] == len(alive)
    assert is_close(totals["total_memory_used"], used), entry
    assert is_close(totals["total_memory_total"], total), entry
    assert is_close(totals["total_memory_percent"], 100 * used / total), entry
    assert is_close(totals["average_utilization"], sum(gpu["utilization"] for gpu in alive) / len(alive)), entry
    assert is_close(totals["total_power"], sum(gpu["power"] for gpu in alive)), entry
    assert totals["max_temperature"] == max(gpu["temperature"] for gpu in alive), entry


def main(single, multi):
    with open(single, encoding="utf-8") as file:  # noqa: PTH123 (as a user's script would)
        single_entries = json.load(file)
    with open(multi, encoding="utf-8") as file:  # noqa: PTH123
        multi_entries = json.load(file)
    assert len(single_entries) == len(multi_entries) > 0
    times = []
    for entry in single_entries:
        require_keys(entry, GPU | {"timestamp"})
        times.append(datetime.fromisoformat(entry["timestamp"]))
    assert times == sorted(times)
    for entry in multi_entries:
        require_keys(entry, {"timestamp", "multi_gpu_data", "aggregate_stats"})
        for gpu in entry["multi_gpu_data"]:
            require_keys(gpu, GPU)
        check_totals(entry)
    last = multi_entries[-1]["multi_gpu_data"]
    print(json.dumps({"gpus": len(last), "entries": len(multi_entries), "power": [gpu["power"] for gpu in last]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
