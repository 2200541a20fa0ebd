"""Rows of a batch: beam search, and reordering beams, against a local cache in the same run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from bench.models import prompt, smollm2
from bench.processes import two_workers
from bench.report import MIN_PAIRS, Report, seconds_of
from kvservice.clock import now_ns
from kvservice_client import Client, RemoteCache, connect, use_remote_attention
from kvservice_client.hf import CACHE_ARGUMENT

BEAMS = 4


@torch.inference_mode()
def beam_search(report: Report, model: Any, client: Client, context: int, new: int = 6) -> None:
    """Compare whole generations with 4 beams, and their tokens."""
    ids = prompt(model, context)
    options = {
        "attention_mask": torch.ones_like(ids),
        "num_beams": BEAMS,
        "do_sample": False,
        "min_new_tokens": new,
        "max_new_tokens": new,
        "pad_token_id": 2,
    }
    ours, theirs = [], []
    for _ in range(MIN_PAIRS):
        model.set_attn_implementation("sdpa")
        expected, local_s = _timed(model, ids, DynamicCache(config=model.config), options)
        use_remote_attention(model)
        cache = RemoteCache(client, model.config, mode="attend")
        tokens, remote_s = _timed(model, ids, cache, options)
        cache.reset()
        assert torch.equal(tokens, expected), "other tokens than the local cache gives"
        ours.append(remote_s)
        theirs.append(local_s)
    note = f"service / DynamicCache + sdpa, {BEAMS} beams, a prompt of {context} and {new} tokens"
    report.ratio("beam4", ours, theirs, note)


def _timed(
    model: Any, ids: torch.Tensor, cache: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    started = now_ns()
    tokens: torch.Tensor = model.generate(ids, **{CACHE_ARGUMENT: cache}, **options)
    return tokens, (now_ns() - started) / 1e9


@torch.inference_mode()
def reorder(report: Report, client: Client, beams: int = 8, context: int = 4096) -> None:
    """Compare one reordering of all rows: page numbers here, tensors there."""
    layers, heads, dim = 30, 3, 64
    local, session = DynamicCache(), client.open(num_rows=beams)
    for layer in range(layers):
        k = torch.randn(beams, heads, context, dim)
        local.update(k, k, layer)
        if layer < 2:  # pages are shared by all layers; two show that
            session.write(layer, k, k)
    generator = torch.Generator().manual_seed(2)
    orders = [torch.randint(0, beams, (beams,), generator=generator) for _ in range(MIN_PAIRS)]
    ours, theirs = [], []
    for order in orders:
        theirs.append(seconds_of(lambda o=order: local.reorder_cache(o)))
        ours.append(seconds_of(lambda o=order: session.select(o.tolist())))
    session.release()
    note = f"DynamicCache / service, {beams} beams of {context} tokens, {layers} layers"
    report.ratio("reorder_speedup", theirs, ours, note)


def main() -> None:
    report = Report("rows")
    with two_workers() as address, connect(address) as client:
        reorder(report, client)
        beam_search(report, smollm2(), client, 1024)
    report.print()


if __name__ == "__main__":
    main()
