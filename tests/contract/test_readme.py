"""The README's examples run as they stand, and its commands and options exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvservice import __version__, config
from kvservice.demo import model
from tests.programs import needs_model

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def example(heading: str, number: int = 1) -> str:
    """Return the Python code under a heading: its first block, or a later one."""
    section = README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return section.split("```python\n")[number].split("```", 1)[0]


def run(*arguments: str) -> str:
    """Run an interpreter of its own, in which warnings are errors, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_loop_example_runs() -> None:
    """The example of a plain loop prints the shape and lengths that it must."""
    printed = run("-c", example("With a loop of your own"))
    assert printed == "torch.Size([2, 8, 1, 64]) (15, 15) (20, 20)\n"


def test_one_line_changes_in_a_decoder_of_ones_own() -> None:
    """The example with both forms of the line gives equal outputs."""
    assert run("-c", example("With a loop of your own", 2)) == "equal\n"


@pytest.mark.processes
@needs_model
def test_a_prompt_is_shared_as_the_example_says() -> None:
    """What is typed for a second decoder works where the first example ends."""
    first = example("With a transformers model").replace(EXAMPLE_MODEL, str(model_folder()))
    second = example("One prompt, many decoders")
    indented = "".join(f"    {line}\n" for line in second.splitlines())
    printed = run("-c", f"{first}{indented}    print(branch.get_seq_length())\n")
    *_, session_id, length = printed.split()
    assert len(session_id) == 36
    assert int(length) > 0


def model_folder() -> Path:
    """Return where the model of the example is on this machine."""
    cache = config.cache_directory()
    return model.find_converted(cache) or model.convert(cache)


@needs_model
def test_transformers_example_runs() -> None:
    """The example for transformers answers, with the model of that name from this machine.

    Nothing but the name is replaced, since nothing is downloaded here.
    """
    code = example("With a transformers model")
    assert code.count(EXAMPLE_MODEL) == 1
    printed = run("-c", code.replace(EXAMPLE_MODEL, str(model_folder())))
    assert printed.startswith("The capital of France is Paris")


RESUMING = """
import threading
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from kvservice_client import use_remote_attention
from tests.chaos.service import serving

torch.manual_seed(0)
torch.set_grad_enabled(False)
config = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(97, (1, 40))
wanted = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
use_remote_attention(model)


def kill_the_tail(model, arguments):
    if ids.shape[1] == 50 and all(worker.running for worker in service.workers):
        service.worker_named(cache._shared.session._mirror.tail.worker_id).kill()


with serving(2) as service, service.connect() as client:
    model.register_forward_pre_hook(kill_the_tail)
{example}
    print(torch.equal(ids, wanted))
"""


@pytest.mark.processes
def test_a_decoder_resumes_as_the_example_says() -> None:
    """With real processes: the worker with the end of the prompt is killed, what it held is fed
    again, and the tokens are those of the local cache."""
    code = "".join(f"    {line}\n" for line in example("When a worker dies").splitlines())
    assert run("-c", RESUMING.replace("{example}", code)) == "32 of 50 tokens still hold\nTrue\n"


def test_examples_are_short() -> None:
    """About ten lines each, as a first example should be."""
    for heading in ("With a transformers model", "With a loop of your own"):
        lines = [line for line in example(heading).splitlines() if line.strip()]
        assert len(lines) <= 12


def documented_commands() -> dict[str, str]:
    """Return subcommand -> its row of the table of commands."""
    section = README.split("\n## The command\n", 1)[1].split("\n## ", 1)[0]
    return {m[1]: m[0] for m in re.finditer(r"(?m)^\| `kvservice ([a-z]+).*$", section)}


def test_commands_are_all_documented() -> None:
    """The README's table has exactly the subcommands that the command has."""
    printed = run("-m", "kvservice", "--help")
    assert set(re.findall(r"(?m)^    ([a-z]+)  ", printed)) == set(documented_commands())


@pytest.mark.parametrize("command", sorted(documented_commands()))
def test_options_exist(command: str) -> None:
    """Every option that the README shows for a subcommand is in its help."""
    printed = run("-m", "kvservice", command, "--help")
    for option in re.findall(r"--[a-z-]+", documented_commands()[command]):
        assert re.search(rf"{option}\b", printed), option


def test_version_is_the_packages() -> None:
    """The command and the package agree about the version."""

    assert run("-m", "kvservice", "--version").split()[-1] == __version__
