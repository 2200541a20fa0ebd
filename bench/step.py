"""Whole steps of a model through the service, against the same model with a local cache.

Two worker processes, the default transport. Local is transformers' DynamicCache with sdpa, in this
process; steps are taken in turn. Below 1 the service is faster.
"""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any

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


def main() -> None:
    report = Report("step")
    with two_workers() as address, connect(address) as client:
        model = smollm2()
        decode(report, "smollm2_128", model, client, 128, 24)
        with connect(address, lane=False) as over_grpc:
            decode(report, "smollm2_128_grpc", model, over_grpc, 128, 24)
        replicas(report, model, client, 128, 24)
        prompts(report, "prompt_1024", model, client, 1024)
        decode(report, "smollm2_4096", model, client, 4096, 16)
        memory(report, model, client)
        del model
        decode(report, "wide_16384", wide(), client, 16_384, 16)
    report.print()


if __name__ == "__main__":
    main()
