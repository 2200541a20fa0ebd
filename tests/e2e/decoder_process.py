"""Decoders as a process of their own: `python -m tests.e2e.decoder_process ADDRESS`.

It does the jobs that come as lines of JSON, each `{"do": NAME, ...}`, and answers each with another
line. It holds all caches until it is told to drop them, its standard input ends, or it is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvservice_client import Client, DynamicCache, StaticCache, connect
from kvservice_client.hf import RemoteCache, use_remote_attention
from tests.decoders import GPT
from tests.e2e import models
from tests.e2e.scenarios import World, follow, forward
from tests.programs import ROOT

CAPACITY = 24


class DecoderProcess:
    """The process, as the tests have it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, name: str, **job: Any) -> Any:
        """Have it do a job; return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": name, **job}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process has ended without a word"
        return json.loads(line)

    def kill(self) -> None:
        """End it by SIGKILL: nothing is released or said."""
        self._process.kill()
        self._process.wait()


@contextmanager
def decoder_process(address: str) -> Iterator[DecoderProcess]:
    """Start one for the service at an address; end it with the block, orderly if it still lives."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.decoder_process", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield DecoderProcess(process)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (0, -9)


# -- what runs there


def _world(family: str, cache: RemoteCache) -> World:
    return World(family, use_remote_attention(models.remote_twin(family)), lambda: cache)


def _config(family: str) -> Any:
    return models.build(family).config


def prompt(client: Client, family: str, ids: Any, spread: int = 1) -> Any:
    """Store a prompt; say which token follows it."""
    cache = RemoteCache(client, _config(family), mode="attend", page_size=4, spread=spread)
    logits = forward(_world(family, cache), torch.tensor(ids), cache)
    return cache, {"session_id": cache.session_id, "next": logits[:, -1:].argmax(-1).tolist()}


def stop_in_step(client: Client, family: str, ids: Any, layer: int) -> Any:
    """Store a prompt, and stop in the step after it, before a layer. Never returns."""
    cache, said = prompt(client, family, ids)
    world = _world(family, cache)

    def stop(*arguments: Any) -> None:
        _say(said)
        threading.Event().wait()

    world.model.model.layers[layer].register_forward_pre_hook(stop)
    forward(world, torch.tensor(said["next"]), cache)
    raise AssertionError("it should have been killed")


def fork(client: Client, session_id: str, token_count: int | None, **more: Any) -> Any:
    """Go on from another's prompt."""
    config = _config(more["family"])
    cache = RemoteCache.fork_from(session_id, token_count, client=client, config=config)
    return _go_on(cache, **more)


def attach(client: Client, session_id: str, **more: Any) -> Any:
    """Take over what another decoder has left, maybe in the middle of a step."""
    cache = RemoteCache.attach(session_id, client=client, config=_config(more["family"]))
    cache.rollback()
    return _go_on(cache, **more)


def _go_on(cache: RemoteCache, family: str, ids: Any, new: int) -> Any:
    """Feed tokens and generate `new` more, each of which is fed too."""
    world, length = _world(family, cache), cache.get_seq_length()
    tokens, _ = follow(world, cache, forward(world, torch.tensor(ids), cache), new)
    return cache, {"found": length, "tokens": tokens.tolist()}


def generate(client: Client, kind: str, ids: Any, new: int) -> Any:
    """Generate with a cache whose decoder attends itself."""
    cache = (
        DynamicCache(client=client) if kind == "dynamic" else StaticCache(CAPACITY, client=client)
    )
    with torch.no_grad():
        ids = GPT().generate(torch.tensor(ids), new, cache)
    return cache, {"session_id": cache.session_id, "ids": ids.tolist()}


def go_on(client: Client, kind: str, session_id: str, ids: Any, new: int) -> Any:
    """Go on with what another such decoder has left."""
    cache: Any
    if kind == "dynamic":
        cache = DynamicCache.attach(session_id, client=client)
    else:
        cache = StaticCache.attach(session_id, CAPACITY, client=client)
    found = cache.get_seq_length()
    with torch.no_grad():
        return cache, {"found": found, "ids": GPT().go_on(torch.tensor(ids), new, cache).tolist()}


JOBS = {job.__name__: job for job in (prompt, stop_in_step, fork, attach, generate, go_on)}


def _do(client: Client, do: str, **job: Any) -> Any:
    """Do a job and say what came of it; return the cache."""
    cache, said = JOBS[do](client, **job)
    _say(said)
    return cache


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    held = []
    with connect(sys.argv[1]) as client:
        for line in sys.stdin:
            job = json.loads(line)
            if job["do"] == "drop":
                held.clear()
                _say("dropped")
            else:
                held.append(_do(client, **job))
        held.clear()


if __name__ == "__main__":
    main()
