"""Attention on GPUs: what is asked of FlashAttention anywhere, and the real one where it is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import run_state_machine_as_test

from kvservice.core.session import MaskKind
from kvservice_workers import arena
from kvservice_workers.attention import cpu, cuda, dispatch, matmul
from kvservice_workers.attention.batch import AttentionParams, Partial
from kvservice_workers.attention.dispatch import Call, Kernel
from kvservice_workers.attention.reference import paged_attention
from kvservice_workers.staging import Staging
from tests.stateful.test_worker_machine import WorkerMachine
from tests.strategies import AttentionCase, RowPlan, Shape, attention_cases, make_case
from tests.varlen import varlen_meaning

EXACT = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
MASKS = (MaskKind.CAUSAL, MaskKind.FULL, MaskKind.CHUNK)


def token_major(case: AttentionCase, device: str = "cpu") -> Call:
    """Return a call on the same keys and values in the layout that GPUs want."""
    k, v = (pages.transpose(1, 2).contiguous() for pages in (case.k_pages, case.v_pages))
    tensors = (tensor.to(device) for tensor in (case.q, k, v))
    blocks = {
        name: block.to(device)
        for name in ("dense", "bias", "sinks")
        if (block := getattr(case.params, name)) is not None
    }
    return Call(*tensors, replace(case.batch, token_major=True), replace(case.params, **blocks))


def check(result: Partial, case: AttentionCase) -> None:
    expected = paged_attention(*case.arguments, dtype=torch.float64)
    tolerance = EXACT[case.shape.dtype]
    for actual, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(actual.cpu().double(), wanted, atol=tolerance, rtol=tolerance)


def run_cuda(call: Call, *, in_place: bool) -> Partial:
    result = dispatch._no_result(call)
    arguments = (call.q, call.k_pages, call.v_pages, call.batch, call.params)
    cuda.attend(*arguments, None, result, varlen=varlen_meaning, in_place=in_place)
    return result


def plain(case: AttentionCase) -> AttentionCase:
    """Return a case as FlashAttention takes it: no softcap, K and V alike."""
    shape = replace(case.shape, v_dim=case.shape.k_dim)
    return make_case(
        case.rows,
        replace(case.params, softcap=None),
        shape,
        query_padding=case.batch.query_padding,
    )


@given(attention_cases(kinds=MASKS, plain=True, max_stored=40))
def test_what_is_asked_of_flash_attention(case: AttentionCase) -> None:
    """Tables, alignment, windows, gaps, sinks and padding: by its meaning, the reference's answer.

    Gathered and read in place; NaN in every slot that nobody owns.
    """
    case = plain(case)
    for in_place in (False, True):
        check(run_cuda(token_major(case), in_place=in_place), case)


PARAMS = [
    AttentionParams(scale=0.3),
    AttentionParams(scale=0.3, window=7),
    AttentionParams(scale=0.3, window=100),
    AttentionParams(scale=0.3, kind=MaskKind.FULL),
    AttentionParams(scale=0.3, kind=MaskKind.CHUNK, chunk=16),
    AttentionParams(scale=0.3, sinks=torch.tensor([0.0, 1.0, -1.0, 3.0])),
]
DECODING = [RowPlan(0, 40, 1, 39), RowPlan(0, 33, 1, 32), RowPlan(16, 55, 1, 54)]
PROMPTS = [RowPlan(0, 40, 6, 34), RowPlan(0, 9, 9, 0), RowPlan(5, 38, 3, 35)]
PADDED = [RowPlan(3, 40, 1, 39, frozenset({6, 7, 20})), RowPlan(0, 30, 4, 26, frozenset({2}))]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rows", [DECODING, PROMPTS, PADDED])
def test_known_rows(rows: list[RowPlan], params: AttentionParams, in_place: bool) -> None:
    """What decoders ask for, by its meaning."""
    case = make_case(rows, params)
    check(run_cuda(token_major(case), in_place=in_place), case)


def test_who_does_what() -> None:
    """Decoding reads pages in place; later starts are gathered; other masks are left to matmul."""
    device = torch.device("cpu")

    def planned(rows: list[RowPlan], params: AttentionParams) -> tuple[int, int, list[int]]:
        batch = make_case(rows, params).batch
        plan = cuda.plan_batch(batch, params, None, device, in_place=True)
        in_place = sum(len(part.lengths) for part in plan.parts if part.tables is not None)
        gathered = sum(len(part.lengths) for part in plan.parts if part.slots is not None)
        return in_place, gathered, plan.others.tolist()

    causal = AttentionParams(scale=1.0)
    assert planned(DECODING, causal) == (3, 0, [])
    assert planned(PROMPTS, causal) == (2, 1, [])
    assert planned(PADDED, causal) == (0, 2, [])
    assert planned(PADDED, replace(causal, window=9)) == (0, 2, [])  # padding is out of sight
    near = [RowPlan(0, 30, 4, 26, frozenset({22}))]
    assert planned(near, replace(causal, window=9)) == (0, 0, [0])
    assert planned([RowPlan(0, 20, 6, 17)], causal) == (0, 0, [0])  # an extent ends among queries
    assert planned([RowPlan(0, 20, 6, 30)], causal) == (1, 0, [])  # and long before them


def test_layers_share_a_plan() -> None:
    """What is worked out about a batch is kept with it, for each mask."""
    call = token_major(make_case(DECODING, PARAMS[0]))
    run_cuda(call, in_place=True)
    [plan] = call.batch.memo.values()
    run_cuda(call, in_place=True)
    assert [plan] == list(call.batch.memo.values())
    run_cuda(replace(call, params=PARAMS[1]), in_place=True)
    assert len(call.batch.memo) == 2


@pytest.mark.parametrize("kernel", [cpu.attend_flash, matmul.attend])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_gathering_from_token_major_pages(kernel: object, page_size: int) -> None:
    """Kernels that gather do so from both layouts."""
    for rows in (DECODING, PROMPTS, PADDED):
        case = make_case(rows, PARAMS[0], Shape(page_size=page_size))
        call = token_major(case)
        result = dispatch._no_result(call)
        assert callable(kernel)
        kernel(call.q, call.k_pages, call.v_pages, call.batch, call.params, None, result)
        check(result, case)


@given(attention_cases(max_stored=24, max_queries=3))
def test_matmul_on_token_major_pages(case: AttentionCase) -> None:
    """Every mask, softcap, bias and dtype."""
    call = token_major(case)
    result = dispatch._no_result(call)
    matmul.attend(call.q, call.k_pages, call.v_pages, call.batch, call.params, None, result)
    check(result, case)


def test_a_worker_with_token_major_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole worker, as on a GPU but for the device: staging, stores, reads, copies, kernels."""
    varlen = Kernel(
        "varlen",
        lambda call: call.params.softcap is None and call.params.dense is None,
        lambda call, rows, result: cuda.attend(
            *(call.q, call.k_pages, call.v_pages, call.batch, call.params, rows, result),
            varlen=varlen_meaning,
            in_place=True,
        ),
    )
    monkeypatch.setattr(arena, "is_token_major", lambda device: True)
    monkeypatch.setitem(dispatch.KERNELS, "cpu", (varlen, *dispatch.CPU_KERNELS[1:]))
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        WorkerMachine, settings=settings(max_examples=15, stateful_step_count=30, deadline=None)
    )


def test_staging() -> None:
    """One buffer each way, aligned, that may be used again at once."""
    staging = Staging(torch.device("cpu"))
    floats = torch.arange(5, dtype=torch.float32).numpy()
    ints = torch.arange(3, dtype=torch.int64).numpy()
    halves = torch.arange(7, dtype=torch.float16).numpy()
    first = staging.upload([floats, ints, halves], [torch.float32, torch.int64, torch.bfloat16])
    staging.upload([floats + 9, ints, halves], [torch.float32, torch.int64, torch.bfloat16])
    assert first[0].tolist() == floats.tolist()
    assert first[1].tolist() == ints.tolist()
    assert first[2].dtype == torch.bfloat16
    raw = staging.download([first[0], first[1]])
    assert raw == [floats.tobytes(), ints.tobytes()]
    large = torch.ones(100_000)
    assert staging.download([large]) == [large.numpy().tobytes()]
    assert staging.upload([large.numpy()], [torch.float32])[0].equal(large)


# -- on a GPU


def gpu_shapes() -> list[Shape]:
    half = partial(Shape, k_dim=64, v_dim=64)
    return [
        half(dtype=torch.bfloat16),
        half(dtype=torch.float16, page_size=256),
        half(dtype=torch.bfloat16, page_size=32, num_kv_heads=1, group_size=4),
        Shape(k_dim=128, v_dim=128, dtype=torch.float16),
        Shape(k_dim=64, v_dim=32, dtype=torch.bfloat16),
        Shape(dtype=torch.float32),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", gpu_shapes(), ids=str)
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("rows", [DECODING, PROMPTS, PADDED])
def test_on_a_gpu(rows: list[RowPlan], params: AttentionParams, shape: Shape) -> None:
    """The table's choice equals the reference."""
    case = make_case(rows, params, shape)
    call = token_major(case, "cuda")
    check(dispatch.attend(call.q, call.k_pages, call.v_pages, call.batch, call.params), case)


@pytest.mark.gpu
@settings(max_examples=60)
@given(
    attention_cases(
        dtypes=(torch.float32, torch.bfloat16, torch.float16), max_stored=40, max_queries=3
    )
)
def test_any_case_on_a_gpu(case: AttentionCase) -> None:
    """All masks and extras, in all dtypes."""
    call = token_major(case, "cuda")
    check(dispatch.attend(call.q, call.k_pages, call.v_pages, call.batch, call.params), case)


@pytest.mark.gpu
def test_a_worker_on_a_gpu() -> None:
    """The whole worker against plain lists."""

    class OnGpu(WorkerMachine):
        device = "cuda"

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        OnGpu, settings=settings(max_examples=20, stateful_step_count=30, deadline=None)
    )
