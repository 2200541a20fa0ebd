"""The demo, from start to end, with a tiny model that is made here."""

from __future__ import annotations

import os
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvservice.core.errors import NotFound
from kvservice.demo import model as demo_model


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A Llama with random weights, drawn so that it does not repeat one token; a letter a token."""
    letters = ["<pad>", "<eos>", *string.ascii_letters, *string.digits, *string.punctuation, " "]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(tmp_path / "model")
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.18,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.processes
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("leaves_nothing")
def test_demo_from_start_to_end(model_folder: Path, tmp_path: Path) -> None:
    """Both caches lead to the same tokens, pages are free again, and no process is left."""
    prompts = ("Who are you?", "Count to a hundred, slowly, please.", "Why?")
    arguments = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvservice", "demo", "--model", str(model_folder)),
            *("--max-new-tokens", "12", *arguments),
        ],
        env=os.environ | {"KVSERVICE_RUN_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "36 tokens: identical" in done.stdout
    assert "released: 0 pages are used" in done.stdout
    assert "processes of the service have ended" in done.stdout
    assert all(prompt in done.stdout for prompt in prompts)
    assert done.stderr == ""


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do about it, and nothing is left in the cache."""
    monkeypatch.setattr(demo_model, "_PACKAGE", "a_package_that_is_not_there")
    assert demo_model.find_converted(tmp_path / "cache") is None
    with pytest.raises(NotFound, match=r"a_package_that_is_not_there.*make demo"):
        demo_model.convert(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
