"""Choose trackers in a fresh clone: TRACKER= through make, keys that stay secret, and alerts."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from refusing_server import server_refusing_keys
from slow_training import SlowTraining

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

CPU = "defconfig-gpt2-cpu-quick"
SHORT = ("OPTIMIZER=adamw", "NUM_GPUS=1", "MAX_ITERS=20", "EVAL_SAMPLES=12", "EVAL_INTERVAL=10", "REUSE=n")
SYMBOLS = ("TRACKER_WANDB", "TRACKER_TRACKIO", "TRACKER_TENSORBOARD")
W, T, B = SYMBOLS
PLANTED_KEYS = {
    "WANDB_API_KEY": "f00d" * 10,
    "HF_TOKEN": "hf_" + "Pl4nted" * 5,
    "TRACKIO_WRITE_TOKEN": "planted-write-token-4711",
    "MY_DATABASE_PASSWORD": "planted-password-4711",
}
PATIENT = "TRACKER_LIMIT=600"  # seconds: trackers that work are never late
MOST_READS = 25  # of a command line, in half a second or more
WITHOUT_KEYS = {"NETRC": "/nowhere", "WANDB_API_KEY": ""}


def trackers_in_config(clone) -> list[str]:
    """Return the trackers in .config."""
    lines = clone.config.read_text(encoding="utf-8").splitlines()
    return [name for name in SYMBOLS if f"CONFIG_{name}=y" in lines]


def matrices(results: Path) -> list[Path]:
    return sorted(results.glob("test_matrix_results_*"))


def run_json(matrix: Path) -> dict:
    (path,) = matrix.glob("*/run.json")
    return json.loads(path.read_text(encoding="utf-8"))


def arguments_of_processes(stop: threading.Event) -> Iterator[bytes]:
    """Yield the command line of every process, several times after its start, until stopped."""
    reads: Counter[Path] = Counter()
    while not stop.wait(0.02):
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            # It changes only when a process replaces itself by another program, soon after its start.
            reads[path] += 1
            if reads[path] <= MOST_READS:
                with contextlib.suppress(OSError):
                    yield path.read_bytes()


@contextlib.contextmanager
def watched_command_lines() -> Iterator[set[str]]:
    """Yield a set that collects the planted values seen in the command line of any process."""
    found: set[str] = set()
    stop = threading.Event()

    def collect():
        for command_line in arguments_of_processes(stop):
            found.update(value for value in PLANTED_KEYS.values() if value.encode() in command_line)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def files_with_keys(*folders: Path) -> list[str]:
    """Return every file that contains a planted value."""
    files = [path for folder in folders for path in (folder.rglob("*") if folder.is_dir() else [folder])]
    found = []
    for path in (path for path in files if path.is_file()):
        content = b""
        with contextlib.suppress(FileNotFoundError):  # of a service of W&B that still ends
            content = path.read_bytes()
        found += [f"{path}: {name}" for name, value in PLANTED_KEYS.items() if value.encode() in content]
    return found


@pytest.fixture
def rejecting_server():
    """A server that rejects every key and repeats it in its error, as a badly written one may. Yields its URL."""
    with server_refusing_keys("no such key: {key}") as url:
        yield url


@pytest.mark.parametrize(
    ("text", "symbols"),
    [
        ("wandb,trackio", [W, T]),
        ("wandb, trackio", [W, T]),
        ("both", [W, T]),
        ("all", [W, T, B]),
        ("tensorboard", [B]),
        ("none", []),
    ],
)
def test_a_defconfig_saves_every_form_of_tracker(clone, text, symbols):
    completed = clone.make(CPU, f"TRACKER={text}")

    assert completed.returncode == 0, completed.stderr
    assert trackers_in_config(clone) == symbols


def test_an_unknown_tracker_is_refused_everywhere_and_the_environment_selects_none(clone, tmp_path):
    assert clone.make(CPU, TRACKER="all").returncode == 0
    assert trackers_in_config(clone) == []

    for target in (CPU, "test-matrix-dry-run", "plan"):
        refused = clone.make(target, "TRACKER=wandbb")
        assert refused.returncode == 2
        assert "did you mean wandb?" in refused.stderr
    refused = clone.kmatrix("test-matrix", "TRACKER=wandbb", f"RESULTS_DIR={tmp_path}")
    assert refused.returncode == 2
    assert not matrices(tmp_path)


def test_the_command_line_overrides_the_trackers_of_the_configuration_without_changing_it(clone, tmp_path):
    assert clone.make(CPU, "TRACKER=both", "PROJECT=mine").returncode == 0
    before = clone.config.read_bytes()

    without = clone.make("test-matrix", *SHORT, "TRACKER=none", f"RESULTS_DIR={tmp_path}/a")
    with_tensorboard = clone.make("test-matrix", *SHORT, "TRACKER=tensorboard", f"RESULTS_DIR={tmp_path}/b")

    assert without.returncode == with_tensorboard.returncode == 0, without.stderr + with_tensorboard.stderr
    assert "trackers: " not in without.stdout
    assert "trackers: TensorBoard; project mine" in with_tensorboard.stdout
    (first,), (second,) = matrices(tmp_path / "a"), matrices(tmp_path / "b")
    assert run_json(first)["tracking"] == {}
    assert run_json(second)["tracking"]["trackers"] == ["tensorboard"]
    assert run_json(first)["run_id"] == run_json(second)["run_id"]
    assert not list(first.glob("*/track.json"))
    assert list((second / "tb").rglob("events.out.tfevents.*"))
    assert not (tmp_path / "b" / "trackio").exists()
    assert clone.config.read_bytes() == before


def test_both_trackers_have_a_self_test_that_takes_seconds(clone):
    for target, title in (
        ("wandb-test", r"W&B works \(offline: no API key\)"),
        ("trackio-test", "Trackio works"),
    ):
        completed = clone.make(target, **WITHOUT_KEYS)
        assert completed.returncode == 0, completed.stderr
        assert re.search(rf"^{title}: uploaded 20 steps in [\d.]+s and read them back$", completed.stdout, re.MULTILINE)


def test_a_planted_key_appears_in_no_file_log_or_command_line(clone, tmp_path):
    assert clone.make(CPU, "TRACKER=all", "WANDB_OFFLINE=y", **PLANTED_KEYS).returncode == 0

    with watched_command_lines() as seen:
        completed = clone.make("test-matrix", *SHORT, PATIENT, f"RESULTS_DIR={tmp_path}", **PLANTED_KEYS)

    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "trackers: W&B (offline: CONFIG_WANDB_OFFLINE=y), Trackio, TensorBoard" in completed.stdout
    (matrix,) = matrices(tmp_path)
    (track,) = matrix.glob("*/track.json")
    assert {tracker["state"] for tracker in json.loads(track.read_text())["trackers"].values()} == {"done"}
    assert files_with_keys(tmp_path, *clone.root.glob(".config*")) == []
    assert seen == set()
    assert not [value for value in PLANTED_KEYS.values() if value in completed.stdout + completed.stderr]


def test_a_key_that_a_server_echoes_in_its_error_is_redacted_from_the_logs(clone, tmp_path, rejecting_server):
    assert clone.make(CPU).returncode == 0
    results = tmp_path / "results"
    arguments = [*SHORT, "TRACKER=wandb", "TRACKER_LIMIT=5", f"RESULTS_DIR={results}"]
    slow = SlowTraining(tmp_path / "slow", "inf if steps > 5 else 0")
    variables = {**PLANTED_KEYS, **slow.environment, "WANDB_BASE_URL": rejecting_server}

    def reported() -> list[dict]:
        tracks = [json.loads(path.read_text()) for path in results.glob("*/*/track.json")]
        return [sent for track in tracks for sent in track["trackers"].values()]

    def has_failed() -> bool:
        return any(sent["error"] for sent in reported())

    # Before the end of the run, from which its limit counts.
    with watched_command_lines() as seen, slow.freed_when(has_failed, "the server has refused the key"):
        completed = clone.make("test-matrix", *arguments, **variables)

    assert completed.returncode == 0, completed.stdout + completed.stderr
    (sent,) = reported()
    assert sent["state"] in ("failed", "behind")
    assert sent["waiting"] > 0
    assert "<hidden>" in sent["error"]
    assert files_with_keys(tmp_path) == []
    assert seen == set()
    assert "make track-sync" in completed.stdout


def test_a_key_on_the_make_command_line_is_refused_before_any_file_is_written(clone, tmp_path):
    assert clone.make(CPU).returncode == 0

    for argument in (
        "WANDB_API_KEY=correct-horse",
        "HF_TOKEN=correct-horse",
        "PROJECT=" + "beef" * 10,  # not a planted key: another test may look at all command lines of the machine
    ):
        refused = clone.kmatrix("test-matrix", argument, f"RESULTS_DIR={tmp_path}")
        assert refused.returncode == 2
        assert argument.partition("=")[2] not in refused.stderr
        assert "environment" in refused.stderr or "export" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_a_nan_loss_is_an_alert_in_every_tracker(clone, tmp_path):
    assert clone.make(CPU, "PROJECT=alarm").returncode == 0
    broken = ("OPTIMIZER=sgd", "LR=1e9", "GRAD_CLIP=0", "NUM_GPUS=1", "MAX_ITERS=60", "EVAL_SAMPLES=12")

    completed = clone.make("train", *broken, "TRACKER=all", PATIENT, f"RESULTS_DIR={tmp_path}", **WITHOUT_KEYS)

    assert completed.returncode == 2
    (run,) = tmp_path.glob("test_matrix_results_*/*/run.json")
    found = {name: alerts(clone, run.parent) for name, alerts in READERS.items()}
    for name, texts in found.items():
        assert [text for text in texts if "nan" in text], f"{name}: {texts}"
        assert len(texts) == len(set(texts)), f"{name} was reported twice: {texts}"


def wandb_alerts(clone, run: Path) -> list[str]:
    (folder,) = (run / "wandb").glob("offline-run-*")
    completed = clone.run(clone.python, "-m", "wandb", "leet", "inspect", "--json", str(folder), **OFFLINE)
    records = [json.loads(line) for line in completed.stdout.splitlines()]
    return [
        f"{record['alert']['title']}: {record['alert']['text']}" for record in records if record.get("type") == "alert"
    ]


def trackio_alerts(clone, run: Path) -> list[str]:
    program = [clone.python, "-c", "from trackio.cli import main; main()"]
    variables = {"TRACKIO_DIR": str(run.parent.parent / "trackio"), "HF_HUB_OFFLINE": "1"}
    completed = clone.run(*program, "get", "alerts", "--project", "alarm", "--json", **variables)
    found = json.loads(completed.stdout)
    return [
        f"{record['title']}: {record['text']}" for record in (found["alerts"] if isinstance(found, dict) else found)
    ]


def tensorboard_alerts(clone, run: Path) -> list[str]:
    code = (
        "import json, sys; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as E;"
        "e = E(sys.argv[1]); e.Reload();"
        "tags = [t for t in e.Tags()['tensors'] if 'alert' in t];"
        "print(json.dumps([v.tensor_proto.string_val[0].decode() for t in tags for v in e.Tensors(t)]))"
    )
    completed = clone.run(clone.python, "-c", code, str(run.parent / "tb" / run.name))
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
READERS = {"wandb": wandb_alerts, "trackio": trackio_alerts, "tensorboard": tensorboard_alerts}
