"""A client as a process: opens sessions, stores something in each, and keeps them until it ends.

python -m tests.chaos.client_process ADDRESS COUNT TTL_S
"""

from __future__ import annotations

import sys

import numpy as np

from kvservice_client import DType, LayerGeometry, connect


def main(address: str, count: int, ttl_s: float) -> None:
    layers = [LayerGeometry(2, 8, 8, DType.FLOAT32)]
    tokens = np.ones((1, 2, 8, 8), np.float32)
    with connect(address) as client:
        sessions = [
            client.open(num_rows=1, layers=layers, page_size=4, ttl_s=ttl_s) for _ in range(count)
        ]
        for session in sessions:
            session.write(0, tokens, tokens)
        print("ready", flush=True)
        sys.stdin.readline()
        for session in sessions:
            session.attend(0, tokens[:, :, :1], tokens[:, :, :1], tokens[:, :, :1])
        print("alive", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
