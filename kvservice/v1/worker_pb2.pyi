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
    __slots__ = ("session_id", "incarnation", "epoch", "layer", "k", "v", "rows", "positions", "padding", "capability", "number", "evict_before")
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
    def __init__(self, session_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., layer: _Optional[int] = ..., k: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., rows: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., padding: _Optional[_Iterable[_Union[_types_pb2.RowRange, _Mapping]]] = ..., capability: _Optional[bytes] = ..., number: _Optional[int] = ..., evict_before: _Optional[_Iterable[_Union[EvictBefore, _Mapping]]] = ...) -> None: ...

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
