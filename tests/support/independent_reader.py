"""Reads recordings of GPUs with nothing but the standard library: a script of somebody who knows only the format.

    python -I independent_reader.py SINGLE.json MULTI.json -> what it found, as JSON

It knows the keys of the two layouts by heart, and computes the aggregates itself.
"""

import json
import sys
from datetime import datetime

GPU = {"gpu_index", "gpu_name", "utilization", "memory_used", "memory_total", "power"}
TOTALS = {
    *("total_memory_used", "total_memory_total", "total_memory_percent", "average_utilization", "total_power"),
    *("max_temperature", "gpu_count"),
}


def whole(entry, keys):
    missing = keys - entry.keys()
    assert not missing, f"missing: {sorted(missing)}"
    return entry


def same(left, right):
    if left is None or right is None:
        return left is right
    return abs(left - right) <= 0.002 * max(1.0, abs(left))


def check_totals(entry):
    gpus, totals = entry["multi_gpu_data"], whole(entry["aggregate_stats"], TOTALS)
    alive = [gpu for gpu in gpus if gpu["memory_used"] is not None]
    used, there = (sum(gpu[key] for gpu in alive) for key in ("memory_used", "memory_total"))
    assert totals["gpu_count"] == len(alive)
    assert same(totals["total_memory_used"], used), entry
    assert same(totals["total_memory_total"], there), entry
    assert same(totals["total_memory_percent"], 100 * used / there), entry
    assert same(totals["average_utilization"], sum(gpu["utilization"] for gpu in alive) / len(alive)), entry
    assert same(totals["total_power"], sum(gpu["power"] for gpu in alive)), entry
    assert totals["max_temperature"] == max(gpu["temperature"] for gpu in alive), entry


def main(single, multi):
    with open(single, encoding="utf-8") as file:  # noqa: PTH123 (as anybody would)
        one = json.load(file)
    with open(multi, encoding="utf-8") as file:  # noqa: PTH123
        several = json.load(file)
    assert len(one) == len(several) > 0
    times = []
    for entry in one:
        whole(entry, GPU | {"timestamp"})
        times.append(datetime.fromisoformat(entry["timestamp"]))
    assert times == sorted(times)
    for entry in several:
        whole(entry, {"timestamp", "multi_gpu_data", "aggregate_stats"})
        for gpu in entry["multi_gpu_data"]:
            whole(gpu, GPU)
        check_totals(entry)
    last = several[-1]["multi_gpu_data"]
    print(json.dumps({"gpus": len(last), "entries": len(several), "power": [gpu["power"] for gpu in last]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
