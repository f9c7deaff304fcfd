"""Parameters, FLOPs and peaks, compared with published figures and calculations by hand."""

from __future__ import annotations

import pytest

from kmatrix.shapes import BYTE_VOCAB, DEVICES, GPT2_VOCAB, NAMED, ModelShape, by_depth, mfu, padded, peak_tflops


def shape(name: str = "124m", **changes) -> ModelShape:
    layers, heads, width = NAMED[name]
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "block_size": 1024, "vocab_size": GPT2_VOCAB}
    return ModelShape(**{**sizes, **changes})


@pytest.mark.parametrize(
    "name, params",
    [("124m", 124_439_808), ("350m", 354_823_168), ("774m", 774_030_080), ("1558m", 1_557_611_200)],
)
def test_the_four_sizes_have_the_parameters_of_the_published_models(name, params):
    assert shape(name).params == params


def test_untied_weights_add_a_vocabulary_times_the_width():
    assert shape(weight_tying=False).params - shape().params == GPT2_VOCAB * 768


def test_without_biases_only_matrices_and_gains_have_parameters():
    small = shape("tiny", block_size=128, vocab_size=BYTE_VOCAB, bias=False)
    assert small.params == (257 + 128) * 128 + 4 * (12 * 128 * 128 + 2 * 128) + 128


def test_flops_per_token_are_six_per_parameter_plus_attention():
    """6 N + 12 L T d, N without position embeddings."""
    n = 124_439_808 - 1024 * 768
    assert shape().flops_per_token == 6 * n + 12 * 12 * 1024 * 768


def test_depth_12_is_the_shape_of_the_small_model():
    assert by_depth(12, 64, 64) == NAMED["124m"]


def test_the_width_is_rounded_up_to_complete_heads():
    assert by_depth(5, 50, 64) == (5, 4, 256)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="5 heads"):
        shape(n_head=5)


@pytest.mark.parametrize(("size", "multiple", "result"), [(50257, 64, 50304), (257, 1, 257), (256, 64, 256)])
def test_a_vocabulary_is_padded_up_to_a_multiple(size, multiple, result):
    assert padded(size, multiple) == result


@pytest.mark.parametrize(
    "device, dtype, peak",
    [
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ],
)
def test_a_known_device_has_its_dense_peak(device, dtype, peak):
    assert peak_tflops(device, dtype) == peak


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB300", 2500),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),  # lower clocks, not known here
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI300A", 980.6),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI350X", 2306.9),
        ("AMD Instinct MI355X", 2516.6),
    ],
)
def test_names_that_drivers_report_have_the_dense_bfloat16_peak_of_their_data_sheet(device, peak):
    assert peak_tflops(device, "bf16") == peak


def test_amds_gpus_have_one_peak_in_32_bits_because_pytorch_does_not_use_their_tf32():
    assert peak_tflops("AMD Instinct MI300X", "fp32") == 163.4


@pytest.mark.parametrize("device", ["NVIDIA RTX A1000", "AMD EPYC", "NVIDIA A10X", "Tesla T4"])
def test_an_unknown_device_has_no_peak_and_no_mfu(device):
    assert peak_tflops(device, "bf16") is None
    assert mfu(1e5, 1e9, peak_tflops(device, "bf16"), 4) is None


def test_mfu_is_the_fraction_of_the_peak_of_all_devices():
    """The published figure of llm.c: 124M, 8 A100, 300 ms for 524,288 tokens is about 60 %."""
    assert mfu(524_288 / 0.3, shape().flops_per_token, 312, 8) == pytest.approx(0.6, abs=0.02)


def test_no_gpu_name_hides_a_later_one():
    for device in DEVICES:
        assert peak_tflops(f"NVIDIA {device.name}", "bf16") == device.bf16, device.name
