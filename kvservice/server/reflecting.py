"""Reflection: the standard service, but its streams count as streams, and are for known callers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvservice.core.errors import KVServiceError
from kvservice.server.guard import Guard
from kvservice.server.rooms import refusing, streaming_in_room
from kvservice.server.streams import OpenCalls
from kvservice.server.threads import served_by
from kvservice.wire import status

REFLECT: Final = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"


class ReflectionHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The method of reflection. Who calls is known before anything is read."""

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        calls: OpenCalls,
        timeout_s: float,
        guard: Guard,
        threads: ThreadPoolExecutor,
    ) -> None:
        """
        Args:
            names: Of the services that there are.
            timeout_s: How long one may ask.
        """
        self._servicer = reflection.ReflectionServicer(names)
        self._calls = calls
        self._timeout_s = timeout_s
        self._guard = guard
        self._handler = grpc.stream_stream_rpc_method_handler(
            served_by(threads, streaming_in_room(calls.streams, self._reflect)),
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        self._refusal = refusing(calls.streams.refusal)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != REFLECT:
            return None
        return self._handler if self._calls.streams.take() else self._refusal

    def _reflect(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        try:
            self._guard.check(self._guard.identify(context))
        except KVServiceError as error:
            context.abort(status.to_code(error), error.message)
        with self._calls.watched(context, timeout_s=self._timeout_s):
            yield from self._servicer.ServerReflectionInfo(requests, context)
