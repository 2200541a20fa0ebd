"""The demo: the same questions to the same model, with its cache on workers and at home.

Starts a service of its own on this machine, unless it is given one, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import DynamicCache

from kvservice import config
from kvservice.cli.exits import FAILED, OK
from kvservice.cli.showing import stats_table
from kvservice.clock import Clock, SystemClock
from kvservice.cluster.launch import LOCAL, Launcher
from kvservice.cluster.processes import find_listener, kill, members
from kvservice.cluster.state import RunState, ServiceOptions, StateStore
from kvservice.core.errors import InvalidRequest
from kvservice.demo import model as demo_model
from kvservice.demo.screen import Screen, make_screen
from kvservice_client import Client, RemoteCache, connect, use_remote_attention
from kvservice_client.hf import CACHE_ARGUMENT

PROMPTS: Final = (
    "What is the capital of France? Answer in one sentence.",
    "Write a haiku about the sea.",
    "List three uses of a brick.",
)
_NAME: Final = "demo"
_START_TIMEOUT_S: Final = 120.0
_MEMORY_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to ask of which model.

    address: Of a running service; None: one is started for the demo, with `num_workers`.
    model: A folder; None: the packaged model.
    kill_worker: Keep two copies of every page, and kill a worker when half of the tokens are there.
    """

    prompts: tuple[str, ...] = ()
    max_new_tokens: int = 48
    num_workers: int = 2
    address: str | None = None
    model: str | None = None
    kill_worker: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.model is not None and not Path(self.model).is_dir():
            raise InvalidRequest(f"--model must name a folder with a model, got {self.model}")
        if self.kill_worker and self.address is not None:
            raise InvalidRequest("--kill-worker is for a service of the demo's own: not --address")
        if self.kill_worker and self.num_workers < 2:
            raise InvalidRequest(f"--kill-worker needs 2 workers, got {self.num_workers}")


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model has generated: i64[rows, tokens], padded behind; and how long it took."""

    tokens: torch.Tensor
    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class _Service:
    """Where to ask, and the run that the demo has started; None: it has not."""

    address: str
    run: RunState | None


class _Victim:
    """The worker that has computed attention so far, to be killed."""

    def __init__(self, service: _Service, client: Client) -> None:
        self._service = service
        self._client = client
        self.name = "no worker"
        self.num_tokens = 0

    def kill(self, num_tokens: int) -> None:
        run = self._service.run
        assert run is not None, "the service is not the demo's own"
        busiest = max(self._client.page_stats(), key=lambda one: one.attention_seconds.num_values)
        port = int(busiest.address.rpartition(":")[2])
        found = find_listener(run.tag, run.head, port)
        assert found is not None, f"nobody listens at {busiest.address}"
        kill(found)
        self.name, self.num_tokens = busiest.worker_id, num_tokens


def run_demo(options: DemoOptions) -> int:
    """Run the demo; return 0 if both caches lead to the same tokens, else 1."""
    clock = SystemClock()
    screen = make_screen(clock)
    tokenizer, model = _load(options, screen)
    with _service(options, screen, clock) as service, connect(service.address) as client:
        is_identical = _compare(options, screen, clock, service, client, tokenizer, model)
    return OK if is_identical else FAILED


def _load(options: DemoOptions, screen: Screen) -> tuple[Any, Any]:
    folder = Path(options.model) if options.model else None
    cache_directory = config.cache_directory()
    folder = folder or demo_model.find_converted(cache_directory)
    if folder is None:
        with screen.stage("Converting the model, this once"):
            folder = demo_model.convert(cache_directory)
    with screen.stage(f"Loading {folder.name}"):
        return demo_model.load(folder)


@contextlib.contextmanager
def _service(options: DemoOptions, screen: Screen, clock: Clock) -> Iterator[_Service]:
    """Yield a service; end it afterwards if it is the demo's own."""
    if options.address is not None:
        yield _Service(options.address, None)
        return
    store = StateStore(config.run_directory(), _NAME)
    with screen.stage(f"Starting Ray with {options.num_workers} workers") as detail:
        launcher = Launcher(store, clock=clock, environment=config.environment(), report=detail)
        state = launcher.up(
            ServiceOptions(num_workers=options.num_workers, memory_bytes=_MEMORY_BYTES, port=0),
            ray_address=LOCAL,
            timeout_s=_START_TIMEOUT_S,
            may_exist=False,
        )
    try:
        yield _Service(state.manager_address, state)
    finally:
        with screen.stage("Ending the service"):
            num_ended = launcher.down().ended_processes
    left = members(state.tag, state.head)
    assert not left, f"processes are left: {left}"
    screen.say(f"all {num_ended} processes of the service have ended")


def _compare(
    options: DemoOptions,
    screen: Screen,
    clock: Clock,
    service: _Service,
    client: Client,
    tokenizer: Any,
    model: Any,
) -> bool:
    """Generate with both caches and show what comes out; return whether it is the same."""
    prompts = options.prompts or PROMPTS
    inputs = _encode(tokenizer, prompts)
    num_workers = len(client.list_workers())
    ask = _Asker(screen, clock, tokenizer, model, prompts, inputs, options.max_new_tokens)
    local_attention = model.config._attn_implementation
    _warm_up(model, inputs)

    use_remote_attention(model)
    if options.kill_worker:
        cache = RemoteCache(client, model.config, mode="attend", replicas=2)
        victim = _Victim(service, client)
        title = "With two copies of keys and values, of which one dies"
        remote = ask(title, cache, victim.kill)
        screen.say(f"{victim.name} was killed by SIGKILL after {victim.num_tokens} tokens")
    else:
        cache = RemoteCache(client, model.config, mode="attend", spread=num_workers)
        remote = ask(f"With keys and values on {num_workers} workers", cache)
    screen.say(stats_table(client.page_stats()))
    cache.reset()  # releases the session
    used = sum(pool.used_pages for worker in client.page_stats() for pool in worker.pools)
    screen.say(f"released: {used} pages are used")

    model.set_attn_implementation(local_attention)
    local = ask("With keys and values at home", DynamicCache(config=model.config))
    is_identical = torch.equal(remote.tokens, local.tokens)
    screen.say(
        f"{remote.num_tokens} tokens: {'identical' if is_identical else 'DIFFERENT'}\n"
        f"remote {remote.tokens_per_s:.1f} tokens/s, local {local.tokens_per_s:.1f} tokens/s, "
        f"ratio {remote.tokens_per_s / local.tokens_per_s:.2f}"
    )
    if used:
        screen.say(f"{used} pages are still used after the release, expected none")
    return is_identical and not used


@dataclass(frozen=True, slots=True)
class _Asker:
    """Asks the same questions again, with another cache."""

    screen: Screen
    clock: Clock
    tokenizer: Any
    model: Any
    prompts: Sequence[str]
    inputs: Any
    max_new_tokens: int

    def __call__(
        self, title: str, cache: Any, midway: Callable[[int], None] | None = None
    ) -> Answers:
        """Generate. `midway` is told how many tokens there are when half of them are."""
        with self.screen.stream(title, self.prompts) as update, torch.inference_mode():
            streamer = _Streamer(self.tokenizer, len(self.prompts), update)
            if midway is not None:
                streamer.midway = (max(1, self.max_new_tokens // 2), midway)
            start = self.clock.monotonic()
            sequences = self.model.generate(
                **self.inputs,
                **{CACHE_ARGUMENT: cache},
                do_sample=False,
                max_new_tokens=self.max_new_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                streamer=streamer,
            )
            seconds = self.clock.monotonic() - start
        tokens = sequences[:, self.inputs["input_ids"].shape[1] :]
        return Answers(tokens, _num_generated(tokens, self.model), seconds)


class _Streamer:
    """Shows the tokens that `generate` hands it. The first it is handed are the prompts."""

    def __init__(
        self, tokenizer: Any, num_rows: int, update: Callable[[Sequence[str]], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._update = update
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self._has_prompt = False
        self.midway: tuple[int, Callable[[int], None]] | None = None

    def put(self, tokens: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        for row, token in zip(self._tokens, tokens.tolist(), strict=True):
            row.append(token)
        texts = self._tokenizer.batch_decode(self._tokens, skip_special_tokens=True)
        # A character whose bytes are not all there yet decodes to this sign.
        self._update([text.rstrip("\N{REPLACEMENT CHARACTER}") for text in texts])
        count = len(self._tokens[0])
        if self.midway is not None and count == self.midway[0]:
            self.midway[1](count)

    def end(self) -> None:
        """Nothing is held back, so that there is nothing to do."""


def _encode(tokenizer: Any, prompts: Sequence[str]) -> Any:
    """Return input_ids and attention_mask i64[rows, tokens], padded in front."""
    if tokenizer.chat_template is None:
        return tokenizer(list(prompts), return_tensors="pt", padding=True)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    return tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)


def _num_generated(tokens: torch.Tensor, model: Any) -> int:
    """Return how many tokens come before the end of their row, the end itself included."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return tokens.numel()
    is_end = torch.isin(tokens, torch.as_tensor(ends)).long()
    return int((is_end.cumsum(1) - is_end == 0).sum())


def _warm_up(model: Any, inputs: Any) -> None:
    """Let the first forward pass, which sets up a lot, be nobody's."""
    with torch.inference_mode():
        model(input_ids=inputs["input_ids"][:, -2:])
