"""Every kernel agrees with the reference, on whatever batch the strategies come up with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

from kvservice.core.errors import Unimplemented
from kvservice.core.session import MaskKind
from kvservice_workers.attention import matmul, native
from kvservice_workers.attention.batch import AttentionParams, Partial
from kvservice_workers.attention.dispatch import (
    CPU_KERNELS,
    Call,
    Kernel,
    Rows,
    attend,
    kernel_name,
    run,
)
from kvservice_workers.attention.merge import merge
from kvservice_workers.attention.reference import paged_attention
from kvservice_workers.attention.validate import validate_values
from tests.strategies import AttentionCase, RowPlan, Shape, attention_cases, make_case

ROUNDING = {
    torch.float64: 2e-6,  # results are float32
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
DTYPES = tuple(ROUNDING)

PAST_AND_NEW = [
    RowPlan(0, 50, 6, 44),  # a prompt behind a past
    RowPlan(0, 9, 9, 0),  # a prompt alone
    RowPlan(5, 38, 1, 37, frozenset({6, 7, 20})),  # decoding over padding in the middle
    RowPlan(3, 20, 4, 25),  # an extent that ends before the queries
    RowPlan(24, 40, 6, 20),  # and one that starts among them
]


def check(partial: Partial, case: AttentionCase) -> None:
    """Compare with the reference in float64."""
    expected = paged_attention(*case.arguments, dtype=torch.float64)
    tolerance = ROUNDING[case.shape.dtype]
    assert partial.out.dtype == partial.lse.dtype == torch.float32
    assert partial.out.is_contiguous()
    for actual, wanted in zip(partial, expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=tolerance, rtol=tolerance)


def with_instruction_set(name: str) -> Kernel:
    """Return the native kernel with the loops for one instruction set of this machine."""

    def run_native(call: Call, rows: Rows, result: Partial) -> None:
        arguments = (call.q, call.k_pages, call.v_pages, call.batch, call.params)
        native.attend(*arguments, rows, result, instruction_set=name)

    return replace(CPU_KERNELS[0], name=f"native-{name}", run=run_native)


KERNELS = (*CPU_KERNELS, *(with_instruction_set(name) for name in native.instruction_sets()[1:]))
"""The table's kernels, and the native one's loops for lesser machines than this."""


def serving(call: Call) -> list[Kernel]:
    return [kernel for kernel in KERNELS if kernel.serves(call)]


@given(attention_cases(max_stored=24, max_queries=3))
def test_every_serving_kernel_equals_the_reference(case: AttentionCase) -> None:
    """All masks and extras in float32; NaN in unowned slots and bad page ids are never met."""
    validate_values(case.batch, case.k_pages.shape[0])
    call = Call(*case.arguments)
    for kernel in serving(call):
        check(run(kernel, call), case)


@given(
    attention_cases(
        kinds=(MaskKind.CAUSAL, MaskKind.FULL),
        plain=True,
        dtypes=DTYPES,
        max_stored=40,
        max_queries=3,
    )
)
def test_every_dtype(case: AttentionCase) -> None:
    """Plain masks in all four dtypes stay within the dtype's rounding."""
    call = Call(*case.arguments)
    for kernel in serving(call):
        check(run(kernel, call), case)


@given(attention_cases(max_stored=24, max_queries=3))
def test_attend_equals_the_reference(case: AttentionCase) -> None:
    """Whatever kernel is chosen."""
    check(attend(*case.arguments), case)


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(scale=1.0),
        AttentionParams(scale=0.125, window=17),
        AttentionParams(scale=0.125, window=3),
        AttentionParams(scale=0.125, softcap=2.0),
        AttentionParams(scale=0.125, kind=MaskKind.FULL),
        AttentionParams(scale=0.125, kind=MaskKind.CHUNK, chunk=8),
        AttentionParams(scale=0.125, sinks=torch.tensor([0.0, 3.0, -3.0, -torch.inf])),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_past_and_new_tokens(params: AttentionParams, page_size: int) -> None:
    """The shapes of batches that serving is made of, with each feature alone."""
    case = make_case(PAST_AND_NEW, params, Shape(page_size=page_size, k_dim=64, v_dim=64))
    call = Call(*case.arguments)
    for kernel in serving(call):
        check(run(kernel, call), case)


@pytest.mark.parametrize("window", [47, 48, 49, 50])
def test_window_at_its_edge(window: int) -> None:
    """With 48 tokens, a window of 47 hides one from the last query, 48 and more hide nothing."""
    case = make_case([RowPlan(0, 48, 3, 45)], AttentionParams(scale=0.0, window=window))
    call = Call(*case.arguments)
    # At scale 0 every score is 0, so exp(lse) counts the positions seen.
    seen = [min(window, 46), min(window, 47), min(window, 48)]
    for kernel in serving(call):
        partial = run(kernel, call)
        check(partial, case)
        np.testing.assert_allclose(partial.lse.exp()[:, 0], seen, rtol=1e-5)


def test_extents_merge_to_the_whole() -> None:
    """Three extents cut in mid-page, each attended alone, merge to the attention over all."""
    case = make_case([RowPlan(0, 60, 3, 57)], AttentionParams(scale=0.3))
    calls = []
    for start, stop in ((0, 13), (13, 58), (58, 60)):
        batch = replace(
            case.batch, kv_starts=np.array([start]), kv_stops=np.array([stop], dtype=np.int64)
        )
        calls.append(Call(*case.with_batch(batch).arguments))
    for kernel in serving(calls[0]):
        parts = [run(kernel, call) for call in calls]
        merged = merge(parts)
        check(merged, case)
        unweighted = torch.stack([part.out for part in parts]).mean(0)
        assert (unweighted - merged.out).abs().max() > 1e-2, "weights would not be missed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_queries", [1, 40])
def test_error_in_half_precision_is_that_of_plain_attention(
    dtype: torch.dtype, num_queries: int
) -> None:
    """The error against float64 is at most twice that of the same attention without pages."""
    shape = Shape(num_kv_heads=2, group_size=4, k_dim=64, v_dim=64, dtype=dtype)
    row = RowPlan(0, 300, num_queries, 300 - num_queries)
    case = make_case([row], AttentionParams(scale=0.125), shape)
    q, k, v = (x.transpose(0, 1) for x in (case.q, case.k[0], case.v[0]))
    mask = torch.arange(300) <= torch.arange(row.q_position, 300)[:, None]
    plain, exact = (
        torch.nn.functional.scaled_dot_product_attention(
            *(x.to(dtype).unsqueeze(0) for x in (q, k, v)),
            attn_mask=mask,
            scale=0.125,
            enable_gqa=True,
        )[0].transpose(0, 1)
        for dtype in (dtype, torch.float64)
    )
    call = Call(*case.arguments)
    for kernel in serving(call):
        assert (run(kernel, call).out - exact).abs().max() <= 2 * (plain - exact).abs().max()


@pytest.mark.parametrize("window", [None, 5])
def test_matmul_is_bounded_in_memory(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of scores held at a time does not grow with the prompt; nothing else changes."""
    monkeypatch.setattr(matmul, "MAX_SCORES", 4 * 50 * 2)
    case = make_case(PAST_AND_NEW, AttentionParams(scale=0.2, softcap=3.0, window=window))
    check(run(CPU_KERNELS[2], Call(*case.arguments)), case)


def test_table_of_kernels() -> None:
    """Which kernel serves what, and what there is none for."""
    plain = AttentionParams(scale=0.2)
    few = "native" if native.available() else "cpu_flash"
    decode = make_case([RowPlan(0, 40, 1, 39), RowPlan(0, 40, 16, 24)], plain)
    assert kernel_name(*decode.arguments) == few
    prompt = make_case([RowPlan(0, 40, 17, 23)], plain)
    assert kernel_name(*prompt.arguments) == "cpu_flash"
    capped = prompt.with_params(replace(plain, softcap=5.0))
    assert kernel_name(*capped.arguments) == "cpu_matmul"
    other_dims = make_case(prompt.rows, plain, Shape(k_dim=24, v_dim=16))
    assert kernel_name(*other_dims.arguments) == "cpu_matmul"
    bias = replace(plain, bias=torch.zeros(1, 1, 16, 40), column_starts=np.zeros(2, np.int64))
    assert kernel_name(*decode.with_params(bias).arguments) == "cpu_matmul"
    with pytest.raises(Unimplemented, match="device meta"):
        attend(*replace(decode, q=decode.q.to("meta")).arguments)


def test_rows_of_one_batch_go_to_different_kernels() -> None:
    """A prompt among decoding rows takes the prompt's kernel, the others theirs."""
    rows = [RowPlan(0, 40, 1, 39), RowPlan(0, 40, 30, 10), RowPlan(3, 20, 0, 20), *PAST_AND_NEW]
    case = make_case(rows, AttentionParams(scale=0.2, sinks=torch.zeros(4)))
    if native.available():
        assert kernel_name(*case.arguments) == "native+cpu_flash"
    check(attend(*case.arguments), case)
