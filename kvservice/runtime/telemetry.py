"""How a server process tells what it does, beside its metrics: its log, and its spans."""

from __future__ import annotations

from kvservice import config, logs
from kvservice.config import ConfigError
from kvservice.wire import tracing


def start(name: str, *, log_level: str, log_format: str) -> None:
    """Configure the log of this process and, if its environment names an exporter, its spans.

    Args:
        name: What traces call it, unless `OTEL_SERVICE_NAME` says otherwise.

    Raises:
        ConfigError: The exporter is not installed.
    """
    logs.configure(log_level, log_format)
    exporter = config.trace_exporter()
    if exporter is None:
        return
    try:
        tracing.set_up(exporter, name)
    except ImportError as error:
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER={exporter} needs the package {error.name}: pip install "
            "'kvservice[tracing]', and the exporter's own; or unset it"
        ) from error
