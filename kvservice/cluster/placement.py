"""What the actors need of a Ray cluster, and what is missing when they can't have it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvservice.cluster.state import ServiceOptions, WorkerGroup

MANAGER_RESOURCE: Final = "kvmanager"
WORKER_RESOURCE: Final = "kvworker"
GPU_WORKER_RESOURCE: Final = "kvworker_gpu"
_HEAD_RESOURCE: Final = "node:__internal_head__"  # Ray gives it to every head node


@dataclass(frozen=True, slots=True)
class Needs:
    """What one actor needs. Ray's units: whole or partial GPUs, and counts of resources."""

    num_cpus: float = 0.0
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)


def manager_needs(total: Mapping[str, float], *, by_resource: bool = False) -> Needs:
    """Return what ties the manager to one node, so that a restart leaves its address alone.

    Args:
        total: What the cluster has.
        by_resource: Ask for the resource `kvmanager` also where no node has it yet.
    """
    if by_resource or total.get(MANAGER_RESOURCE, 0) >= 1:
        return Needs(resources={MANAGER_RESOURCE: 1})
    return Needs(resources={_HEAD_RESOURCE: 0.001})


def worker_needs(
    total: Mapping[str, float], options: ServiceOptions, group: WorkerGroup, *, is_local: bool
) -> Needs:
    """Return what each worker of a group needs.

    Where the cluster has the resource `kvworker` or, for workers on GPUs, `kvworker_gpu`, that
    says where workers may be. Elsewhere each asks for a CPU, for Ray's spreading balances only
    what is asked for.
    """
    num_gpus, resource = 0.0, WORKER_RESOURCE
    if group.device == "cuda":
        # On one machine, workers may share a GPU; in a cluster each has its own.
        share = total.get("GPU", 0) / group.num_workers if group.num_workers else 0
        num_gpus = min(1.0, share) if is_local and share > 0 else 1.0
        if options.by_resource or total.get(GPU_WORKER_RESOURCE, 0) >= 1:
            resource = GPU_WORKER_RESOURCE
    if options.by_resource or total.get(resource, 0) >= 1:
        return Needs(num_gpus=num_gpus, resources={resource: 1})
    return Needs(num_cpus=1, num_gpus=num_gpus)


def shortage(
    needs: Needs, num_missing: int, total: Mapping[str, float], free: Mapping[str, float]
) -> str:
    """Return a sentence with numbers: what is needed, what there is, what of it is free."""
    wanted = dict(needs.resources)
    if needs.num_cpus:
        wanted["CPU"] = needs.num_cpus
    if needs.num_gpus:
        wanted["GPU"] = needs.num_gpus
    parts = [
        f"{amount:g} {name} (the cluster has {total.get(name, 0):g}, free {free.get(name, 0):g})"
        for name, amount in sorted(wanted.items())
    ]
    each = "it needs" if num_missing == 1 else f"each of the {num_missing} missing needs"
    return f"{each} {', '.join(parts)}; add nodes or ask for less"
