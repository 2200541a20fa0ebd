"""Whole steps of a model through the service, against the same model with a local cache.

Two worker processes, the default transport. Local is transformers' DynamicCache with sdpa, in this
process; steps are taken in turn. Below 1 the service is faster.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any, Final

import torch

from bench.models import Decoder, prompt, smollm2, wide
from bench.processes import two_workers
from bench.report import MIN_PAIRS, Report
from kvservice_client import Client, connect


def decode(report: Report, name: str, model: Any, client: Client, context: int, pairs: int) -> None:
    """Compare decoding steps after a prompt."""
    note = f"service / DynamicCache + sdpa, a step at {context} tokens"
    steps(report, name, model, (Decoder(model, client), Decoder(model, None)), context, pairs, note)


def replicas(report: Report, model: Any, client: Client, context: int, pairs: int) -> None:
    """Compare decoding steps with two copies of every page to those with one."""
    decoders = Decoder(model, client, replicas=2), Decoder(model, client)
    note = f"two copies / one, a step at {context} tokens, all on this machine"
    steps(report, "replicas_vs_single", model, decoders, context, pairs, note)


def steps(
    report: Report,
    name: str,
    model: Any,
    decoders: tuple[Decoder, Decoder],
    context: int,
    pairs: int,
    note: str,
) -> None:
    """Take steps in turn, and note the ratio of the first decoder's to the second's."""
    ids = prompt(model, context)
    for decoder in decoders:
        decoder.prefill(ids)
    first, second = decoders
    ours, theirs = [], []
    for i in range(pairs + 2):
        pair = (first.step(), second.step()) if i % 2 else (second.step(), first.step())[::-1]
        if i >= 2:  # warm
            ours.append(pair[0])
            theirs.append(pair[1])
    for decoder in decoders:
        decoder.end()
    report.ratio(name, ours, theirs, note)


def prompts(report: Report, name: str, model: Any, client: Client, length: int) -> None:
    """Compare whole prompts on empty caches."""
    ids = prompt(model, length)
    local, remote = Decoder(model, None), Decoder(model, client)
    ours, theirs = [], []
    for _ in range(MIN_PAIRS):
        theirs.append(local.prefill(ids))
        local.end()
        ours.append(remote.prefill(ids))
        remote.end()
    report.ratio(name, ours, theirs, f"service / DynamicCache + sdpa, a prompt of {length}")


def second_turn(report: Report, model: Any, client: Client, past: int, new: int = 512) -> None:
    """Compare ways to attend to a prompt behind others: new tokens here, or all on the worker."""
    local, remote = (Decoder(model, client, prompts=where) for where in ("local", "remote"))
    for decoder in (local, remote):
        decoder.prefill(prompt(model, past))
    ids = prompt(model, new)
    ours, theirs = [], []
    for i in range(MIN_PAIRS + 1):
        order = (local, remote) if i % 2 else (remote, local)
        took = {decoder: decoder.turn(ids) for decoder in order}
        if i:  # warm
            ours.append(took[local])
            theirs.append(took[remote])
    for decoder in (local, remote):
        decoder.end()
    note = f"{new} tokens behind {past}: to each other in the decoder / all on the worker"
    report.ratio(f"second_turn_{past}", *([s for s, _ in each] for each in (ours, theirs)), note)
    note = "the same, the decoder's own processor time"
    name = f"second_turn_{past}_cpu"
    report.ratio(name, *([cpu_s for _, cpu_s in each] for each in (ours, theirs)), note)


@torch.inference_mode()
def memory(report: Report, model: Any, client: Client) -> None:
    """Note how many bytes this process grows by for each token that is stored remotely."""
    remote = Decoder(model, client)
    remote.prefill(prompt(model, 1024))
    remote.feed(prompt(model, 1024))  # buffers have their size now
    before = _rss()
    for _ in range(3):
        remote.feed(prompt(model, 1024))
    growth = (_rss() - before) / 3072
    remote.end()
    stored = 2 * 3 * 64 * 4 * 30
    note = f"of this process while 3,072 tokens are stored; a local cache: {stored}"
    report.figure("decoder_rss_growth_bytes_per_token", growth, note)


def _rss() -> int:
    """Return what this process holds, without what the allocator only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def over_grpc(report: Report, model: Any, address: str) -> None:
    """Compare decoding steps without lanes."""
    with connect(address, lane=False) as client:
        decode(report, "smollm2_128_grpc", model, client, 128, 24)


PARTS: Final = (
    *("smollm2_128", "smollm2_128_grpc", "replicas", "prompt_1024"),
    *("second_turn_1024", "second_turn_8192", "smollm2_4096", "memory", "wide_16384"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS, help="some parts")
    chosen = parser.parse_args().only
    report = Report("step")
    with two_workers() as address, connect(address) as client:
        model = smollm2()
        run: dict[str, Callable[[], None]] = {
            "smollm2_128": lambda: decode(report, "smollm2_128", model, client, 128, 24),
            "smollm2_128_grpc": lambda: over_grpc(report, model, address),
            "replicas": lambda: replicas(report, model, client, 128, 24),
            "prompt_1024": lambda: prompts(report, "prompt_1024", model, client, 1024),
            "second_turn_1024": lambda: second_turn(report, model, client, 1024),
            "second_turn_8192": lambda: second_turn(report, model, client, 8192),
            "smollm2_4096": lambda: decode(report, "smollm2_4096", model, client, 4096, 16),
            "memory": lambda: memory(report, model, client),
            "wide_16384": lambda: decode(report, "wide_16384", wide(), client, 16_384, 16),
        }
        for part in PARTS:
            if part in chosen:
                run[part]()
    report.print()


if __name__ == "__main__":
    main()
