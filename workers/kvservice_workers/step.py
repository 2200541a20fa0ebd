"""One step of a session: what its layers share, what has arrived of it, and how it was refused."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvservice.core.errors import CapacityError
from kvservice.core.session import StepHeader
from kvservice_workers.attention.batch import PagedBatch
from kvservice_workers.attention.native import Slots
from kvservice_workers.steady import SteadyKey, SteadyStep


@dataclass(slots=True)
class Step:
    """One forward pass in progress: what its layers share, and what has arrived of it."""

    number: int
    header: StepHeader
    # Where pages have been provided for, in all groups: positions of the first new tokens.
    positions: tuple[int, ...]
    # Layer -> positions of what it has appended in this step.
    appended: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # Derived values that layers share, by what they depend on.
    slots: dict[Hashable, Slots] = field(default_factory=dict)
    batches: dict[Hashable, PagedBatch] = field(default_factory=dict)
    # What serves the layers of a group that come after its first.
    steady: dict[SteadyKey, SteadyStep] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A step or write that found no room, by its number, and what was answered."""

    number: int
    error: CapacityError
