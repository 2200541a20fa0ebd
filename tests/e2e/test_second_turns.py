"""Prompts with something before them: the decoder attends to what is new, workers to the past."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvservice.core.errors import DeadlineExceeded, KVServiceError, OutOfPages, QuotaExceeded
from kvservice_client import Client, _hf_behind
from kvservice_client._hf_past import Partial
from kvservice_client._hf_prompt import Uploads
from kvservice_client._session import Session
from kvservice_client.hf import CACHE_ARGUMENT, RemoteCache
from tests.e2e import compare, models
from tests.e2e.conftest import used_pages
from tests.e2e.scenarios import World, forward, padded, prompt
from tests.e2e.test_prompts import (
    assert_close,
    assert_stored,
    failing_backend,
    local_world,
    world_of,
)

NUM_LAYERS = models.NUM_LAYERS


class Spy:
    """Sees what is attended to in the decoder, layer by layer: rows and tokens of each query."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, int]] = []
        attend_new = _hf_behind.attend_new

        def seen(q: torch.Tensor, *arguments: Any, **how: Any) -> Partial:
            self.shapes.append((q.shape[0], q.shape[2]))
            return attend_new(q, *arguments, **how)

        monkeypatch.setattr(_hf_behind, "attend_new", seen)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def turns(world: World, cache: Any, counts: list[int], rows: int = 2) -> list[torch.Tensor]:
    """Feed so many tokens at a time; return the logits of each."""
    return [
        forward(world, prompt(rows, count, seed=40 + turn), cache)
        for turn, count in enumerate(counts)
    ]


@pytest.mark.parametrize("family", [*models.FAMILIES, *models.SPECIAL])
def test_logits_of_every_turn(client: Client, spy: Spy, family: str) -> None:
    """Longer and shorter than the window and the chunk, behind prompts, steps and each other."""
    counts = [11, 3, 1, 13, 1, 2, 9]
    world, local = world_of(client, family, prompts="local"), local_world(family)
    cache, reference = world.new_cache(), local.new_cache()
    for ours, theirs in zip(
        turns(world, cache, counts), turns(local, reference, counts), strict=True
    ):
        assert_close(ours, theirs)
    here = [tokens for _, tokens in spy.shapes]
    assert [count for count in (3, 13, 2, 9) if count in here] == [3, 13, 2, 9]
    assert len(here) % 4 == 0


@pytest.mark.parametrize(
    ("scenario", "way"),
    [
        ("three_turns", "client"),
        ("three_turns", "grpc_client"),
        ("three_turns", "lane_service"),
        ("three_turns_padded", "client"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_tokens_of_generated_turns(
    request: pytest.FixtureRequest, spy: Spy, scenario: str, family: str, way: str
) -> None:
    """Three questions with their answers give the tokens that a local cache gives."""
    service: Client = request.getfixturevalue(way)
    options = {"mode": "attend", "prompts": "local", "page_size": 4}
    results = compare.run(
        family, scenario, "attend", lambda config: RemoteCache(service, config, **options)
    )
    compare.assert_same(family, scenario, results)
    assert len(spy.shapes) == 2 * NUM_LAYERS


@pytest.mark.parametrize("scenario", ["chunked_prefill", "crop_by_hand", "deepcopy_prefix"])
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_other_prompts_behind_a_past(client: Client, spy: Spy, family: str, scenario: str) -> None:
    """A prompt in pieces, tokens behind a crop, and continuations of copies."""
    options = {"mode": "attend", "prompts": "local", "page_size": 4}
    results = compare.run(
        family, scenario, "attend", lambda config: RemoteCache(client, config, **options)
    )
    compare.assert_same(family, scenario, results)
    assert spy.shapes


def test_on_from_another_session(client: Client, spy: Spy) -> None:
    """What is fed behind a fork, of a part of it too, attends to the shared pages."""
    world, local = world_of(client, prompts="local"), local_world()
    cache, reference = world.new_cache(), local.new_cache()
    ids = prompt(2, 13)
    forward(world, ids, cache)
    branch = RemoteCache.fork_from(
        cache.session_id, 10, client=client, config=world.model.config, prompts="local"
    )
    forward(local, ids[:, :10], reference)
    more = prompt(2, 5, seed=3)
    assert_close(forward(world, more, branch), forward(local, more, reference))
    assert spy.shapes == [(2, 5)] * NUM_LAYERS
    assert_stored(branch, reference)
    assert cache._shared.opened().lengths(0) == (13, 13)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt-oss", "llama4"])
def test_padding_before_and_among_new_tokens(client: Client, spy: Spy, family: str) -> None:
    """In both prompts, at their left; later steps know of all of it."""
    world, local = world_of(client, family, prompts="local"), local_world(family)
    cache, reference = world.new_cache(), local.new_cache()
    (first, first_mask), (second, second_mask) = padded([9, 2, 6]), padded([3, 7, 5], seed=1)
    mask = first_mask
    forward(world, first, cache, attention_mask=mask)
    forward(local, first, reference, attention_mask=mask)
    mask = torch.cat([first_mask, second_mask], dim=1)
    ours = forward(world, second, cache, attention_mask=mask)
    theirs = forward(local, second, reference, attention_mask=mask)
    assert_close(ours[second_mask.bool()], theirs[second_mask.bool()])
    assert spy.shapes == [(3, 7)] * NUM_LAYERS
    session = cache._shared.opened()
    assert torch.equal(torch.from_numpy(session.padding()), ~mask.bool())
    for seed in (2, 3):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
        token = prompt(3, 1, seed=seed)
        assert_close(
            forward(world, token, cache, attention_mask=mask),
            forward(local, token, reference, attention_mask=mask),
        )


def test_older_tokens_that_turn_into_padding(client: Client, spy: Spy) -> None:
    """Only workers can take that in before they attend: such a prompt goes there as a whole."""
    world, local = world_of(client, prompts="local"), local_world()
    cache, reference = world.new_cache(), local.new_cache()
    forward(world, prompt(2, 6), cache)
    forward(local, prompt(2, 6), reference)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :3] = 0
    more = prompt(2, 4, seed=1)
    assert_close(
        forward(world, more, cache, attention_mask=mask),
        forward(local, more, reference, attention_mask=mask),
    )
    assert not spy.shapes
    assert cache._shared.opened().padding().sum() == 3


@pytest.mark.parametrize("number", [0, 2])
def test_masks_of_the_callers_own(client: Client, spy: Spy, number: int) -> None:
    """A layer whose mask is an array is attended to by workers, in a step that is local too; if it
    is the first, so are all of the step."""
    world, local = world_of(client, prompts="local"), local_world()
    results = []
    for each in (world, local):
        layer = each.model.model.layers[number].self_attn

        def masked(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            hidden, cache = kwargs["hidden_states"], kwargs[CACHE_ARGUMENT]
            total, new = cache.get_seq_length(number) + hidden.shape[1], hidden.shape[1]
            seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)
            seen[:, 1::3] = False
            return args, {**kwargs, "attention_mask": seen[None, None]}

        cache = each.new_cache()
        results.append(turns(each, cache, [7]))
        hook = layer.register_forward_pre_hook(masked, with_kwargs=True)
        results[-1] += turns(each, cache, [5, 6])
        hook.remove()
        results[-1] += turns(each, cache, [1, 4, 1])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)
    with_array = 2 * (NUM_LAYERS - 1) if number else 0
    assert len(spy.shapes) == with_array + NUM_LAYERS


@pytest.mark.parametrize("kept", [{"spread": 2}, {"replicas": 2}])
def test_a_past_on_two_workers(spy: Spy, kept: dict[str, int]) -> None:
    """Each with a part of it, or with a copy: taken over, and gone on with."""
    with failing_backend(num_workers=2) as (_, client, _failing):
        world, local = world_of(client, **kept), local_world()
        cache, reference = world.new_cache(), local.new_cache()
        turns(world, cache, [19])
        turns(local, reference, [19])
        config = world.model.config
        cache = RemoteCache.attach(cache.detach(), client=client, config=config, prompts="local")
        for ours, theirs in zip(
            turns(world, cache, [6, 1, 8]), turns(local, reference, [6, 1, 8]), strict=True
        ):
            assert_close(ours, theirs)
        assert spy.shapes == [(2, 6)] * NUM_LAYERS + [(2, 8)] * NUM_LAYERS
        assert_stored(cache, reference)


# -- the past, and nothing else


@pytest.mark.parametrize("arrives", ["at once", "at last"])
def test_queries_meet_no_new_token(
    client: Client, monkeypatch: pytest.MonkeyPatch, arrives: str
) -> None:
    """Whether keys and values of earlier layers have arrived by then, or none but the first's."""
    asked: list[tuple[int, int]] = []
    attend_partial = Session.attend_partial

    def noted(session: Session, layer: int, *arguments: Any, **how: Any) -> Any:
        asked.append((session.lengths(layer)[0], session.lengths(1)[0]))
        return attend_partial(session, layer, *arguments, **how)

    world, local = world_of(client, prompts="local"), local_world()
    cache, reference = world.new_cache(), local.new_cache()
    turns(world, cache, [9])
    turns(local, reference, [9])
    assert cache.session_id
    monkeypatch.setattr(Session, "attend_partial", noted)
    if arrives == "at once":
        monkeypatch.setattr(Uploads, "put", lambda _self, write, *_: write())
        ours = turns(world, cache, [6])
    else:
        with cache._shared.uploads.paused():
            ours = turns(world, cache, [6])
    assert_close(ours[0], turns(local, reference, [6])[0])
    later = 15 if arrives == "at once" else 9
    assert asked == [(9, 9), (9, 9), (9, later), (9, later)]
    assert_stored(cache, reference)


# -- equal rows


@pytest.mark.parametrize("order", [[0, 0, 0], [0, 0, 1], [0, 1, 0]])
def test_equal_rows_are_attended_to_and_sent_once(
    client: Client, spy: Spy, order: list[int]
) -> None:
    """Rows that were one, and get the same, are one row until they differ: a prompt in pieces, a
    row that was repeated, and a copy of either."""
    world, local = world_of(client, prompts="local"), local_world()
    cache, reference = world.new_cache(), local.new_cache()
    different = len(set(order))
    for seed, count in ((0, 8), (1, 4)):  # in pieces
        ids = prompt(2, count, seed=seed)[order]
        assert_close(forward(world, ids, cache), forward(local, ids, reference))
    assert spy.shapes == [(different, 4)] * NUM_LAYERS
    assert cache._shared.session is not None
    assert cache._shared.session.num_rows == different
    copied, copied_reference = copy.deepcopy(cache), copy.deepcopy(reference)
    for one, other in ((cache, reference), (copied, copied_reference)):
        ids = prompt(2, 3, seed=2)[order]
        assert_close(forward(world, ids, one), forward(local, ids, other))
    assert spy.shapes == [(different, 4)] * NUM_LAYERS + [(different, 3)] * 2 * NUM_LAYERS
    for seed, count in ((3, 1), (4, 5)):  # different tokens
        ids = prompt(3, count, seed=seed)
        assert_close(forward(world, ids, cache), forward(local, ids, reference))
    assert spy.shapes[-1] == (3, 5)
    assert_stored(cache, reference)
    del copied


def test_rows_that_are_repeated(client: Client, spy: Spy) -> None:
    """Behind one row's answer: all get the same question once, then go their own ways."""
    world, local = world_of(client, prompts="local"), local_world()
    cache, reference = world.new_cache(), local.new_cache()
    for each, one in ((world, cache), (local, reference)):
        turns(each, one, [7, 1], rows=1)
        one.batch_repeat_interleave(4)
    question = prompt(1, 8).expand(4, -1)
    assert_close(forward(world, question, cache), forward(local, question, reference))
    assert spy.shapes == [(1, 8)] * NUM_LAYERS
    assert cache.batch_size == 4
    assert used_pages(client) == 4
    step = prompt(4, 1, seed=5)
    assert_close(forward(world, step, cache), forward(local, step, reference))
    # They have differed by one token: the same question is another one in each row.
    assert_close(forward(world, question, cache), forward(local, question, reference))
    assert spy.shapes[NUM_LAYERS:] == [(4, 8)] * NUM_LAYERS
    assert_stored(cache, reference)


@pytest.mark.parametrize(
    ("options", "is_here"),
    [({}, True), ({"prompts": "remote"}, False), ({"reserve_tokens": 64}, False)],
)
def test_where_it_is_done_if_nothing_is_said(
    client: Client, spy: Spy, options: dict[str, Any], is_here: bool
) -> None:
    """Long prompts of equal rows here, all others on the workers; so are equal ones, if told to, or
    if room was promised for each row."""
    world, local = world_of(client, **options), local_world()
    cache, reference = world.new_cache(), local.new_cache()
    same = [prompt(1, count, seed=count).expand(3, -1) for count in (9, 4, 20)]
    for ids in (*same, prompt(3, 20), prompt(3, 1), same[-1]):
        assert_close(forward(world, ids, cache), forward(local, ids, reference))
        if ids.shape[1] == 4 and "prompts" not in options:
            assert not spy.shapes
            for one in (cache, reference):
                one.reorder_cache(torch.tensor([1, 1, 1]))
    assert spy.shapes == [(1, 20)] * NUM_LAYERS * is_here
    assert_stored(cache, reference)


# -- failures


@contextmanager
def behind_a_past(
    **options: Any,
) -> Iterator[tuple[World, RemoteCache, World, Any, Any]]:
    """Yield remote and local worlds with caches of nine tokens, and what makes calls fail."""
    with failing_backend() as (_, client, failing):
        world, local = world_of(client, prompts="local", **options), local_world()
        cache, reference = world.new_cache(), local.new_cache()
        forward(world, prompt(2, 9), cache)
        forward(local, prompt(2, 9), reference)
        assert cache.session_id
        yield world, cache, local, reference, failing


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("after", [0, 1, NUM_LAYERS - 1])
def test_an_upload_that_fails(after: int, carried_out: bool) -> None:
    """The next call says so; the cache rolls back to the past, and the same is fed again."""
    with behind_a_past() as (world, cache, local, reference, failing):
        more, step = prompt(2, 6, seed=1), prompt(2, 1, seed=2)
        failing.fail("Write", DeadlineExceeded, carried_out=carried_out, after=after)

        def two_steps() -> None:
            forward(world, more, cache)
            forward(world, step, cache)

        with pytest.raises(DeadlineExceeded):
            two_steps()
        assert cache.rollback() == 9
        assert_close(forward(world, more, cache), forward(local, more, reference))
        assert_close(forward(world, step, cache), forward(local, step, reference))
        assert_stored(cache, reference)


def test_a_full_service_refuses_the_first_layer(spy: Spy) -> None:
    """Before the model has computed on: the past is whole, and goes on as soon as there is room."""
    with behind_a_past() as (world, cache, local, reference, failing):
        failing.calls.clear()
        failing.fail("Write", OutOfPages, carried_out=False)
        failing.fail("Append", OutOfPages, carried_out=False)
        with pytest.raises(OutOfPages):
            forward(world, prompt(2, 6, seed=1), cache)
        assert failing.calls.count("Write") == 1
        assert len(spy.shapes) == 1
        assert_close(
            forward(world, prompt(2, 6, seed=1), cache),
            forward(local, prompt(2, 6, seed=1), reference),
        )
        assert_stored(cache, reference)


@pytest.mark.parametrize("error", [DeadlineExceeded, QuotaExceeded])
@pytest.mark.parametrize("carried_out", [False, True])
def test_rows_that_were_to_become_one(carried_out: bool, error: type[KVServiceError]) -> None:
    """If that fails, and even if it was done, the cache still has its rows, and goes on."""
    with behind_a_past() as (world, cache, local, reference, failing):
        for one in (cache, reference):
            one.reorder_cache(torch.tensor([1, 1]))
        more = prompt(1, 6, seed=1).expand(2, -1)
        failing.fail("Select", error, carried_out=carried_out)
        with pytest.raises(error):
            forward(world, more, cache)
        assert cache.batch_size == 2
        assert_close(forward(world, more, cache), forward(local, more, reference))
        step = prompt(2, 1, seed=2)
        assert_close(forward(world, step, cache), forward(local, step, reference))
        assert_stored(cache, reference)
