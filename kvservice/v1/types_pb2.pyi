from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    D_TYPE_UNSPECIFIED: _ClassVar[DType]
    D_TYPE_FLOAT32: _ClassVar[DType]
    D_TYPE_FLOAT16: _ClassVar[DType]
    D_TYPE_BFLOAT16: _ClassVar[DType]
    D_TYPE_FLOAT64: _ClassVar[DType]
    D_TYPE_BOOL: _ClassVar[DType]
D_TYPE_UNSPECIFIED: DType
D_TYPE_FLOAT32: DType
D_TYPE_FLOAT16: DType
D_TYPE_BFLOAT16: DType
D_TYPE_FLOAT64: DType
D_TYPE_BOOL: DType

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Fragment(_message.Message):
    __slots__ = ("data", "total_bytes", "last")
    DATA_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    total_bytes: int
    last: bool
    def __init__(self, data: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., last: bool = ...) -> None: ...

class LayerGeometry(_message.Message):
    __slots__ = ("kv_head_count", "k_dim", "v_dim", "dtype")
    KV_HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    K_DIM_FIELD_NUMBER: _ClassVar[int]
    V_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    kv_head_count: int
    k_dim: int
    v_dim: int
    dtype: DType
    def __init__(self, kv_head_count: _Optional[int] = ..., k_dim: _Optional[int] = ..., v_dim: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class LayerSpec(_message.Message):
    __slots__ = ("window", "geometry")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    window: int
    geometry: LayerGeometry
    def __init__(self, window: _Optional[int] = ..., geometry: _Optional[_Union[LayerGeometry, _Mapping]] = ...) -> None: ...

class SessionSpec(_message.Message):
    __slots__ = ("row_count", "layers", "page_size", "max_tokens", "reserve_tokens", "ttl", "replica_count", "spread")
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_COUNT_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerSpec]
    page_size: int
    max_tokens: int
    reserve_tokens: int
    ttl: _duration_pb2.Duration
    replica_count: int
    spread: int
    def __init__(self, row_count: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerSpec, _Mapping]]] = ..., page_size: _Optional[int] = ..., max_tokens: _Optional[int] = ..., reserve_tokens: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., replica_count: _Optional[int] = ..., spread: _Optional[int] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("worker_id", "address", "incarnation", "starts", "stops", "capability", "followed_by", "replaces", "group", "stay")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_BY_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STAY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    incarnation: str
    starts: _containers.RepeatedScalarFieldContainer[int]
    stops: _containers.RepeatedScalarFieldContainer[int]
    capability: bytes
    followed_by: str
    replaces: _containers.RepeatedScalarFieldContainer[str]
    group: int
    stay: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., starts: _Optional[_Iterable[int]] = ..., stops: _Optional[_Iterable[int]] = ..., capability: _Optional[bytes] = ..., followed_by: _Optional[str] = ..., replaces: _Optional[_Iterable[str]] = ..., group: _Optional[int] = ..., stay: _Optional[str] = ...) -> None: ...

class LayerLengths(_message.Message):
    __slots__ = ("lengths",)
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "epoch", "step", "spec", "extents", "layers", "padding", "padding_unlisted", "last_write", "current_step", "same_since_epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PADDING_UNLISTED_FIELD_NUMBER: _ClassVar[int]
    LAST_WRITE_FIELD_NUMBER: _ClassVar[int]
    CURRENT_STEP_FIELD_NUMBER: _ClassVar[int]
    SAME_SINCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    step: int
    spec: SessionSpec
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    layers: _containers.RepeatedCompositeFieldContainer[LayerLengths]
    padding: _containers.RepeatedCompositeFieldContainer[RowRange]
    padding_unlisted: bool
    last_write: int
    current_step: int
    same_since_epoch: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., spec: _Optional[_Union[SessionSpec, _Mapping]] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., layers: _Optional[_Iterable[_Union[LayerLengths, _Mapping]]] = ..., padding: _Optional[_Iterable[_Union[RowRange, _Mapping]]] = ..., padding_unlisted: bool = ..., last_write: _Optional[int] = ..., current_step: _Optional[int] = ..., same_since_epoch: _Optional[int] = ...) -> None: ...

class RowRange(_message.Message):
    __slots__ = ("row", "start", "stop")
    ROW_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    row: int
    start: int
    stop: int
    def __init__(self, row: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class PoolStats(_message.Message):
    __slots__ = ("pool", "page_size", "page_bytes", "used_page_count", "reserved_page_count", "free_page_count", "token_count")
    POOL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    pool: int
    page_size: int
    page_bytes: int
    used_page_count: int
    reserved_page_count: int
    free_page_count: int
    token_count: int
    def __init__(self, pool: _Optional[int] = ..., page_size: _Optional[int] = ..., page_bytes: _Optional[int] = ..., used_page_count: _Optional[int] = ..., reserved_page_count: _Optional[int] = ..., free_page_count: _Optional[int] = ..., token_count: _Optional[int] = ...) -> None: ...

class ReasonCount(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "device", "budget_bytes", "arena_bytes", "used_bytes", "session_count", "pools", "page_allocation_count", "page_frees", "allocation_failures", "appended_token_count", "popped_token_count", "appended_bytes", "read_bytes", "lease_expiration_count", "draining", "replays", "stale_epoch_count", "page_discrepancies", "attention_seconds", "attention_rows", "session_pages", "moves", "moved_bytes", "handover_seconds", "arriving_count")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PAGE_ALLOCATION_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGE_FREES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_FAILURES_FIELD_NUMBER: _ClassVar[int]
    APPENDED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    POPPED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    APPENDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRATION_COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    STALE_EPOCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGE_DISCREPANCIES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_ROWS_FIELD_NUMBER: _ClassVar[int]
    SESSION_PAGES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_COUNT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    device: str
    budget_bytes: int
    arena_bytes: int
    used_bytes: int
    session_count: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolStats]
    page_allocation_count: int
    page_frees: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    allocation_failures: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    appended_token_count: int
    popped_token_count: int
    appended_bytes: int
    read_bytes: int
    lease_expiration_count: int
    draining: bool
    replays: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    stale_epoch_count: int
    page_discrepancies: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    attention_seconds: Distribution
    attention_rows: Distribution
    session_pages: Distribution
    moves: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    moved_bytes: int
    handover_seconds: Distribution
    arriving_count: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., device: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., session_count: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolStats, _Mapping]]] = ..., page_allocation_count: _Optional[int] = ..., page_frees: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., allocation_failures: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., appended_token_count: _Optional[int] = ..., popped_token_count: _Optional[int] = ..., appended_bytes: _Optional[int] = ..., read_bytes: _Optional[int] = ..., lease_expiration_count: _Optional[int] = ..., draining: bool = ..., replays: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., stale_epoch_count: _Optional[int] = ..., page_discrepancies: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., attention_seconds: _Optional[_Union[Distribution, _Mapping]] = ..., attention_rows: _Optional[_Union[Distribution, _Mapping]] = ..., session_pages: _Optional[_Union[Distribution, _Mapping]] = ..., moves: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., moved_bytes: _Optional[int] = ..., handover_seconds: _Optional[_Union[Distribution, _Mapping]] = ..., arriving_count: _Optional[int] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("session_id", "spec", "extent_starts", "epoch", "group", "incarnation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EXTENT_STARTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    spec: SessionSpec
    extent_starts: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    group: int
    incarnation: str
    def __init__(self, session_id: _Optional[str] = ..., spec: _Optional[_Union[SessionSpec, _Mapping]] = ..., extent_starts: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., group: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class AllocateResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("session_id", "incarnation", "epoch", "token_count", "expected_lengths", "capability", "followed_by")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_BY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    incarnation: str
    epoch: int
    token_count: int
    expected_lengths: _containers.RepeatedScalarFieldContainer[int]
    capability: bytes
    followed_by: str
    def __init__(self, session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., token_count: _Optional[int] = ..., expected_lengths: _Optional[_Iterable[int]] = ..., capability: _Optional[bytes] = ..., followed_by: _Optional[str] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class PopRequest(_message.Message):
    __slots__ = ("session_id", "incarnation", "epoch", "keep", "expected_lengths", "check_only", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CHECK_ONLY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    incarnation: str
    epoch: int
    keep: _containers.RepeatedScalarFieldContainer[int]
    expected_lengths: _containers.RepeatedScalarFieldContainer[int]
    check_only: bool
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., keep: _Optional[_Iterable[int]] = ..., expected_lengths: _Optional[_Iterable[int]] = ..., check_only: bool = ..., capability: _Optional[bytes] = ...) -> None: ...

class PopResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("session_id", "incarnation", "epoch", "check_only", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHECK_ONLY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    incarnation: str
    epoch: int
    check_only: bool
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., check_only: bool = ..., capability: _Optional[bytes] = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class SelectRequest(_message.Message):
    __slots__ = ("session_id", "incarnation", "epoch", "rows", "check_only", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CHECK_ONLY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    incarnation: str
    epoch: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    check_only: bool
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ..., check_only: bool = ..., capability: _Optional[bytes] = ...) -> None: ...

class SelectResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("session_id", "incarnation", "epoch", "new_session_id", "token_count", "ttl", "clip", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEW_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    incarnation: str
    epoch: int
    new_session_id: str
    token_count: int
    ttl: _duration_pb2.Duration
    clip: bool
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., new_session_id: _Optional[str] = ..., token_count: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., clip: bool = ..., capability: _Optional[bytes] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("session_id", "incarnation", "epoch", "capability", "keep_step")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    KEEP_STEP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    incarnation: str
    epoch: int
    capability: bytes
    keep_step: bool
    def __init__(self, session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., capability: _Optional[bytes] = ..., keep_step: bool = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_ids", "capabilities", "epochs", "unsettled_ids", "stays")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_IDS_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    capabilities: _containers.RepeatedScalarFieldContainer[bytes]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    unsettled_ids: _containers.RepeatedScalarFieldContainer[str]
    stays: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., capabilities: _Optional[_Iterable[bytes]] = ..., epochs: _Optional[_Iterable[int]] = ..., unsettled_ids: _Optional[_Iterable[str]] = ..., stays: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released_count", "moved_session_ids")
    RELEASED_COUNT_FIELD_NUMBER: _ClassVar[int]
    MOVED_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    released_count: int
    moved_session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, released_count: _Optional[int] = ..., moved_session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("session_ids", "capabilities")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    capabilities: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., capabilities: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("missing_session_ids", "capabilities")
    MISSING_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    missing_session_ids: _containers.RepeatedScalarFieldContainer[str]
    capabilities: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, missing_session_ids: _Optional[_Iterable[str]] = ..., capabilities: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id", "capability", "ticket", "incarnation", "look_only")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOOK_ONLY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    capability: bytes
    ticket: int
    incarnation: str
    look_only: bool
    def __init__(self, session_id: _Optional[str] = ..., capability: _Optional[bytes] = ..., ticket: _Optional[int] = ..., incarnation: _Optional[str] = ..., look_only: bool = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class PageStatsRequest(_message.Message):
    __slots__ = ("session_id", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., capability: _Optional[bytes] = ...) -> None: ...

class PageStatsResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStats]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStats, _Mapping]]] = ...) -> None: ...
