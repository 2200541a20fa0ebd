from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from kvservice.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MASK_KIND_UNSPECIFIED: _ClassVar[MaskKind]
    MASK_KIND_FULL: _ClassVar[MaskKind]
    MASK_KIND_CAUSAL: _ClassVar[MaskKind]
    MASK_KIND_CHUNK: _ClassVar[MaskKind]
    MASK_KIND_DENSE: _ClassVar[MaskKind]
MASK_KIND_UNSPECIFIED: MaskKind
MASK_KIND_FULL: MaskKind
MASK_KIND_CAUSAL: MaskKind
MASK_KIND_CHUNK: MaskKind
MASK_KIND_DENSE: MaskKind

class Mask(_message.Message):
    __slots__ = ("kind", "window", "chunk", "dense")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    kind: MaskKind
    window: int
    chunk: int
    dense: _types_pb2.Tensor
    def __init__(self, kind: _Optional[_Union[MaskKind, str]] = ..., window: _Optional[int] = ..., chunk: _Optional[int] = ..., dense: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class StepHeader(_message.Message):
    __slots__ = ("counts", "padding", "evict_before", "followed_by")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    EVICT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_BY_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    padding: _containers.RepeatedCompositeFieldContainer[_types_pb2.RowRange]
    evict_before: _containers.RepeatedCompositeFieldContainer[EvictBefore]
    followed_by: str
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., padding: _Optional[_Iterable[_Union[_types_pb2.RowRange, _Mapping]]] = ..., evict_before: _Optional[_Iterable[_Union[EvictBefore, _Mapping]]] = ..., followed_by: _Optional[str] = ...) -> None: ...

class EvictBefore(_message.Message):
    __slots__ = ("window", "positions")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    window: int
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, window: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("call", "fragment")
    CALL_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    call: AttendCall
    fragment: _types_pb2.Fragment
    def __init__(self, call: _Optional[_Union[AttendCall, _Mapping]] = ..., fragment: _Optional[_Union[_types_pb2.Fragment, _Mapping]] = ...) -> None: ...

class AttendCall(_message.Message):
    __slots__ = ("call_id", "session_id", "incarnation", "epoch", "step", "layer", "header", "q", "k", "v", "positions", "query_counts", "query_positions", "mask", "scale", "softcap", "sinks", "bias", "column_starts", "partial", "capability", "trace_parent")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    QUERY_COUNTS_FIELD_NUMBER: _ClassVar[int]
    QUERY_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SOFTCAP_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    COLUMN_STARTS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    session_id: str
    incarnation: str
    epoch: int
    step: int
    layer: int
    header: StepHeader
    q: _types_pb2.Tensor
    k: _types_pb2.Tensor
    v: _types_pb2.Tensor
    positions: _containers.RepeatedScalarFieldContainer[int]
    query_counts: _containers.RepeatedScalarFieldContainer[int]
    query_positions: _containers.RepeatedScalarFieldContainer[int]
    mask: Mask
    scale: float
    softcap: float
    sinks: _types_pb2.Tensor
    bias: _types_pb2.Tensor
    column_starts: _containers.RepeatedScalarFieldContainer[int]
    partial: bool
    capability: bytes
    trace_parent: str
    def __init__(self, call_id: _Optional[int] = ..., session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., layer: _Optional[int] = ..., header: _Optional[_Union[StepHeader, _Mapping]] = ..., q: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., k: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., positions: _Optional[_Iterable[int]] = ..., query_counts: _Optional[_Iterable[int]] = ..., query_positions: _Optional[_Iterable[int]] = ..., mask: _Optional[_Union[Mask, _Mapping]] = ..., scale: _Optional[float] = ..., softcap: _Optional[float] = ..., sinks: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., bias: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., column_starts: _Optional[_Iterable[int]] = ..., partial: bool = ..., capability: _Optional[bytes] = ..., trace_parent: _Optional[str] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("result", "fragment")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    result: AttendResult
    fragment: _types_pb2.Fragment
    def __init__(self, result: _Optional[_Union[AttendResult, _Mapping]] = ..., fragment: _Optional[_Union[_types_pb2.Fragment, _Mapping]] = ...) -> None: ...

class AttendResult(_message.Message):
    __slots__ = ("call_id", "error", "out", "lse")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    LSE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    error: _status_pb2.Status
    out: _types_pb2.Tensor
    lse: _types_pb2.Tensor
    def __init__(self, call_id: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., out: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., lse: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("call", "fragment")
    CALL_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    call: WriteCall
    fragment: _types_pb2.Fragment
    def __init__(self, call: _Optional[_Union[WriteCall, _Mapping]] = ..., fragment: _Optional[_Union[_types_pb2.Fragment, _Mapping]] = ...) -> None: ...

class WriteCall(_message.Message):
    __slots__ = ("session_id", "incarnation", "epoch", "layer", "k", "v", "rows", "positions", "padding", "capability", "number", "evict_before", "extent_starts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVICT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    EXTENT_STARTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    incarnation: str
    epoch: int
    layer: int
    k: _types_pb2.Tensor
    v: _types_pb2.Tensor
    rows: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    padding: _containers.RepeatedCompositeFieldContainer[_types_pb2.RowRange]
    capability: bytes
    number: int
    evict_before: _containers.RepeatedCompositeFieldContainer[EvictBefore]
    extent_starts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., layer: _Optional[int] = ..., k: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., rows: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., padding: _Optional[_Iterable[_Union[_types_pb2.RowRange, _Mapping]]] = ..., capability: _Optional[bytes] = ..., number: _Optional[int] = ..., evict_before: _Optional[_Iterable[_Union[EvictBefore, _Mapping]]] = ..., extent_starts: _Optional[_Iterable[int]] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("lengths",)
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("session_id", "incarnation", "epoch", "layer", "start", "stop", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    incarnation: str
    epoch: int
    layer: int
    start: int
    stop: int
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., layer: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., capability: _Optional[bytes] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("result", "fragment")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    result: ReadResult
    fragment: _types_pb2.Fragment
    def __init__(self, result: _Optional[_Union[ReadResult, _Mapping]] = ..., fragment: _Optional[_Union[_types_pb2.Fragment, _Mapping]] = ...) -> None: ...

class ReadResult(_message.Message):
    __slots__ = ("k", "v", "lengths")
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    k: _types_pb2.Tensor
    v: _types_pb2.Tensor
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, k: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenLaneRequest(_message.Message):
    __slots__ = ("session_id", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., capability: _Optional[bytes] = ...) -> None: ...

class OpenLaneResponse(_message.Message):
    __slots__ = ("addresses", "token")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    token: bytes
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., token: _Optional[bytes] = ...) -> None: ...

class FollowSessionRequest(_message.Message):
    __slots__ = ("session_id", "incarnation", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    incarnation: str
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., capability: _Optional[bytes] = ...) -> None: ...

class FollowSessionResponse(_message.Message):
    __slots__ = ("worker_id", "address", "incarnation", "capability", "ticket", "copied_at_epoch", "stay", "copied_from_epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    COPIED_AT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAY_FIELD_NUMBER: _ClassVar[int]
    COPIED_FROM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    incarnation: str
    capability: bytes
    ticket: int
    copied_at_epoch: int
    stay: str
    copied_from_epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., capability: _Optional[bytes] = ..., ticket: _Optional[int] = ..., copied_at_epoch: _Optional[int] = ..., stay: _Optional[str] = ..., copied_from_epoch: _Optional[int] = ...) -> None: ...

class SharedWith(_message.Message):
    __slots__ = ("worker_id", "address", "incarnation", "ticket", "stay", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STAY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    incarnation: str
    ticket: int
    stay: str
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., ticket: _Optional[int] = ..., stay: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PullSessionRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "incarnation", "move_id", "source_worker_id", "source_address", "source_incarnation", "source_is_dead", "keep")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_IS_DEAD_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    incarnation: str
    move_id: str
    source_worker_id: str
    source_address: str
    source_incarnation: str
    source_is_dead: bool
    keep: bool
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., move_id: _Optional[str] = ..., source_worker_id: _Optional[str] = ..., source_address: _Optional[str] = ..., source_incarnation: _Optional[str] = ..., source_is_dead: bool = ..., keep: bool = ...) -> None: ...

class PullSessionResponse(_message.Message):
    __slots__ = ("session", "copied_bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.Session
    copied_bytes: int
    def __init__(self, session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ..., copied_bytes: _Optional[int] = ...) -> None: ...

class CopyStateRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "incarnation", "copier", "copy", "freeze")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COPIER_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    incarnation: str
    copier: str
    copy: int
    freeze: bool
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., copier: _Optional[str] = ..., copy: _Optional[int] = ..., freeze: bool = ...) -> None: ...

class CopyStateResponse(_message.Message):
    __slots__ = ("copy", "ticket", "state")
    COPY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    copy: int
    ticket: int
    state: SessionState
    def __init__(self, copy: _Optional[int] = ..., ticket: _Optional[int] = ..., state: _Optional[_Union[SessionState, _Mapping]] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("spec", "row_count", "epoch", "origin", "last_change", "last_change_values", "last_step", "step", "begins_at_zero", "starts", "layers", "groups", "padding", "targets", "followed_by", "last_write", "replaces", "left", "refused_step", "refused_write", "group", "change_before", "change_before_values", "shared_with", "unheard_from")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    LAST_CHANGE_FIELD_NUMBER: _ClassVar[int]
    LAST_CHANGE_VALUES_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEGINS_AT_ZERO_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_BY_FIELD_NUMBER: _ClassVar[int]
    LAST_WRITE_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_STEP_FIELD_NUMBER: _ClassVar[int]
    REFUSED_WRITE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CHANGE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_BEFORE_VALUES_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FROM_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.SessionSpec
    row_count: int
    epoch: int
    origin: SessionOrigin
    last_change: str
    last_change_values: _containers.RepeatedScalarFieldContainer[int]
    last_step: int
    step: StepState
    begins_at_zero: bool
    starts: _containers.RepeatedScalarFieldContainer[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerState]
    groups: _containers.RepeatedCompositeFieldContainer[GroupState]
    padding: _containers.RepeatedCompositeFieldContainer[_types_pb2.RowRange]
    targets: _containers.RepeatedScalarFieldContainer[int]
    followed_by: str
    last_write: int
    replaces: _containers.RepeatedScalarFieldContainer[str]
    left: _duration_pb2.Duration
    refused_step: RefusedCall
    refused_write: RefusedCall
    group: int
    change_before: str
    change_before_values: _containers.RepeatedScalarFieldContainer[int]
    shared_with: SharedWith
    unheard_from: int
    def __init__(self, spec: _Optional[_Union[_types_pb2.SessionSpec, _Mapping]] = ..., row_count: _Optional[int] = ..., epoch: _Optional[int] = ..., origin: _Optional[_Union[SessionOrigin, _Mapping]] = ..., last_change: _Optional[str] = ..., last_change_values: _Optional[_Iterable[int]] = ..., last_step: _Optional[int] = ..., step: _Optional[_Union[StepState, _Mapping]] = ..., begins_at_zero: bool = ..., starts: _Optional[_Iterable[int]] = ..., layers: _Optional[_Iterable[_Union[LayerState, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupState, _Mapping]]] = ..., padding: _Optional[_Iterable[_Union[_types_pb2.RowRange, _Mapping]]] = ..., targets: _Optional[_Iterable[int]] = ..., followed_by: _Optional[str] = ..., last_write: _Optional[int] = ..., replaces: _Optional[_Iterable[str]] = ..., left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., refused_step: _Optional[_Union[RefusedCall, _Mapping]] = ..., refused_write: _Optional[_Union[RefusedCall, _Mapping]] = ..., group: _Optional[int] = ..., change_before: _Optional[str] = ..., change_before_values: _Optional[_Iterable[int]] = ..., shared_with: _Optional[_Union[SharedWith, _Mapping]] = ..., unheard_from: _Optional[int] = ...) -> None: ...

class RefusedCall(_message.Message):
    __slots__ = ("number", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: _status_pb2.Status
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class SessionOrigin(_message.Message):
    __slots__ = ("allocate", "fork")
    ALLOCATE_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    allocate: _types_pb2.AllocateRequest
    fork: _types_pb2.ForkRequest
    def __init__(self, allocate: _Optional[_Union[_types_pb2.AllocateRequest, _Mapping]] = ..., fork: _Optional[_Union[_types_pb2.ForkRequest, _Mapping]] = ...) -> None: ...

class StepState(_message.Message):
    __slots__ = ("number", "header", "positions", "appended")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    header: StepHeader
    positions: _containers.RepeatedScalarFieldContainer[int]
    appended: _containers.RepeatedCompositeFieldContainer[LayerPositions]
    def __init__(self, number: _Optional[int] = ..., header: _Optional[_Union[StepHeader, _Mapping]] = ..., positions: _Optional[_Iterable[int]] = ..., appended: _Optional[_Iterable[_Union[LayerPositions, _Mapping]]] = ...) -> None: ...

class LayerPositions(_message.Message):
    __slots__ = ("layer", "positions")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ...) -> None: ...

class LayerState(_message.Message):
    __slots__ = ("layer", "geometry", "lengths")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    geometry: _types_pb2.LayerGeometry
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., geometry: _Optional[_Union[_types_pb2.LayerGeometry, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class GroupState(_message.Message):
    __slots__ = ("window", "in_use", "rows", "evicted", "written_pages", "written_at")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_PAGES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_AT_FIELD_NUMBER: _ClassVar[int]
    window: int
    in_use: bool
    rows: _containers.RepeatedCompositeFieldContainer[RowPages]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    written_pages: _containers.RepeatedScalarFieldContainer[int]
    written_at: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, window: _Optional[int] = ..., in_use: bool = ..., rows: _Optional[_Iterable[_Union[RowPages, _Mapping]]] = ..., evicted: _Optional[_Iterable[int]] = ..., written_pages: _Optional[_Iterable[int]] = ..., written_at: _Optional[_Iterable[int]] = ...) -> None: ...

class RowPages(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pages: _Optional[_Iterable[int]] = ...) -> None: ...

class CopyPagesRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "incarnation", "copy", "window", "layers", "pages")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    incarnation: str
    copy: int
    window: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., copy: _Optional[int] = ..., window: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., pages: _Optional[_Iterable[int]] = ...) -> None: ...

class CopyPagesResponse(_message.Message):
    __slots__ = ("written_at", "layers")
    WRITTEN_AT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    written_at: _containers.RepeatedScalarFieldContainer[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerPages]
    def __init__(self, written_at: _Optional[_Iterable[int]] = ..., layers: _Optional[_Iterable[_Union[LayerPages, _Mapping]]] = ...) -> None: ...

class LayerPages(_message.Message):
    __slots__ = ("layer", "k", "v")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    layer: int
    k: _types_pb2.Tensor
    v: _types_pb2.Tensor
    def __init__(self, layer: _Optional[int] = ..., k: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class HandOverRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "incarnation", "ticket", "worker_id", "worker_address", "worker_incarnation", "confirmed", "keep")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    incarnation: str
    ticket: int
    worker_id: str
    worker_address: str
    worker_incarnation: str
    confirmed: bool
    keep: bool
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., ticket: _Optional[int] = ..., worker_id: _Optional[str] = ..., worker_address: _Optional[str] = ..., worker_incarnation: _Optional[str] = ..., confirmed: bool = ..., keep: bool = ...) -> None: ...

class HandOverResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
