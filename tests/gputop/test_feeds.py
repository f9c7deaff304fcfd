"""Feeds of gputop, the selection of GPUs, and statistics files."""

import json
import math
import time

import pytest

from gpu_factory import damage
from gputop_values import T0, Recorder, append_event, gpu_sample, utilization
from kmatrix.errors import RecordError
from kmatrix.gpu.devices import WIDTH, Device, DeviceLimits
from kmatrix.gpu.formats.binary import SampleFile, read_samples
from kmatrix.gpu.formats.samples import Snapshot
from kmatrix.gpu.nvml.facts import DriverFacts
from kmatrix.gputop.feeds import AttachedFeed, ReplayFeed
from kmatrix.gputop.loop import Session, StatsFiles
from kmatrix.gputop.monitor import GPUMonitor
from kmatrix.gputop.view import History, Metric
from kmatrix.records.files import append_jsonl
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.recordings import load
from programs import run as run_command

# ---- recordings --------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_an_attached_screen_shows_each_new_sample_once(tmp_path, monkeypatch):
    firsts = []

    def read(path, first=0):
        firsts.append(first)
        return read_samples(path, first)

    monkeypatch.setattr("kmatrix.gputop.feeds.read_samples", read)
    recorder = Recorder(tmp_path / "run", started=time.time() - 5)
    feed, history = AttachedFeed(tmp_path / "run"), History()
    assert feed.poll(history) is None
    assert "no sample yet" in feed.notices()[0]
    recorder.write(4)
    assert utilization(feed.poll(history)) == 3.0
    recorder.write(6)
    sample = feed.poll(history)
    assert utilization(sample) == 9.0
    assert sample.ranks == {0: 1, 1: 0}
    assert feed.poll(history) == sample  # nothing new
    assert firsts == [0, 0, 0, 4, 10]
    values = [value for value in history.series(0, Metric.UTILIZATION, recorder.started + 4.5) if value is not None]
    assert sum(values) / len(values) == pytest.approx(4.5, abs=1.0)


@pytest.mark.parametrize(("position", "index"), [(0.0, 0), (10.0, 20), (10.4, 20), (-5.0, 188), (1e9, 198), (-1e9, 0)])
def test_a_replay_starts_at_the_requested_position(tmp_path, position, index):
    Recorder(tmp_path / "run").write(199)
    feed = ReplayFeed(tmp_path / "run", at=position)
    feed.press("space")  # the clock is paused
    assert utilization(feed.poll(History())) == index % 101


def test_a_replay_plays_in_real_time_and_can_be_paused(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kmatrix.gputop.feeds.time.monotonic", lambda: now[0])
    Recorder(tmp_path / "run").write(100)
    feed, history = ReplayFeed(tmp_path / "run"), History()
    now[0] += 10
    assert utilization(feed.poll(history)) == 20.0
    feed.press("space")
    now[0] += 10
    assert (utilization(feed.poll(history)), feed.mode) == (20.0, "paused")
    feed.press("space")
    now[0] += 1000
    assert (utilization(feed.poll(history)), feed.mode) == (99.0, "paused")  # it stops at the end


def test_a_replay_shows_throttling_of_its_position(tmp_path):
    recorder = Recorder(tmp_path / "run", gpus=2)
    recorder.write(200)
    append_event(recorder.run, 0, "started")
    append_event(recorder.run, 10, "throttle", 1, "GPU-1: throttled: heat (hardware), power cap")
    append_event(recorder.run, 20, "throttle", 1, "GPU-1: throttled: none")
    append_event(recorder.run, 30, "lost", 0, "no response (values are null)")
    feed, history = ReplayFeed(tmp_path / "run"), History()
    feed.press("space")
    for second, reasons in (
        (5, {0: (), 1: ()}),
        (15, {0: (), 1: ("power cap", "heat (hardware)")}),
        (35, {1: ()}),
        (15, {0: (), 1: ("power cap", "heat (hardware)")}),
    ):
        feed.seek(second)
        assert feed.poll(history).throttle == reasons


def test_a_folder_without_a_recording_is_refused_and_a_matrix_lists_its_runs(tmp_path):
    with pytest.raises(RecordError, match="contains no gpu_samples"):
        AttachedFeed(tmp_path)
    Recorder(tmp_path / "matrix" / "gpt2_adamw_2gpu").write(1)
    (tmp_path / "matrix" / "gpt2_adamw_2gpu" / "run.json").write_text("{}")
    with pytest.raises(RecordError, match="gpt2_adamw_2gpu"):
        ReplayFeed(tmp_path / "matrix")


@pytest.mark.parametrize("first", [0, 5, 15])
def test_damaged_samples_are_not_shown_and_are_counted(tmp_path, first):
    Recorder(tmp_path / "run").write(20)
    damage(tmp_path / "run" / "gpu_samples.bin", first, 5)
    last = 14 if first == 15 else 19
    feed = ReplayFeed(tmp_path / "run", from_end=True)
    assert utilization(feed.poll(History())) == last
    assert feed.length == (last - (5 if first == 0 else 0)) / 2
    assert feed.notices() == ("gpu_samples.bin is damaged: 5 samples left out",)
    attached = AttachedFeed(tmp_path / "run")
    for _ in range(2):
        assert utilization(attached.poll(History())) == last
        assert attached.notices()[-1] == "gpu_samples.bin is damaged: 5 samples left out"


# ---- live --------------------------------------------------------------------------------------------------------


class FakeSource:
    """Two GPUs with the source interface of a recorder; GPU 1 can be lost. asked: the driver calls that take long."""

    device_type, energy_source = "nvidia", None

    def __init__(self):
        self.devices = [Device(gpu_index=i, gpu_name="NVIDIA A10G", uuid=f"GPU-{i}") for i in range(2)]
        self.lost, self.answers, self.asked = False, False, []

    def read(self, values):
        values[:] = [50.0] * WIDTH + [math.nan if self.lost else 60.0] * WIDTH

    def limits(self, device):
        self.asked.append(f"slow {device}")
        return DeviceLimits(power_limit=300.0, throttled=frozenset({"power cap"}) if device else frozenset())

    def processes(self, device):
        self.asked.append(f"processes {device}")
        return ()

    def is_lost(self, device):
        return self.lost and device == 1

    def recover(self, device):
        self.asked.append(f"recover {device}")
        self.lost = not self.answers
        return self.answers

    def close(self):
        self.asked.append("close")


@pytest.fixture
def source(monkeypatch):
    fake, now = FakeSource(), [100.0]
    fake.pass_time = lambda seconds: now.__setitem__(0, now[0] + seconds)
    monkeypatch.setattr("kmatrix.gputop.monitor.open_source", lambda: fake)
    monkeypatch.setattr("kmatrix.gputop.monitor.driver_facts", lambda _source: DriverFacts())
    monkeypatch.setattr("kmatrix.gputop.monitor.time.monotonic", lambda: now[0])
    return fake


def test_a_lost_gpu_is_shown_again_after_recovery(source):
    monitor = GPUMonitor()
    assert monitor.initialize()
    assert monitor.read().throttle == {0: (), 1: ("power cap",)}
    source.lost = True
    source.pass_time(10)
    lost = monitor.read()
    assert not lost.snapshot.samples[1].is_known
    assert lost.throttle == {0: ()}
    source.answers = True
    source.pass_time(10)
    found = monitor.read()
    assert found.snapshot.samples[1].utilization == 60.0
    assert found.snapshot.time == pytest.approx(time.time(), abs=5)
    assert (lost.snapshot.monotonic, found.snapshot.monotonic) == (110.0, 120.0)


# ---- selection ---------------------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path):
    Recorder(tmp_path / "run", gpus=12).write(50)
    live_session = Session(feed=ReplayFeed(tmp_path / "run"))
    live_session.poll()
    return live_session


def test_keys_change_the_screen(session):
    view_of = {
        "down": lambda view: view.selected == 1,
        "page down": lambda view: view.selected == 11,
        "7": lambda view: view.selected == 7,
        "m": lambda view: view.metric is Metric.MEMORY,
        "c": lambda view: view.charts,
        "l": lambda view: view.large,
        "a": lambda view: view.page == "alerts",
    }
    for key, changed in view_of.items():
        assert session.press(key)
        assert changed(session.view()), key
    session.press("x")  # closes the page
    assert not session.press("q")


def test_a_page_scrolls_if_it_is_longer_than_the_terminal_and_any_other_key_closes_it(session):
    session.press("h")
    session.page_end = 12  # as the loop sets it for each picture
    for key, at in (("up", 0), ("down", 1), ("page down", 11), ("page down", 12), ("up", 11), ("page up", 1)):
        assert session.press(key)
        assert (session.view().page, session.view().page_at) == ("help", at)
    session.press("down")
    session.page_end = 1  # the terminal was enlarged
    session.press("up")
    assert session.view().page_at == 0
    session.press("q")
    assert session.view().page == ""
    assert session.selected == 0
    session.press("h")
    assert session.view().page_at == 0
    session.page_end = 0  # all of it is visible
    session.press("down")
    assert session.view().page == ""


def test_a_subset_of_the_gpus_is_shown_and_written(tmp_path):
    recorder = Recorder(tmp_path / "run", gpus=12)
    session = Session(feed=AttachedFeed(tmp_path / "run"), asked="2, GPU-11", stats=StatsFiles(tmp_path / "x.json"))
    session.poll()
    assert session.is_empty
    recorder.write(1)
    session.poll()
    session.poll()  # nothing new, so nothing is written
    assert [row.sample.gpu_index for row in session.view().rows] == [2, 11]
    (entry,) = json.loads((tmp_path / "x_multi_gpu.json").read_text())
    assert [gpu["gpu_index"] for gpu in entry["multi_gpu_data"]] == [2, 11]
    assert json.loads((tmp_path / "x.json").read_text())[0]["gpu_index"] == 2


# ---- statistics files --------------------------------------------------------------------------------------------


def test_the_statistics_files_contain_the_selected_gpu_and_all_gpus(tmp_path):
    files = StatsFiles(tmp_path / "x.json")
    for second, selected in ((0, 1), (1, 1), (2, 99)):
        files.append(Snapshot(time=T0 + second, samples=(gpu_sample(0), gpu_sample(1, utilization=70.0))), selected)
        single = json.loads((tmp_path / "x.json").read_text())  # valid JSON after every append
    files.close()
    assert [entry["utilization"] for entry in single] == [70, 70, 95]
    keys = {"timestamp", "gpu_index", "gpu_name", "utilization", "memory_used", "memory_total", "power"}
    assert keys <= set(single[0])
    samples = load(tmp_path / "x_multi_gpu.json")
    assert samples.wall.tolist() == [T0, T0 + 1, T0 + 2]
    assert samples["utilization"][0].tolist() == [95, 70]


def test_our_own_statistics_file_is_continued_and_any_other_file_is_refused(tmp_path):
    for _ in range(2):
        files = StatsFiles(tmp_path / "x.json")
        files.append(Snapshot(time=T0, samples=(gpu_sample(0),)), 0)
        files.close()
    assert len(json.loads((tmp_path / "x.json").read_text())) == 2
    for name, text in (("notes.json", "my notes"), ("other.json", '[\n  {\n    "a": 1\n  }\n]')):
        (tmp_path / name).write_text(text)
        with pytest.raises(RecordError, match="is not a statistics file"):
            StatsFiles(tmp_path / name)
        assert (tmp_path / name).read_text() == text


def test_a_full_disk_is_reported_and_does_not_end_the_screen(tmp_path, monkeypatch):
    files = StatsFiles(tmp_path / "x.json")

    def raise_disk_full(_self, _value):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kmatrix.gpu.formats.json_array.JsonArrayFile.append", raise_disk_full)
        files.append(Snapshot(time=T0, samples=(gpu_sample(0),)), 0)
        assert "No space left" in files.problem
    files.append(Snapshot(time=T0, samples=(gpu_sample(0),)), 0)
    assert files.problem == ""


ONE_GPU = [{"gpu_index": 0, "gpu_name": "A", "uuid": "GPU-a"}]


def test_a_replay_follows_the_recording_when_the_clock_was_set_back(tmp_path):
    file = SampleFile(
        tmp_path / "gpu_samples.bin", {"gpus": ONE_GPU, "device_type": "nvidia", "simulated": False, "hz": 1.0}
    )
    for second in range(120):
        wall = T0 + second - (86_400 if second >= 60 else 0)
        file.append(wall, 5.0 + second, [second / 2] * 7)
    file.close()
    for second, index, kind in ((0, None, "started"), (30, 0, "throttle"), (90, 0, "lost")):
        wall = T0 + second - (86_400 if second >= 60 else 0)
        event = {"time": wall, "monotonic": 5.0 + second, "event": kind, "gpu_index": index, "text": "power cap"}
        append_jsonl(RunDir(tmp_path).gpu_events, event)
    for second, busy, throttle in ((10, 10, {0: ()}), (70, 70, {0: ("power cap",)}), (100, 100, {})):
        feed = ReplayFeed(tmp_path, at=second)
        found = feed.poll(History(feed.bucket_s))
        assert (found.snapshot.samples[0].utilization, dict(found.throttle)) == (busy / 2, throttle)
    assert ReplayFeed(tmp_path, from_end=True).length == 119
    attached = AttachedFeed(tmp_path)
    assert attached.poll(History(1.0)).snapshot.samples[0].utilization == 59.5


def test_make_gputop_replays_a_recording(tmp_path):
    recorder = Recorder(tmp_path / "run", hz=1.0)
    recorder.write(30)
    result = run_command("gputop", f"REPLAY={recorder.run.path}")
    assert result.status == 0, result.err
    assert "util 0%" in result.out
    with pytest.raises(SystemExit, match="2"):
        run_command("gputop", f"REPLAY={recorder.run.path}", f"RUN={recorder.run.path}")
