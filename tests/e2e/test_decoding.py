"""Generation with remote caches is token for token that with a local cache."""

from __future__ import annotations

from typing import Any

import pytest

from kvservice_client import Client
from kvservice_client.hf import RemoteCache
from tests.e2e import compare, models, scenarios
from tests.e2e.conftest import assert_no_pages

QUICK_FAMILIES = ("llama", "gpt2", "qwen3", "phi3")
QUICK_SCENARIOS = (
    *("greedy", "leftpad_b3", "beam4", "sampling_3"),
    *("prompt_lookup", "assisted_twin", "three_turns", "deepcopy_prefix"),
)


@pytest.mark.parametrize("scenario", QUICK_SCENARIOS)
@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_over_grpc(cluster: Client, family: str, scenario: str) -> None:
    """The prompt shared by two worker processes; keys and values never come back."""

    def new_cache(config: Any) -> RemoteCache:
        return RemoteCache(cluster, config, mode="attend", spread=2, page_size=4)

    before = [worker.appended_tokens for worker in cluster.page_stats()]
    compare.assert_same(family, scenario, compare.run(family, scenario, "attend", new_cache))
    after = [worker.appended_tokens for worker in cluster.page_stats()]
    assert all(map(int.__lt__, before, after)), "a worker has had nothing to do"
    assert_no_pages(cluster)


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", scenarios.ALL)
@pytest.mark.parametrize("family", models.FAMILIES)
def test_attend(embedded_service: Client, family: str, scenario: str) -> None:
    """Attention on one worker."""

    def new_cache(config: Any) -> RemoteCache:
        return RemoteCache(embedded_service, config, mode="attend")

    compare.assert_same(family, scenario, compare.run(family, scenario, "attend", new_cache))
    assert_no_pages(embedded_service)


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", scenarios.ALL)
@pytest.mark.parametrize("family", models.FAMILIES)
def test_attend_spread(embedded_three: Client, family: str, scenario: str) -> None:
    """The prompt on three workers in small pages, partials merged."""

    def new_cache(config: Any) -> RemoteCache:
        return RemoteCache(embedded_three, config, mode="attend", spread=3, page_size=4)

    compare.assert_same(family, scenario, compare.run(family, scenario, "attend", new_cache))
    assert_no_pages(embedded_three)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::kvservice_client.hf.RemoteFetchWarning")
@pytest.mark.parametrize("mode", ["auto", "fetch"])
@pytest.mark.parametrize("scenario", scenarios.ALL)
@pytest.mark.parametrize("family", models.FAMILIES)
def test_fetched(embedded_service: Client, family: str, scenario: str, mode: str) -> None:
    """The model's own attention, on keys and values that come back from the service."""

    def new_cache(config: Any) -> RemoteCache:
        return RemoteCache(embedded_service, config, mode=mode)

    compare.assert_same(family, scenario, compare.run(family, scenario, mode, new_cache))
    assert_no_pages(embedded_service)


# What transformers' own convolution layers cannot do, so that there is nothing to compare with.
_NOT_WITH_CONVOLUTIONS = ("rows_by_hand_b1", "rows_by_hand_b2", "reset_reuse")
SPECIAL = [
    (family, scenario)
    for family in models.SPECIAL
    for scenario in scenarios.ALL
    if scenario != "early_initialization"  # their layers differ in shape
    and not (family == "lfm2" and scenario in _NOT_WITH_CONVOLUTIONS)
]


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "scenario"), SPECIAL)
def test_special_families(embedded_service: Client, family: str, scenario: str) -> None:
    """Shared keys and values, local states beside remote layers, chunks."""

    def new_cache(config: Any) -> RemoteCache:
        return RemoteCache(embedded_service, config, mode="attend")

    compare.assert_same(family, scenario, compare.run(family, scenario, "attend", new_cache))
    assert_no_pages(embedded_service)
