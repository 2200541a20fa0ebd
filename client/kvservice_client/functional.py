"""The immutable form: one value for each layer, and every update returns a new one.

Arrays are torch's, numpy's or JAX's; what returns is of the kind that came in last. `attend` is
for JAX decoders that attend where the pages are, under `jit` and `scan` too.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvservice.core.errors import GeometryMismatch, InvalidRequest, PositionOutOfRange
from kvservice_client._array_ops import as_kind, int32_scalar, read_dtype, whose
from kvservice_client._arrays import to_host
from kvservice_client._client import Client, current_client
from kvservice_client._session import Session
from kvservice_client._versions import Content, Form, Given, Stretch

__all__ = [
    "KVLayerCache",
    "attend",
    "init_decoder_kv_caches",
    "init_decoder_kv_caches_from_config",
    "init_kv_layer_cache",
    "update_kv_layer_cache",
]


@dataclass(frozen=True)
class KVLayerCache:
    """Keys and values of one layer, up to a capacity, and how many positions of them are valid.

    A value: it is never changed, and what is in it stays, whatever is made of it. Its tokens are
    on the service, in pages that it shares with the values that were made of it and that it was
    made of. They are freed when the last of these is gone. Of a chain of values the newest has its
    arrays at hand, and outlives its pages; those of an older one are read from the service when
    they are looked at.

    May also be made of arrays directly, or by `dataclasses.replace`. Nothing is checked then.

    Attributes:
        keys, values: [rows, kv_heads, positions, dim]; zeros where nothing was written.
        length: int32 scalar array: valid positions, of all rows.
    """

    keys: Any
    values: Any
    length: Any
    _content: Content | None = field(default=None, repr=False, compare=False, kw_only=True)

    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        # Keys and values are then asked of the content; see `__getattr__`.
        content = self._content
        if content is None:
            return
        if not content.is_shown_by(self.keys, self.values):
            content = _given(content.form.client, self.keys, self.values)
        object.__setattr__(self, "_content", content)
        del self.__dict__["keys"], self.__dict__["values"]

    def __getattr__(self, name: str) -> Any:
        content = self.__dict__.get("_content")
        if content is None or name not in ("keys", "values"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return content.arrays()[name == "values"]

    def __deepcopy__(self, memo: dict[int, Any]) -> KVLayerCache:
        """Return itself: it never changes."""
        return self

    @property
    def max_len(self) -> int:
        """Positions, written or not."""
        content = self._content
        return int(self.keys.shape[2]) if content is None else content.form.shape[2]


def init_kv_layer_cache(
    batch_size: int,
    num_kv_heads: int,
    head_dim: int,
    max_len: int,
    dtype: Any,
    *,
    client: Client | None = None,
    replicas: int = 1,
) -> KVLayerCache:
    """Return an empty cache of one layer. Nothing is sent before its first tokens.

    Args:
        max_len: In tokens.
        dtype: Of keys and values; what is stored later is cast to it. Of torch or JAX: until
            then the arrays are theirs too, else numpy's.
        client: Where sessions are opened. None: the default one.
        replicas: Copies of every page.

    Raises:
        InvalidRequest: Not such a dtype, or a negative size.
        RuntimeError: No client is given, and none is set.
    """
    sizes = {
        "batch_size": batch_size,
        "num_kv_heads": num_kv_heads,
        "max_len": max_len,
        "head_dim": head_dim,
    }
    rows, heads, positions, dim = (_as_int(size, name) for name, size in sizes.items())
    if min(rows, heads, positions, dim) < 0:
        raise InvalidRequest(f"sizes must be at least 0, got {sizes}")
    element, kind = read_dtype(dtype)
    client = current_client() if client is None else client
    form = Form(client, (rows, heads, positions, dim), element, replicas)
    return _version(Content(form, kind), 0)


def update_kv_layer_cache(
    cache: KVLayerCache, keys_new: Any, values_new: Any, start: Any
) -> KVLayerCache:
    """Return a cache with tokens written at positions from `start` on.

    Its length is where they end, also if that is less than before, or behind positions that were
    never written. All else is as in `cache`, which does not change.

    Args:
        keys_new, values_new: [rows, kv_heads, new tokens, dim], with 0 tokens or more.
        start: An integer, not traced.

    Raises:
        PositionOutOfRange: They do not fit into [0, max_len).
        GeometryMismatch: Another shape. Nothing is broadcast.
        InvalidRequest: No arrays; `start` is no integer.
        OutOfPages: There is no room for them.
    """
    content = cache._content
    if content is None:
        content = _given(current_client(), cache.keys, cache.values)
    rows, heads, max_len, dim = content.form.shape
    first, kind = _as_int(start, "start"), whose(keys_new, "keys")
    whose(values_new, "values")
    shape = tuple(keys_new.shape)
    if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (rows, heads, dim):
        raise GeometryMismatch(
            f"keys must be [{rows} rows, {heads} heads, tokens, {dim}], got {list(shape)}"
        )
    if tuple(values_new.shape) != shape:
        raise GeometryMismatch(
            f"values must be {list(shape)} as the keys, got {list(values_new.shape)}"
        )
    end = first + shape[2]
    if first < 0:
        raise PositionOutOfRange(f"start must be at least 0, got {first}")
    if end > max_len:
        raise PositionOutOfRange(
            f"KV cache overflow: end={end} exceeds max_len={max_len}", end=end, max_len=max_len
        )
    if 0 not in shape:
        dtype = content.form.dtype
        keys, values = as_kind(keys_new, dtype, kind), as_kind(values_new, dtype, kind)
        content = content.written(first, keys, values, kind)
    return _version(content, end)


def init_decoder_kv_caches(
    *,
    num_layers: int,
    batch_size: int,
    num_kv_heads: int,
    head_dim: int,
    max_len: int,
    dtype: Any,
    client: Client | None = None,
    replicas: int = 1,
) -> tuple[KVLayerCache, ...]:
    """Return an empty cache for each layer; see `init_kv_layer_cache`."""
    options: dict[str, Any] = {"client": client, "replicas": replicas}
    return tuple(
        init_kv_layer_cache(batch_size, num_kv_heads, head_dim, max_len, dtype, **options)
        for _ in range(num_layers)
    )


def init_decoder_kv_caches_from_config(
    config: Any,
    *,
    batch_size: int,
    max_len: int | None = None,
    dtype: Any = "float32",
    client: Client | None = None,
    replicas: int = 1,
) -> tuple[KVLayerCache, ...]:
    """Return an empty cache for each layer that a decoder's config names.

    Args:
        config: With `num_layers`, `d_model`, `num_heads`, `num_kv_heads` (None or 0: as many as
            heads), `max_len`, and `kv_cache_max_len` (None or 0: `max_len`).
        max_len: None: what the config says.
    """
    if max_len is None:
        max_len = config.kv_cache_max_len or config.max_len
    return init_decoder_kv_caches(
        num_layers=config.num_layers,
        batch_size=batch_size,
        num_kv_heads=config.num_kv_heads or config.num_heads,
        head_dim=config.d_model // config.num_heads,
        max_len=max_len,
        dtype=dtype,
        client=client,
        replicas=replicas,
    )


def attend(
    session: Session,
    layer: Any,
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    v_dim: int | None = None,
    **options: Any,
) -> Any:
    """Attend where the pages are, as `Session.attend`; also inside `jax.jit` and `jax.lax.scan`.

    There, the call is made when the compiled function runs, once, in its place among all such
    calls (an ordered `io_callback`). A compiled function is tied to the session, which is not an
    argument of it. Neither gradients nor `vmap` go through it.

    Args:
        layer: An int, or an integer scalar array, such as the counter of a scan over layers.
        q, k, v: As `Session.attend` takes them, one shape for each compilation; nothing is
            compiled again as the sequence grows.
        v_dim: Dim of the values stored before, where `v` is None. None: q's dim.
        **options: As of `Session.attend`. Arrays among them may be traced.

    Returns:
        [rows, heads, tokens, v_dim], or packed as q is, in q's dtype.

    Raises:
        KVServiceError: In compiled functions JAX makes an error of its own of it, which has ours
            in its text, and raises it where the result is waited for.
    """
    arrays = {name: value for name, value in options.items() if _is_array(value)}
    plain = {name: value for name, value in options.items() if name not in arrays}
    if not any(map(_is_traced, (layer, q, k, v, *arrays.values()))):
        return session.attend(_as_int(layer, "layer"), q, k, v, **options)
    import jax
    from jax.experimental import io_callback

    def call(layer: Any, q: Any, k: Any, v: Any, arrays: Any) -> Any:
        given = {name: np.asarray(value) for name, value in arrays.items()}
        q, k, v = (None if one is None else np.asarray(one) for one in (q, k, v))
        return session.attend(int(layer), q, k, v, **{**plain, **given})

    out_dim = v.shape[-1] if v is not None else v_dim or q.shape[-1]
    out = jax.ShapeDtypeStruct((*q.shape[:-1], out_dim), q.dtype)
    return io_callback(call, out, layer, q, k, v, arrays, ordered=True)


def _version(content: Content, length: int) -> KVLayerCache:
    """Return a value whose keys and values are looked up when they are asked for."""
    cache = object.__new__(KVLayerCache)
    object.__setattr__(cache, "length", int32_scalar(length, content.kind))
    object.__setattr__(cache, "_content", content)
    return cache


def _given(client: Client, keys: Any, values: Any) -> Content:
    """Return a version made of arrays.

    Raises:
        InvalidRequest: They do not make one.
    """
    host_keys, host_values = to_host(keys, "keys"), to_host(values, "values")
    alike = host_keys.shape == host_values.shape and host_keys.dtype is host_values.dtype
    if not alike or len(host_keys.shape) != 4 or not host_keys.dtype.is_float:
        raise InvalidRequest(
            "keys and values must be alike, of a float dtype and [rows, heads, positions, dim], "
            f"got {list(host_keys.shape)} and {list(host_values.shape)}"
        )
    rows, heads, positions, dim = host_keys.shape
    form = Form(client, (rows, heads, positions, dim), host_keys.dtype)
    everything = Stretch(Given(keys, values, host_keys.dtype), 0, positions)
    return Content(form, host_keys.kind, None, [everything], (keys, values))


def _as_int(value: Any, name: str) -> int:
    if _is_traced(value):
        return operator.index(value)  # JAX's own error says more
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidRequest(f"{name} must be an integer, got {value!r}") from None


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_traced(value: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)
