"""Errors on the wire: the class comes back by its reason, or the nearest one by its code."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvservice.core import errors
from kvservice.core.errors import all_errors
from kvservice.wire import status


@pytest.mark.parametrize("cls", list(all_errors()), ids=lambda cls: cls.__name__)
def test_every_error_comes_back(cls: type[errors.KVServiceError]) -> None:
    """Class, message, metadata and delay survive, as an exception that can be raised."""
    sent = cls("it was 3, not 4", retry_delay_s=0.25, three=3)
    received = status.from_status(status.to_status(sent))
    assert type(received) is cls
    assert (received.message, received.metadata) == ("it was 3, not 4", {"three": "3"})
    assert received.retry_delay_s == 0.25


def test_delay_is_sent_only_where_there_is_one() -> None:
    """No RetryInfo means that nothing is said about trying again."""
    sent = status.to_status(errors.OutOfPages("full"))
    assert [detail.type_url.rpartition(".")[2] for detail in sent.details] == ["ErrorInfo"]
    assert status.from_status(sent).retry_delay_s is None


def foreign(code: int, reason: str, domain: str = "kvservice") -> status_pb2.Status:
    result = status_pb2.Status(code=code, message="from afar")
    info = error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata={"message": "m"})
    result.details.add().Pack(info)
    return result


@pytest.mark.parametrize("code", [code.value[0] for code in grpc.StatusCode if code.value[0]])
def test_unknown_reason_becomes_the_nearest_class(code: int) -> None:
    """A newer server's reason is kept in the metadata; the code says what to do."""
    received = status.from_status(foreign(code, "FROM_THE_FUTURE"))
    assert received.reason
    assert received.metadata == {"message": "m", "unknown_reason": "FROM_THE_FUTURE"}
    if code not in (1, 2, 9):  # CANCELLED, UNKNOWN, FAILED_PRECONDITION: never sent by us
        assert received.code.value == code


def test_other_domains_say_nothing() -> None:
    """Somebody else's reason of the same name is not ours."""
    received = status.from_status(foreign(14, "DRAINING", domain="example.org"))
    assert type(received) is errors.Unavailable
    assert received.metadata == {}


def test_trailer_is_cut_to_what_peers_accept() -> None:
    """Lengths of many rows do not fit into trailing metadata; class and beginning do."""
    sent = errors.Conflict("x" * 9000, lengths=",".join(["1234"] * 9000), epoch=7)
    small = status.to_trailer_status(sent)
    assert small.ByteSize() <= status.MAX_TRAILER_BYTES
    received = status.from_status(small)
    assert type(received) is errors.Conflict
    assert received.metadata["epoch"] == "7"
    assert received.metadata["lengths"].startswith("1234,1234")
    assert received.metadata["lengths"].endswith("...")


class Failed(grpc.RpcError):  # type: ignore[misc]
    """A call's error, as grpc raises it."""

    def __init__(self, code: grpc.StatusCode, trailer: bytes | None = None) -> None:
        self._code = code
        self._trailer = trailer

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "what gRPC said"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return () if self._trailer is None else ((status.DETAILS_KEY, self._trailer),)


def test_call_error_with_details_is_ours() -> None:
    """The status in the trailing metadata is what counts."""
    trailer = status.to_status(errors.StaleEpoch("old", epoch=4)).SerializeToString()
    received = status.from_rpc_error(Failed(grpc.StatusCode.ABORTED, trailer))
    assert type(received) is errors.StaleEpoch
    assert received.metadata == {"epoch": "4"}


@pytest.mark.parametrize("trailer", [None, b"\xff\xff", b""])
def test_call_error_without_details_goes_by_its_code(trailer: bytes | None) -> None:
    """gRPC's own errors, and those with broken details, keep code and text."""
    received = status.from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, trailer))
    assert type(received) is errors.Unavailable
    assert str(received) == "what gRPC said"
