"""TensorBoard logs of a run have each value once, at its step and time, read by TensorBoard's own reader."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, urlsplit

import pytest

from kmatrix.records.runs import Status
from kmatrix.track.page import Page
from kmatrix.track.tensorboard import TensorBoardMirror, opening
from kmatrix.track.tracker import DeviceValues, MetricPoint, TrackerAlert, identity
from track_factory import START_TIME, make_run_dir

pytest.importorskip("tensorboard", reason="make setup-trackers installs it")


@pytest.fixture
def identity_of(tmp_path):
    return identity(make_run_dir(tmp_path))


@pytest.fixture
def folder(identity_of):
    return identity_of.dir.path.parent / "tb" / identity_of.name


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False)
    reader.Reload()
    return reader


def points(*steps):
    return [
        MetricPoint(step=step, time=START_TIME + step, values={"train/loss": 6.0 - step, "tokens": 100 * step})
        for step in steps
    ]


def devices(second, power):
    return DeviceValues(time=START_TIME + second, values={"gpu/0/power": power, "gpu_total_memory": 900.0})


def texts(folder, tag):
    return [event.tensor_proto.string_val[0].decode() for event in read(folder).Tensors(tag)]


def test_points_are_written_at_their_steps_and_times_during_the_run(identity_of, folder):
    tracker = TensorBoardMirror()
    assert tracker.open(identity_of).steps == {}
    tracker.points(points(0, 10))
    found = read(folder).Scalars("train/loss")
    assert [(event.step, event.wall_time, event.value) for event in found] == [
        (0, START_TIME, 6.0),
        (10, START_TIME + 10, -4.0),
    ]


def test_device_values_are_written_as_means_at_the_next_step(identity_of, folder):
    tracker = TensorBoardMirror()
    tracker.open(identity_of)
    tracker.devices([devices(1, 100.0), devices(2, 200.0), devices(11, 300.0), devices(30, 7.0)])
    tracker.points(points(5, 20))
    tracker.close(Status.FINISHED)
    found = read(folder).Scalars("gpu/0/power")
    assert [(event.step, event.value) for event in found] == [(5, 150.0), (20, 300.0)]


def test_a_reopened_run_reports_its_stored_steps_and_appends(identity_of, folder):
    first = TensorBoardMirror()
    first.open(identity_of)
    first.devices([devices(1, 100.0)])
    first.points(points(0, 10))
    first.alert(TrackerAlert(time=START_TIME, title="spike", text="loss"))
    next(folder.glob("*tfevents*")).open("ab").write(b"\x18\0\0\0torn")  # as a kill may leave it
    second = TensorBoardMirror()
    stored = second.open(identity_of)
    assert stored.steps == {0: {"train/loss": 6.0, "tokens": 0.0}, 10: {"train/loss": -4.0, "tokens": 1000.0}}
    assert (stored.devices_time, stored.alerts, stored.link) == (START_TIME + 10, 1, str(folder))
    second.points(points(20))
    second.close(Status.FINISHED)
    assert [event.step for event in read(folder).Scalars("tokens")] == [0, 10, 20]


def test_configuration_alerts_and_status_are_texts_written_once(identity_of, folder):
    tracker = TensorBoardMirror()
    tracker.open(identity_of)
    tracker.alert(TrackerAlert(time=START_TIME, title="spike", text="the loss rose"))
    tracker.close(Status.STOPPED)
    for _ in range(2):
        tracker = TensorBoardMirror()
        tracker.open(identity_of)
        tracker.close(Status.FINISHED)
    (config,) = texts(folder, "config")
    assert "| GPT2_MAX_ITERS | 500 |" in config
    assert f"| group | {identity_of.group} |" in config
    assert texts(folder, "alerts") == ["**spike** (warn): the loss rose"]
    assert texts(folder, "status") == ["stopped", "finished"]


def test_a_configuration_with_other_nodes_is_written_again_and_only_then(identity_of, folder):
    for hosts in ("n1, n2", "n1, n2", "n3, n2"):
        tracker = TensorBoardMirror()
        tracker.open(identity_of)
        tracker.configure({"nodes": "2", "hosts": hosts})
        tracker.close(Status.STOPPED)
    found = texts(folder, "config")
    assert [text.partition("| hosts | ")[2].partition(" |")[0] for text in found] == ["", "n1, n2", "n3, n2"]
    assert all("| GPT2_MAX_ITERS | 500 |" in text for text in found)


def test_opening_a_fully_sent_run_writes_nothing(identity_of, folder):
    tracker = TensorBoardMirror()
    tracker.open(identity_of)
    tracker.points(points(0))
    tracker.close(Status.FINISHED)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    reopened = TensorBoardMirror()
    reopened.open(identity_of)
    reopened.close(Status.FINISHED)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_first_custom_chart_has_both_losses(identity_of, folder):
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    TensorBoardMirror().open(identity_of)
    [event] = read(folder).Tensors(metadata.CONFIG_SUMMARY_TAG)
    first = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category[0].chart[0]
    assert list(first.multiline.tag) == ["train/loss$", "val/loss$"]


def session(folder):
    """Return what the tab HParams knows of a run: its values, and its final status or None."""
    from tensorboard.plugins.hparams import metadata

    found = read(folder).SummaryMetadata
    start = metadata.parse_session_start_info_plugin_data(
        found(metadata.SESSION_START_INFO_TAG).plugin_data.content
    ).hparams
    values = {name: value.string_value or value.number_value for name, value in start.items()}
    try:
        end = metadata.parse_session_end_info_plugin_data(found(metadata.SESSION_END_INFO_TAG).plugin_data.content)
    except KeyError:
        return values, None
    return values, end.status


def test_hparams_are_the_axes_and_the_main_symbols(identity_of, folder):
    TensorBoardMirror().open(identity_of)
    assert session(folder) == ({"optimizer": "adamw", "seed": 1.0, "max_iters": 500.0}, None)


def test_only_a_finished_run_has_a_final_status_in_hparams(identity_of, folder):
    from tensorboard.plugins.hparams import api_pb2

    for status, expected in ((Status.STOPPED, None), (Status.FINISHED, api_pb2.STATUS_SUCCESS)):
        tracker = TensorBoardMirror()
        tracker.open(identity_of)
        tracker.points(points(0))
        tracker.close(status)
        assert session(folder)[1] == expected


def test_memory_is_not_written_under_two_tags(identity_of, folder):
    tracker = TensorBoardMirror()
    tracker.open(identity_of)
    both = {"gpu/0/memory_used": 7.0, "gpu_0_memory": 7.0, "gpu_total_memory": 7.0}
    tracker.devices([DeviceValues(time=START_TIME, values=both)])
    tracker.points(points(0))
    tags = [tag for tag in read(folder).Tags()["scalars"] if tag.startswith("gpu")]
    assert sorted(tags) == ["gpu/0/memory_used", "gpu_total_memory"]


def test_the_address_pins_the_losses():
    address = opening(Page(url="http://127.0.0.1:6006/", port=6006, pid=1))
    query = parse_qs(urlsplit(address).query)
    assert [card["tag"] for card in json.loads(query["pinnedCards"][0])] == ["train/loss", "val/loss"]
    assert query["smoothing"] == ["0"]
