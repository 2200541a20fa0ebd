"""Session: one decoder's cache on the service, as a decoder holds it.

A call goes through `_ask`, which checks and packs arrays; then `_attend` (keys and values alone:
`_tokens`; what changes the structure: `_changes`, `_fork`) says what each worker is asked, by what
`_mirror` knows of the session; then `_links`, which asks, for as long as it takes; then a
`_transport`. What returns is put together where it was taken apart. `_steady` is the short way of
decoding: what a step's first layer was asked serves the later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.core.session import WorkerStats
from kvservice.v1 import types_pb2
from kvservice.wire import convert
from kvservice_client._arrays import Kind, kind_of
from kvservice_client._ask import check_layer, read_ask
from kvservice_client._attend import Attender
from kvservice_client._changes import Changes
from kvservice_client._connections import Connections
from kvservice_client._fork import fork_mirror
from kvservice_client._holding import Holding, goes_on
from kvservice_client._leases import Lease, Leases
from kvservice_client._links import Links
from kvservice_client._mirror import Mirror
from kvservice_client._release import release
from kvservice_client._tokens import TokenAccess


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
        self._mirror = mirror
        lease = Lease(mirror.id, mirror.spec.ttl_s, (), 0.0)
        lease.renewed(connections.clock.monotonic())
        self._links = Links(connections, mirror, lease)
        self._changes = Changes(mirror, self._links, leases)
        self._attender = Attender(mirror, self._links, self._changes)
        self._access = TokenAccess(mirror, self._links)
        self._kind = Kind()
        self._links.whereabouts.follow_extents()
        self._holding = Holding(self, mirror, self._changes, lease, leases)

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
        return not self._holding.lease.open

    def lengths(self, layer: int = 0) -> tuple[int, ...]:
        """Return a layer's length of each row, padding included. Asks nobody."""
        with self._holding.lock:
            return self._mirror.layer_lengths(check_layer(layer))

    def padding(self) -> npt.NDArray[np.bool_]:
        """Return which positions are padding, bool[rows, longest length]. Asks nobody.

        Who has attached to a session, or forked another's, learns it here.
        """
        with self._holding.lock:
            return self._mirror.padding_bits()

    # -- attention

    @goes_on
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
        self._holding.ready()
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

    @goes_on
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
        self._holding.ready()
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

    @goes_on
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
            OutOfPages: No worker has room. What several workers hold may have been written on
                some, those behind first: repeat it, or learn by `roll_back` how long rows are.
        """
        self._holding.ready()
        self._access.write(layer, k, v, positions, rows, padding, queries_from)
        self._kind = kind_of(k, "k")

    @goes_on
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
        self._holding.ready()
        kind = self._kind if like is None else kind_of(like, "like")
        return self._access.read(layer, start, stop, kind)

    # -- structural changes

    @goes_on
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
        self._holding.ready(allow_lost=True)
        self._changes.pop(num_tokens, keep)

    @goes_on
    def roll_back(self) -> tuple[int, ...]:
        """Cut every row to what all its layers still hold, and return those lengths.

        For a step that died half-way, and for `PagesLost`: what is gone is forgotten, and the
        session goes on at the next epoch, on workers that live. Feed the rest of the tokens again.

        Raises:
            PositionOutOfRange: A window has evicted what the next query would see: reset.
        """
        self._holding.check_open()
        return self._changes.roll_back()

    @goes_on
    def select(self, rows: Sequence[int]) -> None:
        """Let new row i continue old row rows[i], by sharing pages. Changes `num_rows`.

        Args:
            rows: At least one; any number, repeats allowed.
        """
        self._holding.ready()
        self._changes.select(rows)

    @goes_on
    def reset(self) -> None:
        """Drop all tokens. Rows, lease and reservation stay."""
        self._holding.ready(allow_lost=True)
        self._changes.reset()

    @goes_on
    def fork(self, token_count: int | None = None) -> Session:
        """Open a session that shares this one's pages, or the leading `token_count` of each row.

        Neither sees what is appended to the other afterwards.

        Raises:
            PositionOutOfRange: A row is shorter, or its window has evicted what the child's next
                query would see.
        """
        self._holding.ready()
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
        with self._holding.lock:
            if self._holding.end() and not self._holding.lease.taken:
                release(self._mirror, self._links)

    @goes_on
    def detach(self) -> str:
        """Let go of the session without releasing it; it lives on until its lease ends.

        Returns:
            The id, for `Client.attach`.
        """
        self._holding.ready(allow_lost=True)
        self._holding.end()
        return self.id

    @goes_on
    def page_stats(self) -> list[WorkerStats]:
        """Return the numbers of the workers that hold the session.

        Where authentication is on, and the caller is no operator: their names alone.
        """
        self._holding.ready()
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
