"""The pages of a tensor cache: a session that follows the cache's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvservice.core.errors import (
    GeometryMismatch,
    KVServiceError,
    PagesLost,
    SessionNotFound,
    StaleEpoch,
)
from kvservice_client._client import Client
from kvservice_client._outcomes import OUTCOME_UNKNOWN
from kvservice_client._session import Session

Shape = tuple[int, int, int, torch.dtype]  # heads, k dim, v dim, dtype


@dataclass(slots=True)
class _Told:
    """What the service has been told of a layer: positions [0, stored) of two tensors.

    Fields:
        versions: Of the tensors then, which count writes in place.
    """

    k: torch.Tensor
    v: torch.Tensor
    versions: tuple[int, int]
    stored: int

    def holds(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether these are the tensors, as they were."""
        return k is self.k and v is self.v and _versions(k, v) == self.versions

    def find_change(self, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int] | None:
        """Return the first and one past the last position at which two tensors differ from it."""
        alike = _shape(k, v) == _shape(self.k, self.v) and k.shape == self.k.shape
        if not alike or k.device != self.k.device or _versions(self.k, self.v) != self.versions:
            return 0, k.shape[2]
        changed = torch.cat([_differences(self.k, k), _differences(self.v, v)])
        return (int(changed.min()), int(changed.max()) + 1) if len(changed) else None


class TensorPages:
    """Keeps a session's pages equal to a cache's tensors, which are the truth while it lives.

    A call that fails changes no tensor. If it may have reached the service all the same, the pages
    stand apart from the tensors, as they do when the cache's owner has put other tensors into it:
    `follow` mends both, and comes first in whatever is done.

    Fields:
        session: None before the first tokens, and while there are no rows.
    """

    def __init__(self, client: Client, capacity: int | None = None, replicas: int = 1) -> None:
        """Open nothing yet.

        Args:
            capacity: Tokens that every row is bound to, and has room reserved for. None: neither.
            replicas: Copies of every page.
        """
        self.client = client
        self._replicas = replicas
        self.session: Session | None = None
        self._capacity = capacity
        self._told: dict[int, _Told] = {}
        self._shapes: dict[int, Shape] = {}  # what the session has fixed, by layer
        self._apart: int | None = None  # the first position that may differ
        self._rows_apart = False

    # -- what the tensors are

    def told(self, layer: int, k: torch.Tensor, v: torch.Tensor, stored: int | None = None) -> None:
        """Note that the service holds what is in these tensors.

        Args:
            stored: Positions that it stores; the rest is zeros. None: as many as before.
        """
        known = self._told.get(layer)
        if stored is None:
            stored = known.stored if known is not None else 0
        self._told[layer] = _Told(k, v, _versions(k, v), stored)

    def stored(self, layer: int) -> int:
        """Return how many positions of a layer the service stores."""
        known = self._told.get(layer)
        return known.stored if known is not None else 0

    def follow(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], layer: int | None = None
    ) -> None:
        """Bring the pages to what the tensors say, where they may stand apart.

        Args:
            keys, values: By layer, all of them.
            layer: Look only at this one for tensors that were replaced or written to. None: all.

        Raises:
            KVServiceError: It has failed; the tensors are still the truth.
        """
        if layer is not None and layer < len(keys):
            self._look_at(layer, keys[layer], values[layer])
        if layer is None or self._apart is not None:
            for one, (k, v) in enumerate(zip(keys, values, strict=True)):
                self._look_at(one, k, v)
        if self._apart is None:
            return
        try:
            self._mend(self._apart, keys, values)
        except BaseException as error:
            self._failed(error, self._apart)
            raise
        self._apart, self._rows_apart = None, False

    # -- what is done to them; `follow` comes first

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: Sequence[int]) -> None:
        """Store tokens of a layer at different positions. Opens the session if need be.

        What the layer's tensors are now is to be told afterwards.

        Raises:
            KVServiceError: Nothing has changed, or `follow` will see to it.
        """
        if not k.shape[0] or not positions:
            return
        session, shape = self.session, _shape(k, v)
        known_shape = self._shapes.get(layer, shape)
        if session is None or session.num_rows != k.shape[0] or known_shape != shape:
            self._store_anew(layer, k, v, positions)
        else:
            try:
                session.write(layer, k, v, positions=list(positions))
            except GeometryMismatch:  # it was taken over, and has a shape from before its reset
                self._store_anew(layer, k, v, positions)
            except BaseException as error:
                self._shapes[layer] = shape
                self._failed(error, min(positions) if self.stored(layer) else 0)
                raise
        self._shapes[layer] = shape

    def pop(self, keep: int) -> None:
        """Cut every layer to `keep` tokens."""
        if self.session is not None:
            try:
                self.session.pop(keep=keep)
            except BaseException as error:
                self._failed(error, keep)
                raise
        for known in self._told.values():
            known.stored = min(known.stored, keep)

    def select(self, rows: Sequence[int]) -> None:
        """Let new row i continue old row rows[i]. Without rows there is no session."""
        if not rows:
            self.session = None
            self._shapes.clear()
            for known in self._told.values():
                known.stored = 0
        elif self.session is not None:
            try:
                self.session.select(rows)
            except BaseException as error:
                self._failed(error, 0, rows_too=True)
                raise

    def reset(self) -> None:
        """Drop all tokens, of all layers. A session that is gone is given up."""
        if self.session is not None:
            try:
                self.session.reset()
            except (SessionNotFound, StaleEpoch):
                self.session = None
                self._shapes.clear()
            except BaseException as error:
                self._failed(error, 0, rows_too=True)
                raise
        self._told.clear()
        self._apart, self._rows_apart = None, False

    def fork(self) -> TensorPages:
        """Return pages of their own that share these, copy-on-write. Tell them the tensors next."""
        child = TensorPages(self.client, self._capacity, self._replicas)
        child.session = None if self.session is None else self.session.fork()
        child._shapes = dict(self._shapes)
        return child

    def adopt(self, session: Session, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take a session that holds these tokens."""
        self.session = session
        for layer, (k, v) in enumerate(layers):
            if k.shape[2]:
                self._shapes[layer] = _shape(k, v)
            self.told(layer, k, v, k.shape[2])

    # -- inside

    def _store_anew(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: Sequence[int]
    ) -> None:
        """Store tokens, and all those before, in another session. The old one is released."""
        session = self._open(k.shape[0])  # what fails now is released with it
        for other, known in self._told.items():
            _write(session, other, known.k, known.v, 0, known.stored)
        session.write(layer, k, v, positions=list(positions))
        self.session, self._apart = session, None
        self._shapes = {one: _shape(known.k, known.v) for one, known in self._told.items()}

    def _open(self, num_rows: int) -> Session:
        if self._capacity is None:
            return self.client.open(num_rows=num_rows, replicas=self._replicas)
        return self.client.open(
            num_rows=num_rows,
            max_tokens=self._capacity,
            reserve_tokens=self._capacity,
            replicas=self._replicas,
        )

    def _failed(self, error: BaseException, start: int, *, rows_too: bool = False) -> None:
        """Note from where on the pages may differ now, if they may."""
        if isinstance(error, KVServiceError) and not isinstance(error, OUTCOME_UNKNOWN):
            return
        if isinstance(error, PagesLost):
            start = min(start, int(error.metadata["from_position"]))
        self._apart = start if self._apart is None else min(self._apart, start)
        self._rows_apart |= rows_too

    def _look_at(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        known = self._told.get(layer)
        if known is not None and known.holds(k, v):
            return
        change = (0, k.shape[2]) if known is None else known.find_change(k, v)
        stored = k.shape[2] if self._capacity is None else self.stored(layer)
        if change is not None:
            stored = max(stored, change[1])
            self._apart = change[0] if self._apart is None else min(self._apart, change[0])
        self.told(layer, k, v, stored)

    def _mend(
        self, start: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        """Make positions from `start` on of every layer what the tensors say."""
        if not keys:
            self.reset()
            return
        num_rows = keys[0].shape[0]
        if any(k.shape[0] != num_rows for k in keys):
            raise GeometryMismatch(
                f"layers must have the same rows, got {[k.shape[0] for k in keys]}"
            )
        if not num_rows:
            self.session = None
            self._shapes.clear()
            return
        shapes = {layer: _shape(*pair) for layer, pair in enumerate(zip(keys, values, strict=True))}
        session = self.session
        if any(shapes.get(one, had) != had for one, had in self._shapes.items()):
            session = None
        if session is not None:
            try:
                start = self._cut_back(session, num_rows, start)
                self._write_all(session, keys, values, start)
            except GeometryMismatch:  # as in `store`
                session = None
        if session is None:
            session = self._open(num_rows)
            self._write_all(session, keys, values, 0)
        self.session, self._shapes = session, {**self._shapes, **shapes}

    def _cut_back(self, session: Session, num_rows: int, start: int) -> int:
        """Make a session ready for positions from `start` on, or from where it says."""
        if session.num_rows == num_rows and not self._rows_apart:
            return _cut(session, start)
        self._rows_apart = True  # until it is done
        session.reset()
        if session.num_rows != num_rows:
            session.select([0] * num_rows)
        return 0

    def _write_all(
        self,
        session: Session,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        start: int,
    ) -> None:
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            _write(session, layer, k, v, start, self.stored(layer))


def _cut(session: Session, start: int) -> int:
    """Cut a session to `start` tokens or fewer, and return to how many, at a new epoch.

    A call that nobody waits for any more may still be under way: it is refused by then.
    """
    epoch = session.epoch
    session.pop(keep=start)
    if session.epoch == epoch and start > 0:
        start -= 1
        session.pop(keep=start)
    if session.epoch == epoch:
        start = 0
        session.reset()
    return start


def _write(
    session: Session, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, stop: int
) -> None:
    if start < stop:
        positions = list(range(start, stop))
        session.write(layer, k[:, :, start:stop], v[:, :, start:stop], positions=positions)


def _shape(k: torch.Tensor, v: torch.Tensor) -> Shape:
    return k.shape[1], k.shape[3], v.shape[3], k.dtype


def _versions(*tensors: torch.Tensor) -> tuple[int, int]:
    first, second = (0 if one.is_inference() else one._version for one in tensors)
    return first, second


def _differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the positions at which two tensors differ in any bit."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.view(integers) != b.view(integers)).any(3).any(1).any(0).nonzero()[:, 0]
