"""Rows with their own numbers of new tokens, between a rectangle and the packed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import InvalidRequest
from kvservice_client._arrays import from_host, to_host

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Which tokens of [num_rows, heads, num_tokens, dim] are real: in each row the first ones.

    Fields:
        rows, tokens: i64[num_packed]: where each real token is, row by row.
    """

    num_rows: int
    num_tokens: int
    rows: Ints
    tokens: Ints

    @classmethod
    def of(cls, counts: Sequence[int], num_rows: int, num_tokens: int) -> Ragged | None:
        """Return the form that `counts` describe; None: all tokens are real.

        Raises:
            InvalidRequest: Not one count for each row, from 0 to num_tokens, with one above 0.
        """
        fits = len(counts) == num_rows and all(0 <= count <= num_tokens for count in counts)
        if not fits or not any(counts):
            raise InvalidRequest(
                f"counts must be from 0 to {num_tokens} for each of {num_rows} rows, one of them "
                f"above 0, got {list(counts)}"
            )
        if all(count == num_tokens for count in counts):
            return None
        rows = np.repeat(np.arange(num_rows), counts)
        tokens = np.concatenate([np.arange(count) for count in counts])
        return cls(num_rows, num_tokens, rows, tokens)

    def pack(self, array: Any, name: str) -> Any:
        """Return the real tokens, [num_packed, heads, dim], as the same kind of array."""
        shape = np.shape(array)
        if len(shape) != 4 or (shape[0], shape[2]) != (self.num_rows, self.num_tokens):
            raise InvalidRequest(
                f"{name} must be [{self.num_rows} rows, heads, {self.num_tokens} tokens, dim], "
                f"got {list(shape)}"
            )
        return array[self.rows, :, self.tokens]  # numpy, torch and JAX agree on this

    def unpack(self, packed: Any) -> Any:
        """Return [num_rows, heads, num_tokens, dim], with zeros for the other tokens."""
        host = to_host(packed, "out")
        _, heads, dim = host.shape
        data = np.zeros((self.num_rows, self.num_tokens, heads, dim), host.data.dtype)
        data[self.rows, self.tokens] = host.data
        return from_host(data.transpose(0, 2, 1, 3), host.dtype, host.kind)
