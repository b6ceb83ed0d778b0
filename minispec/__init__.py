"""minispec: how a modern LLM server works, in code short enough to read.

Start with `minispec.core`, then follow the notebooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minispec.config import SamplingParams, SpeculativeConfig
    from minispec.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "SpeculativeConfig"]

_HOMES = {"LLM": "llm", "SamplingParams": "config", "SpeculativeConfig": "config"}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import; the command line's help should not.
    if name not in _HOMES:
        raise AttributeError(f"module 'minispec' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"minispec.{_HOMES[name]}"), name)
