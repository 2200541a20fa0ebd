"""A session on two workers and a bad network does what one dense array in memory does."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvservice_client import ClientConfig, DType, LayerGeometry, OutOfPages
from kvservice_client._retry import RetryPolicy
from tests.backends import embedded_backend
from tests.driving import Driver
from tests.faults import Faults

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

MAX_ROWS = 4
MAX_LENGTH = 40
WINDOWS = (None, 5)
LAYERS = [LayerGeometry(1, 4, 4, DType.FLOAT32)] * 2
VERBS = ("Attend", "Pop", "Select", "Reset", "Fork", "Write", "Read")
CONFIG = ClientConfig(
    timeout_s=10.0, detection_s=9.0, retry=RetryPolicy(first_delay_s=0.0005, max_delay_s=0.001)
)


class SessionMachine(RuleBasedStateMachine):
    """Every attention output is compared as it comes, and what is stored after every rule."""

    drivers = Bundle("drivers")

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.live: list[Driver] = []

    @initialize(pages=st.sampled_from([40, 1000]), windowed=st.booleans())
    def start(self, pages: int, windowed: bool) -> None:
        # 32 bytes a token and layer; 2 layers, pages of 4 tokens.
        self.backend = self.stack.enter_context(
            embedded_backend(num_workers=2, memory_bytes=pages * 256)
        )
        self.faults = Faults(self.backend.dial)
        self.client = self.backend.connect(dial=self.faults.dial, config=CONFIG)
        self.windows = WINDOWS if windowed else (None, None)

    @rule(target=drivers, rows=st.integers(1, 3), spread=st.sampled_from([1, 1, 2]))
    def open(self, rows: int, spread: int) -> Driver:
        session = self.client.open(
            num_rows=rows, page_size=4, spread=spread, layers=LAYERS, windows=self.windows
        )
        driver = Driver(session, num_heads=2, num_kv_heads=1, k_dim=4, v_dim=4)
        driver.session.retain = None if len(self.live) % 2 else 0
        self.live.append(driver)
        return driver

    @rule(driver=drivers, count=st.integers(1, 9), data=st.data())
    def step(self, driver: Driver, count: int, data: st.DataObject) -> None:
        """Feed tokens to all rows, some of them padding."""
        if self.gone(driver) or max(driver.session.lengths(0)) + count > MAX_LENGTH:
            return
        padding = None
        if data.draw(st.booleans()):
            padding = np.random.default_rng(count).random((driver.session.num_rows, count)) < 0.3
        self.feed(driver, count, padding=padding)

    @rule(driver=drivers, data=st.data())
    def ragged_step(self, driver: Driver, data: st.DataObject) -> None:
        """Feed each row its own number of tokens."""
        if self.gone(driver) or max(driver.session.lengths(0)) + 5 > MAX_LENGTH:
            return
        rows = driver.session.num_rows
        counts = data.draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows).filter(any))
        self.feed(driver, sum(counts), counts=counts)

    @rule(driver=drivers, count=st.integers(1, 4))
    def half_a_step(self, driver: Driver, count: int) -> None:
        """A forward pass dies after its first layer, and is rolled back."""
        if self.gone(driver) or max(driver.session.lengths(0)) + count > MAX_LENGTH:
            return
        before = driver.session.lengths(0)
        try:
            driver.session.attend(0, *driver.tokens(count))
        except OutOfPages:
            return
        driver.session.roll_back()
        # In a session's first step, what its layers have been told is all there is to go by.
        assert driver.session.lengths(0) == before

    @rule(driver=drivers, count=st.integers(1, 4))
    def repeat(self, driver: Driver, count: int) -> None:
        """A call that is made again, with other tokens, stands for the first."""
        if self.gone(driver) or max(driver.session.lengths(0)) + count > MAX_LENGTH:
            return
        pos = driver.session.lengths(0)
        try:
            driver.session.attend(0, *driver.tokens(count))
        except OutOfPages:
            return
        q, k, v = driver.tokens(count)
        out = driver.session.attend(0, q, k, v, pos=pos, window=self.windows[0])
        expected = driver.dense.attend(0, q, k, v, window=self.windows[0])
        assert np.abs(out - expected).max() < 2e-5
        driver.step(count, layers=[1], windows=self.windows)

    @rule(driver=drivers, keep=st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=MAX_ROWS))
    def pop(self, driver: Driver, keep: list[int]) -> None:
        if self.gone(driver) or self.windows[1] is not None:
            return
        driver.pop(keep=[keep[row % len(keep)] for row in range(driver.session.num_rows)])

    @rule(driver=drivers, picks=st.lists(st.integers(0, 99), min_size=1, max_size=MAX_ROWS))
    def select(self, driver: Driver, picks: list[int]) -> None:
        if not self.gone(driver):
            driver.select([pick % driver.session.num_rows for pick in picks])

    @rule(driver=drivers)
    def reset(self, driver: Driver) -> None:
        if not self.gone(driver):
            driver.reset()

    @rule(target=drivers, driver=drivers, part=st.integers(0, MAX_LENGTH))
    def fork(self, driver: Driver, part: int) -> object:
        if self.gone(driver) or not any(driver.session.lengths(0)):
            return multiple()
        shortest = min(driver.session.lengths(0))
        whole = part < 5 or not shortest or self.windows[1] is not None
        child = driver.fork(None if whole else 1 + part % shortest)
        self.live.append(child)
        return child

    @rule(driver=drivers)
    def attach(self, driver: Driver) -> None:
        """Another holder goes on with the session."""
        if self.gone(driver) or any(driver.dense.padding):
            return
        retain = driver.session.retain
        driver.session = self.client.attach(driver.session.detach())
        driver.session.retain = retain

    @rule(driver=consumes(drivers))
    def release(self, driver: Driver) -> None:
        if not self.gone(driver):
            driver.session.release()
            self.live.remove(driver)

    @rule(
        verb=st.sampled_from(VERBS),
        what=st.sampled_from(["request", "answer"]),
        after=st.integers(0, 3),
    )
    def lose(self, verb: str, what: str, after: int) -> None:
        """The network will lose something soon."""
        self.faults.lose(verb, what, after=after)

    @rule()
    def beat(self) -> None:
        self.backend.beat()

    @precondition(lambda self: self.live)
    @invariant()
    def all_is_stored(self) -> None:
        for driver in self.live:
            assert driver.session.lengths(0) == driver.session.lengths(1)
            if self.windows[1] is None:
                driver.check_stored()
        for worker in self.backend.workers:
            worker.check()

    def gone(self, driver: Driver) -> bool:
        return driver not in self.live

    def feed(self, driver: Driver, count: int, **options: object) -> None:
        """Make one step, or find that nobody has room: then nothing has changed."""
        packed = "counts" in options
        before = driver.session.lengths(0)
        for layer, window in enumerate(self.windows):
            tokens = driver.tokens(count, packed=packed)
            try:
                out = driver.session.attend(layer, *tokens, window=window, **options)
            except OutOfPages:
                assert layer == 0, "the first layer takes the pages of all"
                assert driver.session.lengths(0) == before
                return
            expected = driver.dense.attend(layer, *tokens, window=window, **options)
            assert np.abs(out - expected).max() < 2e-5

    def teardown(self) -> None:
        self.faults.forget()
        for driver in self.live:
            driver.session.release()
        self.stack.close()


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=25, stateful_step_count=25)
