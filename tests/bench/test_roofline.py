"""The arithmetic of the prediction on GPUs, and that the tables of docs/performance.md are those that it prints."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from factories import ROOT
from pages import page_text

sys.path.insert(0, str(ROOT / "bench"))
import roofline
from roofline import AS_IT_IS, BANDS, DEVICES, Means, Work, band, named, part_of, predict, product_seconds, stored

H100, MID = DEVICES["H100"], BANDS["H100"][1]
SMALL = named("124m")
NOTHING = Work(products=(), attention=(), kernels=())


def parts(work, means=AS_IT_IS, rates=MID):
    return predict(work, SMALL, 32, H100, rates, means).parts


def test_a_large_product_reaches_the_rate_of_the_main_loop():
    size = 16384
    ideal = 2.0 * size**3 / (H100.peak * MID.products)
    assert ideal < product_seconds(size, size, size, H100, MID) < 1.05 * ideal


def test_a_product_is_never_faster_than_its_bytes():
    rows = 1 << 22
    least = 2.0 * (2 * rows * 8 + 64) / (H100.bandwidth * MID.bandwidth)
    assert product_seconds(rows, 8, 8, H100, MID) >= least


def test_a_tile_more_than_the_multiprocessors_costs_a_second_wave():
    one, two = (product_seconds(128 * tiles, 256, 768, H100, MID) for tiles in (H100.units, H100.units + 1))
    assert one * 1.5 < two <= one * 2


def test_a_long_inner_dimension_is_split_over_idle_multiprocessors():
    """As in the gradient of a weight: few tiles, and as many columns as the batch has tokens."""
    rows, columns, inner = 768, 768, 32768
    tiles = (rows // 128) * (columns // 256)
    alone = 2.0 * 128 * 256 * (inner + roofline.FILL) * H100.units / (H100.peak * MID.products)
    assert tiles < H100.units
    assert product_seconds(rows, columns, inner, H100, MID) < 0.5 * alone


def test_bytes_take_the_time_of_the_reached_bandwidth():
    work = replace(NOTHING, kernels=(("triton_per_fused_add_0", 1e9, 3),))
    assert parts(work)["elementwise"] == pytest.approx(3e9 / (3.35e12 * 0.87))


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_15", "loss"),
        ("triton_poi_fused__to_copy_6", "casts"),
        ("triton_poi_fused__to_copy_view_2", "elementwise"),
        ("triton_poi_fused_gelu_view_8", "elementwise"),
    ],
)
def test_a_kernel_belongs_to_a_part_by_its_operators(kernel, part):
    assert part_of(kernel) == part


def test_causal_attention_counts_half_of_the_square_and_backward_two_and_a_half_times():
    shape = (32, 12, 1024, 64, 1)
    forward = parts(replace(NOTHING, attention=(("forward", *shape),)))["attention"]
    backward = parts(replace(NOTHING, attention=(("backward", *shape),)))["attention"]
    flops = 32 * 12 * 1024 * 1024 * 64 * 4 / 2
    assert forward == pytest.approx(flops / MID.forward)
    assert backward == pytest.approx(2.5 * flops / MID.backward)


def test_accumulation_shares_the_optimizer_among_micro_batches():
    one, four = (parts(NOTHING, Means(accumulation=count))["optimizer"] for count in (1, 4))
    assert four == pytest.approx(one / 4)
    assert one == pytest.approx(40 * (SMALL.params + 47 * 768) / (3.35e12 * 0.87))


def test_more_bytes_in_a_graph_make_the_prediction_slower():
    work = stored("124m-32")
    more = replace(work, kernels=(*work.kernels, ("triton_poi_fused_add_99", 1e9, 1)))
    for before, after in zip(band(work, SMALL, 32, "H100"), band(more, SMALL, 32, "H100"), strict=True):
        assert after.mfu < before.mfu


def test_low_is_slower_than_mid_and_mid_than_high():
    for gpu in DEVICES:
        low, mid, high = (prediction.mfu for prediction in band(stored("124m-32"), SMALL, 32, gpu))
        assert low < mid < high


def test_the_mfu_is_that_of_the_speed():
    (_, mid, _) = band(stored("124m-32"), SMALL, 32, "H100")
    assert mid.mfu == pytest.approx(mid.tokens_per_second * SMALL.flops_per_token / H100.peak)
    assert mid.seconds == pytest.approx(32 * 1024 / mid.tokens_per_second)


def test_a_size_that_was_not_traced_is_predicted_as_its_graph_would_be():
    """The products are the same; the bytes come from two graphs, of which this is one."""
    graph, computed = stored("124m-32"), roofline.work_at(SMALL, 32)
    assert computed.flops == pytest.approx(graph.flops)
    assert computed.bytes_moved == pytest.approx(graph.bytes_moved, rel=0.01)
    ours, theirs = (band(work, SMALL, 32, "H100")[1].mfu for work in (computed, graph))
    assert ours == pytest.approx(theirs, rel=0.01)


def test_a_stream_in_16_bits_moves_fewer_bytes():
    assert stored("124m-32-bf16-stream").bytes_moved < 0.8 * stored("124m-32").bytes_moved


def test_fp8_moves_the_bytes_of_its_traced_graph():
    """The factors are quantized by kernels of their own, which a faster product alone would not show."""
    traced, plain = stored("124m-32-fp8"), stored("124m-32")
    size, launches = roofline.quantization(SMALL, 32)
    assert plain.bytes_moved + size == pytest.approx(traced.bytes_moved)
    assert plain.launches + launches == pytest.approx(traced.launches)
    found = parts(plain, Means(fp8=True))
    assert found["quantization"] == pytest.approx(size / (H100.bandwidth * MID.bandwidth))
    assert found["blocks' products"] == pytest.approx(parts(plain)["blocks' products"] / roofline.FP8_SPEED, rel=0.02)


def test_a_layer_of_half_the_tokens_quantizes_its_weights_all_the_same():
    added = [roofline.quantization(SMALL, batch)[0] for batch in (32, 16)]
    assert 0.5 < added[1] / added[0] < 0.7


def test_the_prediction_of_the_page_is_that_of_the_stored_graphs():
    """Predictions that a change of the model or of the rates makes wrong are not left on the page."""
    text = page_text(ROOT / "docs" / "performance.md")
    for row in (*roofline.sizes(), *roofline.ladder()):
        assert f"| {' | '.join(row)} |" in text


def test_the_program_prints_both_tables(capsys):
    roofline.main([])
    out = capsys.readouterr().out
    assert out.startswith("Predictions, not measurements")
    assert all(f"| {titles[0]} |" in out for titles in (roofline.SIZE_TITLES, roofline.LADDER_TITLES))
