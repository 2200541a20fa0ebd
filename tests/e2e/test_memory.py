"""A decoder's memory does not grow with its context: what is stored is on the workers."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvservice_client import Client, RemoteCache, connect, use_remote_attention
from kvservice_client.hf import CACHE_ARGUMENT
from tests.e2e.conftest import assert_no_pages

CHUNK, CHUNKS = 256, 8
LAYERS, KV_HEADS, DIM = 2, 16, 64
STORED = 2 * LAYERS * KV_HEADS * DIM * 4  # bytes a token: 16 KiB


@pytest.fixture
def lane_client(service_address: str) -> Iterator[Client]:
    """A client of two worker processes, so that none of their memory is this process's."""
    with connect(service_address) as client:
        yield client
        assert_no_pages(client)


def build(attention: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=CHUNK * (CHUNKS + 3),
    )
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(attention)
    return model


class Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc, sums over all of its arenas."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated() -> int:
    """Return this process's bytes that are in use, without what the allocator keeps for later.

    What is kept depends on which threads gRPC happens to serialise in: each may have an arena of
    its own, whose end is never given back.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


@torch.inference_mode()
def growth(model: Any, cache: Any) -> float:
    """Feed long prompts behind a past; return by how many bytes a token this process has grown."""
    ids = torch.randint(0, 64, (1, CHUNK), generator=torch.Generator().manual_seed(1))
    kept: dict[str, Any] = {CACHE_ARGUMENT: cache, "use_cache": True}
    for _ in range(2):  # a first prompt, and one behind it: buffers and caches are there now
        model(input_ids=ids, logits_to_keep=1, **kept)
    before = allocated()
    for _ in range(CHUNKS):
        model(input_ids=ids, logits_to_keep=1, **kept)
    model(input_ids=ids[:, :1], **kept)  # by now what was sent has arrived
    return (allocated() - before) / (CHUNK * CHUNKS)


def test_a_local_cache_is_seen_to_grow() -> None:
    """The measure itself: it finds the bytes that a local cache keeps."""
    model = build("sdpa")
    assert growth(model, DynamicCache(config=model.config)) > 0.7 * STORED


@pytest.mark.parametrize(("prompts", "spread"), [("auto", 1), ("auto", 2), ("local", 1)])
def test_prompts_behind_a_past_leave_nothing_in_the_decoder(
    lane_client: Client, prompts: Any, spread: int
) -> None:
    """Less than a twentieth of a local cache's, over 2,048 tokens, whoever attends to them."""
    model = build("sdpa")
    use_remote_attention(model)
    cache = RemoteCache(lane_client, model.config, spread=spread, prompts=prompts)
    grown = growth(model, cache)
    assert cache.get_seq_length() == CHUNK * (CHUNKS + 2) + 1
    cache.reset()
    assert grown < 0.05 * STORED
