"""A process that computes its part of a model: parallel.py starts it, with the arguments of `LLM` on stdin.

Knows: how to begin and to end. Does not know: what is computed. Taught in notebook 02 (KV cache: two programs in one).
"""

from __future__ import annotations

import pickle
import sys

from minispec.config import ConfigError
from minispec.llm import LLM
from minispec.models.config import ModelLoadError

if __name__ == "__main__":
    try:
        LLM(**pickle.loads(sys.stdin.buffer.read()))  # does not return
    except (ConfigError, ModelLoadError):  # process 0 says the same
        sys.exit(2)
