"""How commands end."""

from __future__ import annotations

from typing import Final

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_RUNNING: Final = 3
UNHEALTHY: Final = 4

EXPLAINED: Final = """\
exit codes:
  0        done; from `status`: healthy
  1        failed; one line on stderr says why. From `doctor`: something is wrong
  2        the command line is wrong
  3        nothing is running under this name
  4        from `status`: the manager does not answer, or workers are missing
  128 + n  ended by signal n before it was done
"""


class NotRunning(Exception):
    """There is no service to ask."""


class Interrupted(BaseException):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
