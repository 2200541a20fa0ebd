"""Each thing that could be wrong is broken on purpose: the scenario named must notice.

If one of these fails, a scenario proves less than it is thought to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvservice.core.errors import KVServiceError
from kvservice.embedded import embedded
from kvservice_client import Client, _attend
from kvservice_client._hf_session import SharedSession
from kvservice_client._merge import Partial
from kvservice_client.hf import RemoteCache
from kvservice_workers import long_way
from kvservice_workers.attention import dispatch
from kvservice_workers.attention.batch import AttentionParams, PagedBatch
from kvservice_workers.page_table import PageNeed, PageTable
from kvservice_workers.provision import Provision
from tests.e2e import compare
from tests.e2e.conftest import assert_no_pages

Patch = pytest.MonkeyPatch


def _wrap_kernel(patch: Patch, change: Callable[..., Any]) -> None:
    """Let `change(attend, q, k, v, batch, params)` answer all attention of the workers."""
    real = dispatch.attend
    patch.setattr(dispatch, "attend", lambda *arguments: change(real, *arguments))
    patch.setattr(long_way, "settle", lambda *arguments, **options: None)  # the way around it


def _with_params(patch: Patch, **changes: Any) -> None:
    def change(
        real: Any, q: Any, k: Any, v: Any, batch: PagedBatch, params: AttentionParams
    ) -> Any:
        return real(q, k, v, batch, replace(params, **changes))

    _wrap_kernel(patch, change)


def ignore_padding(patch: Patch) -> None:
    patch.setattr(SharedSession, "unseen_padding", lambda self, mask, length: None)


def ignore_window(patch: Patch) -> None:
    _with_params(patch, window=None)


def drop_sinks(patch: Patch) -> None:
    _with_params(patch, sinks=None)


def drop_softcap(patch: Patch) -> None:
    _with_params(patch, softcap=None)


def wrong_head_order(patch: Patch) -> None:
    """Query head h reads KV head h % num_kv_heads."""

    def change(real: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        heads = torch.arange(q.shape[1]).reshape(-1, k.shape[1]).T.flatten()
        out, lse = real(q[:, heads].contiguous(), k, v, *rest)
        back = torch.argsort(heads)
        return type(real(q, k, v, *rest))(out[:, back], lse[:, back])

    _wrap_kernel(patch, change)


def merge_without_lse(patch: Patch) -> None:
    real = _attend.merge

    def merge(partials: Sequence[Partial], *rest: Any) -> Any:
        return real([_with_flat_lse(partial) for partial in partials], *rest)

    patch.setattr(_attend, "merge", merge)


def _with_flat_lse(partial: Partial) -> Partial:
    return replace(partial, lse=partial.lse * 0.0)


def truncate_nothing(patch: Patch) -> None:
    patch.setattr(RemoteCache, "crop", lambda self, tokens_to_remove: None)


def evict_one_page_more(patch: Patch) -> None:
    real = Provision.add_eviction

    def add_eviction(self: Provision, group: Any, row: int, num_pages: int) -> None:
        real(self, group, row, min(num_pages + 1, len(group.tables[row].entries)))

    patch.setattr(Provision, "add_eviction", add_eviction)


def write_to_shared_pages(patch: Patch) -> None:
    real = PageTable.need

    def need(self: PageTable, indices: Any) -> PageNeed:
        return PageNeed(real(self, indices).new, [])

    patch.setattr(PageTable, "need", need)


def reorder_nothing(patch: Patch) -> None:
    patch.setattr(RemoteCache, "reorder_cache", lambda self, beam_idx: None)


def copy_by_reference(patch: Patch) -> None:
    """The copy of a cache writes to the original's session."""
    patch.setattr(SharedSession, "fork", lambda self: self)


def repeat_rows_as_blocks(patch: Patch) -> None:
    """Repeat as `repeat` does, not as `repeat_interleave`."""

    def repeat(self: RemoteCache, repeats: int) -> None:
        self._select(list(range(self.batch_size)) * repeats)

    patch.setattr(RemoteCache, "batch_repeat_interleave", repeat)


@dataclass(frozen=True)
class Control:
    """A mutation, and what must notice it."""

    mutate: Callable[[Patch], None]
    family: str
    scenario: str
    spread: int = 1
    refused: bool = False  # the service refuses a call, before any text could differ


CONTROLS = [
    Control(ignore_padding, "llama", "leftpad_b3"),
    Control(ignore_window, "mistral", "greedy"),
    Control(merge_without_lse, "llama", "greedy", spread=3),
    Control(drop_sinks, "gpt-oss", "greedy"),
    Control(drop_softcap, "gemma2", "greedy"),
    Control(wrong_head_order, "llama", "greedy"),
    Control(truncate_nothing, "llama", "assisted_weak"),
    Control(evict_one_page_more, "mistral", "greedy", refused=True),
    Control(write_to_shared_pages, "llama", "beam4"),
    Control(write_to_shared_pages, "llama", "deepcopy_interleaved"),
    Control(reorder_nothing, "llama", "beam4"),
    Control(copy_by_reference, "llama", "deepcopy_prefix", refused=True),
    Control(repeat_rows_as_blocks, "llama", "rows_by_hand_b2"),
]
NAMES = [f"{control.mutate.__name__} -> {control.scenario}" for control in CONTROLS]


def _difference(client: Client, control: Control) -> str | None:
    def new_cache(config: Any) -> RemoteCache:
        return RemoteCache(client, config, mode="attend", page_size=4, spread=control.spread)

    results = compare.run(control.family, control.scenario, "attend", new_cache)
    return compare.difference(results, compare.expected(control.family, control.scenario))


@pytest.mark.parametrize("control", CONTROLS, ids=NAMES)
def test_a_mutation_is_noticed(control: Control, monkeypatch: Patch) -> None:
    """The scenario is right, and with the mutation it is not."""
    with embedded(num_workers=control.spread) as client:
        assert _difference(client, control) is None
        assert_no_pages(client)
        control.mutate(monkeypatch)
        if control.refused:
            with pytest.raises(KVServiceError):
                _difference(client, control)
        else:
            assert _difference(client, control) is not None
