"""Drives a session and its oracle with the same calls, and compares what they return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice_client import Client, Session
from kvservice_client.testing import DenseSession

Array = npt.NDArray[np.float32]

TOLERANCE = 2e-5  # float32 against float64


class Driver:
    """A session of some layers, and a DenseSession that is told the same.

    Every attention output is compared, so a test only says what is to happen.
    """

    def __init__(
        self,
        session: Session,
        *,
        num_layers: int = 2,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        k_dim: int = 8,
        v_dim: int = 8,
        seed: int = 0,
        dense: DenseSession | None = None,
    ) -> None:
        self.session = session
        self.dense = dense if dense is not None else DenseSession(session.num_rows)
        self.num_layers = num_layers
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.k_dim, self.v_dim = k_dim, v_dim
        self.rng = np.random.default_rng(seed)

    @classmethod
    def open(cls, client: Client, *, num_rows: int = 2, seed: int = 0, **options: Any) -> Driver:
        """Open a session; options for the driver and for `Client.open`."""
        mine = ("num_layers", "num_heads", "num_kv_heads", "k_dim", "v_dim")
        shapes = {name: options.pop(name) for name in mine if name in options}
        return cls(client.open(num_rows=num_rows, **options), seed=seed, **shapes)

    def random(self, heads: int, tokens: int, dim: int, *, packed: bool = False) -> Array:
        rows = self.session.num_rows
        shape = (tokens, heads, dim) if packed else (rows, heads, tokens, dim)
        return self.rng.standard_normal(shape).astype(np.float32)

    def tokens(self, count: int, *, packed: bool = False) -> tuple[Array, Array, Array]:
        """Return random q, k, v of new tokens."""
        return (
            self.random(self.num_heads, count, self.k_dim, packed=packed),
            self.random(self.num_kv_heads, count, self.k_dim, packed=packed),
            self.random(self.num_kv_heads, count, self.v_dim, packed=packed),
        )

    def step(
        self,
        count: int = 1,
        *,
        layers: Sequence[int] | None = None,
        windows: Sequence[int | None] | None = None,
        **options: Any,
    ) -> list[Array]:
        """Feed new tokens to all layers, comparing each output."""
        outs = []
        for layer in range(self.num_layers) if layers is None else layers:
            if windows is not None:
                options["window"] = windows[layer]
            outs.append(self.attend(layer, *self.tokens(count), **options))
        return outs

    def ragged_step(self, counts: Sequence[int], **options: Any) -> None:
        """Feed each row its own number of new tokens, packed."""
        for layer in range(self.num_layers):
            self.attend(layer, *self.tokens(sum(counts), packed=True), counts=counts, **options)

    def attend(self, layer: int, q: Array, k: Any = None, v: Any = None, **options: Any) -> Array:
        """Make one call on both, and compare."""
        out = self.session.attend(layer, q, k, v, **options)
        expected = self.dense.attend(layer, q, k, v, **options)
        close(out, expected)
        assert self.session.lengths(layer) == self.dense.lengths(layer)
        return out

    def query(self, layer: int, count: int = 1, **options: Any) -> Array:
        """Attend without new tokens, and compare."""
        return self.attend(layer, self.random(self.num_heads, count, self.k_dim), **options)

    def pop(self, *args: Any, **options: Any) -> None:
        self.session.pop(*args, **options)
        self.dense.pop(*args, **options)

    def select(self, rows: Sequence[int]) -> None:
        self.session.select(rows)
        self.dense.select(rows)

    def reset(self) -> None:
        self.session.reset()
        self.dense.reset()

    def fork(self, token_count: int | None = None) -> Driver:
        child = self.dense.fork()
        if token_count is not None:
            child.pop(keep=token_count)
        return Driver(
            self.session.fork(token_count),
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            seed=int(self.rng.integers(2**32)),
            dense=child,
        )

    def check_stored(self) -> None:
        """Compare what is stored, where it is no padding."""
        for layer in range(self.num_layers):
            lengths = self.dense.lengths(layer)
            if not any(lengths):
                continue
            k, v = self.session.read(layer)
            for row, length in enumerate(lengths):
                real = [p for p in range(length) if p not in self.dense.padding[row]]
                for got, expected in zip((k, v), self.dense.read(layer, row), strict=True):
                    assert np.array_equal(got[row][:, real], expected[:, real].astype(np.float32))


def close(out: Any, expected: Any, *, tolerance: float = TOLERANCE) -> None:
    """Assert that an output is the expected one, within what float32 can do."""
    out = np.asarray(out, np.float64)
    assert out.shape == expected.shape
    worst = np.abs(out - expected).max(initial=0.0)
    assert worst <= tolerance, f"off by {worst:.2e}, at {np.abs(out - expected).argmax()}"
