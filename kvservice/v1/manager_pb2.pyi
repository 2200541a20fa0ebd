from google.protobuf import duration_pb2 as _duration_pb2
from kvservice.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_ALIVE: _ClassVar[WorkerState]
    WORKER_STATE_SUSPECT: _ClassVar[WorkerState]
    WORKER_STATE_DEAD: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_ALIVE: WorkerState
WORKER_STATE_SUSPECT: WorkerState
WORKER_STATE_DEAD: WorkerState
WORKER_STATE_DRAINING: WorkerState

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "expected_count")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    expected_count: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., expected_count: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "device", "budget_bytes", "free_bytes", "session_count", "state", "metrics_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    device: str
    budget_bytes: int
    free_bytes: int
    session_count: int
    state: WorkerState
    metrics_address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., device: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., session_count: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "timeout")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timeout: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class MoveSessionRequest(_message.Message):
    __slots__ = ("session_id", "worker_id", "tenant", "from_worker_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FROM_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    worker_id: str
    tenant: str
    from_worker_id: str
    def __init__(self, session_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., tenant: _Optional[str] = ..., from_worker_id: _Optional[str] = ...) -> None: ...

class MoveSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.Session
    def __init__(self, session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ...) -> None: ...

class SessionReport(_message.Message):
    __slots__ = ("tenant", "session", "expired")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session: _types_pb2.Session
    expired: bool
    def __init__(self, tenant: _Optional[str] = ..., session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ..., expired: bool = ...) -> None: ...

class TenantUse(_message.Message):
    __slots__ = ("tenant", "session_count", "page_count")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_count: int
    page_count: int
    def __init__(self, tenant: _Optional[str] = ..., session_count: _Optional[int] = ..., page_count: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker", "sessions", "ended_sessions", "known_manager", "leaving", "token_ids", "limited_tenants")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_MANAGER_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LIMITED_TENANTS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    sessions: _containers.RepeatedCompositeFieldContainer[SessionReport]
    ended_sessions: _containers.RepeatedCompositeFieldContainer[SessionReport]
    known_manager: str
    leaving: bool
    token_ids: _containers.RepeatedScalarFieldContainer[bytes]
    limited_tenants: _containers.RepeatedCompositeFieldContainer[TenantUse]
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ..., sessions: _Optional[_Iterable[_Union[SessionReport, _Mapping]]] = ..., ended_sessions: _Optional[_Iterable[_Union[SessionReport, _Mapping]]] = ..., known_manager: _Optional[str] = ..., leaving: bool = ..., token_ids: _Optional[_Iterable[bytes]] = ..., limited_tenants: _Optional[_Iterable[_Union[TenantUse, _Mapping]]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("manager_incarnation", "drain", "left_behind", "ended_token_ids", "used_elsewhere")
    MANAGER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    LEFT_BEHIND_FIELD_NUMBER: _ClassVar[int]
    ENDED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    USED_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    manager_incarnation: str
    drain: _duration_pb2.Duration
    left_behind: _containers.RepeatedCompositeFieldContainer[SessionReport]
    ended_token_ids: _containers.RepeatedScalarFieldContainer[bytes]
    used_elsewhere: _containers.RepeatedCompositeFieldContainer[TenantUse]
    def __init__(self, manager_incarnation: _Optional[str] = ..., drain: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., left_behind: _Optional[_Iterable[_Union[SessionReport, _Mapping]]] = ..., ended_token_ids: _Optional[_Iterable[bytes]] = ..., used_elsewhere: _Optional[_Iterable[_Union[TenantUse, _Mapping]]] = ...) -> None: ...
