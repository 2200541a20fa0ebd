"""Decoders whose tokens are known beforehand, so that every answer can be checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvservice.clock import SystemClock
from kvservice.core.errors import PagesLost, Unavailable, WorkerLost
from kvservice_client import Client, Session
from tests.chaos.service import TTL_S, Service
from tests.oracles import causal_visible, dense_attention
from tests.serving import until

HEADS, KV_HEADS, DIM = 4, 2, 8
NUM_LAYERS = 2
MAX_TOKENS = 4096
TOLERANCE = 2e-5  # float32 against float64
CLOCK = SystemClock()

Array = npt.NDArray[np.float32]


class Tokens:
    """The tokens of one seed: q, k and v of every layer and position."""

    def __init__(self, seed: int, num_tokens: int = MAX_TOKENS) -> None:
        rng = np.random.default_rng(seed)
        self._arrays = [
            [
                rng.standard_normal((num_tokens, heads, DIM)).astype(np.float32)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            ]
            for _ in range(NUM_LAYERS)
        ]

    def of(self, layer: int, start: int, stop: int) -> tuple[Array, Array, Array]:
        """Return q, k, v of positions [start, stop), each [1, heads, tokens, dim]."""
        q, k, v = (a[None, start:stop].swapaxes(1, 2) for a in self._arrays[layer])
        return q, k, v

    def attention(self, layer: int, start: int, stop: int) -> npt.NDArray[np.float64]:
        """Return what attention over all positions must be, [1, heads, tokens, dim]."""
        q, k, v = (a.astype(np.float64) for a in self._arrays[layer])
        visible = causal_visible(np.arange(start, stop), np.arange(stop))
        out, _ = dense_attention(
            q[start:stop],
            k[:stop],
            v[:stop],
            np.broadcast_to(visible, (HEADS, *visible.shape)),
            scale=DIM**-0.5,
        )
        return out[None].swapaxes(1, 2)


class Decoder:
    """One session that is fed the tokens of a seed, one step after the other.

    Attributes:
        length: Tokens that all layers have stored, by the service's word.
        num_checked: Answers that were compared with the oracle.
    """

    def __init__(
        self, client: Client, seed: int, *, session: Session | None = None, **options: Any
    ):
        self.tokens = Tokens(seed)
        self.session = session or client.open(num_rows=1, page_size=4, **options)
        self.length = 0
        self.num_checked = 0

    def step(self, count: int = 1) -> None:
        """Feed the next tokens to all layers, and check the answers."""
        stop = self.length + count
        for layer in range(NUM_LAYERS):
            self.attend(layer, self.length, stop)
        self.length = stop

    def attend(self, layer: int, start: int, stop: int) -> None:
        out = self.session.attend(layer, *self.tokens.of(layer, start, stop), pos=start)
        np.testing.assert_allclose(
            out, self.tokens.attention(layer, start, stop), atol=TOLERANCE, rtol=TOLERANCE
        )
        self.num_checked += 1

    def check_stored(self) -> None:
        """Compare all keys and values with what was fed, bit for bit."""
        for layer in range(NUM_LAYERS):
            stored = self.session.read(layer, 0, self.length)
            for got, fed in zip(stored, self.tokens.of(layer, 0, self.length)[1:], strict=True):
                np.testing.assert_array_equal(got, fed)
            self.num_checked += 1

    def taken_over(self, client: Client, seed: int) -> Decoder:
        """Return a decoder that has attached to the session, and has found all that was fed."""
        heir = Decoder(client, seed, session=client.attach(self.session.id))
        (heir.length,) = heir.session.lengths(0)
        assert heir.length == self.length
        heir.check_stored()
        heir.step()
        return heir

    def resume(self) -> int:
        """Go back to what still holds; return how many tokens are to be fed again."""
        (left,) = self.session.roll_back()
        again, self.length = self.length - left, left
        return again


class Crowd:
    """Runs something in threads of its own between `with` and its end, which raises their errors.

    Attributes:
        errors: Whatever went wrong in a thread.
    """

    def __init__(self, run: Callable[..., None], members: Iterable[tuple[int, Any]]) -> None:
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=run, args=member, daemon=True) for member in members
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a client hangs"
        if self.errors and error[0] is None:
            raise self.errors[0]


class Load(Crowd):
    """Decoders that step in threads of their own, until they are stopped.

    What a decoder is told is noted; after a loss it resumes, and feeds the rest again.

    Attributes:
        losses: Seed -> (seconds from `mark` until it was told, tokens that were lost).
        resumed: Seed -> seconds from `mark` until it was back where it had been.
    """

    def __init__(self, decoders: dict[int, Decoder], *, max_tokens: int = 200) -> None:
        self.decoders = decoders
        self.losses: dict[int, tuple[float, int]] = {}
        self.resumed: dict[int, float] = {}
        self.slowest_s: dict[int, float] = dict.fromkeys(decoders, 0.0)
        self.marked_at = CLOCK.monotonic()
        self._max_tokens = max_tokens
        super().__init__(self._run, decoders.items())

    def mark(self) -> None:
        """Count seconds from now on."""
        self.slowest_s = dict.fromkeys(self.decoders, 0.0)
        self.marked_at = CLOCK.monotonic()

    def run_for(self, condition: Callable[[], bool]) -> None:
        """Go on until a condition holds; raise what has gone wrong meanwhile."""
        while not condition():
            if self.errors:
                raise self.errors[0]
            assert CLOCK.monotonic() - self.marked_at < 60.0, "it takes too long"
            CLOCK.wait(self._stop, 0.01)

    def all_advance(self, count: int = 5) -> None:
        """Go on until every decoder has taken some more steps."""
        before = {seed: one.num_checked for seed, one in self.decoders.items()}
        self.run_for(
            lambda: all(
                one.num_checked >= before[seed] + count * NUM_LAYERS
                for seed, one in self.decoders.items()
            )
        )

    @property
    def num_checked(self) -> int:
        return sum(one.num_checked for one in self.decoders.values())

    def _run(self, seed: int, decoder: Decoder) -> None:
        try:
            while not self._stop.is_set():
                began = CLOCK.monotonic()
                try:
                    if decoder.length >= self._max_tokens:
                        decoder.session.pop(keep=8)
                        decoder.length = 8
                    decoder.step()
                except PagesLost:
                    self._resume(seed, decoder)
                took = CLOCK.monotonic() - began
                self.slowest_s[seed] = max(self.slowest_s[seed], took)
                CLOCK.wait(self._stop, 0.01)
        except BaseException as error:
            self.errors.append(error)

    def _resume(self, seed: int, decoder: Decoder) -> None:
        told_s = CLOCK.monotonic() - self.marked_at
        again = persist(decoder.resume)
        self.losses[seed] = told_s, again
        if again:
            persist(lambda: decoder.step(again))
        self.resumed[seed] = CLOCK.monotonic() - self.marked_at


def under_load(service: Service, count: int) -> Load:
    """Return decoders with a client each, on all workers, with 40 tokens behind them."""
    made: dict[int, Decoder] = {}
    looking = service.connect()

    def heartbeats_have_told() -> bool:
        used = sum(stats.used_bytes for stats in looking.page_stats())
        told = sum(one.budget_bytes - one.free_bytes for one in looking.list_workers())
        return told == used > 0

    for seed in range(count):
        if seed == count // 2:
            until(heartbeats_have_told)  # so that the emptier worker gets the others
        made[seed] = Decoder(service.connect(), seed, ttl_s=TTL_S)
        made[seed].step(40)
    return Load(made)


def workers_of(decoder: Decoder) -> list[str]:
    """Return the workers that hold a decoder's session, in position order."""
    return [extent.worker_id for extent in decoder.session._mirror.extents]


def on_worker(load: Load, worker_id: str) -> set[int]:
    """Return the seeds of the decoders on a worker: some, but not all."""
    hit = {seed for seed, one in load.decoders.items() if workers_of(one) == [worker_id]}
    assert 0 < len(hit) < len(load.decoders), "all workers should have sessions"
    return hit


def persist(call: Callable[[], Any], *, timeout_s: float = 30.0) -> Any:
    """Call again and again while nobody answers."""
    deadline = CLOCK.monotonic() + timeout_s
    while True:
        try:
            return call()
        except (WorkerLost, Unavailable):
            if CLOCK.monotonic() > deadline:
                raise
