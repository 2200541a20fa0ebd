"""The native kernel: to the bit the same whatever runs beside it, and safe to call wrongly."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvservice.core.errors import InternalError
from kvservice.core.session import MaskKind
from kvservice_workers.attention import native
from kvservice_workers.attention.batch import AttentionParams, Partial
from kvservice_workers.attention.dispatch import CPU_KERNELS, Call, run
from kvservice_workers.attention.reference import paged_attention
from tests.strategies import AttentionCase, RowPlan, Shape, make_case

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.why_missing()))

LONG = RowPlan(5, 3_000, 1, 2_999, frozenset(range(700, 900)))
SHAPE = Shape(num_kv_heads=2, group_size=3, k_dim=64, v_dim=64)


def attend(case: AttentionCase, **options: int) -> Partial:
    """Run the native kernel over all rows of a case."""
    call = Call(*case.arguments)
    num_queries, num_q_heads = case.q.shape[:2]
    result = Partial(
        torch.full((num_queries, num_q_heads, case.shape.v_dim), torch.nan),
        torch.full((num_queries, num_q_heads), torch.nan),
    )
    native.attend(*case.arguments, None, result, **options)
    assert native.serves(call.k_pages, call.v_pages, call.params)
    return result


def equal(a: Partial, b: Partial) -> bool:
    """Return whether partials are the same to the bit."""
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    """Chunks are fixed by the row and merged in their order, whoever computed them."""
    rows = [LONG, RowPlan(0, 2_000, 3, 1_997), RowPlan(0, 1, 1, 0)]
    case = make_case(rows, AttentionParams(scale=0.2), replace(SHAPE, dtype=dtype))
    alone = attend(case, num_threads=1)
    for num_threads in (2, 3, 64):
        for _ in range(5):
            assert equal(attend(case, num_threads=num_threads), alone)


@needs_native
def test_neighbours_change_no_bit() -> None:
    """A row gives the same bits alone and among others, wherever in the batch it stands."""
    params = AttentionParams(scale=0.2)
    rows = [RowPlan(0, 700, 2, 698), LONG, RowPlan(0, 0, 1, 0), RowPlan(8, 1_111, 1, 1_110)]
    case = make_case(rows, params, SHAPE)
    together = attend(case)
    for index in range(len(rows)):
        q_start, q_stop = case.batch.q_starts[index], case.batch.q_starts[index + 1]
        batch = replace(
            case.batch,
            **{
                name: getattr(case.batch, name)[index : index + 1]
                for name in ("page_tables", "kv_starts", "kv_stops", "q_positions", "padding")
            },
            chunk_origins=np.zeros(1, np.int64),
            q_starts=np.array([0, q_stop - q_start]),
        )
        own = replace(case, q=case.q[q_start:q_stop], batch=batch)
        among = Partial(together.out[q_start:q_stop], together.lse[q_start:q_stop])
        assert equal(attend(own), among)


@needs_native
def test_rows_longer_than_all_chunks() -> None:
    """Beyond 128 chunks of 512 positions, chunks grow; sums beyond the limit go in portions."""
    shape = Shape(num_kv_heads=1, group_size=64, k_dim=8, v_dim=256)
    case = make_case([RowPlan(0, 70_000, 1, 69_999)] * 2, AttentionParams(scale=0.2), shape)
    result = attend(case)
    again = run(CPU_KERNELS[2], Call(*case.arguments))
    torch.testing.assert_close(result.out, again.out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(result.lse, again.lse)


@needs_native
def test_many_callers_at_once() -> None:
    """Callers share the helpers; each gets its own answer."""
    params = AttentionParams(scale=0.2)
    cases = [make_case([LONG], params, SHAPE, seed=seed) for seed in range(4)]
    expected = [attend(case, num_threads=1) for case in cases]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(20):
            if not equal(attend(cases[index], num_threads=4), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_native
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 7, 8, 71])
@pytest.mark.parametrize("dim", [1, 4, 7, 40, 64, 80, 96, 128, 130, 256])
def test_group_sizes_and_dims(group_size: int, dim: int) -> None:
    """What does not fill registers evenly, in every dtype, with K and V of different dims."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)):
        shape = Shape(7, 1, group_size, dim, dim + 3, dtype)
        case = make_case([RowPlan(2, 27, 2, 25)], AttentionParams(scale=dim**-0.5), shape)
        as_floats = replace(
            case, q=case.q.float(), k_pages=case.k_pages.float(), v_pages=case.v_pages.float()
        )
        expected = run(CPU_KERNELS[2], Call(*as_floats.arguments))
        result = attend(case)
        torch.testing.assert_close(result.out, expected.out, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(result.lse, expected.lse, atol=tolerance, rtol=tolerance)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_read_exactly(dtype: torch.dtype) -> None:
    """All bit patterns that are numbers, also those below the normal range, come out as v."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()].reshape(-1, 256)
    shape = Shape(16, 1, 1, 8, 256, dtype)
    case = make_case([RowPlan(0, 16, 1, 15)], AttentionParams(scale=0.0, window=1), shape)
    page, offset = int(case.batch.page_tables[0, 0]), 15
    for row in numbers:
        case.v_pages[page, 0, offset] = row
        assert torch.equal(attend(case).out[0, 0], row.float())


@needs_native
def test_infinite_and_nan_values_are_not_hidden() -> None:
    """What a decoder stored is what it gets back: NaN in v gives NaN, in k too."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shape = Shape(dtype=dtype)
        for name, number in (
            ("k_pages", torch.nan),
            ("v_pages", torch.nan),
            ("v_pages", torch.inf),
        ):
            case = make_case([RowPlan(0, 16, 1, 15)], AttentionParams(scale=0.1), shape)
            getattr(case, name)[int(case.batch.page_tables[0, 0]), 0, 3] = number
            result = attend(case)
            assert not result.out[0, :2].isfinite().any()
            assert result.out[0, 2:].isfinite().all()


@needs_native
def test_large_scores_stay_finite() -> None:
    """exp(1000) is infinite in float32; the running maximum is taken off first."""
    case = make_case([RowPlan(0, 600, 1, 599)], AttentionParams(scale=100.0))
    expected = paged_attention(*case.arguments, dtype=torch.float64)
    result = attend(case)
    torch.testing.assert_close(result.lse.double(), expected.lse, atol=1e-3, rtol=1e-6)
    torch.testing.assert_close(result.out.double(), expected.out, atol=1e-3, rtol=1e-3)


@needs_native
def test_pages_at_any_stride() -> None:
    """K and V may share an arena: only each page must be contiguous."""
    case = make_case([RowPlan(0, 50, 1, 49)], AttentionParams(scale=0.2))
    both = torch.stack([case.k_pages, case.v_pages], dim=1)
    strided = replace(case, k_pages=both[:, 0], v_pages=both[:, 1])
    assert equal(attend(strided), attend(case))
    scattered = case.k_pages.transpose(1, 2).contiguous().transpose(1, 2)
    assert not native.serves(scattered, case.v_pages, case.params)


@needs_native
def test_a_page_that_does_not_exist_is_an_error() -> None:
    """Our own bug, found before it reads foreign memory."""
    case = make_case([RowPlan(0, 50, 1, 49)], AttentionParams(scale=0.2))
    for page in (-1, 10_000, 2**31 - 1):
        tables = case.batch.page_tables.copy()
        tables[0, 1] = page
        with pytest.raises(InternalError, match="row 0"):
            attend(case.with_batch(replace(case.batch, page_tables=tables)))
    short = np.ascontiguousarray(case.batch.page_tables[:, :2])
    with pytest.raises(InternalError, match="row 0"):
        attend(case.with_batch(replace(case.batch, page_tables=short)))


@needs_native
def test_wrong_arguments_are_refused() -> None:
    """The extension checks what it can see: counts, kinds and sizes of arguments."""
    from kvservice_workers import _native

    with pytest.raises(TypeError, match="arguments"):
        _native.attend(1, 2, 3)
    case = make_case([RowPlan(0, 50, 1, 49)], AttentionParams(scale=0.2))
    with pytest.raises(ValueError, match="items"):
        attend(case.with_batch(replace(case.batch, kv_stops=np.zeros(0, np.int64))))


@needs_native
def test_full_and_chunk_masks_with_many_queries() -> None:
    """More queries than are done at a time, with masks that hide within tiles."""
    for params in (
        AttentionParams(scale=0.2),
        AttentionParams(scale=0.2, window=30),
        AttentionParams(scale=0.2, kind=MaskKind.FULL, softcap=1.0),
        AttentionParams(scale=0.2, kind=MaskKind.CHUNK, chunk=13),
    ):
        case = make_case([RowPlan(3, 90, 50, 40, frozenset({44, 60}), 3)], params)
        expected = paged_attention(*case.arguments, dtype=torch.float64)
        result = attend(case)
        torch.testing.assert_close(result.out.double(), expected.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result.lse.double(), expected.lse, atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_works_in_a_forked_child() -> None:
    """The child has none of its parent's helper threads, and makes its own."""
    program = """
import os
from tests.kernels.test_native import LONG, SHAPE, AttentionParams, attend, equal, make_case
case = make_case([LONG], AttentionParams(scale=0.2), SHAPE)
before = attend(case, num_threads=2)
child = os.fork()
if child == 0:
    os._exit(0 if equal(attend(case, num_threads=2), before) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_the_extension_the_torch_kernels_serve() -> None:
    """A machine without compiler attends all the same, and can say why it is slower."""
    program = """
import sys
sys.modules["kvservice_workers._native"] = None
from kvservice_workers.attention import native
from kvservice_workers.attention.dispatch import attend, kernel_name
from tests.kernels.test_native import LONG, SHAPE, AttentionParams, make_case
assert not native.available()
assert "not built" in native.why_missing()
case = make_case([LONG], AttentionParams(scale=0.2), SHAPE)
assert kernel_name(*case.arguments) == "cpu_flash"
assert attend(*case.arguments).out.isfinite().all()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
