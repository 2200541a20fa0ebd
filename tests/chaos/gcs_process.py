"""A Ray head with Redis behind its GCS, as a process: `kill` and `start` on stdin mean the GCS.

    python -m tests.chaos.gcs_process REDIS_ADDRESS

Says the head's address first, and each time what it has done.
"""

from __future__ import annotations

import os
import sys


def main(redis_address: str) -> None:
    os.environ["RAY_REDIS_ADDRESS"] = redis_address  # before Ray reads it
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "node_ip_address": "127.0.0.2",  # so that it stays on this machine
            "num_cpus": 0,
            "resources": {"kvmanager": 1, "kvworker": 2},
            "include_dashboard": False,
            "object_store_memory": 80 << 20,
        },
    )
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "kill\n":
            cluster.head_node.kill_gcs_server(check_alive=False)
        else:
            cluster.head_node.start_gcs_server()
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
