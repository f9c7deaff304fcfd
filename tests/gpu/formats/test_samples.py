"""The formats of GPU recordings: written content, crash safety, and reading."""

import json
import math
import struct
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_factory import damage, overwrite
from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import COLUMNS, SampleFile, read_samples
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.gpu.formats.json_array import JsonArrayFile, PublishedArrayFile, open_published
from kmatrix.gpu.formats.samples import GpuSample, Snapshot, aggregate, legacy, multi

ROOT = Path(__file__).resolve().parents[3]
A10G = GpuSample(
    gpu_index=0,
    gpu_name="NVIDIA A10G",
    uuid="GPU-a",
    utilization=95.0,
    memory_used=12800.0,
    memory_total=23028.0,
    power=150.125,
    temperature=60.0,
)
LOST = GpuSample(gpu_index=1, gpu_name="NVIDIA A10G", uuid="GPU-b", memory_total=23028.0)
TIME = 1_736_937_000.123456
HEADER = {
    "run_id": "0123456789",
    "started": {"wall": 1000.0, "monotonic": 50.0},
    "hz": 20.0,
    "simulated": False,
    "device_type": "nvidia",
    "energy_source": "counter",
    "gpus": [
        {"gpu_index": 0, "gpu_name": "A", "uuid": "GPU-a", "rank": 0, "memory_total": 100.0},
        {"gpu_index": 3, "gpu_name": "B", "uuid": "GPU-b", "rank": 1, "memory_total": None},
    ],
}
NUMBERS = st.none() | st.floats(0, 1e6, allow_nan=False).map(lambda number: round(number, 3))


def test_a_lost_gpu_is_null_and_the_totals_cover_the_others():
    entry = multi(Snapshot(time=TIME, samples=(A10G, LOST)))
    assert entry["multi_gpu_data"][1]["utilization"] is None
    assert entry["aggregate_stats"]["average_utilization"] == 95
    assert entry["aggregate_stats"]["total_memory_used"] == 12800
    assert entry["aggregate_stats"]["total_memory_total"] == 23028
    assert entry["aggregate_stats"]["gpu_count"] == 1


def test_totals_without_values_are_null_and_not_zero():
    totals = aggregate([LOST])
    assert {name: value for name, value in totals.items() if value is not None} == {"gpu_count": 0}


def test_values_that_are_not_finite_are_null():
    entry = legacy(replace(A10G, power=math.inf, temperature=math.nan), TIME)
    assert entry["power"] is None
    assert entry["temperature"] is None
    json.dumps(entry, allow_nan=False)


def test_simulated_gpus_are_marked_and_real_ones_are_not():
    simulated = replace(A10G, gpu_name="NVIDIA A10G (simulated)")
    assert multi(Snapshot(time=TIME, samples=(simulated,)))["simulated"] is True
    assert "simulated" not in multi(Snapshot(time=TIME, samples=(A10G,)))


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 9, 20, 39])
def test_a_writer_continues_a_truncated_array_after_its_last_complete_object(tmp_path, cut):
    path = tmp_path / "a.json"
    file = JsonArrayFile(path)
    for number in range(3):
        file.append({"n": number})
    file.close()
    path.write_bytes(path.read_bytes()[:-cut])
    JsonArrayFile(path).append({"n": 9})
    numbers = [entry["n"] for entry in json.loads(path.read_text())]
    assert numbers[-1] == 9
    assert numbers[:-1] == list(range(len(numbers) - 1))
    assert len(numbers) >= 4 - math.ceil(max(0, cut - 3) / 9)


def test_readers_of_a_published_array_never_see_a_part_of_it(tmp_path):
    path = tmp_path / "a.json"
    file = PublishedArrayFile(path)
    slow = None
    for number in range(300):
        if slow is None:
            # A reader that reads a piece at a time while the writer continues.
            slow, text = path.open(), ""
        file.append({"n": number, "text": "x" * 50})
        piece = slow.read(500)
        text += piece
        if not piece:
            numbers = [entry["n"] for entry in json.loads(text)]
            assert numbers == list(range(len(numbers)))
            slow.close()
            slow = None
    assert len(numbers) > 10
    file.close()
    assert [entry["n"] for entry in json.loads(path.read_text())] == list(range(300))
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("kind", [PublishedArrayFile, JsonArrayFile])
def test_an_array_has_one_writer(tmp_path, kind):
    """Two would replace each other's objects, and delete each other's copies."""
    path = tmp_path / "a.json"
    first = kind(path)
    first.append({"n": 0})
    with pytest.raises(BlockingIOError, match="another program writes it"):
        kind(path)
    first.append({"n": 1})
    first.close()
    assert [entry["n"] for entry in json.loads(path.read_text())] == [0, 1]
    kind(path).close()


def test_without_hard_links_the_array_is_written_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    file = open_published(tmp_path / "a.json")
    file.append({"n": 0})
    file.close()
    assert json.loads((tmp_path / "a.json").read_text()) == [{"n": 0}]


@pytest.mark.process
def test_a_full_disk_keeps_array_and_samples_complete(tmp_path):
    script = """
import resource, sys
from pathlib import Path
from kmatrix.gpu.formats.binary import SampleFile; from kmatrix.gpu.formats.json_array import JsonArrayFile
folder = Path(sys.argv[1])
header = {"gpus": [{"gpu_index": 0, "gpu_name": "A", "uuid": "a"}], "device_type": "nvidia", "simulated": False}
header["started"] = {"wall": 1.0, "monotonic": 0.0}
array, samples = JsonArrayFile(folder / "a.json"), SampleFile(folder / "s.bin", header)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
refused = 0
for n in range(200):
    row = [float(n)] * 7
    for write in (lambda: array.append({"n": n, "text": "x" * 50}), lambda: samples.append(float(n + 1), 0.0, row)):
        try:
            write()
        except OSError:
            refused += 1
assert refused > 100, refused
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
array.append({"n": 1000})
samples.append(1000.0, 0.0, [1.0] * 7)
"""
    environment = {"PYTHONPATH": f"{ROOT / 'lib'}:{ROOT / 'tests/support'}"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=environment, timeout=60)
    numbers = [entry["n"] for entry in json.loads((tmp_path / "a.json").read_text())]
    assert numbers == [*range(len(numbers) - 1), 1000]
    assert len(numbers) > 10
    times = list(read_samples(tmp_path / "s.bin").times)
    assert times == [*map(float, range(1, len(times))), 1000.0]
    assert len(times) > 10


def write_samples(path, count, header=HEADER):
    file = SampleFile(path, header)
    width = len(header["gpus"]) * len(COLUMNS)
    for number in range(count):
        file.append(1000.0 + number / 8, 50.0 + number / 8, [number + column / 4 for column in range(width)])
    file.close()


@given(st.integers(1, 5), st.lists(st.floats(width=32), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_any_float_and_any_number_of_gpus_survive_a_round_trip(tmp_path_factory, count, numbers):
    path = tmp_path_factory.mktemp("samples") / "s.bin"
    gpus = [{"gpu_index": index, "gpu_name": "A", "uuid": str(index), "memory_total": 1.0} for index in range(count)]
    file = SampleFile(path, {**HEADER, "gpus": gpus})
    for number in numbers:
        file.append(1.5, 2.5, [number] * (count * len(COLUMNS)))
    recording = read_samples(path)
    for gpu in range(count):
        assert [repr(value) for value in recording.columns[gpu]["power"]] == [repr(number) for number in numbers]


@pytest.mark.parametrize("cut", [1, 80])
def test_a_truncated_last_record_is_dropped_and_reported(tmp_path, cut):
    path = tmp_path / "s.bin"
    write_samples(path, 10)
    path.write_bytes(path.read_bytes()[:-cut])
    recording = read_samples(path)
    assert len(recording) == 9


def test_a_recording_continues_after_the_last_complete_record(tmp_path):
    path = tmp_path / "s.bin"
    write_samples(path, 3)
    path.write_bytes(path.read_bytes() + b"half")
    write_samples(path, 2)
    assert list(read_samples(path).times) == [1000.0, 1000.125, 1000.25, 1000.0, 1000.125]


def test_a_recording_of_other_gpus_is_archived_and_not_overwritten(tmp_path):
    path = tmp_path / "gpu_samples.bin"
    write_samples(path, 3)
    write_samples(path, 2, {**HEADER, "gpus": HEADER["gpus"][:1]})
    write_samples(path, 1)
    assert [len(read_samples(tmp_path / f"gpu_samples{part}.bin")) for part in (".1", ".2", "")] == [3, 2, 1]


def test_a_growing_recording_is_read_from_the_last_position(tmp_path):
    path = tmp_path / "s.bin"
    write_samples(path, 10)
    assert list(read_samples(path, 8).times) == [1001.0, 1001.125]
    assert len(read_samples(path, 10)) == 0
    assert len(read_samples(path, 99)) == 0


def test_facts_of_a_device_that_are_known_later_replace_those_in_the_header(tmp_path):
    unknown = {**HEADER, "gpus": [HEADER["gpus"][0], {"gpu_index": 3, "gpu_name": "GPU 3", "uuid": "", "rank": 1}]}
    known = {**HEADER["gpus"][1], "gpu_name": "N" * 96, "uuid": "GPU-" + "b" * 36, "memory_total": 81559.0}
    file = SampleFile(tmp_path / "s.bin", unknown)
    file.append(1.0, 2.0, [1.0] * 14)
    file.write_calibration({"power": {"period_ms": 100.0, "call_us": 3.0}})
    assert file.write_facts({**HEADER, "gpus": [HEADER["gpus"][0], known], "started": {}, "simulated": True})
    file.append(2.0, 3.0, [1.0] * 14)
    file.close()
    recording = read_samples(tmp_path / "s.bin")
    assert recording.header["gpus"] == [HEADER["gpus"][0], known]
    assert (recording.header["simulated"], recording.header["started"]) == (True, HEADER["started"])
    assert recording.header["calibration"]["power"]["period_ms"] == 100.0
    assert list(recording.times) == [1.0, 2.0]
    assert SampleFile(tmp_path / "s.bin", {**HEADER, "gpus": [HEADER["gpus"][0], known], "simulated": True}).continued


def test_a_sample_of_a_recording_is_a_snapshot_with_none_for_nan(tmp_path):
    file = SampleFile(tmp_path / "s.bin", HEADER)
    file.append(1001.0, 51.0, [50.0, 25.0, 100.0, 90.0, math.nan, 1410.0, 5.0, *[math.nan] * 7])
    snapshot = read_samples(tmp_path / "s.bin").snapshot(0)
    assert (snapshot.time, snapshot.monotonic) == (1001.0, 51.0)
    assert (snapshot.samples[0].memory_percent, snapshot.samples[0].temperature) == (25.0, None)
    assert not snapshot.samples[1].is_known


@pytest.mark.parametrize("damage", [b"", b"KMXGPU3\n", b"no recording at all", b"KMXGPU3\n\xff\0\0\0{"])
def test_a_file_that_is_not_a_recording_is_refused_by_name(tmp_path, damage):
    (tmp_path / "s.bin").write_bytes(damage)
    with pytest.raises(RecordError, match=r"s\.bin"):
        read_samples(tmp_path / "s.bin")


def test_a_recording_of_another_format_is_refused_as_such(tmp_path):
    write_samples(tmp_path / "s.bin", 1, {**HEADER, "schema": 4})
    with pytest.raises(RecordError, match="schema 4"):
        read_samples(tmp_path / "s.bin")


NAN, HUGE = struct.pack("<d", math.nan), struct.pack("<d", 1e300)
ONES, TEXT = b"\xff" * 80, b"the text of another file" * 4


@pytest.mark.parametrize("data", [bytes(80), HUGE * 10, ONES, TEXT[:80]])
@pytest.mark.parametrize(("first", "count"), [(0, 3), (95, 5), (0, 100)])
def test_damaged_records_are_left_out_and_counted(tmp_path, data, first, count):
    path = tmp_path / "s.bin"
    write_samples(path, 100)
    whole = read_samples(path)
    times, memory = list(whole.times), list(whole.columns[1]["memory_used"])
    damage(path, first, count, data)
    recording = read_samples(path)
    kept = [at for at in range(100) if not first <= at < first + count]
    assert (len(recording), recording.damaged, recording.records) == (100 - count, count, 100)
    assert list(recording.times) == [times[at] for at in kept]
    column = recording.columns[1]["memory_used"]
    assert [column[at] for at in range(-len(kept), len(kept))] == [memory[at] for at in kept] * 2
    assert list(column[2:9]) == [memory[at] for at in kept][2:9]
    assert [snapshot.time for snapshot in recording.snapshots()] == [times[at] for at in kept]
    assert RecordingClock(recording).length == (times[kept[-1]] - times[kept[0]] if kept else 0)


def test_a_record_is_damaged_if_one_of_its_two_clocks_is(tmp_path):
    path = tmp_path / "s.bin"
    write_samples(path, 10)
    for at, place in ((2, 0), (4, 8)):
        content = bytearray(path.read_bytes())
        begin = 12 + struct.unpack("<I", content[8:12])[0] + 80 * at + place
        content[begin : begin + 8] = NAN
        path.write_bytes(content)
    assert list(read_samples(path).times) == [1000.0 + at / 8 for at in range(10) if at not in {2, 4}]


def test_a_value_that_cannot_be_true_is_unknown(tmp_path):
    path = tmp_path / "s.bin"
    for column, value in product(COLUMNS, (math.inf, -5000.0)):
        path.unlink(missing_ok=True)
        write_samples(path, 3)
        overwrite(path, 1, column, value, gpu=1)
        recording = read_samples(path)
        assert [getattr(recording.snapshot(at).samples[1], column) is None for at in range(3)] == [False, True, False]


def test_memory_above_that_of_the_gpu_is_unknown_but_not_its_rounding(tmp_path):
    for total, used in ((81_559.126, 81_559.126), (100.0, 101.0)):
        gpus = [{**HEADER["gpus"][0], "memory_total": total}]
        file = SampleFile(tmp_path / f"{total}.bin", {**HEADER, "gpus": gpus})
        file.append(1000.0, 50.0, [1.0, used, 1.0, 1.0, 1.0, 1.0, 1.0])
        file.close()
        (sample,) = read_samples(tmp_path / f"{total}.bin").snapshot(0).samples
        assert (sample.memory_used is None) == (used > total)
