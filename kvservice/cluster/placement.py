"""What the actors need of a Ray cluster, and what is missing when they can't have it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvservice.cluster.state import ServiceOptions

MANAGER_RESOURCE: Final = "kvmanager"
WORKER_RESOURCE: Final = "kvworker"
_HEAD_RESOURCE: Final = "node:__internal_head__"  # Ray gives it to every head node


@dataclass(frozen=True, slots=True)
class Needs:
    """What one actor needs. Ray's units: whole or partial GPUs, and counts of resources."""

    num_cpus: float = 0.0
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)


def manager_needs(total: Mapping[str, float]) -> Needs:
    """Return what ties the manager to one node, so that a restart leaves its address alone."""
    if total.get(MANAGER_RESOURCE, 0) >= 1:
        return Needs(resources={MANAGER_RESOURCE: 1})
    return Needs(resources={_HEAD_RESOURCE: 0.001})


def worker_needs(total: Mapping[str, float], options: ServiceOptions, *, is_local: bool) -> Needs:
    """Return what each worker needs.

    Where the cluster has the resource `kvworker`, that says where workers may be. Elsewhere each
    asks for a CPU, for Ray's spreading balances only what is asked for.
    """
    num_gpus = 0.0
    if options.device == "cuda":
        # On one machine, workers may share a GPU; in a cluster each has its own.
        share = total.get("GPU", 0) / options.num_workers
        num_gpus = min(1.0, share) if is_local and share > 0 else 1.0
    if total.get(WORKER_RESOURCE, 0) >= 1:
        return Needs(num_gpus=num_gpus, resources={WORKER_RESOURCE: 1})
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
