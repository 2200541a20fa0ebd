"""A real model with real weights: the same text with its cache on the service."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvservice import config
from kvservice.demo import model as demo_model
from kvservice_client import Client
from kvservice_client.hf import CACHE_ARGUMENT, RemoteCache, use_remote_attention
from tests.programs import needs_model

pytestmark = [needs_model, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a haiku about the sea.",
    "Say hello.",
)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """Return tokenizer and model, converted once and kept in the user's cache folder."""
    cache_directory = config.cache_directory()
    folder = demo_model.find_converted(cache_directory) or demo_model.convert(cache_directory)
    return demo_model.load(folder)


@pytest.fixture
def chat(smollm2: Any) -> Any:
    """Return the questions as one left-padded batch."""
    tokenizer, _ = smollm2
    return tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in QUESTIONS],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )


def _generate(model: Any, inputs: Any, cache: Any, **options: Any) -> tuple[Any, torch.Tensor]:
    out = model.generate(
        **inputs,
        **{CACHE_ARGUMENT: cache},
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)


def test_greedy_padded_batch(smollm2: Any, chat: Any, client: Client) -> None:
    """Three questions of different lengths; the answers are token for token the local ones."""
    tokenizer, model = smollm2
    model.set_attn_implementation("sdpa")
    options = {"max_new_tokens": 12}
    wanted, wanted_logits = _generate(model, chat, DynamicCache(config=model.config), **options)
    use_remote_attention(model)
    cache = RemoteCache(client, model.config, mode="attend")
    ours, logits = _generate(model, chat, cache, **options)
    assert torch.equal(ours, wanted)
    torch.testing.assert_close(logits, wanted_logits, atol=1e-3, rtol=0)
    answers = tokenizer.batch_decode(ours[:, chat["input_ids"].shape[1] :])
    assert "Paris" in answers[0]


def test_beam(smollm2: Any, chat: Any, client: Client) -> None:
    """Beam search, which reorders rows at every step."""
    _, model = smollm2
    inputs = {name: tensor[:1] for name, tensor in chat.items()}
    options = {"max_new_tokens": 6, "num_beams": 4}
    model.set_attn_implementation("sdpa")
    wanted, _ = _generate(model, inputs, DynamicCache(config=model.config), **options)
    use_remote_attention(model)
    ours, _ = _generate(model, inputs, RemoteCache(client, model.config, mode="attend"), **options)
    assert torch.equal(ours, wanted)
