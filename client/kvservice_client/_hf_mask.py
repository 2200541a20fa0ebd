"""Masks as descriptions: what a query sees, without a [queries, keys] matrix.

The mask function registered as 'kvservice' returns a `RemoteMask`. It looks like the additive mask
that eager attention gets, and becomes one when anything computes on it; the attention function
reads the description instead, and sends that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map

from kvservice_client._hf_compat import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    sdpa_mask,
    sliding_window_overlay,
)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A mask that needs no matrix.

    Not causal: every position is seen. Causal: positions up to the query's own; with `window`
    only the newest `window` of them; with `chunk` only those of the query's chunk, counted from
    `origins[row]`.
    """

    causal: bool
    window: int | None = None
    chunk: int | None = None
    origins: torch.Tensor | None = None

    def first_seen(self, query: int) -> int:
        """Return a position below which a query at position `query` surely sees nothing."""
        reach = self.window or self.chunk
        return 0 if reach is None else max(query - reach + 1, 0)


def recognise(mask_function: Any) -> Pattern | None:
    """Return what an index mask function of transformers stands for; None if it is another one.

    Overlays are closures: they are told by the function that made them, and read by their cells.
    A renamed one is not recognised, which is slower and still right; a test notices it.
    """
    if mask_function is causal_mask_function:
        return Pattern(causal=True)
    if mask_function is bidirectional_mask_function:
        return Pattern(causal=False)
    if not _made_by(and_masks, mask_function):
        return None
    parts = _cells(mask_function).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    cells = _cells(parts[0])
    if _made_by(sliding_window_overlay, parts[0]) and isinstance(cells.get("sliding_window"), int):
        return Pattern(causal=True, window=cells["sliding_window"])
    if _made_by(chunked_overlay, parts[0]) and isinstance(cells.get("chunk_size"), int):
        return Pattern(causal=True, chunk=cells["chunk_size"], origins=cells.get("left_padding"))
    return None


def _made_by(factory: Any, function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code in factory.__code__.co_consts


def _cells(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


class RemoteMask(torch.Tensor):
    """An additive mask [rows, 1, queries, keys] without storage: only its description.

    It is a 4-d tensor of the model's float dtype, because transformers and models pass such a one
    on as it is, and may add it to scores.

    Fields:
        arguments: What transformers asked its mask function for.
        pattern: What `recognise` makes of it.
    """

    arguments: dict[str, Any]
    pattern: Pattern | None

    @staticmethod
    def __new__(cls: type[RemoteMask], arguments: dict[str, Any], dtype: torch.dtype) -> RemoteMask:
        shape = (
            arguments["batch_size"],
            1,
            arguments["q_length"],
            arguments["kv_length"],
        )
        mask: RemoteMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=arguments["device"]
        )
        mask.arguments = arguments
        mask.pattern = recognise(arguments["mask_function"])
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def kv_offset(self) -> int:
        """Position of the first key."""
        return int(self.arguments["kv_offset"])

    @property
    def q_offset(self) -> int:
        """Position of the first query."""
        return int(self.arguments["q_offset"])

    @property
    def num_tokens(self) -> int | None:
        """Tokens that the 2-d mask it was made from covers; None if there was none."""
        given = self.arguments["attention_mask"]
        return None if given is None else int(given.shape[-1])

    @cached_property
    def padding(self) -> npt.NDArray[np.bool_] | None:
        """bool[rows, tokens], true where the 2-d mask has padding; None if it has none."""
        given = self.arguments["attention_mask"]
        if given is None:
            return None
        padding = np.asarray(given.detach().to("cpu", torch.bool).logical_not().numpy())
        return padding if padding.any() else None

    @cached_property
    def seen(self) -> torch.Tensor:
        """bool[rows, 1, queries, keys], true where a query sees a key."""
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return _tensor(sdpa_mask(**{**self.arguments, **skips}))

    @cached_property
    def local(self) -> torch.Tensor | None:
        """The mask that 'sdpa' would have been given: None where it can do without."""
        mask: torch.Tensor | None = sdpa_mask(**self.arguments)
        return mask

    @cached_property
    def among_new(self) -> torch.Tensor | None:
        """bool[rows, 1, queries, queries]: what queries see of each other, where they are the
        newest tokens. None: all up to their own."""
        pattern, first, count = self.pattern, self.q_offset, int(self.arguments["q_length"])
        is_triangle = (
            pattern is not None
            and pattern.causal
            and pattern.chunk is None
            and (pattern.window is None or pattern.window >= count)
        )
        padding = self.padding
        if is_triangle and (padding is None or not padding[:, first : first + count].any()):
            return None
        columns = {"kv_offset": first, "kv_length": count, "allow_is_causal_skip": False}
        return _tensor(sdpa_mask(**{**self.arguments, **columns}))

    def additive(self) -> torch.Tensor:
        """[rows, 1, queries, keys], floats: 0 where seen, the dtype's lowest number elsewhere."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(self.seen, zero, torch.finfo(self.dtype).min)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def dense(argument: Any) -> Any:
            return argument.additive() if isinstance(argument, RemoteMask) else argument

        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RemoteMask({tuple(self.shape)}, {self.dtype}, {self.pattern})"


def _tensor(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None, "a mask that must not be skipped was skipped"
    return value


@torch.compiler.disable  # type: ignore[untyped-decorator]
def remote_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    config: object = None,
    **options: Any,
) -> RemoteMask:
    """Describe a mask. The signature is transformers' mask interface.

    Whether the lengths fit the cache is checked where the mask is used: this function also serves
    attention without any cache of ours.
    """
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "device": device,
        **options,
    }
    return RemoteMask(arguments, dtype)


@dataclass(frozen=True, slots=True)
class Seen:
    """What queries see, in the words of `Session.attend`.

    Fields:
        mask: "causal", "full", "chunk", or a dense block: bool, or floats to add to the scores.
        window, chunk: What goes with "causal" and "chunk".
        query_position: Position of the first query; the others follow it.
    """

    mask: str | torch.Tensor
    query_position: int
    window: int | None = None
    chunk: int | None = None


def describe(
    mask: torch.Tensor | None,
    *,
    first_key: int,
    num_keys: int,
    num_queries: int,
    is_causal: bool,
    window: int | None,
) -> Seen:
    """Say what a layer's queries see.

    Args:
        mask: What transformers hands to the attention function. It has the last word; without
            one, `is_causal` and `window` do.
        first_key: Position of the first key that the layer stands for, past ones included.
        num_keys: Keys from there to the newest.
        num_queries: Queries; they are the newest tokens, unless the mask is not causal.

    Raises:
        ValueError: The mask was made for other keys or queries.
    """
    length = first_key + num_keys
    newest = length - num_queries
    if mask is None:
        if is_causal:
            return Seen("causal", newest, window=window)
        # A query that is padding returns zeros, by its position. Where queries are no tokens of
        # this sequence (cross attention), none may fall on one that is.
        return Seen("full", length)
    _check_columns(mask, first_key, num_keys, num_queries)
    if not isinstance(mask, RemoteMask):
        return Seen(_block(mask, num_queries), newest)
    pattern = mask.pattern
    if pattern is None or not _fits(pattern, mask, first_key, newest):
        return Seen(mask.seen, newest)
    if not pattern.causal:
        return Seen("full", length)
    if mask.q_offset != newest:
        raise ValueError(
            f"the attention mask was made for queries from position {mask.q_offset}, but the "
            f"layer's newest {num_queries} tokens start at {newest}"
        )
    if pattern.chunk is not None:
        return Seen("chunk", newest, chunk=pattern.chunk)
    return Seen("causal", newest, window=pattern.window)


def _check_columns(mask: torch.Tensor, first_key: int, num_keys: int, num_queries: int) -> None:
    made_for = mask.kv_offset if isinstance(mask, RemoteMask) else first_key
    if mask.dim() != 4 or mask.shape[-1] != num_keys or made_for != first_key:
        raise ValueError(
            f"the attention mask {tuple(mask.shape)} is for {mask.shape[-1]} keys from position "
            f"{made_for}, but the layer has {num_keys} from position {first_key}"
        )
    if mask.shape[-2] not in (1, num_queries):
        raise ValueError(
            f"the attention mask is for {mask.shape[-2]} queries, but there are {num_queries}"
        )


def _fits(pattern: Pattern, mask: RemoteMask, first_key: int, newest: int) -> bool:
    """Whether a pattern says all: it reaches no key before the layer's first, and counts chunks
    from the end of leading padding, as workers do."""
    if pattern.first_seen(newest) < first_key:
        return False
    if pattern.origins is None:
        return True
    padding = mask.padding
    if padding is None:
        return not bool(pattern.origins.any())
    leading = np.logical_and.accumulate(padding, axis=1).sum(axis=1)
    return bool(np.array_equal(leading, pattern.origins.cpu().numpy()))


def _block(mask: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Return a dense mask as workers take it: bool or floats, one row for each query."""
    if not mask.is_floating_point():
        mask = mask.to(torch.bool)
    return mask.expand(-1, -1, num_queries, -1)
