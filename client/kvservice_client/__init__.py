"""Client of kvservice: sessions whose keys and values live on workers, with attention there.

Names that need torch or transformers are loaded at first use, so that this import needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvservice.core.errors import (
    AlreadyExists,
    CapacityError,
    Conflict,
    DeadlineExceeded,
    Draining,
    GeometryMismatch,
    InternalError,
    InvalidRequest,
    KVServiceError,
    NotFound,
    OutOfOrder,
    OutOfPages,
    Overloaded,
    PagesLost,
    PermissionDenied,
    PositionOutOfRange,
    QuotaExceeded,
    SessionNotFound,
    StaleEpoch,
    StaleWorker,
    TooLarge,
    TooManySessions,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    WorkerLost,
    WorkerNotFound,
)
from kvservice.core.geometry import DType, LayerGeometry, LayerSpec
from kvservice.core.session import PoolStats, SessionInfo, WorkerStats
from kvservice_client import functional
from kvservice_client._client import Client, current_client, use
from kvservice_client._connect import connect
from kvservice_client._connections import ClientConfig
from kvservice_client._session import Session
from kvservice_client._transport_grpc import Tls
from kvservice_client.paged_cache import PagedCache, PageStats, Popped

if TYPE_CHECKING:
    from kvservice_client.hf import RemoteCache, use_remote_attention
    from kvservice_client.tensor_caches import DynamicCache, EncoderDecoderCache, StaticCache

__all__ = [
    "AlreadyExists",
    "CapacityError",
    "Client",
    "ClientConfig",
    "Conflict",
    "DType",
    "DeadlineExceeded",
    "Draining",
    "DynamicCache",
    "EncoderDecoderCache",
    "GeometryMismatch",
    "InternalError",
    "InvalidRequest",
    "KVServiceError",
    "LayerGeometry",
    "LayerSpec",
    "NotFound",
    "OutOfOrder",
    "OutOfPages",
    "Overloaded",
    "PageStats",
    "PagedCache",
    "PagesLost",
    "PermissionDenied",
    "PoolStats",
    "Popped",
    "PositionOutOfRange",
    "QuotaExceeded",
    "RemoteCache",
    "Session",
    "SessionInfo",
    "SessionNotFound",
    "StaleEpoch",
    "StaleWorker",
    "StaticCache",
    "Tls",
    "TooLarge",
    "TooManySessions",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "WorkerLost",
    "WorkerNotFound",
    "WorkerStats",
    "connect",
    "current_client",
    "functional",
    "use",
    "use_remote_attention",
]

# Name -> the module that has it, and the extra that brings what the module needs.
_LATE = {
    "DynamicCache": ("tensor_caches", "hf"),
    "EncoderDecoderCache": ("tensor_caches", "hf"),
    "RemoteCache": ("hf", "hf"),
    "StaticCache": ("tensor_caches", "hf"),
    "use_remote_attention": ("hf", "hf"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _LATE[name]
    try:
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs {error.name}, which is not installed: pip install 'kvservice[{extra}]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
