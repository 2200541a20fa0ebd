"""Session: one decoder's cache on the service, as a decoder holds it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from kvservice.core.errors import (
    InvalidRequest,
    KVServiceError,
    PagesLost,
    PositionOutOfRange,
    SessionNotFound,
)
from kvservice.core.session import WorkerStats
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice_client._arrays import Kind, kind_of, to_ints
from kvservice_client._ask import check_layer, read_ask, read_positions, read_tokens
from kvservice_client._attend import Attender
from kvservice_client._changes import Changes
from kvservice_client._connections import Connections
from kvservice_client._fork import fork_mirror
from kvservice_client._leases import Lease, Leases
from kvservice_client._links import CopiesChanged, Links
from kvservice_client._mirror import Mirror
from kvservice_client._tokens import TokenAccess, place, read_rows

P = ParamSpec("P")
T = TypeVar("T")


def _goes_on(
    method: Callable[Concatenate[Session, P], T],
) -> Callable[Concatenate[Session, P], T]:
    """Make a method of `Session` that is carried out again where a copy was given up on the way.

    All it asks for may be repeated, and the other copy has all that was acknowledged.
    """

    @wraps(method)
    def carried_out(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with session._lock:
            was_uncertain, is_repeated = session._mirror.uncertain, False
            while True:
                try:
                    result = method(session, *args, **kwargs)
                except CopiesChanged:
                    is_repeated = True
                else:
                    if is_repeated and not was_uncertain:
                        session._mirror.uncertain = False  # now it is known what became of it
                    return result

    return carried_out


class Session:
    """An ordered batch of sequences on the service that step together. Made by a Client.

    It has one user at a time; a lock sees to that. Arrays are torch's, numpy's or JAX's, and
    what returns is of the same kind, dtype and device. The session is released when this object
    goes, or the process ends normally, unless `detach` let go of it.

    After a call that raises, the session is as before, but for these: `PagesLost`, and an Attend
    that has failed after other layers of its step had stored, which may be repeated. After either,
    `roll_back()` says how many tokens of each row still hold; feed the rest again.

    Raises, everywhere:
        SessionNotFound: It was released, or its lease has expired.
        StaleEpoch: Somebody has attached to it; this object is of no more use.
        WorkerLost, Unavailable: Nobody answers; it was retried for the client's `timeout_s`.
        DeadlineExceeded: The answer took longer than `timeout_s`. The same call may be repeated.
        PagesLost: A worker has died with some of the session's pages.

    Attributes:
        retain: Tokens kept beyond each window, so that as many can be popped. None: nothing is
            evicted (while a cache records its past). Read at the start of each step.
    """

    def __init__(
        self, connections: Connections, leases: Leases, mirror: Mirror, owner: object
    ) -> None:
        """Take over a session that was just opened, forked or attached.

        Args:
            mirror: What is known of it.
            owner: Kept alive as long as this session.
        """
        self.retain: int | None = 0
        self._owner = owner
        self._leases = leases
        self._lock = threading.RLock()
        self._mirror = mirror
        self._lease = Lease(mirror.id, mirror.spec.ttl_s, (), 0.0)
        self._lease.renewed(connections.clock.monotonic())
        self._links = Links(connections, mirror, self._lease)
        self._changes = Changes(mirror, self._links, leases)
        self._attender = Attender(mirror, self._links, self._changes)
        self._access = TokenAccess(mirror, self._links)
        self._kind = Kind()
        self._links.follow_extents()
        leases.add(self._lease)
        self._finalizer = weakref.finalize(self, leases.release_soon, self._lease)
        self._finalizer.atexit = False  # `Leases` sees to the process's end

    # -- what is known without asking

    @property
    def id(self) -> str:
        """The session's id, for `Client.attach`. Another one after all its pages were lost."""
        return self._mirror.id

    @property
    def num_rows(self) -> int:
        return self._mirror.num_rows

    @property
    def num_layers(self) -> int:
        """Layers that were stated at `open`, or have stored something."""
        return self._mirror.num_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each stated layer."""
        return self._mirror.windows

    @property
    def page_size(self) -> int:
        return self._mirror.spec.page_size

    @property
    def max_tokens(self) -> int | None:
        """No row grows beyond. None: no bound."""
        return self._mirror.spec.max_tokens

    @property
    def epoch(self) -> int:
        """Structural changes so far, plus 1."""
        return self._mirror.epoch

    @property
    def closed(self) -> bool:
        """Whether it was released or detached, by this object or with its client."""
        return not self._lease.open

    def lengths(self, layer: int = 0) -> tuple[int, ...]:
        """Return a layer's length of each row, padding included. Asks nobody."""
        with self._lock:
            return self._mirror.layer_lengths(check_layer(layer))

    def padding(self) -> npt.NDArray[np.bool_]:
        """Return which positions are padding, bool[rows, longest length]. Asks nobody.

        Who has attached to a session, or forked another's, learns it here.
        """
        with self._lock:
            mirror = self._mirror
            longest = max(mirror.longest())
            return np.stack(
                [mirror.padding.bits(row, 0, longest) for row in range(mirror.num_rows)]
            )

    # -- attention

    @_goes_on
    def attend(
        self,
        layer: int,
        q: Any,
        k: Any = None,
        v: Any = None,
        *,
        pos: int | Sequence[int] | None = None,
        scale: float | None = None,
        mask: Any = "causal",
        window: int | None = None,
        chunk: int | None = None,
        counts: Sequence[int] | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        bias: Any = None,
        padding: Any = None,
        column_starts: int | Sequence[int] | None = None,
        query_positions: int | Sequence[int] | None = None,
    ) -> Any:
        """Store new keys and values of one layer, attend to all that is stored, return the output.

        A *step* is one forward pass: it begins at the first append to a layer that has already
        appended in the current one. Its layers share counts, positions and padding.

        Args:
            q: float[rows, heads, tokens, dim]. With `counts`: [sum(counts), heads, dim], the
                tokens of all rows one after the other.
            k, v: Alike, with heads that divide q's (query head h reads KV head h // group_size).
                None: attend only, as part of the current step; may be repeated freely.
            pos: Position of the first new token, of all rows or of each. None: the layer's
                lengths. Where the layer's last append of this step stood: a repeat of that.
            scale: Factor on q·k. None: 1 / sqrt(dim).
            mask: "causal"; "full": every stored position; "chunk": causal within chunks of
                `chunk` positions, counted from the end of leading padding; or an array, bool
                (True: seen) or float (added to the scores), [rows or 1, heads or 1, queries,
                columns].
            window: With "causal": a query sees the newest `window` positions, its own included.
            counts: New tokens (without k: queries) of each row, possibly 0.
            softcap: Scores become softcap * tanh(score / softcap), before bias and mask.
            sinks: float[heads]: a logit that takes part in the softmax, without a value.
            bias: float[rows or 1, heads or 1, queries, columns], added to the scores.
            padding: Which new tokens are padding, bool[rows, tokens] (with `counts`:
                bool[sum(counts)]); or bool[rows, longest length afterwards], all positions, where
                older ones may have turned into padding. Padding is never seen, and a query that
                is padding returns 0. None in a later layer of a step: as its first layer said.
            column_starts: Position of column 0 of a mask array and bias, of all rows or of each;
                may be negative. None: the last column is the newest position.
            query_positions: Position of the first query, of all rows or of each. None: the new
                tokens; where there are none, or another number of them, the newest positions, or
                none at all for mask "full" (cross attention).

        Returns:
            [rows, heads, tokens, v_dim] or packed, as q; strided as it arrived (tokens before
            heads). 0 for queries that see nothing.

        Raises:
            InvalidRequest, GeometryMismatch: Shapes, dtypes or ranges. Nothing was sent, or
                stored.
            OutOfOrder: `pos` is not the layer's length.
            Conflict: It does not fit the current step, or the last one has died half-way.
            OutOfPages: No worker has room. Nothing has been stored; only in the first step of a
                session that has not stated its layers, a later layer may be refused: roll back.
        """
        plain = (
            type(mask) is str
            and counts is sinks is bias is column_starts is None
            and query_positions is None
        )
        options = (mask, window, chunk, softcap)
        with self._lock:
            self._ready()
            try:
                if plain and self._attender.is_steady(padding):
                    out = self._attender.attend_steadily(layer, (q, k, v), pos, scale, options)
                    if out is not None:
                        return out
                ask = read_ask(
                    layer,
                    q,
                    k,
                    v,
                    num_rows=self._mirror.num_rows,
                    counts=counts,
                    mask=mask,
                    window=window,
                    chunk=chunk,
                    scale=scale,
                    softcap=softcap,
                    sinks=sinks,
                    bias=bias,
                    column_starts=column_starts,
                    pos=pos,
                    query_positions=query_positions,
                )
                self._kind = ask.queries.kind
                out = self._attender.attend(ask, padding, self.retain)
                if plain and k is not None:
                    self._attender.settle(ask, (q, k, v), options)
                return out
            except BaseException:
                if k is not None:
                    self._mirror.note_failure(layer)
                raise

    @_goes_on
    def attend_partial(
        self,
        layer: int,
        q: Any,
        *,
        query_positions: int | Sequence[int],
        scale: float | None = None,
        mask: str = "causal",
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Any, Any]:
        """Attend to what a layer has stored, to be merged with attention to other positions.

        A decoder that has attended to keys and values of its own, which are not stored yet, puts
        both together by their lse: `out = sum(out_i * exp(lse_i - lse))`, with
        `lse = logsumexp(lse_i)`. A sink is one more `lse_i`, without an `out_i`.

        Args:
            q: float[rows, heads, tokens, dim].
            query_positions: Position of the first query, of all rows or of each. Causal masks see
                what is stored before.
            scale, mask, window, chunk, softcap: As for `attend`; no mask arrays.
            meanwhile: Called by this thread while the workers compute; more than once if the call
                has to be made again. The session must not be used in it.

        Returns:
            out: float32[rows, heads, tokens, v_dim], normalised over what is stored.
            lse: float32[rows, heads, tokens], natural log of the sum of exp(scaled scores); -inf,
                with out = 0, where nothing is seen.

        Effects:
            None: nothing is stored, and the step in progress goes on.

        Raises:
            InvalidRequest, GeometryMismatch: Shapes, dtypes or ranges; or nothing is stored.
        """
        with self._lock:
            self._ready()
            ask = read_ask(
                layer,
                q,
                num_rows=self._mirror.num_rows,
                mask=mask,
                window=window,
                chunk=chunk,
                scale=scale,
                softcap=softcap,
                query_positions=query_positions,
            )
            ask.partial, ask.meanwhile = True, meanwhile
            partial: tuple[Any, Any] = self._attender.attend(ask, None, self.retain)
            return partial

    # -- keys and values

    @_goes_on
    def write(
        self,
        layer: int,
        k: Any,
        v: Any,
        *,
        positions: Any = None,
        rows: Sequence[int] | None = None,
        padding: Any = None,
        queries_from: int | Sequence[int] | None = None,
    ) -> None:
        """Store keys and values at any positions of a layer, without attention.

        Positions that a write leaves out beyond a row's end become padding, for good.

        Args:
            k, v: float[rows, kv_heads, tokens, dim].
            positions: Where the tokens go: a list for all rows, or one for each; in any order,
                the last of two equal ones wins. None: behind each row's end.
            rows: Which rows of the session these are. None: all.
            padding: bool[rows, tokens]: which of the tokens are padding.
            queries_from: Where queries may still stand, of all rows or of each: here or later.
                What none of them sees, by the layers' windows, is freed. None: nothing is.

        Raises:
            InvalidRequest, GeometryMismatch, PositionOutOfRange: Nothing has been stored.
            OutOfPages: No worker has room. Overwriting what several workers hold may have been
                done on some; it may be repeated.
        """
        with self._lock:
            self._ready()
            chosen = read_rows(rows, self._mirror.num_rows)
            tokens = read_tokens(k, v, len(chosen), None)
            lengths = self._mirror.layer_lengths(check_layer(layer))
            placed = place(tokens, chosen, lengths, positions, padding)
            self._kind = kind_of(k, "k")
            evict_before = []
            if queries_from is not None:
                first = read_positions(queries_from, self._mirror.num_rows, "queries_from")
                evict_before = self._mirror.unseen_from(first)
            self._access.write(layer, placed, evict_before)

    @_goes_on
    def read(
        self, layer: int, start: int = 0, stop: int | None = None, *, like: Any = None
    ) -> tuple[Any, Any]:
        """Return keys and values of positions [start, stop) of every row.

        Args:
            stop: None: the longest row's length.
            like: An array whose kind and device the result gets. None: the last one that this
                session was given, or numpy.

        Returns:
            k, v: [rows, kv_heads, stop - start, dim], in the layer's dtype. Zeros for padding
            without a page, and behind a shorter row's end.

        Raises:
            InvalidRequest: The range is empty, or the layer has stored nothing.
            PositionOutOfRange: Beyond the longest row, or evicted by the layer's window.
        """
        with self._lock:
            self._ready()
            longest = max(self._mirror.layer_lengths(check_layer(layer)))
            stop = longest if stop is None else stop
            if not 0 <= start < stop:
                raise InvalidRequest(f"positions must be a range, got [{start}, {stop})")
            if stop > longest:
                raise PositionOutOfRange(
                    f"positions up to {stop} were asked for, the longest row has {longest}",
                    length=longest,
                )
            kind = self._kind if like is None else kind_of(like, "like")
            return self._access.read(layer, start, stop, kind)

    # -- structural changes

    @_goes_on
    def pop(
        self, num_tokens: int | None = None, *, keep: int | Sequence[int] | None = None
    ) -> None:
        """Drop the newest tokens of all layers, in one call.

        Args:
            num_tokens: Drop so many from each row's longest layer; more than there are: all.
            keep: Or cut to this length, of all rows or of each; at or above it, nothing happens.

        Raises:
            PositionOutOfRange: The next query could see what a window has evicted.
            PagesLost: Some of what would stay is lost.
        """
        if (num_tokens is None) == (keep is None):
            raise InvalidRequest("say either num_tokens or keep")
        with self._lock:
            self._ready(allow_lost=True)
            if self._mirror.uncertain and self._mirror.find_lost() is None:
                self._changes.refresh()
            longest = self._mirror.longest()
            if keep is not None:
                lengths = read_positions(keep, self.num_rows, "keep")
            elif type(num_tokens) is int and num_tokens >= 0:
                lengths = tuple(max(0, length - num_tokens) for length in longest)
            else:
                raise InvalidRequest(f"num_tokens must be at least 0, got {num_tokens!r}")
            nothing_to_do = self._mirror.find_lost() is None and not self._mirror.is_late_possible
            if nothing_to_do and all(map(int.__ge__, lengths, longest)):
                step = self._mirror.step
                if step is not None and step.failed_layer is not None and not step.appended:
                    self._mirror.step = None  # it has stored nothing, and is not to be repeated
                return
            self._changes.pop(lengths)

    @_goes_on
    def roll_back(self) -> tuple[int, ...]:
        """Cut every row to what all its layers still hold, and return those lengths.

        For a step that died half-way, and for `PagesLost`: what is gone is forgotten, and the
        session goes on at the next epoch, on workers that live. Feed the rest of the tokens again.

        Raises:
            PositionOutOfRange: A window has evicted what the next query would see: reset.
        """
        with self._lock:
            while True:
                known = self._mirror.num_lost
                try:
                    self._ready(allow_lost=True)
                    return self._changes.roll_back()
                except PagesLost:
                    if self._mirror.num_lost == known:
                        raise
                    # One more has died meanwhile; less is left.

    @_goes_on
    def select(self, rows: Sequence[int]) -> None:
        """Let new row i continue old row rows[i], by sharing pages. Changes `num_rows`.

        Args:
            rows: At least one; any number, repeats allowed.
        """
        chosen = to_ints(rows, "rows")
        with self._lock:
            self._ready()
            num_rows = self._mirror.num_rows
            if not chosen or min(chosen) < 0 or max(chosen) >= num_rows:
                raise InvalidRequest(f"rows must be below {num_rows}, at least one, got {chosen}")
            if chosen != list(range(num_rows)):
                self._changes.select(chosen)

    @_goes_on
    def reset(self) -> None:
        """Drop all tokens. Rows, lease and reservation stay."""
        with self._lock:
            self._ready(allow_lost=True)
            self._changes.reset()

    @_goes_on
    def fork(self, token_count: int | None = None) -> Session:
        """Open a session that shares this one's pages, or the leading `token_count` of each row.

        Neither sees what is appended to the other afterwards.

        Raises:
            PositionOutOfRange: A row is shorter, or its window has evicted what the child's next
                query would see.
        """
        with self._lock:
            self._ready()
            if self._mirror.uncertain:
                self._changes.refresh()
            longest = self._mirror.longest()
            if token_count is not None and not 1 <= token_count <= min(longest):
                raise PositionOutOfRange(
                    f"token_count must be 1 to the shortest row's length, {min(longest)}, got "
                    f"{token_count}",
                    length=min(longest),
                )
            child = fork_mirror(self._mirror, self._links, self._leases, token_count)
            session = Session(self._links.connections, self._leases, child, self._owner)
            session.retain, session._kind = self.retain, self._kind
            return session

    # -- the end

    def release(self) -> None:
        """Free the session now. It cannot be used afterwards; again is no error.

        Raises:
            WorkerLost: A worker does not answer; what it holds goes when the lease ends.
        """
        with self._lock:
            if not self._end():
                return
            for extent in self._mirror.extents:
                extent.close_streams()
            if self._lease.taken:
                return
            request = types_pb2.ReleaseRequest(session_ids=[self.id], epochs=[self.epoch])
            if self._lease.unsettled:
                request.unsettled_ids.append(self.id)
            failures: list[KVServiceError] = []
            for extent in self._mirror.everywhere:
                try:
                    with suppress(CopiesChanged):
                        self._links.unary(extent, "Release", request)
                except KVServiceError as error:
                    if not extent.lost:  # with a dead worker its pages are gone
                        failures.append(error)
            if failures:
                raise failures[0]

    def detach(self) -> str:
        """Let go of the session without releasing it; it lives on until its lease ends.

        Returns:
            The id, for `Client.attach`.
        """
        with self._lock:
            self._ready(allow_lost=True)
            self._end()
            for extent in self._mirror.extents:
                extent.close_streams()
            return self.id

    @_goes_on
    def page_stats(self) -> list[WorkerStats]:
        """Return the numbers of the workers that hold the session.

        Where authentication is on, and the caller is no operator: their names alone.
        """
        with self._lock:
            self._ready()
            request = types_pb2.PageStatsRequest(session_id=self.id)
            answers = [
                self._links.unary(copy, "PageStats", request)
                for extent in self._mirror.extents
                for copy in extent.copies
            ]
        return [convert.stats_from_pb(stats) for one in answers for stats in one.workers]

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"epoch {self.epoch}"
        return f"<kvservice session {self.id}, {self.num_rows} rows, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a session is not copied or pickled: use fork(), or detach() and attach()")

    # -- inside

    def _ready(self, *, allow_lost: bool = False) -> None:
        """Check that calls can be made, and finish a structural change in progress."""
        if not self._lease.open:
            raise SessionNotFound("the session was released or detached, or its client closed")
        self._changes.settle()
        if not allow_lost and self._mirror.find_lost() is not None:
            raise self._mirror.pages_lost()

    def _end(self) -> bool:
        """Neither renew nor release it any more. Returns False if that was so before."""
        was_open = self._lease.open
        self._finalizer.detach()
        self._leases.forget(self._lease)
        return was_open
