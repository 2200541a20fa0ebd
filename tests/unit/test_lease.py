"""Leases: renewing is cheap, expiry costs what has expired."""

import random

from kvservice.core.lease import LeaseTable


def test_expiry_as_a_dict_of_deadlines_would() -> None:
    """Any mixture of calls gives exactly the holders that are over, in order."""
    rng = random.Random(7)
    leases: LeaseTable[int] = LeaseTable()
    model: dict[int, float] = {}
    now, next_holder = 0.0, 0
    for _ in range(3000):
        now += rng.random()
        match rng.randrange(4):
            case 0:
                next_holder += 1
                model[next_holder] = now + rng.uniform(0, 20)
                leases.grant(next_holder, model[next_holder])
            case 1 if model:
                holder = rng.choice(list(model))
                deadline = now + rng.uniform(0, 20)
                leases.renew(holder, deadline)
                model[holder] = max(model[holder], deadline)
            case 2 if model:
                holder = rng.choice(list(model))
                leases.revoke(holder)
                del model[holder]
            case 3:
                over = leases.expired(now)
                assert sorted(over) == sorted(h for h, at in model.items() if at <= now)
                assert [model[h] for h in over] == sorted(model[h] for h in over)
                for holder in over:
                    leases.revoke(holder)
                    del model[holder]
        leases.check()
        assert len(leases) == len(model)
        look = leases.next_look()
        assert (look is None) == (not model)
        assert look is None or look <= min(model.values())


def test_looking_for_expired_leases_touches_only_those_whose_time_may_be_over() -> None:
    """10,000 leases far in the future are not looked at."""
    leases: LeaseTable[int] = LeaseTable()
    for holder in range(10_000):
        leases.grant(holder, 1000.0 + holder)
    leases.grant(-1, 1.0)
    assert leases.expired(2.0) == [-1]
    assert leases.expired(2.0) == [-1], "until it is revoked"
    leases.revoke(-1)
    assert leases.expired(2.0) == []


def test_ended_leases_do_not_pile_up() -> None:
    """Opening and closing for ever takes no more memory than what is open."""
    leases: LeaseTable[int] = LeaseTable()
    for holder in range(5000):
        leases.grant(holder, 3600.0)
        leases.revoke(holder)
    assert len(leases._heap) < 200


class Counted:
    """A holder that counts how often a table looks it up."""

    lookups = 0

    def __init__(self, name: int) -> None:
        self.name = name

    def __hash__(self) -> int:
        Counted.lookups += 1
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and other.name == self.name


def test_expiry_costs_what_has_expired() -> None:
    """Counted in look-ups: ten of 10,000 leases cost what ten of a hundred do."""
    costs = []
    for total in (100, 10_000):
        leases: LeaseTable[Counted] = LeaseTable()
        holders = [Counted(number) for number in range(total)]
        for number, holder in enumerate(holders):
            leases.grant(holder, 1.0 if number < 10 else 1000.0 + number)
        Counted.lookups = 0
        over = leases.expired(2.0)
        for holder in over:
            leases.revoke(holder)
        assert len(over) == 10
        costs.append(Counted.lookups)
    assert costs[1] <= costs[0] + 10


def test_renewed_leases_are_looked_at_once_a_ttl() -> None:
    """However often they are renewed: renewing does not touch the order."""
    leases: LeaseTable[Counted] = LeaseTable()
    holders = [Counted(number) for number in range(1000)]
    for holder in holders:
        leases.grant(holder, 10.0)
    for now in range(1, 10):
        for holder in holders:
            leases.renew(holder, now + 10.0)
    Counted.lookups = 0
    assert leases.expired(11.0) == []
    once = Counted.lookups
    assert once <= 4 * len(holders)
    Counted.lookups = 0
    for now in range(12, 18):
        assert leases.expired(float(now)) == []
    assert Counted.lookups <= 4 * 6, "until the next of them may be over"
