"""Generation with remote caches is token for token that with a local cache.

On a manager and two workers in processes of their own, by gRPC. After each run no page is in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvservice_client import Client
from kvservice_client.hf import RemoteCache
from tests.e2e import compare, models, scenarios


@dataclass(frozen=True)
class Way:
    """How a cache is used. Striped: the prompt is shared by both workers, in small pages."""

    mode: str
    spread: int = 1
    page_size: int = 16

    def check(self, client: Client, family: str, scenario: str) -> None:
        """Run a scenario and compare it with a local cache's."""

        def new_cache(config: Any) -> RemoteCache:
            return RemoteCache(
                client, config, mode=self.mode, spread=self.spread, page_size=self.page_size
            )

        results = compare.run(family, scenario, self.mode, new_cache)
        compare.assert_same(family, scenario, results)


ATTEND, AUTO, FETCH = Way("attend"), Way("auto"), Way("fetch")
STRIPED = Way("attend", spread=2, page_size=2)  # the shortest prompt has three tokens

QUICK_FAMILIES = ("llama", "gpt2", "qwen3", "phi3")
QUICK_SCENARIOS = (
    *("greedy", "leftpad_b3", "beam4", "sampling_3"),
    *("prompt_lookup", "assisted_twin", "three_turns", "deepcopy_prefix"),
)

# What transformers' own convolution layers cannot do, so that there is nothing to compare with.
NOT_WITH_CONVOLUTIONS = ("rows_by_hand_b1", "rows_by_hand_b2", "reset_reuse")
MATRIX = [
    *((family, scenario) for family in models.FAMILIES for scenario in scenarios.ALL),
    *(
        (family, scenario)
        for family in models.SPECIAL
        for scenario in scenarios.ALL
        if scenario != "early_initialization"  # their layers differ in shape
        and not (family == "lfm2" and scenario in NOT_WITH_CONVOLUTIONS)
    ),
]


@pytest.mark.parametrize("scenario", QUICK_SCENARIOS)
@pytest.mark.parametrize("family", QUICK_FAMILIES)
def test_striped_quickly(striped_client: Client, family: str, scenario: str) -> None:
    """Some of the matrix, with the prompt on both workers."""
    STRIPED.check(striped_client, family, scenario)


@pytest.mark.parametrize("family", sorted({**models.FAMILIES, **models.SPECIAL}))
def test_every_family_quickly(striped_client: Client, family: str) -> None:
    """Three turns of a padded batch, past the windows, with every kind of layer there is."""
    STRIPED.check(striped_client, family, "three_turns_padded")


@pytest.mark.parametrize("scenario", QUICK_SCENARIOS)
def test_by_lane(lane_service: Client, striped_client: Client, scenario: str) -> None:
    """Some of the matrix as users have it: attention by lane, all else by gRPC."""
    STRIPED.check(lane_service, "mistral", scenario)


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "scenario"), MATRIX)
def test_attend(grpc_client: Client, family: str, scenario: str) -> None:
    """Attention where the pages are, each session on one of the two workers."""
    ATTEND.check(grpc_client, family, scenario)


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "scenario"), MATRIX)
def test_striped(striped_client: Client, family: str, scenario: str) -> None:
    """The prompt on both workers, partials merged."""
    STRIPED.check(striped_client, family, scenario)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::kvservice_client.hf.RemoteFetchWarning")
@pytest.mark.parametrize("way", [AUTO, FETCH], ids=lambda way: way.mode)
@pytest.mark.parametrize(("family", "scenario"), MATRIX)
def test_fetched(grpc_client: Client, family: str, scenario: str, way: Way) -> None:
    """The model's own attention, on keys and values that come back from the service."""
    way.check(grpc_client, family, scenario)
