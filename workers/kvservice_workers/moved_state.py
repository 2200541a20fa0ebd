"""What a session is, as one worker tells another, and the session made of it there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvservice.core.geometry import HOLE
from kvservice.core.moving import MAX_REPLACED, GroupState, Refused, SessionState, StepState
from kvservice.core.session import RowRange
from kvservice_workers.layer_group import LayerGroup
from kvservice_workers.padding import RowPadding
from kvservice_workers.page_table import PageTable
from kvservice_workers.session_state import WorkerSession
from kvservice_workers.step import Refusal, Step


def state_of(session: WorkerSession, left_s: float) -> SessionState:
    """Return all that another worker must know of a session, but for what its pages hold.

    Args:
        left_s: How much of its lease is left, in seconds.
    """
    step = session.step
    return SessionState(
        spec=session.spec,
        num_rows=session.num_rows,
        origin=session.origin,
        epoch=session.epoch,
        last_change=session.last_change,
        change_before=session.change_before,
        copied=session.copied,
        unheard_from=session.unheard_from,
        last_step=session.last_step,
        step=None
        if step is None
        else StepState(step.number, step.header, step.positions, dict(step.appended)),
        begins_at_zero=session.begins_at_zero,
        starts=None if session.starts is None else tuple(session.starts),
        lengths={layer: tuple(lengths) for layer, lengths in session.lengths.items()},
        geometries=dict(session.geometries),
        groups=tuple(_group_state(group) for group in session.groups.values()),
        padding=tuple(
            RowRange(row, start, stop)
            for row, padding in enumerate(session.padding)
            for start, stop in padding.ranges()
        ),
        targets=None if session.targets is None else tuple(session.targets),
        followed_by=session.followed_by,
        last_write=session.last_write,
        refused_step=_refused(session.refused_step),
        refused_write=_refused(session.refused_write),
        group=session.group,
        replaces=session.replaces,
        left_s=left_s,
    )


def become(session: WorkerSession, state: SessionState, source: str) -> None:
    """Make a session all that another worker knows of it, but for pages and promises."""
    session.spec, session.origin = state.spec, state.origin
    session.epoch, session.last_change = state.epoch, state.last_change
    session.change_before, session.copied = state.change_before, state.copied
    session.unheard_from = state.unheard_from
    session.last_step, session.last_write = state.last_step, state.last_write
    session.begins_at_zero = state.begins_at_zero
    session.starts = None if state.starts is None else list(state.starts)
    session.lengths = dict(state.lengths)
    session.geometries.update(state.geometries)
    session.padding = [RowPadding() for _ in range(state.num_rows)]
    for item in state.padding:
        session.padding[item.row].mark(item.start, item.stop)
    session.followed_by, session.group = state.followed_by, state.group
    session.replaces = (*state.replaces, source)[-MAX_REPLACED:]
    session.refused_step = Refusal(*state.refused_step) if state.refused_step else None
    session.refused_write = Refusal(*state.refused_write) if state.refused_write else None
    session.step = None
    if state.step is not None:
        step = state.step
        session.step = Step(step.number, step.header, step.positions, dict(step.appended))


def set_tables(group: LayerGroup, state: GroupState, copies: Mapping[int, int]) -> None:
    """Put pages in the order that they have there. One that several rows list is theirs.

    Args:
        copies: Page there -> page here, which has one reference so far.
    """
    pages = group.pool.pages
    listings: Counter[int] = Counter(
        page for table in state.tables for page in table if page != HOLE
    )
    for page, count in listings.items():
        pages.retain([copies[page]] * (count - 1))
    group.tables = [
        PageTable.holding(pages, [copies[page] if page != HOLE else HOLE for page in table])
        for table in state.tables
    ]
    group.evicted, group.in_use = list(state.evicted), state.in_use
    group.changed()


def _refused(refusal: Refusal | None) -> Refused | None:
    return None if refusal is None else (refusal.number, refusal.error)


def _group_state(group: LayerGroup) -> GroupState:
    listed = {page for table in group.tables for page in table.entries}
    written = group.written or {}
    return GroupState(
        window=group.window,
        tables=tuple(tuple(table.entries) for table in group.tables),
        evicted=tuple(group.evicted),
        in_use=group.in_use,
        written={page: at for page, at in written.items() if page in listed},
    )
