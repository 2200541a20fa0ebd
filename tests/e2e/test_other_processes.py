"""Decoders in processes of their own: one goes on from what another has stored, or left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from kvservice_client import Client
from kvservice_client.testing import eventually
from tests.decoders import GPT
from tests.e2e import models
from tests.e2e.conftest import used_pages
from tests.e2e.decoder_process import DecoderProcess, decoder_process
from tests.e2e.scenarios import World, follow, forward
from tests.e2e.scenarios import prompt as random_prompt
from tests.processes import stored_tokens

pytestmark = pytest.mark.processes

PROMPT = random_prompt(1, 13, seed=1)
NEW = 3


def expected_tokens(family: str, new: int = NEW) -> Any:
    """Return what follows the prompt, by a local cache."""
    model = models.build(family)
    cache = transformers.DynamicCache(config=model.config)
    world = World(family, model, lambda: cache)
    tokens, _ = follow(world, cache, forward(world, PROMPT, cache), new)
    assert len(set(tokens[0].tolist())) > 1
    return tokens.tolist()


@pytest.fixture(scope="module")
def first(service_address: str) -> Iterator[DecoderProcess]:
    with decoder_process(service_address) as process:
        yield process


@pytest.fixture(scope="module")
def second(service_address: str) -> Iterator[DecoderProcess]:
    with decoder_process(service_address) as process:
        yield process


@pytest.fixture
def victim(service_address: str) -> Iterator[DecoderProcess]:
    """A process that the test kills."""
    with decoder_process(service_address) as process:
        yield process


@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_fork_from_another_process(
    first: DecoderProcess, second: DecoderProcess, grpc_client: Client, family: str, spread: int
) -> None:
    """A second process goes on from a stored prompt. It is never told the prompt: it stores only
    the tokens that it adds, and takes one page, the copy of the one that both write to."""
    wanted = expected_tokens(family)
    stored = first.do("prompt", family=family, ids=PROMPT.tolist(), spread=spread)
    pages, tokens = used_pages(grpc_client), sum(stored_tokens(grpc_client).values())
    assert pages == 4  # of 4 tokens, for 13
    job = {"family": family, "session_id": stored["session_id"], "token_count": None}
    job |= {"ids": stored["next"], "new": NEW - 1}
    branch = second.do("fork", **job)
    assert branch["found"] == PROMPT.shape[1]
    assert [stored["next"][0] + branch["tokens"][0]] == wanted
    assert used_pages(grpc_client) == pages + 1
    assert sum(stored_tokens(grpc_client).values()) == tokens + NEW
    second.do("drop")
    eventually(lambda: used_pages(grpc_client) == pages)
    assert second.do("fork", **job) == branch  # the prompt is as it was
    for process in (first, second):
        process.do("drop")


def test_fork_of_a_part_from_another_process(
    first: DecoderProcess, second: DecoderProcess, grpc_client: Client
) -> None:
    """A leading part of the prompt is enough to go on from, with the rest fed again."""
    stored = first.do("prompt", family="llama", ids=PROMPT.tolist())
    before = sum(stored_tokens(grpc_client).values())
    job = {"family": "llama", "session_id": stored["session_id"], "token_count": 10}
    branch = second.do("fork", **job, ids=PROMPT[:, 10:].tolist(), new=NEW)
    assert branch == {"found": 10, "tokens": expected_tokens("llama")}
    assert sum(stored_tokens(grpc_client).values()) == before + 3 + NEW
    for process in (first, second):
        process.do("drop")


def test_attach_after_sigkill(
    victim: DecoderProcess, second: DecoderProcess, grpc_client: Client
) -> None:
    """A decoder is killed, with one cache between two steps and one in the middle of a step, two
    layers of which are stored; another process makes the tokens that it would have made."""
    left = {"mistral": victim.do("prompt", family="mistral", ids=PROMPT.tolist())}
    left["llama"] = victim.do("stop_in_step", family="llama", ids=PROMPT.tolist(), layer=2)
    victim.kill()
    for family, said in left.items():
        job = {"family": family, "session_id": said["session_id"], "ids": said["next"]}
        heir = second.do("attach", **job, new=NEW - 1)
        assert heir["found"] == PROMPT.shape[1]
        assert [said["next"][0] + heir["tokens"][0]] == expected_tokens(family)
    second.do("drop")


def test_tensor_caches_after_sigkill(
    victim: DecoderProcess, second: DecoderProcess, grpc_client: Client
) -> None:
    """DynamicCache and StaticCache have the same content in the process that goes on."""
    ids = PROMPT.remainder(50)[:, :6].tolist()
    kinds = ("dynamic", "static")
    left = {kind: victim.do("generate", kind=kind, ids=ids, new=5) for kind in kinds}
    victim.kill()
    with torch.no_grad():
        wanted = GPT().generate(torch.tensor(ids), 12).tolist()
    for kind, said in left.items():
        job = {"session_id": said["session_id"], "ids": said["ids"]}
        assert second.do("go_on", kind=kind, **job, new=7) == {"found": 11, "ids": wanted}
    second.do("drop")
