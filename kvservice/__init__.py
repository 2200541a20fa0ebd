"""Remote KV-cache pages for autoregressive decoders: manager, servers, and what they share."""

__version__ = "0.1.0"
