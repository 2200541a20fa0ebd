"""Encoder-decoders: a cache for the decoder's own tokens, and one for what the encoder said."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import DynamicCache, EncoderDecoderCache

from kvservice_client import Client, use
from kvservice_client.hf import CACHE_ARGUMENT, RemoteCache, use_remote_attention
from tests.e2e import models
from tests.e2e.compare import difference
from tests.e2e.scenarios import Results, padded, prompt

NewCache = Callable[[], EncoderDecoderCache]
Build = Callable[[], Any]
Case = Callable[[Any, NewCache], Results]


@functools.cache
def t5(seed: int = 0, encoder_layers: int = 2) -> Any:
    """Return a T5 with 3 decoder layers, and padding as start token."""
    config = tf.T5Config(
        vocab_size=models.VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=encoder_layers,
        num_decoder_layers=3,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        dropout_rate=0.0,
        tie_word_embeddings=False,
        pad_token_id=models.PAD,
        decoder_start_token_id=models.PAD,
        eos_token_id=None,
    )
    model = tf.T5ForConditionalGeneration(config)
    models.spread_weights(model, 0.18, seed)
    return _ready(model)


@functools.cache
def whisper() -> Any:
    config = tf.WhisperConfig(
        vocab_size=models.VOCAB,
        d_model=64,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=8,
        max_source_positions=30,
        max_target_positions=64,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=models.PAD,
        bos_token_id=1,
        decoder_start_token_id=1,
        eos_token_id=models.PAD,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        tie_word_embeddings=False,
    )
    model = tf.WhisperForConditionalGeneration(config)
    models.spread_weights(model, 0.18)
    return _ready(model)


@functools.cache
def t5gemma() -> Any:
    """Return a T5Gemma whose decoder alternates layers with and without a window."""
    part = tf.T5GemmaModuleConfig(
        vocab_size=models.VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=models.WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=models.PAD,
        bos_token_id=1,
        eos_token_id=None,
    )
    config = tf.T5GemmaConfig(
        encoder=part,
        decoder=copy.deepcopy(part),
        vocab_size=models.VOCAB,
        tie_word_embeddings=False,
        decoder_start_token_id=1,
        pad_token_id=models.PAD,
    )
    model = tf.T5GemmaForConditionalGeneration(config)
    models.spread_weights(model, 0.15)
    return _ready(model)


def _ready(model: Any) -> Any:
    model.eval()
    start = model.config.decoder_start_token_id
    model.generation_config = tf.GenerationConfig(
        pad_token_id=models.PAD, decoder_start_token_id=start, eos_token_id=None
    )
    return model


def generate(model: Any, cache: Any, **options: Any) -> Results:
    """Generate; return sequences, and the logits that led to them."""
    torch.manual_seed(0)
    out = tf.GenerationMixin.generate(
        model,
        max_new_tokens=10,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **{CACHE_ARGUMENT: cache},
        **options,
    )
    return [out.sequences, torch.stack(out.logits)]


def t5_greedy(model: Any, new_cache: NewCache) -> Results:
    ids, mask = padded([9, 4, 7])
    return generate(model, new_cache(), input_ids=ids, attention_mask=mask)


def t5_greedy_right_padded(model: Any, new_cache: NewCache) -> Results:
    ids, mask = (side.flip(1) for side in padded([9, 4, 7]))
    return generate(model, new_cache(), input_ids=ids, attention_mask=mask)


def t5_beam(model: Any, new_cache: NewCache) -> Results:
    ids, mask = padded([9, 5], seed=1)
    return generate(model, new_cache(), input_ids=ids, attention_mask=mask, num_beams=4)


def t5_assisted(model: Any, new_cache: NewCache) -> Results:
    draft = t5(seed=7, encoder_layers=3)  # its own cache counts its layers by the encoder's
    return generate(model, new_cache(), input_ids=prompt(1, 9, seed=2), assistant_model=draft)


def t5_deepcopy(model: Any, new_cache: NewCache) -> Results:
    """Decoding goes on from copies of both caches."""
    ids, cache = prompt(1, 8, seed=3), new_cache()
    with torch.no_grad():
        encoded = model.encoder(ids)

        def feed(token: int, cache: EncoderDecoderCache) -> torch.Tensor:
            ids = torch.full((1, 1), token)
            arguments = {
                "encoder_outputs": encoded,
                "decoder_input_ids": ids,
                CACHE_ARGUMENT: cache,
            }
            logits: torch.Tensor = model(**arguments).logits
            return logits

        results = [feed(models.PAD, cache)]
        for token in (5, 6):
            branch = copy.deepcopy(cache)
            results += [feed(token + step, branch) for step in range(3)]
    return results


def whisper_greedy(model: Any, new_cache: NewCache) -> Results:
    return generate(model, new_cache(), input_features=_sound(2))


def whisper_beam(model: Any, new_cache: NewCache) -> Results:
    return generate(model, new_cache(), input_features=_sound(1), num_beams=3)


def _sound(rows: int) -> torch.Tensor:
    return torch.randn(rows, 8, 60, generator=torch.Generator().manual_seed(3))


CASES = [
    *(
        (t5, case)
        for case in (t5_greedy, t5_greedy_right_padded, t5_beam, t5_assisted, t5_deepcopy)
    ),
    *((whisper, case) for case in (whisper_greedy, whisper_beam)),
]
NAMES = [case.__name__ for _, case in CASES]


@pytest.mark.parametrize(("build", "case"), [(t5, t5_beam), (whisper, whisper_greedy)])
def test_striped_quickly(striped_client: Client, build: Build, case: Case) -> None:
    """Some of the matrix."""
    check(striped_client, build(), case, "attend", spread=2, page_size=2)


@pytest.mark.parametrize("encoder_layers", [2, 4])
def test_layers_are_those_of_the_decoder(client: Client, encoder_layers: int) -> None:
    """A config that counts the encoder's layers too says how many the decoder has."""
    cache = RemoteCache(client, t5(encoder_layers=encoder_layers).config)
    assert len(cache) == len(cache.is_sliding) == 3
    cache.early_initialization(1, 4, 16, torch.float32, torch.device("cpu"))
    assert cache.is_initialized


def test_a_model_that_makes_its_own_cross_attention_cache(client: Client) -> None:
    """T5Gemma replaces it by one of the same class, which finds the default client."""
    model = t5gemma()
    ids, mask = padded([9, 4])
    model.set_attn_implementation("eager")
    wanted = generate(
        model,
        EncoderDecoderCache(DynamicCache(), DynamicCache()),
        input_ids=ids,
        attention_mask=mask,
    )
    use_remote_attention(model)
    config = model.config
    use(client)
    try:
        cache = EncoderDecoderCache(RemoteCache(config=config, mode="attend"), RemoteCache())
        ours = generate(model, cache, input_ids=ids, attention_mask=mask)
        assert isinstance(cache.cross_attention_cache, RemoteCache)
        assert cache.cross_attention_cache.get_seq_length() == ids.shape[1]
    finally:
        use(None)
    assert difference(ours, tuple(wanted)) is None


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::kvservice_client.hf.RemoteFetchWarning")
@pytest.mark.parametrize("mode", ["attend", "auto", "fetch"])
@pytest.mark.parametrize(("build", "case"), CASES, ids=NAMES)
def test_encoder_decoder(grpc_client: Client, build: Build, case: Case, mode: str) -> None:
    """Both caches are remote; the cross-attention cache is built without a config."""
    check(grpc_client, build(), case, mode)


@pytest.mark.matrix
@pytest.mark.parametrize(("build", "case"), CASES, ids=NAMES)
def test_striped_encoder_decoder(striped_client: Client, build: Build, case: Case) -> None:
    """What the encoder said is on both workers."""
    check(striped_client, build(), case, "attend", spread=2, page_size=2)


def check(client: Client, model: Any, case: Case, mode: str, **options: int) -> None:
    """Compare a case with local caches and with remote ones."""
    model.set_attn_implementation("sdpa")
    config = model.config
    local = case(model, lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()))
    if mode == "attend":
        use_remote_attention(model)

    def new_cache() -> EncoderDecoderCache:
        return EncoderDecoderCache(
            RemoteCache(client, config, mode=mode, **options),
            RemoteCache(client, mode=mode, **options),
        )

    assert difference(case(model, new_cache), tuple(local)) is None
