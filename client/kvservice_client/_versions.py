"""Versions of one layer's keys and values: what each of them shows, and in which session it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvservice.core.errors import KVServiceError, PagesLost, SessionNotFound
from kvservice.core.geometry import DType, LayerGeometry
from kvservice_client._array_ops import as_kind, frozen, replaced, zeros
from kvservice_client._arrays import Kind
from kvservice_client._client import Client
from kvservice_client._outcomes import OUTCOME_UNKNOWN
from kvservice_client._session import Session

Pair = tuple[Any, Any]  # keys and values, [rows, heads, positions, dim]


class Source(Protocol):
    """Where positions of a version can be read."""

    def read(self, start: int, stop: int, kind: Kind) -> Pair:
        """Return keys and values of positions [start, stop)."""


class Given:
    """Arrays that somebody made a version of. They stay where they are."""

    def __init__(self, keys: Any, values: Any, dtype: DType) -> None:
        self._pair = keys, values
        self._dtype = dtype

    def read(self, start: int, stop: int, kind: Kind) -> Pair:
        """Return parts of them."""
        keys, values = (array[:, :, start:stop] for array in self._pair)
        return as_kind(keys, self._dtype, kind), as_kind(values, self._dtype, kind)


class Pages:
    """A session that versions share. It is released when the last of them is gone.

    Fields:
        used: No version sees a position from here on, and none was ever written.
    """

    def __init__(self, session: Session, used: int = 0) -> None:
        self.session = session
        self.used = used

    def read(self, start: int, stop: int, kind: Kind) -> Pair:
        """Ask the service."""
        like = zeros((1,), DType.FLOAT32, kind)
        return self.session.read(0, start, stop, like=like)

    def write(self, start: int, keys: Any, values: Any) -> None:
        """Store tokens at positions from `start` on, which is at least `used`.

        Raises:
            KVServiceError: No version sees any of it.
        """
        stop = start + keys.shape[2]
        try:
            self.session.write(0, keys, values, positions=list(range(start, stop)))
        except BaseException as error:
            if not isinstance(error, KVServiceError) or isinstance(error, OUTCOME_UNKNOWN):
                self.used = stop  # something may stand there
            raise
        self.used = stop

    def fork(self, token_count: int) -> Pages:
        """Return pages that share the first positions with these."""
        return Pages(self.session.fork(token_count), token_count)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions [start, stop) of a version, and where they are."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and element type of a version's keys, and of its values, and who opens sessions."""

    client: Client
    shape: tuple[int, int, int, int]  # rows, heads, positions, dim
    dtype: DType
    replicas: int = 1

    def open(self) -> Pages:
        """Open a session for one layer."""
        rows, heads, max_len, dim = self.shape
        layer = LayerGeometry(heads, dim, dim, self.dtype)
        session = self.client.open(
            num_rows=rows, layers=[layer], max_tokens=max_len, replicas=self.replicas
        )
        return Pages(session)


class Content:
    """What one version shows. It never changes.

    Versions of a cache that grows write to one session, each behind what the others see, so that
    each goes on seeing its own. To write where others may see something, a version forks.

    Fields:
        lead: The session that it would write to; None before the first tokens.
        stretches: In position order, disjoint. All other positions are zeros.
    """

    def __init__(
        self,
        form: Form,
        kind: Kind,
        lead: Pages | None = None,
        stretches: Sequence[Stretch] = (),
        arrays: Pair | None = None,
    ) -> None:
        """Describe a version.

        Args:
            kind: Of the arrays that it is read as.
            arrays: Its keys and values, if they are at hand.
        """
        self.form = form
        self.kind = kind
        self.lead = lead
        self.stretches = tuple(stretches)
        self._arrays = arrays

    def arrays(self) -> Pair:
        """Return keys and values, which are read from the service if they are not at hand."""
        if self._arrays is None:
            keys = values = zeros(self.form.shape, self.form.dtype, self.kind)
            for stretch in self.stretches:
                k, v = stretch.source.read(stretch.start, stretch.stop, self.kind)
                keys = replaced(keys, stretch.start, k, self.kind)
                values = replaced(values, stretch.start, v, self.kind)
            self._arrays = frozen(keys), frozen(values)
        return self._arrays

    def is_shown_by(self, keys: Any, values: Any) -> bool:
        """Whether these are the very arrays that it has handed out."""
        return self._arrays is not None and keys is self._arrays[0] and values is self._arrays[1]

    def written(self, start: int, keys: Any, values: Any, kind: Kind) -> Content:
        """Return a version with positions from `start` on replaced.

        The arrays at hand go with it: this version is read from the service when asked again.
        While it has them, it does without what the service has lost, and stores it anew.

        Args:
            keys, values: In range, of the right shape and dtype, and of the kind.

        Raises:
            KVServiceError: No version has changed.
        """
        stop = start + keys.shape[2]
        try:
            lead, stretches = self._place_for(start)
            lead.write(start, keys, values)
        except (PagesLost, SessionNotFound):
            if self._arrays is None:
                raise
            self._store_anew(self._arrays)
            lead, stretches = self._place_for(start)
            lead.write(start, keys, values)
        shown = [
            *_clipped(stretches, 0, start),
            Stretch(lead, start, stop),
            *_clipped(stretches, stop, self.form.shape[2]),
        ]
        arrays = self._arrays
        if not self.stretches and (arrays is None or self.kind != kind):
            blank = zeros(self.form.shape, self.form.dtype, kind)
            arrays = blank, blank
        elif self.kind != kind:
            arrays = None
        if arrays is not None:
            arrays = (
                frozen(replaced(arrays[0], start, keys, kind)),
                frozen(replaced(arrays[1], start, values, kind)),
            )
        self._arrays = None
        return Content(self.form, kind, lead, _joined(shown), arrays)

    def _store_anew(self, arrays: Pair) -> None:
        """Put all that this version shows into another session."""
        lead = self.form.open()
        for one in self.stretches:
            keys, values = (array[:, :, one.start : one.stop] for array in arrays)
            lead.write(one.start, keys, values)
        self.lead = lead
        self.stretches = tuple(Stretch(lead, one.start, one.stop) for one in self.stretches)

    def _place_for(self, start: int) -> tuple[Pages, Sequence[Stretch]]:
        """Return a session in which nobody sees positions from `start` on, and this version's
        stretches with what it shares of them."""
        lead = self.lead
        if lead is None:
            return self.form.open(), self.stretches
        if start >= lead.used:
            return lead, self.stretches
        shared = max((one.stop for one in _clipped(self.stretches, 0, start, lead)), default=0)
        if not shared:
            return self.form.open(), self.stretches
        child = lead.fork(shared)
        return child, list(_moved(self.stretches, lead, child, shared))


def _clipped(
    stretches: Sequence[Stretch], start: int, stop: int, source: Source | None = None
) -> Iterator[Stretch]:
    """Yield what of the stretches lies in [start, stop), only of one source if it is given."""
    for one in stretches:
        first, last = max(one.start, start), min(one.stop, stop)
        if first < last and (source is None or one.source is source):
            yield Stretch(one.source, first, last)


def _moved(
    stretches: Sequence[Stretch], lead: Source, child: Source, shared: int
) -> Iterator[Stretch]:
    """Yield the stretches with those of `lead` below `shared` in `child`."""
    for one in stretches:
        if one.source is not lead or one.start >= shared:
            yield one
            continue
        yield Stretch(child, one.start, min(one.stop, shared))
        if one.stop > shared:
            yield Stretch(lead, shared, one.stop)


def _joined(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Return the stretches with neighbours of one source made one."""
    result: list[Stretch] = []
    for one in stretches:
        last = result[-1] if result else None
        if last is not None and last.source is one.source and last.stop == one.start:
            result[-1] = Stretch(one.source, last.start, one.stop)
        else:
            result.append(one)
    return result
