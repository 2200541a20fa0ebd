"""What a model's config asks of a cache, and whether its attention can run on the service."""

from __future__ import annotations

from typing import Any, Final

from kvservice_client._hf_attention import remote_attention
from kvservice_client._hf_compat import (
    LOCAL_LAYER_CLASSES,
    AttentionInterface,
    AttentionMaskInterface,
    get_layer_types_and_kwargs,
)
from kvservice_client._hf_layer import RemoteLayer, RemoteSlidingLayer
from kvservice_client._hf_mask import remote_mask
from kvservice_client._hf_session import SharedSession

ATTENTION: Final = "kvservice"

REMOTE_TYPES: Final = ("full_attention", "sliding_attention", "chunked_attention")
# Layers without keys and values, or with those of another layer: they stay objects of transformers.
LOCAL_TYPES: Final = ("linear_attention", "conv", "dummy", "moe", "mlp")

AttentionInterface.register(ATTENTION, remote_attention)
AttentionMaskInterface.register(ATTENTION, remote_mask)
# Without a mask function under the same name, transformers drops causality and padding silently.
assert ATTENTION in AttentionInterface().valid_keys()
assert ATTENTION in AttentionMaskInterface().valid_keys()


def use_remote_attention(model: Any) -> Any:
    """Set the attention of a model's decoder to 'kvservice', or refuse with the reason.

    Encoders and other towers of a composite model keep theirs; where the whole model has one
    configuration, its other attention is computed locally, as before.

    Returns:
        The model, for chaining.

    Raises:
        ValueError: The model's attention cannot run on the service. The model is unchanged.
    """
    name = type(model).__name__
    fetch = "use RemoteCache(mode='fetch') with the model as it is"
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} does not go through transformers' AttentionInterface: {fetch}")
    if model.training:
        raise ValueError(
            f"{name} is in training mode, and remote attention is inference only: "
            "call model.eval() first"
        )
    text = model.config.get_text_config(decoder=True)
    types, _ = get_layer_types_and_kwargs(text)
    if unknown := sorted(set(types) - {*REMOTE_TYPES, *LOCAL_TYPES}):
        raise ValueError(
            f"{name} has layers of type {', '.join(unknown)}, whose attention needs more than keys "
            "and values"
        )
    if getattr(text, "kv_lora_rank", None):
        raise ValueError(
            f"{name} caches latents and expands them after the cache (MLA), so that its attention "
            f"cannot run where they are: {fetch}"
        )
    part = next(
        (key for key in model.config.sub_configs if getattr(model.config, key) is text), None
    )

    def set_attention(name: str) -> None:
        model.set_attn_implementation({part: name} if part is not None else name)

    before = text._attn_implementation
    set_attention(ATTENTION)
    if model.get_decoder().config._attn_implementation != ATTENTION:
        set_attention(before)
        raise ValueError(f"{name} did not take the attention implementation {ATTENTION!r}")
    return model


def layers_of(config: Any, shared: SharedSession) -> list[Any]:
    """Return the layers that a config asks for, in order."""
    types, all_options = _decoder_layers(config.get_text_config(decoder=True))
    if unknown := sorted(set(types) - {*REMOTE_TYPES, *LOCAL_TYPES}):
        raise ValueError(
            f"layers of type {', '.join(unknown)} have a state that a RemoteCache cannot store"
        )
    if not set(types) & set(REMOTE_TYPES):
        raise ValueError("no layer of this config has keys and values to store")
    return [
        remote_layer(shared, options.get("sliding_window"))
        if layer_type in REMOTE_TYPES
        else LOCAL_LAYER_CLASSES[layer_type](**options)
        for layer_type, options in zip(types, all_options, strict=False)
    ]


def _decoder_layers(config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return type and options of each layer of a decoder.

    T5's config is one for encoder and decoder, and `num_hidden_layers` is the encoder's number.
    """
    types, options = get_layer_types_and_kwargs(config)
    num_layers = getattr(config, "num_decoder_layers", None)
    if not config.is_encoder_decoder or num_layers is None:
        return types, options
    return [types[0]] * num_layers, [options[0]] * num_layers


def remote_layer(shared: SharedSession, window: int | None) -> RemoteLayer:
    return RemoteLayer(shared) if window is None else RemoteSlidingLayer(shared, window)
