"""`make bench PART=`: its measurements on the CPU, its file, its arithmetic, and its tables in docs/gpu-day.md."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from factories import ROOT
from pages import page_text

sys.path.insert(0, str(ROOT / "bench"))
import gpu
import gpu_kernels
import gpu_parts
import gpu_profile
import gpu_report
import gpu_results
import gpu_runs
from gpu_results import FailedError, Item, OutOfTimeError, Results, Scale
from gpu_runs import Setting

from kmatrix.records.lock import try_lock

pytestmark = pytest.mark.nightly

CPU = Scale(device="cpu", tiny=True, name="CPU", gpus=0)
H100 = Scale(device="cuda", tiny=False, name="NVIDIA H100 80GB HBM3", gpus=1)


@pytest.fixture
def results(tmp_path):
    return Results(path=tmp_path / "results.jsonl", scale=CPU, about=gpu_results.machine(CPU))


def show(name, values):
    return f"{name} {values}"


def write(results, part, **lines):
    for name, values in lines.items():
        results.run(part, [Item(name=name.replace("__", ", ").replace("_", " "), measure=lambda v=values: v)], show)


def fields(symbols, scale=H100, **options):
    return gpu_runs.config_of(Setting(symbols=symbols, **options), scale, {"data_path": "data", "vocab_size": 50257})


# -- the file


def test_a_measurement_is_in_the_file_as_soon_as_it_is_made_and_is_not_repeated(results, capsys):
    made = []
    items = [Item(name=name, measure=lambda n=name: made.append(n) or {"seconds": 1.0}) for name in ("a", "b")]
    assert results.run("first", items[:1], show) == 0
    assert results.run("first", items, show) == 0
    assert made == ["a", "b"]
    assert "earlier" in capsys.readouterr().out


def test_a_measurement_that_is_not_possible_has_its_reason_and_the_next_one_is_made(results):
    def fail():
        raise FailedError("no kernel")

    items = [Item(name="a", measure=fail), Item(name="b", measure=lambda: {"seconds": 1.0})]
    assert results.run("first", items, show) == 0
    lines = results.lines("first")
    assert lines["a"]["failed"] == "no kernel"
    assert lines["b"]["seconds"] == 1.0


def test_at_the_end_of_a_call_the_other_measurements_are_left(results):
    results.limit_s, results.end = 480.0, time.monotonic() + 5
    items = [
        Item(name="short", measure=dict),
        Item(name="long", measure=dict, least_s=60),
        Item(name="c", measure=dict),
    ]
    assert results.run("speed", items, show) == 2
    assert [*results.lines("speed")] == ["short"]


def test_a_measurement_that_had_a_whole_call_and_did_not_end_is_not_possible(results):
    def endless():
        raise OutOfTimeError

    results.limit_s = 480.0
    assert results.run("speed", [Item(name="interrupted", measure=endless)], show) == 1
    results.limit_s = 0.0
    assert results.run("speed", [Item(name="endless", measure=endless)], show) == 0
    assert "did not end within" in results.lines("speed")["endless"]["failed"]


def test_measurements_of_another_device_do_not_count(results):
    write(results, "first", copy={"gbps": 3000.0})
    other = Results(path=results.path, scale=H100)
    assert other.lines("first") == {}


def test_every_line_states_the_machine(results):
    write(results, "first", copy={"gbps": 3000.0})
    line = results.lines("first")["copy"]
    assert {"device", "driver_version", "clocks.sm", "power.limit", "torch", "cudnn"} <= line["machine"].keys()
    text = "\n".join(gpu_results.headline(line["machine"]))
    assert f"torch {torch.__version__}" in text
    assert all(word in text for word in ("driver", "clock", "power", "cuDNN"))


# -- first


def test_the_first_part_runs(results, capsys):
    assert results.run("first", gpu_kernels.first(CPU), gpu_kernels.show) == 0
    lines = results.lines("first")
    products = [name for name in lines if name.endswith(gpu_kernels.WAYS)]
    assert len(products) == 15
    assert sum(name.endswith("FP8") for name in lines) == 12
    assert "forward_tflops" in lines["attention auto"]
    assert "failed" in lines["attention cudnn"]
    assert "TFLOP/s" in capsys.readouterr().out
    assert "no figure here is a measurement of a GPU" in "\n".join(gpu_report.report(results))


def test_the_products_of_a_micro_batch_have_the_flops_of_its_layers():
    shape = gpu_kernels.TINY
    products = gpu_parts.products_of(shape, 128)
    weights = 12 * shape.n_layer * shape.n_embd**2 + 512 * shape.n_embd  # the vocabulary of 500 is filled up
    assert sum(2 * m * n * k * count for m, n, k, count in products) == 6 * weights * 128
    assert gpu_kernels.chain(products, CPU)["seconds"] > 0


# -- runs


def test_every_run_is_allowed_by_kconfig_on_a_gpu_and_in_the_check_on_the_cpu():
    for case in (*gpu_parts.speed_cases(), *gpu_parts.ladder_cases()):
        config = fields(case.setting.symbols, steps=case.setting.steps)
        assert (config.device, config.dtype, config.compile) == ("cuda", "bf16", True), case.name
        assert config.max_iters == case.setting.steps > gpu_runs.SETTLE, case.name
        tiny = fields(case.setting.symbols, CPU)
        assert (tiny.device, tiny.n_embd, tiny.compile) == ("cpu", 64, False), case.name


def test_a_micro_batch_that_does_not_fit_is_halved(results, monkeypatch, capsys):
    def train(setting, _):
        if int(setting.symbols["BATCH_SIZE"]) > 8:
            raise FailedError("out of memory")
        return {"micro_batch": int(setting.symbols["BATCH_SIZE"])}

    monkeypatch.setattr(gpu_runs, "train", train)
    setting = Setting(symbols={"BATCH_SIZE": "32"})
    assert gpu_runs.fitting(setting, results) == {"micro_batch": 8}
    assert "micro-batch 16 does not fit: trying 8" in capsys.readouterr().out


def test_a_run_that_fails_has_its_reason():
    reasons = {
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate": "out of memory",
        "error: kernel flash3 cannot be used\n  hint: x": "exit status 1: error: kernel flash3",
        "Traceback\nValueError: bad\nx": "exit status 1: ValueError: bad",
    }
    for output, reason in reasons.items():
        with pytest.raises(FailedError, match=reason):
            gpu_runs._finished(1, output)


def test_only_recompilations_after_step_2_count():
    again = "[0/1] [__recompiles] Recompiling function inner in x.py:1\n"
    log = [f"Iter {step} | epoch 0 | loss 1\n" for step in range(4)]
    assert gpu_runs.late_recompilations("".join([again, log[0], again, *log[1:]])) == 0
    assert gpu_runs.late_recompilations("".join([*log[:2], again, *log[2:]])) == 1
    assert gpu_runs.late_recompilations("no step") is None


def test_clocks_are_those_of_the_first_gpu_that_pytorch_sees(monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command)
        return SimpleNamespace(stdout="580.1, 1980 MHz, 1980 MHz, 2619 MHz, 120.00 W, 700.00 W, 40\n")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="ab-cd"))
    monkeypatch.setattr(gpu_results.subprocess, "run", run)
    assert gpu_results.sensors()["power.limit"] == "700.00 W"
    assert "--id=GPU-ab-cd" in asked[0]


# -- profile


def trace(*events):
    return [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in events]


def test_the_shares_of_a_profile_are_those_of_its_kernels_and_gaps():
    events = trace(
        ("kernel", "nvjet_hsh_128x256", 0, 50),
        ("kernel", "triton_per_fused_native_layer_norm_0", 50, 20),
        ("kernel", "triton_red_fused__log_softmax_1", 70, 10),
        ("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 90, 10),
        ("cuda_runtime", "cudaStreamSynchronize", 0, 5),
        ("cpu_op", "aten::mm", 0, 500),
    )
    found = gpu_profile.shares(events, 1)
    assert found["shares"] == pytest.approx(
        {"products": 0.5, "elementwise": 0.2, "loss": 0.1, "attention": 0.1, "gaps": 0.1}
    )
    assert (found["kernels"], found["waits"]) == (4, 1)


def test_a_kernel_has_its_kind():
    kinds = {
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "triton_poi_fused_gelu_view_8": "elementwise",
    }
    assert {name: gpu_profile.kind_of(name) for name in kinds} == kinds


def test_an_operator_counts_without_those_in_it():
    events = gpu_profile._events(trace(("cpu_op", "aten::linear", 0, 100), ("cpu_op", "aten::mm", 10, 80)), ("cpu_op",))
    assert [event.duration for event in gpu_profile.own(events)] == [20, 80]
    assert gpu_profile.busy(events) == 100


# -- report


def test_the_page_has_the_tables_of_the_stored_measurements():
    stored = Results(path=gpu_report.STORED, scale=gpu_report.elsewhere(gpu_report.STORED))
    assert "\n".join(gpu_report.report(stored)) in page_text(ROOT / "docs" / "gpu-day.md")


def test_the_ladder_has_the_gain_of_each_change(results):
    write(
        results, "ladder", **{"124m_as_it_is": {"tokens_per_second": 100.0}, "124m_FP8": {"tokens_per_second": 110.0}}
    )
    assert [row[:3] for row in gpu_report.ladder(results)] == [
        ["124m as it is", "100", "+0.0 %"],
        ["124m FP8", "110", "+10.0 %"],
    ]


def test_the_shares_of_the_input_pipeline_and_of_evaluations_are_those_of_a_step(results):
    phases = {"evaluation": [50.0, 1.0, 1.0], "checkpoint": [0.5]}
    write(
        results,
        "speed",
        **{
            "input_pipeline__124m": {"seconds": 0.0004},
            "evaluation_and_checkpoints__124m": {"step_ms": 80.0, "phases_s": phases},
        },
    )
    lines = results.lines("speed")
    assert gpu_report.input_share(lines) == pytest.approx(0.005)
    assert gpu_report.between_share(lines) == pytest.approx(1.5 / 21.5)


def test_the_best_setting_is_compared_with_the_peer_of_the_same_round(results):
    theirs, plain, graphed = gpu_parts.peer_names("124m", 1)
    for name, speed in ((theirs, 100.0), (plain, 120.0), (graphed, 130.0)):
        results.run("peer", [Item(name=name, measure=lambda s=speed: {"tokens_per_second": s})], show)
    assert gpu_report._ratios(results.lines("peer"), "124m") == [1.3]
    assert gpu_report.peer(results)[0] == ["124m", "1", "100", "120 (1.20x)", "130 (1.30x)"]


# -- the program


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_every_part_but_the_report_is_refused_with_one_line(capsys):
    for part in gpu.PARTS:
        if part != "report":
            assert gpu.main(["--part", part]) == 2
    assert capsys.readouterr().err.count("error: PyTorch finds no GPU") == len(gpu.PARTS) - 1


def test_a_wrong_argument_is_refused(capsys):
    errors = {
        ("--part", "second"): "unknown part second",
        ("--on", "tpu"): "unknown device tpu",
        ("--on", "cpu", "--part", "peer"): "pass PEER=<checkout of karpathy/nanoGPT>",
    }
    for arguments, error in errors.items():
        assert gpu.main([*arguments]) == 2
        assert error in capsys.readouterr().err


def test_an_interrupted_call_says_that_the_same_command_continues(tmp_path, monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    items = [Item(name="one", measure=lambda: {"seconds": 1.0}), Item(name="two", measure=interrupted)]
    monkeypatch.setattr(gpu, "items_of", lambda *_: items)
    assert gpu.main(["--part", "speed", "--on", "cpu", "--folder", str(tmp_path)]) == 130
    assert "interrupted; the same command continues" in capsys.readouterr().err
    assert [json.loads(line)["name"] for line in (tmp_path / "results.jsonl").read_text().splitlines()] == ["one"]


def test_a_full_disk_is_one_error_and_the_same_command_continues(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gpu, "items_of", lambda *_: [Item(name="one", measure=lambda: {"seconds": 1.0})])
    command = ["--part", "speed", "--on", "cpu", "--folder", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(gpu_results, "append_jsonl", full)
        assert gpu.main(command) == 1
    error = f"error: cannot write {tmp_path / 'results.jsonl'}: No space left on device\n"
    assert capsys.readouterr().err.startswith(error)
    monkeypatch.setattr(gpu, "show_of", lambda _: show)
    assert gpu.main(command) == 0


def test_two_calls_do_not_measure_at_the_same_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "items_of", lambda *_: [])
    command = ["--part", "speed", "--on", "cpu", "--folder", str(tmp_path)]
    assert gpu.main(command) == 0
    lock = try_lock(tmp_path / ".lock")
    os.set_inheritable(lock, True)
    with subprocess.Popen(["sleep", "600"], close_fds=False) as trainer:  # it outlives the call that started it
        os.close(lock)
        assert gpu.main(command) == 2
        trainer.kill()
    assert f"another call is measuring into {tmp_path}" in capsys.readouterr().err
    assert gpu.main(command) == 0


def test_a_report_needs_no_gpu(tmp_path, capsys):
    assert gpu.main(["--part", "report", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("Nothing was measured")


NANOGPT_S = 0.02
# In the place of nanoGPT's train.py: it reads the data of its place, and logs a step in NANOGPT_S.
NANOGPT = f"""
import sys, time
from pathlib import Path

place = next(one.partition("=")[2] for one in sys.argv if one.startswith("--dataset="))
assert all((Path("data") / place / f"{{kind}}.bin").stat().st_size for kind in ("train", "val"))
for step in range(7):
    time.sleep({NANOGPT_S})
    print(f"iter {{step}}: loss 10.8, time 20.00ms, mfu -100.00%")
"""
# Each kind of measurement once: every setting of a part is resolved above, and a run takes ten seconds.
OF_EACH_KIND = {
    "speed": (
        *("124m", "input pipeline, 124m", "evaluation and checkpoints, 124m", "nanochat d12"),
        *("products of 124m", "products of nanochat d12"),
    ),
    "ladder": ("124m stream, graphs, x4, FP8",),
    "peer": ("124m round 1 nanoGPT", "124m round 1 kmatrix"),
    "profile": ("124m as it is",),
    "ranks": ("adamw ZERO_STAGE=1, 2 ranks",),
}


@pytest.mark.parametrize("part", OF_EACH_KIND)
def test_each_kind_of_measurement_of_a_part_that_trains_runs_on_the_cpu(part, tmp_path, monkeypatch, capsys):
    chosen, items_of = OF_EACH_KIND[part], gpu.items_of
    monkeypatch.setattr(gpu, "items_of", lambda *args: (item for item in items_of(*args) if item.name in chosen))
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT" / "train.py").write_text(NANOGPT)
    peer = ["--peer", str(tmp_path / "nanoGPT")] if part == "peer" else []
    assert gpu.main(["--part", part, "--on", "cpu", "--folder", str(tmp_path), *peer]) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == list(chosen)
    assert not [line["failed"] for line in lines if "failed" in line]
    assert part != "peer" or lines[0]["step_ms"] >= 1e3 * NANOGPT_S
    assert capsys.readouterr().out.rstrip().endswith("complete")
