"""Names of RPCs, and of the methods that serve them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from google.protobuf.descriptor import ServiceDescriptor

from kvservice.v1 import manager_pb2, worker_pb2

MANAGER: Final[ServiceDescriptor] = manager_pb2.DESCRIPTOR.services_by_name["PageManagerService"]
WORKER: Final[ServiceDescriptor] = worker_pb2.DESCRIPTOR.services_by_name["PageWorkerService"]


@lru_cache(maxsize=256)
def snake_case(method: str) -> str:
    """Return the name of the Python method that serves an RPC: `renew_lease` for `RenewLease`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower()
