"""What a decoding step costs through the service, against attention over local tensors.

Local is what a decoder does without us: append by concatenation, then torch's attention. Both get
the same tensors in turn, so that whatever else the machine does meets both; a ratio is the median
over pairs of service time by local time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.lone_worker import lone_worker
from kvservice.clock import now_ns
from kvservice.embedded import embedded
from kvservice.tables import table
from kvservice_client import Client, Session, connect


@dataclass(frozen=True, slots=True)
class Decoder:
    """Shapes of a decoder's attention: by default those of SmolLM2-135M, with fewer layers."""

    num_layers: int = 6
    num_q_heads: int = 9
    num_kv_heads: int = 3
    dim: int = 64
    num_rows: int = 1

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of `count` new tokens in one layer."""
        q = torch.randn(self.num_rows, self.num_q_heads, count, self.dim)
        k, v = torch.randn(2, self.num_rows, self.num_kv_heads, count, self.dim)
        return q, k, v


class Local:
    """Keys and values of all layers as two growing tensors each."""

    def __init__(self, decoder: Decoder) -> None:
        empty = torch.zeros(decoder.num_rows, decoder.num_kv_heads, 0, decoder.dim)
        self._kv = [(empty, empty)] * decoder.num_layers

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (torch.cat(pair, 2) for pair in zip(self._kv[layer], (k, v), strict=True))
        self._kv[layer] = keys, values
        causal = q.shape[2] > 1
        return scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=True)


def measure(client: Client, decoder: Decoder, num_prompt: int, num_steps: int) -> list[float]:
    """Return, for each step after a prompt, service time by local time; check the outputs."""
    ratios = []
    local = Local(decoder)
    session = client.open(num_rows=decoder.num_rows)
    try:
        step(session, local, decoder, num_prompt)
        for _ in range(num_steps):
            remote_ns, local_ns = step(session, local, decoder, 1)
            ratios.append(remote_ns / local_ns)
    finally:
        session.release()
    return ratios


def step(session: Session, local: Local, decoder: Decoder, num_tokens: int) -> tuple[int, int]:
    """Do one step on both sides; return nanoseconds of the service and of local attention."""
    remote_ns = local_ns = 0
    for layer in range(decoder.num_layers):
        q, k, v = decoder.tokens(num_tokens)
        start = now_ns()
        ours = session.attend(layer, q, k, v)
        middle = now_ns()
        theirs = local.attend(layer, q, k, v)
        local_ns += now_ns() - middle
        remote_ns += middle - start
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return remote_ns, local_ns


@contextmanager
def over_grpc() -> Iterator[Client]:
    """Yield a client of a worker in a process of its own."""
    with lone_worker() as address, connect(address) as client:
        yield client


def main(num_steps: int) -> None:
    """Print one line for each way to the pages and each length of prompt."""
    torch.manual_seed(0)
    decoder = Decoder()
    rows = []
    for name, way in (("embedded", embedded), ("gRPC", over_grpc)):
        for num_prompt in (128, 2048, 8192):
            with way() as client:
                ratios = measure(client, decoder, num_prompt, num_steps)
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows.append((name, num_prompt, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"))
    print(f"decode step, {decoder}, float32, {torch.get_num_threads()} threads")
    print(table(("way", "prompt tokens", "service / local", "middle half"), rows))
