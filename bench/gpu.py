"""The GPU kernels beside a copy on the same device.

    python -m bench.gpu

    gpu_decode_16k_read_fraction   time in which the device reads K and V once (half of a copy's),
                                   by ours: 1 would be perfect
    gpu_ragged32_read_fraction     the same for 32 rows of different length

bfloat16, 32 query and 8 KV heads of 128, pages in random order.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from bench.kernel import RAGGED, Paged, paged
from bench.report import MIN_PAIRS, Report, seconds_of
from kvservice_workers.attention import cuda

PAGE_SIZES = (16, 256)


def on_gpu(case: Paged) -> Paged:
    """Return a batch with its tensors on the GPU, in its layout."""
    k_pages, v_pages = (
        pages.transpose(1, 2).contiguous().cuda() for pages in (case.k_pages, case.v_pages)
    )
    batch = replace(case.batch, token_major=True)
    return replace(case, q=case.q.cuda(), k_pages=k_pages, v_pages=v_pages, batch=batch)


def measure(report: Report, name: str, lengths: tuple[int, ...]) -> None:
    for page_size in PAGE_SIZES:
        case = on_gpu(paged(lengths, dtype=torch.bfloat16, page_size=page_size))
        read = torch.empty(sum(lengths) * case.k_pages[0, 0].numel() * 2, dtype=torch.bfloat16)
        source, target = read.cuda(), torch.empty_like(read, device="cuda")

        def attend(case: Paged = case) -> None:
            case.attend()
            torch.cuda.synchronize()

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target.copy_(source)
            torch.cuda.synchronize()

        attend()
        copy()
        copies, ours = [], []
        for _ in range(4 * MIN_PAIRS):
            copies.append(seconds_of(copy) / 2)  # it reads and writes
            ours.append(seconds_of(attend))
        q = case.q
        how = (
            "in place" if cuda.reads_pages(q.device, q.dtype, page_size, q.shape[2]) else "gathered"
        )
        note = f"half a copy / ours, pages of {page_size}, {how}"
        report.ratio(f"{name}_page_{page_size}", copies, ours, note)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench.gpu needs a GPU that torch can use")
    report = Report("gpu")
    measure(report, "gpu_decode_16k_read_fraction", (16_384,))
    measure(report, "gpu_ragged32_read_fraction", RAGGED)
    report.print()


if __name__ == "__main__":
    main()
