"""What the tensor caches ask of their arguments. Every check comes before any change."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from kvservice.core.errors import GeometryMismatch, InvalidRequest
from kvservice_client._arrays import check_dense


def as_int(value: Any, name: str) -> int:
    """Return an integer.

    Raises:
        InvalidRequest: It is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidRequest(f"{name} must be an integer, got {value!r}") from None


def check_states(k: Any, v: Any) -> None:
    """Check that k and v are new tokens of one layer: [rows, kv_heads, tokens, dim].

    Raises:
        InvalidRequest: They are not dense tensors of four dimensions.
        GeometryMismatch: They differ in anything but the dim.
    """
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
            got = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InvalidRequest(
                f"{name} must be a tensor [rows, kv_heads, tokens, dim], got {got}"
            )
        check_dense(tensor, name)
    if k.shape[:3] != v.shape[:3]:
        raise GeometryMismatch(
            f"k and v must have the same rows, heads and tokens, got k {list(k.shape)} and "
            f"v {list(v.shape)}"
        )
    if k.dtype != v.dtype or k.device != v.device:
        raise GeometryMismatch(
            f"k and v must be alike, got {k.dtype} on {k.device} and {v.dtype} on {v.device}"
        )


def check_fits(name: str, new: torch.Tensor, stored: torch.Tensor) -> None:
    """Check that new tokens can follow those of a layer: all but their number is the same.

    Raises:
        GeometryMismatch: They cannot.
    """
    rows, heads, _, dim = stored.shape
    if (new.shape[0], new.shape[1], new.shape[3]) != (rows, heads, dim):
        raise GeometryMismatch(
            f"{name} must be [{rows} rows, {heads} heads, tokens, {dim}] as what is stored, got "
            f"{list(new.shape)}"
        )
    if new.dtype != stored.dtype or new.device != stored.device:
        raise GeometryMismatch(
            f"{name} must be {stored.dtype} on {stored.device} as what is stored, got "
            f"{new.dtype} on {new.device}"
        )


def check_rows(k: torch.Tensor, stored: Sequence[torch.Tensor]) -> None:
    """Check that a new layer has the rows that the other layers have.

    Raises:
        GeometryMismatch: It has not.
    """
    for other in stored[:1]:
        if k.shape[0] != other.shape[0]:
            raise GeometryMismatch(
                f"the cache holds {other.shape[0]} rows, got a batch of {k.shape[0]}; reset() it "
                "to begin with another batch"
            )


def find_layer(layer_idx: Any, num_layers: int) -> int:
    """Return the number of a layer, which need not be there yet. Negative: from the end.

    Raises:
        IndexError: Negative, and there are not so many.
        InvalidRequest: Not an integer.
    """
    layer = as_int(layer_idx, "layer_idx")
    if layer < 0:
        layer += num_layers
        if layer < 0:
            raise IndexError(f"layer_idx {layer_idx} of {num_layers} layers")
    return layer


def read_rows(indices: Any, num_rows: int) -> list[int]:
    """Return row numbers as a list. Negative ones count from the end.

    Args:
        indices: int32 or int64 [rows], a tensor.

    Raises:
        InvalidRequest: Not such a tensor, or a row that does not exist.
    """
    fits = (
        isinstance(indices, torch.Tensor)
        and indices.ndim == 1
        and indices.dtype in (torch.int32, torch.int64)
    )
    if not fits:
        raise InvalidRequest(
            f"row indices must be a tensor of int32 or int64, of one dimension, got {indices!r}"
        )
    rows: list[int] = indices.tolist()
    for row in rows:
        if not -num_rows <= row < num_rows:
            raise InvalidRequest(f"row index out of range: there are {num_rows} rows, got {row}")
    return [row % num_rows for row in rows]
