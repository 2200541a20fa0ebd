"""Keys and values of a prompt that the decoder attends to itself: on their way to the service.

It needs them only by the next step, so they are sent meanwhile, and those of rows that are equal
once.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch

MAX_BYTES_UNDERWAY: Final = 256 << 20
"""Keys and values that wait to be sent; a decoder that is further ahead waits."""


class Layer(Protocol):
    """What is kept up to date about a layer."""

    length: int

    def set_length(self, length: int) -> None: ...


@dataclass(slots=True, eq=False)
class Upload:
    """Tokens of one layer on their way, or arrived."""

    write: Callable[[], None]
    layer: weakref.ref[Layer]
    num_tokens: int
    num_bytes: int
    stored: bool = False


class Uploads:
    """Writes of one session, carried out in order by a thread that lives while there are any.

    A write that fails takes those behind it with it. The error is raised by the next `check` or
    `finish`, once, after the layers concerned have been set back.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Upload] = deque()
        self._put: list[Upload] = []  # all since the last `settle`
        self._running = False
        self._num_pauses = 0
        self._num_bytes = 0
        self._error: BaseException | None = None

    def put(self, write: Callable[[], None], layer: Layer, num_tokens: int, num_bytes: int) -> None:
        """Have `write` called soon; wait first if too much is under way."""
        upload = Upload(write, weakref.ref(layer), num_tokens, num_bytes)
        with self._changed:
            self._changed.wait_for(
                lambda: not self._waiting or self._num_bytes + num_bytes <= MAX_BYTES_UNDERWAY
            )
            self._put.append(upload)
            self._waiting.append(upload)
            self._num_bytes += num_bytes
            if not self._running:
                self._running = True
                threading.Thread(target=self._carry_out, name="kvservice-upload").start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no further write begin: who calls the session meanwhile waits for one at most."""
        self._pause(1)
        try:
            yield
        finally:
            self._pause(-1)

    def _pause(self, change: int) -> None:
        with self._changed:
            self._num_pauses += change
            self._changed.notify_all()

    def check(self) -> None:
        """Raise if a write has failed; do not wait for those under way."""
        if self._error is not None:
            self.finish()

    def finish(self) -> None:
        """Wait until all is stored.

        Raises:
            KVServiceError: A write has failed. Its layer and the later ones are set back.
        """
        error = self.settle()
        if error is not None:
            raise error

    def settle(self) -> BaseException | None:
        """Wait, as `finish` does, and return the error instead."""
        if not self._put:
            return None
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
            uploads, self._put = self._put, []
            error, self._error = self._error, None
        for upload in uploads:
            layer = upload.layer()
            if not upload.stored and layer is not None:
                layer.set_length(layer.length - upload.num_tokens)
        return error

    def _carry_out(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_pauses)
                if not self._waiting:
                    self._running = False
                    self._changed.notify_all()
                    return
                upload = self._waiting.popleft()
            try:
                upload.stored = self._error is None
                if upload.stored:
                    upload.write()
            except BaseException as error:  # whatever it is belongs to the caller's thread
                upload.stored, self._error = False, error
            upload.write = _done  # lets go of the tensors
            with self._changed:
                self._num_bytes -= upload.num_bytes
                self._changed.notify_all()
            del upload


def _done() -> None:
    """What is left of a write that has been carried out."""


def equal_rows(k: torch.Tensor, v: torch.Tensor) -> list[int] | None:
    """Find rows of a batch that are equal, as those of beams at first.

    Args:
        k, v: [rows, heads, tokens, dim].

    Returns:
        Which of the different rows each one is, numbered as they first appear; None if all
        differ.
    """
    if k.shape[0] == 1 or not k.shape[2]:
        return None
    numbers: list[int] = []
    first_of: list[int] = []
    alike: dict[tuple[float, ...], list[int]] = {}
    for row, sample in enumerate(k[:, 0, -1, :4].tolist()):
        candidates = alike.setdefault(tuple(sample), [])
        for number in candidates:
            other = first_of[number]
            if torch.equal(k[row], k[other]) and torch.equal(v[row], v[other]):
                numbers.append(number)
                break
        else:
            candidates.append(len(first_of))
            numbers.append(len(first_of))
            first_of.append(row)
    return numbers if len(first_of) < len(numbers) else None


def alike(first: Sequence[int], second: Sequence[int]) -> list[int] | None:
    """Return which rows are equal by both of two numberings, numbered as they first appear; None
    if all differ."""
    numbers: dict[tuple[int, int], int] = {}
    both = [numbers.setdefault(pair, len(numbers)) for pair in zip(first, second, strict=True)]
    return both if len(numbers) < len(both) else None


def first_rows(numbers: list[int]) -> list[int]:
    """Return, for each different row, the first row of the batch that is it."""
    return [numbers.index(number) for number in range(max(numbers) + 1)]


def are_folded(tensor: torch.Tensor, numbers: list[int]) -> bool:
    """Whether rows that are said to be equal are."""
    first = first_rows(numbers)
    return all(
        first[number] == row or torch.equal(tensor[row], tensor[first[number]])
        for row, number in enumerate(numbers)
    )
