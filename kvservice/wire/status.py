"""Errors on the wire: `KVServiceError` to and from `google.rpc.Status`.

The reason travels in an ErrorInfo of domain `kvservice`, the metadata with it, the retry delay in
a RetryInfo. Nothing is ever recognised by its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvservice.core import errors
from kvservice.core.errors import DOMAIN, KVServiceError

DETAILS_KEY: Final = "grpc-status-details-bin"
"""The trailing metadata that carries the status, as gRPC libraries of all languages have it."""

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

MAX_TRAILER_BYTES: Final = 4096
"""Peers refuse trailing metadata beyond 8 KiB by default; the message travels beside this."""

# What an error is where its reason is unknown (a newer server's) or missing (gRPC's own).
_BY_CODE: Final[Mapping[int, type[KVServiceError]]] = {
    1: errors.Unavailable,  # CANCELLED: the server has closed an idle stream, or is going
    2: errors.InternalError,  # UNKNOWN
    3: errors.InvalidRequest,
    4: errors.DeadlineExceeded,
    5: errors.NotFound,
    6: errors.AlreadyExists,
    7: errors.PermissionDenied,
    8: errors.Overloaded,
    9: errors.Conflict,  # FAILED_PRECONDITION
    10: errors.Conflict,
    11: errors.PositionOutOfRange,
    12: errors.Unimplemented,
    13: errors.InternalError,
    14: errors.Unavailable,
    15: errors.PagesLost,
    16: errors.Unauthenticated,
}


def to_status(error: KVServiceError) -> status_pb2.Status:
    """Return the error as it travels."""
    status = status_pb2.Status(code=error.code.value, message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status.details.add().Pack(info)
    if error.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_delay_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def to_trailer_status(error: KVServiceError) -> status_pb2.Status:
    """Return the error small enough for trailing metadata: long texts are cut, and say so."""
    status = to_status(error)
    if status.ByteSize() <= MAX_TRAILER_BYTES:
        return status
    room = MAX_TRAILER_BYTES // 2 // (len(error.metadata) + 1)
    short = type(error)(_cut(error.message, room), retry_delay_s=error.retry_delay_s)
    short.metadata = {name: _cut(value, room) for name, value in error.metadata.items()}
    return to_status(short)


def _cut(text: str, num_bytes: int) -> str:
    data = text.encode()
    if len(data) <= num_bytes:
        return text
    return data[: max(num_bytes - 3, 0)].decode(errors="ignore") + "..."


def to_code(error: KVServiceError) -> grpc.StatusCode:
    """Return the error's code as gRPC has it."""
    return _CODES[error.code.value]


def from_status(status: status_pb2.Status) -> KVServiceError:
    """Return the error that a status stands for; unknown reasons become the nearest class."""
    reason, metadata, retry_delay_s = "", dict[str, str](), None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            retry_delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    try:
        cls = errors.error_class(reason)
    except KeyError:
        cls = _BY_CODE.get(status.code, errors.InternalError)
        if reason:
            metadata["unknown_reason"] = reason
    error = cls(status.message, retry_delay_s=retry_delay_s)
    error.metadata = metadata  # their names are the server's, not ours to spell as keywords
    return error


def from_rpc_error(error: grpc.RpcError) -> KVServiceError:
    """Return what a failed RPC stands for, as the exception of a call or as that of a stream."""
    call: Any = error
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY:
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except DecodeError:
                break
            if status.code == call.code().value[0]:
                return from_status(status)
    code: int = call.code().value[0]
    return _BY_CODE.get(code, errors.InternalError)(call.details() or call.code().name)
