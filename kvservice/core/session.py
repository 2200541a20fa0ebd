"""What is said about a session, and asked of one, as plain values.

These are the arguments and results of the worker's and the manager's verbs. The wire turns them
into protobuf and back (`kvservice.wire.convert`); nothing here knows of it.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvservice.core.distribution import EMPTY, Distribution
from kvservice.core.errors import InvalidRequest, TooLarge
from kvservice.core.geometry import (
    DEFAULT_PAGE_SIZE,
    MAX_LAYERS,
    MAX_PAGE_SIZE,
    HostTensor,
    LayerSpec,
)

MAX_ROWS: Final = 65_536
MAX_REPLICAS: Final = 2
MAX_TOKENS: Final = 1 << 40
DEFAULT_TTL_S: Final = 60.0
MIN_TTL_S: Final = 1.0
MAX_TTL_S: Final = 3600.0
MAX_PADDING_RANGES: Final = 65_536
"""As many are told of a session by one worker."""


def check_session_id(session_id: str) -> str:
    """Return the id, which must be a UUID4 in its canonical lower-case form.

    Raises:
        InvalidRequest: It is anything else. The message does not repeat what was sent.
    """
    try:
        valid = len(session_id) == 36 and str(uuid.UUID(session_id)) == session_id
        valid = valid and uuid.UUID(session_id).version == 4
    except ValueError:
        valid = False
    if not valid:
        raise InvalidRequest("a session id must be a UUID4 in lower-case canonical form")
    return session_id


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session is opened with. Lengths in tokens, per row; times in seconds."""

    num_rows: int
    layers: tuple[LayerSpec, ...] = ()
    page_size: int = DEFAULT_PAGE_SIZE
    max_tokens: int | None = None
    reserve_tokens: int | None = None
    ttl_s: float = DEFAULT_TTL_S
    replicas: int = 1
    spread: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_rows <= MAX_ROWS:
            raise InvalidRequest(f"num_rows must be between 1 and {MAX_ROWS}, got {self.num_rows}")
        if len(self.layers) > MAX_LAYERS:
            raise InvalidRequest(f"at most {MAX_LAYERS} layers, got {len(self.layers)}")
        if not 1 <= self.page_size <= MAX_PAGE_SIZE:
            raise InvalidRequest(
                f"page_size must be between 1 and {MAX_PAGE_SIZE} tokens, got {self.page_size}"
            )
        for name, value in (
            ("max_tokens", self.max_tokens),
            ("reserve_tokens", self.reserve_tokens),
        ):
            if value is not None and not 1 <= value <= MAX_TOKENS:
                raise InvalidRequest(f"{name} must be between 1 and {MAX_TOKENS}, got {value}")
        if (self.max_tokens or MAX_TOKENS) < (self.reserve_tokens or 0):
            raise InvalidRequest(
                f"reserve_tokens ({self.reserve_tokens}) must be at most max_tokens "
                f"({self.max_tokens})"
            )
        if not (math.isfinite(self.ttl_s) and MIN_TTL_S <= self.ttl_s <= MAX_TTL_S):
            raise InvalidRequest(
                f"ttl must be between {MIN_TTL_S:g} s and {MAX_TTL_S:g} s, got {self.ttl_s:g} s"
            )
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise InvalidRequest(
                f"replicas must be between 1 and {MAX_REPLICAS}, got {self.replicas}"
            )
        if self.spread < 1:
            raise InvalidRequest(f"spread must be at least 1, got {self.spread}")
        stated = [layer.geometry is not None for layer in self.layers]
        if any(stated) and not all(stated):
            raise InvalidRequest("geometry must be stated for all layers or for none")

    @property
    def states_geometry(self) -> bool:
        """Whether every layer's shape is known beforehand, so that pools can be shared."""
        return bool(self.layers) and self.layers[0].geometry is not None


@dataclass(frozen=True, slots=True)
class Extent:
    """The positions of a session's rows that one worker holds; per row, half-open.

    `starts` is empty while nothing is stored and the start is not fixed. `followed_by` is the
    incarnation on which the session goes on behind the extent, or those of all copies of what is
    there, with commas between; empty: it ends here. `capability` is what its worker has issued for
    it, if it wants one to be shown. Extents of one `group` are copies of each other; of group 0
    there are none. An extent without a worker, in the answer to Attach, is lost, and all that
    follows its `starts`. `replaces` are lives of workers from which the extent was moved here, and
    on which the session does not go on behind it: what one of these holds now is another extent.
    `stay` names the time from when it was opened or came there until it ends there.
    """

    worker_id: str
    address: str
    incarnation: str
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    followed_by: str = ""
    capability: bytes = field(default=b"", repr=False)
    group: int = 0
    replaces: tuple[str, ...] = ()
    stay: str = ""

    @property
    def followers(self) -> tuple[str, ...]:
        """The incarnations on which the session goes on; any one of them has what follows."""
        return tuple(self.followed_by.split(",")) if self.followed_by else ()

    def stands_for(self, incarnation: str) -> bool:
        """Whether this is the extent that was once on that incarnation of a worker."""
        return incarnation == self.incarnation or incarnation in self.replaces


@dataclass(frozen=True, slots=True)
class RowRange:
    """Positions [start, stop) of one row."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as the service knows it. `lengths[layer][row]` are stored lengths as positions.

    `padding` is told to those who take a session over: by row, rising. If it is `unlisted`, there
    is too much to be told, and `padding` is empty. `last_write` and `current_step` are the numbers
    of the newest write and step of this epoch; 0: there was none. `same_since_epoch` is that since
    which nothing has changed but copies, which were made or given up; 0: it is `epoch`.
    """

    session_id: str
    epoch: int
    step: int
    spec: SessionSpec
    extents: tuple[Extent, ...]
    lengths: tuple[tuple[int, ...], ...] = ()
    padding: tuple[RowRange, ...] = ()
    padding_unlisted: bool = False
    last_write: int = 0
    current_step: int = 0
    same_since_epoch: int = 0

    def check_padding_listed(self) -> None:
        """Refuse to go on without knowing what is padding.

        Raises:
            TooLarge: There are too many ranges of it.
        """
        if self.padding_unlisted:
            raise TooLarge(
                f"a session with more than {MAX_PADDING_RANGES} separate ranges of padding on one "
                "worker cannot be taken over: its new holder could not be told of them",
                limit=MAX_PADDING_RANGES,
            )


@dataclass(frozen=True, slots=True)
class EndedSession:
    """A session that a worker does not hold any more: released, or `expired`."""

    tenant: str
    session_id: str
    expired: bool


@dataclass(frozen=True, slots=True)
class EvictBefore:
    """Per row: no later query of the layer group with this window sees a position below."""

    window: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepHeader:
    """What all layers of a step share. `counts[row]` new tokens of each row, possibly 0.

    `followed_by` as in `Extent`.
    """

    counts: tuple[int, ...]
    padding: tuple[RowRange, ...] = ()
    evict_before: tuple[EvictBefore, ...] = ()
    followed_by: str = ""


class MaskKind(Enum):
    """The rule of a mask; see `Mask`."""

    FULL = "full"
    CAUSAL = "causal"
    CHUNK = "chunk"
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class Mask:
    """Which stored positions a query sees. Padding is never seen, whatever the mask.

    kind FULL: all. CAUSAL: up to the query's own; with `window` only the newest `window` of them,
    its own included. CHUNK: causal, within the query's chunk of `chunk` positions, counted from
    the end of the row's leading padding. DENSE: what `dense` says, of shape [rows or 1, heads or 1,
    queries, columns], BOOL (true: seen) or a float type (added to the scores).
    """

    kind: MaskKind = MaskKind.CAUSAL
    window: int | None = None
    chunk: int | None = None
    dense: HostTensor | None = None


@dataclass(frozen=True, slots=True)
class AttendCall:
    """One layer of one step: store k and v if given, attend, return the output.

    Tensors hold the tokens of all rows one after the other: [tokens, heads, dim]. Fields that are
    empty tuples take the defaults that `worker.proto` states.
    """

    session_id: str
    epoch: int
    step: int
    layer: int
    q: HostTensor
    scale: float
    mask: Mask
    k: HostTensor | None = None
    v: HostTensor | None = None
    header: StepHeader | None = None
    positions: tuple[int, ...] = ()
    query_counts: tuple[int, ...] = ()
    query_positions: tuple[int, ...] = ()
    softcap: float | None = None
    sinks: HostTensor | None = None
    bias: HostTensor | None = None
    column_starts: tuple[int, ...] = ()
    partial: bool = False


@dataclass(frozen=True, slots=True)
class AttendResult:
    """out [tokens, heads, v_dim] in the layer's dtype, or FLOAT32 with lse [tokens, heads] for a
    partial."""

    out: HostTensor
    lse: HostTensor | None = None


@dataclass(frozen=True, slots=True)
class WriteCall:
    """Store k and v [tokens, kv_heads, dim] at (rows[i], positions[i]), in any order.

    `number` counts the writes of the session's holder, rising; 0: they are not counted.
    There may be no tokens where there is something to evict. `extent_starts` say per row where an
    extent begins that has no start yet; empty: at the lowest position that is written.
    """

    session_id: str
    epoch: int
    layer: int
    k: HostTensor
    v: HostTensor
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    padding: tuple[RowRange, ...] = ()
    number: int = 0
    evict_before: tuple[EvictBefore, ...] = ()
    extent_starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadResult:
    """k and v [rows, kv_heads, stop - start, dim], zeros for holes; the layer's lengths per row."""

    k: HostTensor
    v: HostTensor
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of pages in one pool; see `types.proto`."""

    pool: int
    page_size: int
    page_bytes: int
    used_pages: int
    reserved_pages: int
    free_pages: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker's numbers, of one moment; see `types.proto`."""

    worker_id: str
    incarnation: str
    address: str
    device: str
    budget_bytes: int
    arena_bytes: int
    used_bytes: int
    num_sessions: int
    pools: tuple[PoolStats, ...]
    page_allocations: int
    page_frees: dict[str, int]
    allocation_failures: dict[str, int]
    appended_tokens: int
    popped_tokens: int
    appended_bytes: int
    read_bytes: int
    lease_expirations: int
    draining: bool = False
    replays: dict[str, int] = field(default_factory=dict)
    stale_epochs: int = 0
    page_discrepancies: dict[str, int] = field(default_factory=dict)
    attention_seconds: Distribution = EMPTY
    attention_rows: Distribution = EMPTY
    session_pages: Distribution = EMPTY
    moves: dict[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    handover_seconds: Distribution = EMPTY
    num_arriving: int = 0
