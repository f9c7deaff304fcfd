"""Run the benchmarks of recording and reports, alone and with a peer.

The peer is a folder with the original project's names and a few lines in each; times are not checked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

SCREEN = """
import json, time
class Monitor:
    def get_stats(self, index):
        return {"memory_used": 1.0}
class GPUTop:
    def __init__(self, stats_file):
        self.path, self.json_data, self.gpu_monitor = stats_file, [], Monitor()
    def log_stats_to_json(self, stats):
        self.json_data.append(stats)
        with open(self.path, "w") as file:
            json.dump(self.json_data, file)
    def run(self):
        while True:
            self.log_stats_to_json(self.gpu_monitor.get_stats(0))
            time.sleep(0.2)
"""
READER = """
import json, pathlib, sys
for path in pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").glob("**/gpu_stats*.json"):
    print(path.name, len(json.loads(path.read_text())))
"""
SCRIPTS = ("generate_consolidated_gpu_summary.py", "generate_gpu_memory_comparison.py")


@pytest.fixture
def peer_checkout(tmp_path) -> Path:
    """A folder that looks like a checkout of the original project."""
    scripts = tmp_path / "peer" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "gputop.py").write_text(SCREEN)
    for name in SCRIPTS:
        (scripts / name).write_text(READER)
    return scripts.parent


def rows_of(text: str) -> dict[tuple[str, int, float], list[str]]:
    """Return the rows of the recording table: (name, GPUs, requested rate) -> the other cells."""
    lines = [(line[:14].strip(), line[14:].split()) for line in text.splitlines()[2:]]
    return {(name, int(cells[0]), float(cells[1])): cells[2:] for name, cells in lines}


def test_the_cost_of_recording_is_printed_next_to_its_peers(clone, peer_checkout):
    arguments = ("bench/recorder.py", "--seconds", "1", "--gpus", "1,4", "--hz", "20", "--peer", str(peer_checkout))
    completed = clone.run(clone.python, *arguments)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    table = rows_of(completed.stdout)
    methods = ("empty loop", "recorder", "pynvml+CSV")
    assert set(table) == {
        *((method, gpus, 20.0) for method in methods for gpus in (1, 4)),
        *((method, gpus, 1.0) for method in ("original", "original, 1 h") for gpus in (1, 4)),
    }
    for (method, gpus, _), (reached, cpu, over, memory, late, size) in table.items():
        assert float(cpu) >= 0
        assert float(memory) > 1
        assert (reached == "-") == (method not in methods[1:])
        assert (over == "-") == (method not in methods[1:])
        if method == "recorder":
            record = 3 * 8 + (6 * 4 + 8) * gpus  # two clocks and the energy of the host, 7 columns per GPU
            assert int(late) >= 0
            assert float(size) == pytest.approx(3600 * 20 * record / 1e6, rel=0.05)


def test_the_time_of_reports_is_printed_next_to_the_original(clone, peer_checkout):
    completed = clone.run(clone.python, "bench/reports.py", "50", "300", "--peer", str(peer_checkout), "--rounds", "3")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    lines = completed.stdout.splitlines()
    assert sum("samples x 4 GPUs x 3 runs" in line for line in lines) == 2
    for kind in ("text", "graphs"):
        for reader in ("ours, recordings of ours", "ours, files of the original", "the original, its own files"):
            found = [line for line in lines if line.strip().startswith(f"{kind}: {reader}")]
            assert len(found) == 2
            assert all("CPU" in line and "MiB" in line for line in found)
            assert all(("x as fast" in line) == reader.startswith("ours") for line in found)


def test_without_a_peer_only_our_numbers_are_printed(clone):
    completed = clone.run(clone.python, "bench/reports.py", "50")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert len([line for line in completed.stdout.splitlines() if "ours, " in line]) == 4
    assert "original, its" not in completed.stdout


def test_a_failing_peer_is_reported_and_the_benchmark_continues(clone, peer_checkout):
    (peer_checkout / "scripts" / SCRIPTS[0]).write_text("raise SystemExit('out of order')")
    completed = clone.run(clone.python, "bench/reports.py", "50", "--peer", str(peer_checkout))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "out of order" in completed.stdout
    assert "graphs: the original, its own files" in completed.stdout


@pytest.mark.parametrize("bench", ["recorder", "reports"])
def test_a_folder_that_is_not_a_checkout_is_refused(clone, tmp_path, bench):
    completed = clone.run(clone.python, f"bench/{bench}.py", "--peer", str(tmp_path))
    assert completed.returncode == 2
    assert "not a checkout of the original project" in completed.stderr
    assert "Traceback" not in completed.stderr
