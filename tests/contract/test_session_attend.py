"""Attention through a session equals dense attention in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from kvservice_client import Client, DType, LayerGeometry
from kvservice_client.testing import DenseSession
from tests.driving import Driver, close


def test_prompt_and_decode(client: Client) -> None:
    """A prompt and many single tokens, over page boundaries."""
    driver = Driver.open(client, page_size=4)
    driver.step(6)
    for _ in range(15):
        driver.step()
    driver.check_stored()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "k_dim", "v_dim"), [(4, 4, 8, 8), (6, 1, 16, 8), (6, 2, 3, 5)]
)
def test_shapes(client: Client, num_heads: int, num_kv_heads: int, k_dim: int, v_dim: int) -> None:
    """MHA, MQA and GQA; keys and values of different, and odd, dims."""
    driver = Driver.open(
        client, num_heads=num_heads, num_kv_heads=num_kv_heads, k_dim=k_dim, v_dim=v_dim
    )
    driver.step(5)
    driver.step()


def test_stated_layers(client: Client) -> None:
    """A session that states its layers does the same, each layer with its own shape."""
    layers = [LayerGeometry(2, 8, 8, DType.FLOAT32)] * 2
    driver = Driver.open(client, layers=layers, windows=[None, 4], reserve_tokens=16)
    assert driver.session.num_layers == 2
    assert driver.session.windows == (None, 4)
    driver.step(5, windows=[None, 4])
    driver.step(windows=[None, 4])


def test_prompt_in_pieces(client: Client) -> None:
    """A prompt in several steps is the prompt."""
    driver = Driver.open(client, page_size=4)
    for count in (3, 1, 7, 2):
        driver.step(count)


def test_ragged_rows(client: Client) -> None:
    """Rows with their own numbers of new tokens, none included, packed."""
    driver = Driver.open(client, num_rows=3, page_size=4)
    for counts in ([5, 1, 9], [1, 0, 1], [0, 6, 1], [1, 1, 1]):
        driver.ragged_step(counts)
    assert driver.session.lengths(0) == (7, 8, 12)
    driver.step(2)
    driver.check_stored()


def test_ragged_equals_rectangular(client: Client) -> None:
    """The packed form is a matter of layout alone."""
    packed, plain = Driver.open(client), Driver.open(client)
    q, k, v = plain.tokens(3)
    out = plain.attend(0, q, k, v)
    q, k, v = (np.concatenate(list(array.swapaxes(1, 2))) for array in (q, k, v))
    packed_out = packed.attend(0, q, k, v, counts=[3, 3])
    assert np.array_equal(packed_out.reshape(2, 3, 4, 8).swapaxes(1, 2), out)


@pytest.mark.parametrize("longest", [False, True])
def test_left_padding(client: Client, longest: bool) -> None:
    """Leading padding is never seen and its queries return 0, said either way."""
    driver = Driver.open(client, num_rows=3, page_size=4)
    padding = np.zeros((3, 9), np.bool_)
    padding[0, :2] = padding[1, :6] = True
    outs = driver.step(9, padding=padding)
    assert not outs[0][1, :, :6].any()
    for length in range(10, 16):
        now = np.zeros((3, length), np.bool_)
        now[:, :9] = padding
        driver.step(padding=now if longest else None)
    driver.check_stored()


def test_padding_in_the_middle(client: Client) -> None:
    """Padding between turns, and positions that turn into padding later."""
    driver = Driver.open(client, num_rows=2, page_size=4)
    driver.step(5, padding=np.array([[False] * 5, [True] * 2 + [False] * 3]))
    driver.step(6, padding=np.array([[False] * 3 + [True] * 3, [False] * 6]))
    driver.step(2)
    whole = np.zeros((2, 14), np.bool_)
    whole[1, :2] = whole[0, 8:11] = True
    whole[1, 5:8] = True  # new
    driver.step(padding=whole)
    driver.step()


def test_ragged_padding(client: Client) -> None:
    """Padding of packed tokens."""
    driver = Driver.open(client, num_rows=2, page_size=4)
    driver.ragged_step([2, 5], padding=np.array([True, False, True, True, False, False, True]))
    driver.ragged_step([1, 1])


def test_rows_of_padding_alone(client: Client) -> None:
    """A row whose tokens are all padding returns 0, and goes on afterwards."""
    driver = Driver.open(client, page_size=4)
    driver.step(8, padding=np.array([[False] * 8, [True] * 8]))
    driver.step()


@pytest.mark.parametrize("window", [1, 3, 4, 5, 16])
def test_windows_with_eviction(client: Client, window: int) -> None:
    """Layers with a window see the newest positions, while older pages go back."""
    windows = [window, None]
    driver = Driver.open(client, page_size=4, windows=windows)
    driver.step(7, windows=windows)
    for _ in range(20):
        driver.step(windows=windows)
    driver.step(6, windows=windows)


def test_eviction_frees_pages(client: Client) -> None:
    """With every layer windowed, a session does not grow."""
    layers = [LayerGeometry(2, 8, 8, DType.FLOAT32)] * 2
    driver = Driver.open(client, num_rows=1, page_size=4, layers=layers, windows=[4, 4])
    for _ in range(40):
        driver.step(windows=[4, 4])
    (stats,) = client.page_stats()
    assert sum(pool.used_pages for pool in stats.pools) <= 3


def test_retain_keeps_what_is_to_be_popped(client: Client) -> None:
    """`retain` tokens beyond the window can be popped; None keeps all."""
    for retain, pop in ((5, 5), (None, 20)):
        driver = Driver.open(client, page_size=4, windows=[4, 4])
        driver.session.retain = retain
        for _ in range(25):
            driver.step(windows=[4, 4])
        driver.pop(pop)
        driver.step(3, windows=[4, 4])


@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_chunks(client: Client, chunk: int) -> None:
    """Chunked attention, counted from the end of leading padding."""
    driver = Driver.open(client, page_size=4)
    padding = np.zeros((2, 6), np.bool_)
    padding[1, :3] = True
    driver.step(6, mask="chunk", chunk=chunk, padding=padding)
    for _ in range(8):
        driver.step(mask="chunk", chunk=chunk)


def test_full_mask(client: Client) -> None:
    """Every position is seen, later ones of the same call included."""
    driver = Driver.open(client)
    driver.step(5, mask="full")
    driver.step(2, mask="full")


@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_dense_masks(client: Client, shape: tuple[int, int]) -> None:
    """A bool or float array says what is seen; its last column is the newest position."""
    driver = Driver.open(client, page_size=4)
    driver.step(6)
    seen = driver.rng.random((*shape, 3, 9)) < 0.6
    driver.step(3, mask=seen)
    driver.step(1, mask=np.where(seen[:, :, :1, :4], 0.5, -np.inf).astype(np.float32))
    driver.step(1, mask=seen[:, :, :1], column_starts=[1, 2])
    driver.step(1, mask=seen[:, :, :1], column_starts=[-3, 0])


def test_scores(client: Client) -> None:
    """Scale, softcap, bias and sinks, each alone and all at once."""
    driver = Driver.open(client)
    bias = driver.rng.standard_normal((1, 4, 3, 5)).astype(np.float32)
    sinks = driver.rng.standard_normal(4).astype(np.float32)
    options: list[dict[str, Any]] = [
        {"scale": 0.3},
        {"softcap": 2.0},
        {"bias": bias},
        {"sinks": sinks},
        {"scale": 2.0, "softcap": 5.0, "bias": bias, "sinks": sinks},
    ]
    driver.step(2)
    for chosen in options:
        driver.step(3, **chosen)


def test_queries_alone(client: Client) -> None:
    """Attending without new tokens changes nothing, and may be repeated."""
    driver = Driver.open(client, num_layers=1)
    driver.step(6)
    first = driver.query(0)
    q = driver.random(4, 2, 8)
    assert np.array_equal(driver.session.attend(0, q), driver.session.attend(0, q))
    driver.query(0, 3, query_positions=[2, 3])
    driver.step()
    assert first.shape == (2, 4, 1, 8)


def test_cross_attention(client: Client) -> None:
    """Keys are stored once; queries of another sequence see them all, but for padding."""
    driver = Driver.open(client, num_layers=1, page_size=4)
    q, k, v = driver.tokens(7)
    padding = np.zeros((2, 7), np.bool_)
    padding[1, 4:] = True  # an encoder pads on the right
    driver.session.write(0, k, v, padding=padding)
    driver.dense.attend(0, q, k, v, mask="full", padding=padding)
    for count in (3, 1, 1):
        out = driver.query(0, count, mask="full")
        assert np.abs(out).min(axis=(1, 2, 3)).all()


def test_cross_attention_in_one_call(client: Client) -> None:
    """The first call stores the keys and asks for other tokens than they are."""
    session = client.open(num_rows=2)
    driver = Driver(session, num_layers=1)
    _, k, v = driver.tokens(7)
    q = driver.random(4, 3, 8)
    padding = np.zeros((2, 7), np.bool_)
    padding[1, 4:] = True
    out = session.attend(0, q, k, v, mask="full", padding=padding)
    dense = DenseSession(2)
    dense.attend(0, driver.random(4, 7, 8), k, v, mask="full", padding=padding)
    close(out, dense.attend(0, q, mask="full"))


def test_fewer_queries_than_tokens(client: Client) -> None:
    """Queries are the newest positions where there are fewer of them than tokens."""
    session = client.open(num_rows=2)
    driver = Driver(session, num_layers=1)
    q, k, v = driver.tokens(6)
    expected = driver.dense.attend(0, q, k, v)
    close(session.attend(0, q[:, :, -2:], k, v), expected[:, :, -2:])


def test_repeated_attend(client: Client) -> None:
    """The same call again, at the same position, stores nothing new and answers the same."""
    driver = Driver.open(client, num_layers=1)
    driver.step(5)
    q, k, v = driver.tokens(2)
    out = driver.attend(0, q, k, v)
    again = driver.session.attend(0, q, k, v, pos=5)
    assert np.array_equal(out, again)
    assert driver.session.lengths(0) == (7, 7)
    driver.step()


def test_repeat_with_other_tokens(client: Client) -> None:
    """A repeat replaces what its layer has appended in this step."""
    driver = Driver.open(client, num_layers=1)
    driver.step(3)
    q, k, v = driver.tokens(1)
    driver.session.attend(0, q, v, k)
    close(driver.session.attend(0, q, k, v, pos=[3, 3]), driver.dense.attend(0, q, k, v))
    driver.step()


def test_a_row_is_alone(client: Client) -> None:
    """A row's output does not depend on its neighbours, nor on its padding."""
    driver = Driver.open(client, num_rows=1, num_layers=1)
    q, k, v = driver.tokens(5)
    alone = driver.attend(0, q, k, v)
    both = client.open(num_rows=2)
    padded = np.zeros((2, 4, 9, 8), np.float32)
    padded_kv = np.full((2, 2, 2, 9, 8), 7.0, np.float32)
    padded[1:, :, 4:], padded_kv[0, 1:, :, 4:], padded_kv[1, 1:, :, 4:] = q, k, v
    padding = np.zeros((2, 9), np.bool_)
    padding[1, :4] = True
    out = both.attend(0, padded, *padded_kv, padding=padding)
    close(out[1:, :, 4:], alone.astype(np.float64), tolerance=1e-6)


def as_kind(kind: str, array: Any) -> Any:
    library, dtype = kind.split()
    if library == "torch":
        return torch.from_numpy(array.copy()).to(getattr(torch, dtype))
    if library == "jax":
        return jnp.asarray(array).astype(dtype)
    return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize(
    "kind",
    [
        "numpy float16", "numpy bfloat16", "torch float32", "torch float16", "torch bfloat16",
        "jax float32", "jax bfloat16",
    ],
)  # fmt: skip
def test_kinds_of_arrays(client: Client, kind: str) -> None:
    """Every library and dtype in, the same out, as exact as the dtype."""
    driver = Driver.open(client, num_layers=1)
    session, dense = driver.session, DenseSession(2)
    for count in (5, 1):
        made = [as_kind(kind, array) for array in driver.tokens(count)]
        out = session.attend(0, *made)
        assert type(out) is type(made[0])
        assert out.dtype == made[0].dtype
        values = [np.asarray(_float64(array)) for array in (*made, out)]
        tolerance = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}[kind.split()[1]]
        close(values[3], dense.attend(0, *values[:3]), tolerance=tolerance)
    k, v = session.read(0)
    assert type(k) is type(v) is type(made[0])
    expected, _ = dense.read(0, 1)
    assert np.array_equal(np.asarray(_float64(k))[1], expected)


def _float64(array: Any) -> Any:
    if isinstance(array, torch.Tensor):
        return array.double().numpy()
    return np.asarray(array.astype(np.float32) if isinstance(array, jax.Array) else array).astype(
        np.float64
    )
