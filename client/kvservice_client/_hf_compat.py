"""The one place that knows transformers' versions, and names everything of it that we build on.

A transformers whose contract is not the one we follow must be refused by name, not met half-way
through a forward pass. So the version is checked first, then every name and member is looked up.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, Final

import transformers

SUPPORTED: Final = "transformers >= 5.20, < 6"


def check_version(version: str) -> None:
    """Refuse a version of transformers whose cache contract we do not follow.

    Raises:
        ImportError: The version is outside of what `SUPPORTED` says.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or int(match[1]) != 5 or int(match[2]) < 20:
        raise ImportError(f"kvservice_client supports {SUPPORTED}, found transformers {version}")


def require(module: str, name: str, *members: str) -> Any:
    """Return `module.name`, which must have all `members`.

    Raises:
        ImportError: Something is missing. The message names it, and the supported versions.
    """
    try:
        found = getattr(importlib.import_module(module), name)
        missing = next((member for member in members if not hasattr(found, member)), None)
    except (ImportError, AttributeError) as error:
        raise ImportError(_lacks(f"{module}.{name}")) from error
    if missing is not None:
        raise ImportError(_lacks(f"{module}.{name}.{missing}"))
    return found


def _lacks(name: str) -> str:
    return (
        f"transformers {transformers.__version__} has no {name}; "
        f"kvservice_client supports {SUPPORTED} as far as they share one cache contract"
    )


check_version(transformers.__version__)

PreTrainedConfig: Any = require(
    "transformers.configuration_utils", "PreTrainedConfig", "get_text_config"
)

# Caches. A RemoteCache overrides or inherits these members, and generation calls them.
DynamicCache: Any = require(
    "transformers.cache_utils",
    "DynamicCache",
    *("update", "get_seq_length", "get_query_offset", "get_mask_sizes", "get_max_length"),
    *("crop", "activate_past_recording", "reorder_cache", "reset", "early_initialization"),
    *("batch_repeat_interleave", "batch_select_indices", "batch_size"),
    *("is_sliding", "is_linear", "is_compileable", "is_croppable", "is_initialized"),
)
CacheLayerMixin: Any = require(
    "transformers.cache_utils",
    "CacheLayerMixin",
    *("lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"),
)
LOCAL_LAYER_CLASSES: Any = require("transformers.cache_utils", "DYNAMIC_LAYER_TYPE_MAPPING")
get_layer_types_and_kwargs: Any = require("transformers.cache_utils", "get_layer_types_and_kwargs")

# Attention.
AttentionInterface: Any = require(
    "transformers.modeling_utils", "AttentionInterface", "register", "valid_keys"
)
sdpa_attention_forward: Any = require(
    "transformers.integrations.sdpa_attention", "sdpa_attention_forward"
)

# Masks. The overlays are told from each other by their closures: see `_hf_mask.recognise`.
AttentionMaskInterface: Any = require(
    "transformers.masking_utils", "AttentionMaskInterface", "register", "valid_keys"
)
causal_mask_function: Any = require("transformers.masking_utils", "causal_mask_function")
bidirectional_mask_function: Any = require(
    "transformers.masking_utils", "bidirectional_mask_function"
)
and_masks: Any = require("transformers.masking_utils", "and_masks")
sliding_window_overlay: Any = require("transformers.masking_utils", "sliding_window_overlay")
chunked_overlay: Any = require("transformers.masking_utils", "chunked_overlay")
sdpa_mask: Any = require("transformers.masking_utils", "sdpa_mask")
_create_causal_mask: Any = require("transformers.masking_utils", "create_causal_mask")

CACHE_ARGUMENT: Final = (
    "cache" if "cache" in inspect.signature(_create_causal_mask).parameters else "past_key_values"
)
"""What models, `generate` and mask functions call their cache. It was renamed in 5.24."""
