"""Tensors on the wire: what is accepted comes out as it went in, everything else is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.errors import InvalidRequest
from kvservice.core.geometry import DType, HostTensor
from kvservice.v1 import types_pb2
from kvservice.wire import tensors
from kvservice.wire.tensors import from_numpy, tensor_from_pb, tensor_to_pb, to_numpy

ALL = list(DType)
SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=8).map(tuple)


@given(dtype=st.sampled_from(ALL), shape=SHAPES, seed=st.integers(0, 99))
def test_tensor_survives_the_wire(dtype: DType, shape: tuple[int, ...], seed: int) -> None:
    """Host tensor to protobuf, through bytes, and back: equal in everything."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape)) * dtype.itemsize
    data = rng.integers(0, 2 if dtype is DType.BOOL else 256, size, np.uint8).tobytes()
    sent = HostTensor(dtype, shape, data)
    received = tensor_from_pb(
        types_pb2.Tensor.FromString(tensor_to_pb(sent).SerializeToString()), "t"
    )
    assert received == sent


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", "?"])
def test_numpy_array_comes_back(dtype: str) -> None:
    """An array keeps type, shape and values, without a copy where it is contiguous."""
    array = (np.arange(24).reshape(2, 3, 4) % 2).astype(dtype)
    tensor = from_numpy(array)
    back = to_numpy(tensor)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    assert np.shares_memory(back, array)


def test_strided_and_big_endian_arrays_are_made_plain() -> None:
    """What travels is row-major and little-endian, whatever the array was."""
    array = np.arange(12, dtype=">f4").reshape(3, 4).T
    back = to_numpy(from_numpy(array))
    assert back.dtype == np.dtype("<f4")
    assert np.array_equal(back, array)


def test_bfloat16_travels_as_its_bits() -> None:
    """numpy has no bfloat16: its bits are uint16, and it must be said that they are meant."""
    bits = np.array([[0x3F80, 0xC000]], np.uint16)
    tensor = from_numpy(bits, DType.BFLOAT16)
    assert tensor.dtype is DType.BFLOAT16
    assert np.array_equal(to_numpy(tensor), bits)
    with pytest.raises(InvalidRequest, match="uint16"):
        from_numpy(bits)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros(2, np.int64), None),
        (np.zeros(2, np.float32), DType.FLOAT16),
        (np.zeros(2, np.float32), DType.BFLOAT16),
        (np.zeros(2, np.complex64), None),
    ],
)
def test_other_element_types_are_refused(array: np.ndarray, dtype: DType | None) -> None:
    """Nothing is cast silently."""
    with pytest.raises(InvalidRequest):
        from_numpy(array, dtype)


def pb(dtype: int = 1, shape: tuple[int, ...] = (2,), data: bytes = bytes(8)) -> types_pb2.Tensor:
    return types_pb2.Tensor(dtype=dtype, shape=shape, data=data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (pb(dtype=0), "dtype"),
        (pb(dtype=77), "dtype"),
        (pb(shape=()), "dimensions"),
        (pb(shape=(1,) * 9, data=bytes(4)), "dimensions"),
        (pb(shape=(-1, -2)), "0 to"),
        (pb(shape=(3,)), "takes 12 bytes, got 8"),
        (pb(shape=(2,), data=bytes(9)), "takes 8 bytes, got 9"),
        (pb(shape=(1 << 40, 1 << 40)), "0 to"),
        (pb(shape=(1 << 31,)), "0 to"),
        (pb(shape=((1 << 31) - 1, (1 << 31) - 1, 4)), "takes"),
        (pb(shape=(2, 0)), "takes 0 bytes, got 8"),
        (pb(shape=(0, 1 << 30), data=b""), "no elements"),
        (pb(dtype=5, shape=(3,), data=b"\0\1\2"), "0 or 1"),
    ],
)
def test_malformed_tensor_is_refused(tensor: types_pb2.Tensor, text: str) -> None:
    """Shape, dtype and payload must agree before anybody makes room for them."""
    with pytest.raises(InvalidRequest, match=text) as caught:
        tensor_from_pb(tensor, "q")
    assert "q" in str(caught.value)


def test_rank_is_checked_where_it_is_known() -> None:
    """A tensor of another rank than its field has is refused by number."""
    assert tensor_from_pb(pb(), "q", 1).shape == (2,)
    with pytest.raises(InvalidRequest, match="must have 3 dimensions, got 1"):
        tensor_from_pb(pb(), "q", 3)


def test_empty_tensor_is_a_tensor() -> None:
    """A call may carry no tokens; the other dimensions still say what they would be."""
    tensor = tensor_from_pb(pb(shape=(0, 8, 128), data=b""), "k", 3)
    assert to_numpy(tensor).shape == (0, 8, 128)


def test_every_dtype_has_a_number() -> None:
    """Each element type of the core travels, and comes back as itself."""
    for dtype in DType:
        assert tensors.dtype_from_pb(tensors.dtype_to_pb(dtype), "t") is dtype
