"""Arrays of torch, numpy and JAX, to the wire and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.errors import InvalidRequest
from kvservice.core.geometry import DType
from kvservice_client import _arrays as arrays

BF16 = ml_dtypes.bfloat16
VALUES = np.array([[1.5, -2.25, 0.0], [3.0, -0.5, 7.0]])  # exact in every float dtype

MADE = {
    "numpy float32": (VALUES.astype(np.float32), DType.FLOAT32),
    "numpy float16": (VALUES.astype(np.float16), DType.FLOAT16),
    "numpy float64": (VALUES, DType.FLOAT64),
    "numpy bfloat16": (VALUES.astype(BF16), DType.BFLOAT16),
    "numpy bool": (VALUES > 0, DType.BOOL),
    "torch float32": (torch.tensor(VALUES, dtype=torch.float32), DType.FLOAT32),
    "torch float16": (torch.tensor(VALUES, dtype=torch.float16), DType.FLOAT16),
    "torch bfloat16": (torch.tensor(VALUES, dtype=torch.bfloat16), DType.BFLOAT16),
    "torch float64": (torch.tensor(VALUES), DType.FLOAT64),
    "torch bool": (torch.tensor(VALUES > 0), DType.BOOL),
    "jax float32": (jnp.asarray(VALUES, jnp.float32), DType.FLOAT32),
    "jax bfloat16": (jnp.asarray(VALUES, jnp.bfloat16), DType.BFLOAT16),
}


@pytest.mark.parametrize(("array", "dtype"), MADE.values(), ids=MADE.keys())
def test_round_trip(array: Any, dtype: DType) -> None:
    """Kind, dtype, shape, device and every value return; the bytes are row-major."""
    tensor = arrays.to_host_tensor(array, "x")
    assert (tensor.dtype, tensor.shape) == (dtype, (2, 3))
    assert len(tensor.data) == tensor.num_bytes
    back = arrays.from_host_tensor(tensor, arrays.kind_of(array, "x"))
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert getattr(back, "device", None) == getattr(array, "device", None)
    assert bool((back == array).all())


@pytest.mark.parametrize("name", ["numpy bfloat16", "torch bfloat16", "jax bfloat16"])
def test_bfloat16_travels_as_its_bits(name: str) -> None:
    """All libraries send the upper half of the float32."""
    expected = (VALUES.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    assert arrays.to_host_tensor(MADE[name][0], "x").data == expected


def test_host_memory_is_not_copied_on_the_way_in() -> None:
    """What is in host memory already is looked at where it is."""
    plain, tensor = np.zeros((2, 3), np.float32), torch.zeros(2, 3, dtype=torch.bfloat16)
    assert np.shares_memory(arrays.to_host(plain, "x").data, plain)
    host = arrays.to_host(tensor, "x").data
    host[0, 0] = 0x3F80
    assert tensor[0, 0] == 1.0


def test_what_returns_can_be_written_and_is_nobodys() -> None:
    """A result aliases nothing, and its owner may change it."""
    source = np.ones((2, 3), np.float32)
    tensor = arrays.to_host_tensor(source, "x")
    for kind in (arrays.Kind(), arrays.kind_of(torch.zeros(1), "x")):
        back = arrays.from_host_tensor(tensor, kind)
        back[0, 0] = 5.0
    assert source[0, 0] == 1.0


def test_strides_and_gradients_do_not_matter() -> None:
    """Transposed, reversed, sliced and differentiable arrays send the values that they show."""
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for view in (base.transpose(2, 0, 1), base[::-1], base[:, 1:, ::2]):
        assert arrays.to_host_tensor(view, "x").data == view.copy().tobytes()
    tensor = torch.from_numpy(base).permute(2, 0, 1).requires_grad_()
    assert arrays.to_host_tensor(tensor, "x").data == base.transpose(2, 0, 1).copy().tobytes()
    parameter = torch.nn.Parameter(torch.ones(2))
    assert arrays.to_host_tensor(parameter, "x").data == np.ones(2, np.float32).tobytes()


def test_other_devices_are_kept() -> None:
    """An array on a device of its own returns to that device."""
    device = jax.devices()[0]
    array = jax.device_put(jnp.ones((2, 2)), device)
    back = arrays.from_host_tensor(arrays.to_host_tensor(array, "x"), arrays.kind_of(array, "x"))
    assert back.devices() == {device}


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0, 2.0],
        None,
        np.zeros(3, np.int64),
        np.zeros(3, ">f4"),
        np.zeros(3, object),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        jnp.zeros(3, jnp.int32),
    ],
)
def test_other_things_are_refused(wrong: Any) -> None:
    """What cannot travel is named, with what it was."""
    with pytest.raises(InvalidRequest, match=r"^sinks must be"):
        arrays.to_host(wrong, "sinks")


def test_integers_and_bools_are_not_taken_for_each_other() -> None:
    """Masks are bool and positions are integers, whatever library they come from."""
    assert arrays.to_bool([[True, False]], "padding").tolist() == [[True, False]]
    assert arrays.to_bool(torch.tensor([True]), "padding").tolist() == [True]
    for wrong in ([[1, 0]], np.zeros(2), torch.zeros(2)):
        with pytest.raises(InvalidRequest, match=r"^padding must be"):
            arrays.to_bool(wrong, "padding")
    assert arrays.to_ints(torch.tensor([1, 2]), "rows") == [1, 2]
    assert arrays.to_ints(np.array([1, 2]), "rows") == [1, 2]
    assert arrays.to_ints((1, 2), "rows") == [1, 2]
    for wrong in ([1.0], [True], np.zeros(2), torch.zeros(2)):
        with pytest.raises(InvalidRequest, match=r"^rows must be"):
            arrays.to_ints(wrong, "rows")


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_rounding_to_bfloat16_is_torchs(values: list[float]) -> None:
    """Without torch, float32 is rounded to bfloat16 as torch rounds it, and read back exactly."""
    data = np.array(values, np.float32)
    expected = torch.from_numpy(data.copy()).to(torch.bfloat16)
    bits = arrays.float32_to_bits16(data)
    assert np.array_equal(bits.view(np.int16), expected.view(torch.int16).numpy())
    assert np.array_equal(arrays.bits16_to_float32(bits), expected.float().numpy())


def test_rounding_keeps_nan() -> None:
    """NaN stays NaN, also where rounding would carry into the exponent."""
    nans = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(arrays.bits16_to_float32(arrays.float32_to_bits16(nans))).all()
