"""Tiny models of many families with random weights that make them choose many different tokens.

The default initialisation repeats one token and proves nothing: embeddings are untied, and weights
spread so that a wrong attention output changes what is generated.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf

VOCAB = 96
PAD = 0
WINDOW = 8
NUM_LAYERS = 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_CHUNKED = "chunked_attention"
_ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)


@dataclass(frozen=True)
class Family:
    """One configuration: what builds it, and how its local attention is computed."""

    model_class: Any
    config: Callable[[], Any]
    attention: str = "sdpa"
    std: float = 0.18


def _gpt2() -> Any:
    return tf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=NUM_LAYERS,
        n_head=4,
        n_positions=512,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=None,
    )


def _gemma3() -> Any:
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return tf.Gemma3TextConfig(
        **_SIZES, head_dim=16, sliding_window=WINDOW, layer_types=types, query_pre_attn_scalar=16
    )


def _gpt_oss() -> Any:
    return tf.GptOssConfig(
        **_SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**_SIZES)),
    "gpt2": Family(tf.GPT2LMHeadModel, _gpt2),
    "qwen3": Family(tf.Qwen3ForCausalLM, lambda: tf.Qwen3Config(**_SIZES, head_dim=16)),
    "gemma2": Family(
        tf.Gemma2ForCausalLM,
        lambda: tf.Gemma2Config(
            **_SIZES,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
            attn_logit_softcapping=5.0,
            query_pre_attn_scalar=16,
        ),
        attention="eager",
        std=0.12,
    ),
    "gemma3": Family(tf.Gemma3ForCausalLM, _gemma3, std=0.12),
    "mistral": Family(
        tf.MistralForCausalLM, lambda: tf.MistralConfig(**_SIZES, sliding_window=WINDOW)
    ),
    "phi3": Family(tf.Phi3ForCausalLM, lambda: tf.Phi3Config(**_SIZES, sliding_window=None)),
    "phi3-window": Family(
        tf.Phi3ForCausalLM, lambda: tf.Phi3Config(**_SIZES, sliding_window=WINDOW)
    ),
    "gpt-oss": Family(tf.GptOssForCausalLM, _gpt_oss, attention="eager"),
}

# Families whose caches are special: layers that share keys and values, local states, chunks.
SPECIAL: dict[str, Family] = {
    "gemma3n": Family(
        tf.Gemma3nForCausalLM,
        lambda: tf.Gemma3nTextConfig(
            **_SIZES,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * NUM_LAYERS,
        ),
        std=0.12,
    ),
    "gemma4": Family(
        tf.Gemma4ForCausalLM,
        lambda: tf.Gemma4TextConfig(
            **_SIZES,
            head_dim=16,
            global_head_dim=32,
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
        ),
        std=0.12,
    ),
    "lfm2": Family(
        tf.Lfm2ForCausalLM,
        lambda: tf.Lfm2Config(
            **_SIZES, layer_types=["conv", "full_attention", "conv", "full_attention"]
        ),
    ),
    "llama4": Family(
        tf.Llama4ForCausalLM,
        lambda: tf.Llama4TextConfig(
            **_SIZES,
            intermediate_size_mlp=96,
            head_dim=16,
            attention_chunk_size=WINDOW,
            layer_types=[_CHUNKED, _CHUNKED, "full_attention", _CHUNKED],
            num_local_experts=2,
            moe_layers=[1],
        ),
    ),
}


def family(name: str) -> Family:
    """Return a family by its name."""
    return FAMILIES[name] if name in FAMILIES else SPECIAL[name]


@functools.cache
def build(name: str) -> Any:
    """Return a model of a family, on its own attention. The same object every time."""
    chosen = family(name)
    model = chosen.model_class._from_config(chosen.config(), attn_implementation=chosen.attention)
    spread_weights(model, chosen.std)
    return quiet(model)


@functools.cache
def remote_twin(name: str) -> Any:
    """Return the same model once more, for remote attention to be set on."""
    chosen = family(name)
    model = chosen.model_class._from_config(chosen.config(), attn_implementation=chosen.attention)
    model.load_state_dict(build(name).state_dict())
    return quiet(model)


@functools.cache
def weak_draft(name: str) -> Any:
    """Return another model of the family: its proposals are rarely accepted."""
    chosen = family(name)
    model = chosen.model_class._from_config(chosen.config(), attn_implementation=chosen.attention)
    spread_weights(model, chosen.std, seed=99)
    return quiet(model)


@functools.cache
def twin_draft(name: str) -> Any:
    """Return the model with a little noise: its proposals are mostly accepted."""
    model = copy.deepcopy(build(name))
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.004)
    return model


def spread_weights(model: Any, std: float, seed: int = 0) -> None:
    """Draw all matrices with a standard deviation of `std`, embeddings with 1, sinks with 1."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("embed", "wte", "wpe", "sinks")):
                parameter.normal_(0.0, 1.0, generator=random)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=random)


def quiet(model: Any) -> Any:
    """Return the model ready to generate, without a default of its own for sampling."""
    model.eval()
    model.generation_config = tf.GenerationConfig(
        pad_token_id=PAD, bos_token_id=1, eos_token_id=None
    )
    return model
