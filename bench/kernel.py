"""The CPU kernels beside torch's own, on keys and values that torch has in one piece.

    python -m bench.kernel

    decode_16k_read_fraction   time to read K and V once (a sum), by ours: 1 would be perfect
    decode_*_vs_flash          torch's flash on a contiguous copy, grouped query heads, by ours
    decode_16k_vs_gqa          scaled_dot_product_attention(enable_gqa=True), by ours
    decode_16k_vs_repeated     the same on repeated heads with a mask, as models call it, by ours
    bf16_vs_f32                ours in float32, by ours in bfloat16
    ragged32_vs_padded         32 rows padded to the longest, with a mask, by ours in one call
    prefill_*_vs_flash         torch's flash on contiguous pieces, merged, by ours
    cold_start_s               the first attention of a process that has torch imported

Ours reads 16-token pages in random order. Every call comes after a pause, as a decoder's does.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bench.report import Report, seconds_of
from kvservice.clock import SystemClock
from kvservice_workers.attention.batch import AttentionParams, PagedBatch, Partial
from kvservice_workers.attention.dispatch import attend
from kvservice_workers.attention.merge import merge

PAIRS = 11
FEW_PAIRS = 9
PAUSE_S = 0.003
PAGE_SIZE = 16
HEADS, KV_HEADS, DIM = 32, 8, 128
RAGGED = tuple(64 + 137 * row % 4096 for row in range(32))

Action = Callable[[], object]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_sdpa = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Paged:
    """Rows of an arena, their newest queries, and the first row's K and V in one piece."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batch: PagedBatch
    k: torch.Tensor
    v: torch.Tensor

    def attend(self) -> Partial:
        scale = self.q.shape[2] ** -0.5
        return attend(self.q, self.k_pages, self.v_pages, self.batch, AttentionParams(scale=scale))


def paged(
    lengths: tuple[int, ...],
    num_queries: int = 1,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    dim: int = DIM,
    dtype: torch.dtype = torch.float32,
    page_size: int = PAGE_SIZE,
) -> Paged:
    """Lay rows out in pages of random order, in an arena a quarter larger than they need."""
    rng = np.random.default_rng(0)
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) * 5 // 4 + 1
    free = rng.permutation(num_pages).astype(np.int32)
    tables = np.full((len(lengths), max(counts)), -1, np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], free = free[:count], free[count:]
    k_pages, v_pages = (
        torch.randn(num_pages, heads[1], page_size, dim).to(dtype) for _ in range(2)
    )
    stops = np.array(lengths, np.int64)
    zeros = np.zeros(len(lengths), np.int64)
    batch = PagedBatch(
        page_size=page_size,
        page_tables=tables,
        kv_starts=zeros,
        kv_stops=stops,
        q_starts=np.arange(len(lengths) + 1, dtype=np.int64) * num_queries,
        q_positions=stops - num_queries,
        chunk_origins=zeros,
    )
    ids = torch.from_numpy(tables[0, : counts[0]].astype(np.int64))
    k, v = (
        pages[ids].transpose(0, 1).reshape(1, heads[1], -1, dim)[:, :, : lengths[0]].contiguous()
        for pages in (k_pages, v_pages)
    )
    q = torch.randn(len(lengths) * num_queries, heads[0], dim).to(dtype)
    return Paged(q, k_pages, v_pages, batch, k, v)


def in_turn(actions: dict[str, Action], rounds: int) -> dict[str, list[float]]:
    """Return seconds of each action, one sample a round, each after a pause."""
    clock, never = SystemClock(), threading.Event()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for round_index in range(rounds + 1):
        for name, action in actions.items():
            clock.wait(never, PAUSE_S)
            seconds = seconds_of(action)
            if round_index > 0:  # the first warms up
                times[name].append(seconds)
    return times


def grouped_flash(case: Paged) -> Action:
    """Return torch's flash with the query heads of a group as rows: K and V are read once."""
    q = case.q.view(1, case.k.shape[1], -1, case.q.shape[2])
    return lambda: _flash(q, case.k, case.v)


def measure_decode(report: Report) -> None:
    """One token of one row, 16,384 stored: bound by memory."""
    case = paged((16_384,))
    half = paged((16_384,), dtype=torch.bfloat16)
    both = torch.cat([case.k.flatten(), case.v.flatten()])
    q = case.q.view(1, HEADS, 1, DIM)
    mask = torch.zeros(1, 1, 1, 16_384)

    def repeated() -> torch.Tensor:
        k, v = (
            x[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(1, 2)
            for x in (case.k, case.v)
        )
        return _sdpa(q, k, v, attn_mask=mask)

    times = in_turn(
        {
            "read": both.sum,
            "ours": case.attend,
            "flash": grouped_flash(case),
            "ours bf16": half.attend,
            "gqa": lambda: _sdpa(q, case.k, case.v, enable_gqa=True),
            "repeated": repeated,
        },
        PAIRS,
    )
    ours = times["ours"]
    report.ratio("decode_16k_read_fraction", times["read"], ours, "a sum / ours")
    report.ratio("decode_16k_vs_flash", times["flash"], ours, "grouped flash / ours")
    report.ratio("decode_16k_vs_gqa", times["gqa"], ours, "sdpa enable_gqa / ours")
    report.ratio("decode_16k_vs_repeated", times["repeated"], ours, "repeated, masked / ours")
    report.ratio("bf16_vs_f32", ours, times["ours bf16"], "ours float32 / ours bfloat16")
    milliseconds = [seconds * 1e3 for seconds in ours]
    report.figure(
        "decode_16k_ms", statistics.median(milliseconds), "ours, 16,384 tokens", milliseconds
    )
    gigabytes = both.numel() * 4 / 1e9 / statistics.median(times["read"])
    report.figure("read_gb_per_s", gigabytes, "a sum over the same bytes")


def measure_shorter(report: Report) -> None:
    """One token of one row, 4,096 stored."""
    small = paged((4_096,), heads=(9, 3), dim=64)
    for name, case in (("decode_4k_vs_flash", paged((4_096,))), ("decode_4k_smol_vs_flash", small)):
        times = in_turn({"flash": grouped_flash(case), "ours": case.attend}, PAIRS)
        report.ratio(name, times["flash"], times["ours"], "grouped flash / ours")


def measure_ragged(report: Report) -> None:
    """One token of each of 32 rows of 64 to 4,096 tokens."""
    case = paged(RAGGED)
    longest = max(RAGGED)
    k, v = (torch.randn(len(RAGGED), KV_HEADS, longest, DIM) for _ in range(2))
    q = case.q.view(len(RAGGED), HEADS, 1, DIM)
    mask = (torch.arange(longest) < torch.tensor(RAGGED)[:, None])[:, None, None]
    actions: dict[str, Action] = {
        "padded": lambda: _sdpa(q, k, v, attn_mask=mask, enable_gqa=True),
        "ours": case.attend,
    }
    times = in_turn(actions, FEW_PAIRS)
    report.ratio("ragged32_vs_padded", times["padded"], times["ours"], "padded sdpa / ours")


def measure_prefill(report: Report) -> None:
    """2,048 new tokens, alone and behind 8,192."""
    new = 2_048
    for name, past in (("prefill_2k_vs_flash", 0), ("prefill_2k_on_8k_vs_flash", 8_192)):
        case = paged((past + new,), num_queries=new)
        q = case.q.view(new, KV_HEADS, -1, DIM).permute(1, 2, 0, 3).contiguous()
        pieces = [x[0, :, past:, None].transpose(1, 2).contiguous() for x in (case.k, case.v)]
        old = [x[:, :, :past].contiguous() for x in (case.k, case.v)]

        def contiguous(q=q, pieces=pieces, old=old, past=past) -> object:  # type: ignore[no-untyped-def]
            group = q.shape[1]
            out, lse = _flash(q, *(x.expand(-1, group, -1, -1) for x in pieces), 0.0, True)
            if past == 0:
                return out
            past_out, past_lse = _flash(q.view(1, KV_HEADS, -1, DIM), *old)
            return merge([Partial(out, lse), Partial(past_out.view_as(out), past_lse.view_as(lse))])

        times = in_turn({"flash": contiguous, "ours": case.attend}, FEW_PAIRS)
        report.ratio(name, times["flash"], times["ours"], "flash in one piece / ours")


def measure_cold_start(report: Report) -> None:
    """Import, and the first call, in a new process."""
    program = (
        "import torch; from bench.report import seconds_of\n"
        "def first():\n"
        "    from bench.kernel import paged\n"
        "    paged((1,)).attend()\n"
        "print(seconds_of(first))"
    )
    seconds = [
        float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        )
        for _ in range(3)
    ]
    report.figure("cold_start_s", statistics.median(seconds), "import and first call", seconds)


def main() -> None:
    torch.manual_seed(0)
    report = Report("kernel")
    measure_decode(report)
    measure_shorter(report)
    measure_ragged(report)
    measure_prefill(report)
    measure_cold_start(report)
    report.print()


if __name__ == "__main__":
    main()
