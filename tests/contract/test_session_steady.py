"""The short way through a decoding step: the same outputs, and only where nothing differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvservice.core.errors import InvalidRequest, OutOfOrder, SessionNotFound
from kvservice.embedded import embedded
from kvservice_client import Client, Session
from kvservice_client._attend import Attender

LAYERS = 3


@pytest.fixture
def client() -> Iterator[Client]:
    with embedded(num_workers=1, memory_bytes=1 << 26) as client:
        yield client
        assert not [pool for each in client.page_stats() for pool in each.pools if pool.used_pages]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attempt at the short way served."""
    outcomes: list[bool] = []
    original = Attender.attend_steadily

    def noting(self: Attender, *args: Any) -> Any:
        out = original(self, *args)
        outcomes.append(out is not None)
        return out

    monkeypatch.setattr(Attender, "attend_steadily", noting)
    return outcomes


def tensors(kind: str, count: int, seed: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((2, heads, count, 8), np.float32) for heads in (4, 2, 2)]
    if kind == "numpy":
        return arrays[0], arrays[1], arrays[2]
    dtype = {"torch": torch.float32, "bfloat16": torch.bfloat16}[kind]
    q, k, v = (torch.from_numpy(array).to(dtype) for array in arrays)
    # As models have them: heads before tokens, in memory the other way round.
    return q.transpose(1, 2).contiguous().transpose(1, 2), k, v


def decode(session: Session, kind: str, **options: Any) -> list[Any]:
    """Take a prompt and three steps; return all outputs."""
    outs = []
    for step, count in enumerate([5, 1, 1, 1]):
        for layer in range(LAYERS):
            outs.append(session.attend(layer, *tensors(kind, count, 9 * step + layer), **options))
    return outs


@pytest.mark.parametrize("kind", ["numpy", "torch", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"window": 3, "scale": 1.0}, {"softcap": 2.0}])
def test_the_same_outputs_as_the_long_way(
    client: Client,
    served: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: dict[str, Any],
) -> None:
    """Of the same kind, dtype and values."""
    with client.open(num_rows=2) as session:
        short = decode(session, kind, **options)
    assert served.count(True) == 3 * (LAYERS - 1)
    monkeypatch.setattr(Attender, "is_steady", lambda self, padding: False)
    with client.open(num_rows=2) as session:
        long = decode(session, kind, **options)
    for ours, theirs in zip(short, long, strict=True):
        assert type(ours) is type(theirs)
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert bool((ours == theirs).all())


@pytest.mark.parametrize("kind", ["numpy", "torch", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"mask": "full", "scale": 0.5}])
def test_several_extents_give_the_long_ways_bits(
    served: list[bool], monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    """A prompt on three workers, with padding; only the tail stores, and all are asked."""
    padding = np.zeros((2, 48), np.bool_)
    padding[0, :5] = padding[1, :18] = True

    def decode_spread(client: Client) -> list[Any]:
        with client.open(num_rows=2, spread=3) as session:
            outs = []
            for step, count in enumerate([48, 1, 1, 1]):
                news = np.zeros((2, count), np.bool_)
                if step == 2:
                    news[0] = True  # a row that has ended
                for layer in range(LAYERS):
                    outs.append(
                        session.attend(
                            layer,
                            *tensors(kind, count, 9 * step + layer),
                            padding=padding if step == 0 else news,
                            **options,
                        )
                    )
            assert len(session._mirror.extents) == 3
            return outs

    with embedded(num_workers=3, memory_bytes=1 << 24) as client:
        short = decode_spread(client)
        assert served.count(True) == 3 * (LAYERS - 1)
        monkeypatch.setattr(Attender, "is_steady", lambda self, padding: False)
        long = decode_spread(client)
    for ours, theirs in zip(short, long, strict=True):
        assert type(ours) is type(theirs)
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert bool((ours == theirs).all())


def test_extents_that_change_end_the_short_way(served: list[bool]) -> None:
    """A cut that empties the tail: the one before it takes the tokens again."""
    with (
        embedded(num_workers=2, memory_bytes=1 << 24) as client,
        client.open(num_rows=2, spread=2) as session,
    ):
        for layer in range(LAYERS):
            session.attend(layer, *tensors("numpy", 32, layer))
        session.attend(0, *tensors("numpy", 1, 0))
        session.roll_back()
        session.pop(22)
        assert len(session._mirror.extents) == 1
        for _ in range(2):
            for layer in range(LAYERS):
                session.attend(layer, *tensors("numpy", 1, layer))
        assert session.lengths(1) == (12, 12)
        assert served == [False, True, True] * 2


def test_saying_where_tokens_go_keeps_the_short_way(client: Client, served: list[bool]) -> None:
    """Caches that count say so with every layer; a wrong place is refused as ever."""
    with client.open(num_rows=2) as session:
        for layer in range(LAYERS):
            session.attend(layer, *tensors("numpy", 4, layer), pos=0)
        for layer in range(LAYERS):
            session.attend(layer, *tensors("numpy", 1, layer), pos=4)
        assert served.count(True) == LAYERS - 1
        session.attend(0, *tensors("numpy", 1, 0), pos=5)
        for wrong in (4, 6, [5, 4]):
            with pytest.raises(OutOfOrder):
                session.attend(1, *tensors("numpy", 1, 1), pos=wrong)
        assert session.lengths(1) == (5, 5)


def test_padding_that_is_the_steps_own_keeps_the_short_way(
    client: Client, served: list[bool]
) -> None:
    """Caches hand the same array to every layer."""
    with client.open(num_rows=2) as session:
        padding = np.zeros((2, 4), np.bool_)
        padding[0, :2] = True
        for layer in range(LAYERS):
            session.attend(layer, *tensors("numpy", 4, layer), padding=padding)
        padding = np.concatenate([padding, np.zeros((2, 1), np.bool_)], axis=1)
        for layer in range(LAYERS):
            session.attend(layer, *tensors("numpy", 1, layer), padding=padding)
    assert served.count(True) == LAYERS - 1


def ready(client: Client) -> Session:
    """Return a session whose second step has had its first layer."""
    session = client.open(num_rows=2)
    for layer in range(LAYERS):
        session.attend(layer, *tensors("numpy", 4, layer))
    session.attend(0, *tensors("numpy", 1, 0))
    return session


@pytest.mark.parametrize(
    "change",
    [
        {"window": 2},
        {"mask": "full"},
        {"softcap": 1.0},
        {"sinks": np.ones(4, np.float32)},
        {"bias": np.ones((1, 1, 1, 5), np.float32)},
        {"pos": [4, 4]},
        {"mask": np.ones((1, 1, 1, 5), np.bool_)},
    ],
)
def test_what_is_asked_otherwise_goes_the_long_way(
    client: Client, served: list[bool], change: dict[str, Any]
) -> None:
    """Legal, but not as the step's first layer asked; the others still go the short way."""
    session = ready(client)
    session.attend(1, *tensors("numpy", 1, 1), **change)
    assert not any(served)
    session.attend(2, *tensors("numpy", 1, 2))
    session.release()


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(client: Client, scale: float) -> None:
    """Nothing was sent; the layer can still be asked."""
    session = ready(client)
    with pytest.raises(InvalidRequest, match="scale"):
        session.attend(1, *tensors("numpy", 1, 1), scale=scale)
    session.attend(1, *tensors("numpy", 1, 1))
    session.release()


def test_wrong_shapes_and_layers_are_refused_as_ever(client: Client) -> None:
    """The long way finds the words."""
    session = ready(client)
    q, k, v = tensors("numpy", 1, 1)
    with pytest.raises(InvalidRequest):
        session.attend(1, q, k[:, :1], v)
    with pytest.raises(InvalidRequest):
        session.attend(-1, q, k, v)
    with pytest.raises(OutOfOrder):
        session.attend(1, q, k, v, pos=9)
    session.attend(1, q, k, v)
    session.release()


def test_every_structural_change_ends_the_short_way(client: Client, served: list[bool]) -> None:
    """Lengths, rows and epoch are others; outputs are those of what is left."""
    session = ready(client)
    session.roll_back()
    session.select([1, 1])
    for layer in range(LAYERS):
        out = session.attend(layer, *tensors("numpy", 1, layer))
        assert np.isfinite(out).all()
    assert session.lengths(0) == (5, 5)
    session.pop(1)
    for layer in range(LAYERS):
        session.attend(layer, *tensors("numpy", 1, layer))
    assert session.lengths(2) == (5, 5)
    session.release()


def test_errors_of_the_service_surface(client: Client) -> None:
    """The session has gone while a step was under way."""
    session = ready(client)
    twin = client.attach(session.id)
    twin.release()
    with pytest.raises(SessionNotFound):
        session.attend(1, *tensors("numpy", 1, 1))
