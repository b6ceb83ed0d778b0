"""What all tests share: two threads, a fixed seed, and the embedded model, fetched once if it is not there yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minispec.models.config import ModelLoadError
from minispec.models.embedded import fetch_embedded

torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct; tests that need it are skipped where it is neither cached nor reachable."""
    try:
        return fetch_embedded(progress=False)
    except ModelLoadError as error:
        pytest.skip(str(error))
