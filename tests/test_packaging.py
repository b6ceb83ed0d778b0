"""Installing: pins, ranges, extras, conda, make and CI agree with each other and name no machine and no index."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
DIRECT = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
EXTRAS = {k: [Requirement(x) for x in lines] for k, lines in PROJECT["project"]["optional-dependencies"].items()}
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
PIP_PART = next(entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict))
LINES = (ROOT / "requirements.lock.txt").read_text("utf-8").splitlines()
PINS = [Requirement(line) for line in LINES if line and not line.startswith("#")]
# What the course and the engine are designed around.
CARD = {"torch", "transformers", "flashinfer-python", "jupyterlab", "ipywidgets", "nbval", "matplotlib"}


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(r.name) for r in requirements}


def test_the_extras_hold_what_they_are_for() -> None:
    assert {"torch", "transformers", "safetensors", "gguf", "huggingface-hub", "numpy"} <= names(DIRECT)
    assert {"jupyterlab", "ipywidgets", "nbval", "matplotlib"} <= names(EXTRAS["course"])
    assert {"pytest", "ruff", "nbclient", "nbformat", "openai", "httpx"} <= names(EXTRAS["dev"])
    assert any(r.name == "minispec" and r.extras == {"course", "quant", "serve"} for r in EXTRAS["dev"])
    assert {"fastapi", "uvicorn"} <= names(EXTRAS["serve"])
    assert names(EXTRAS["quant"]) == {"torchao"}
    (flashinfer,) = EXTRAS["gpu"]
    assert [flashinfer.marker.evaluate(default_environment() | {"sys_platform": s}) for s in ("linux", "darwin")] == [
        True,
        False,
    ]


def test_every_pin_is_exact_and_lies_in_the_range_asked_for() -> None:
    pinned = {canonicalize_name(r.name): r.specifier for r in PINS}
    assert len(pinned) == len(PINS)
    for name, specifier in pinned.items():
        assert re.fullmatch(r"==[\w.]+", str(specifier)), f"{name}{specifier}: one release, no build of one machine"
    for wanted in DIRECT + EXTRAS["course"] + EXTRAS["quant"] + EXTRAS["serve"] + EXTRAS["dev"]:
        if wanted.name != "minispec":
            version = str(pinned[canonicalize_name(wanted.name)]).removeprefix("==")
            assert wanted.specifier.contains(version), f"{wanted} does not allow the tested {version}"


def test_the_conda_file_is_complete_by_conda_and_by_its_pip_part_alone() -> None:
    editable = [line for line in PIP_PART if line.startswith("-e ")]
    assert editable == ["-e .[course,dev]"]
    by_pip = [Requirement(line) for line in PIP_PART if line not in editable]
    assert names(by_pip) | names(DIRECT) | names(EXTRAS["course"]) >= CARD
    assert names(by_pip) >= CARD, "readable without pyproject.toml"
    by_conda = {line.split()[0] for line in ENVIRONMENT["dependencies"] if isinstance(line, str)}
    assert {"python", "pip"} <= by_conda and {n for n in CARD if n != "flashinfer-python"} - {"torch"} <= by_conda
    assert "pytorch" in by_conda


def test_the_conda_file_can_be_solved_on_any_platform() -> None:
    assert ENVIRONMENT["channels"] == ["conda-forge"]
    for line in ENVIRONMENT["dependencies"]:
        if isinstance(line, str):
            assert re.fullmatch(r"[a-z-]+( [<>=]=?[\w.]+(,[<>]=?[\w.]+)*)?", line), f"{line}: no builds, no exact pins"
    for requirement in (Requirement(line) for line in PIP_PART if not line.startswith("-e")):
        asked = [r for r in DIRECT + sum(EXTRAS.values(), []) if canonicalize_name(r.name) == requirement.name]
        assert [r.specifier for r in asked] == [requirement.specifier], f"{requirement} differs from pyproject.toml"


def test_every_folder_is_a_package_and_every_data_file_is_shipped() -> None:
    package = ROOT / "minispec"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["minispec"]
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            inside = path.relative_to(package).as_posix()
            if path.suffix == ".py":
                assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"
            else:
                assert any(fnmatch(inside, pattern) for pattern in patterns), f"{inside} is in no package-data pattern"


def test_the_version_is_written_once_in_effect() -> None:
    source = (ROOT / "minispec/__init__.py").read_text("utf-8")
    assert f'__version__ = "{PROJECT["project"]["version"]}"' in source


@pytest.mark.parametrize(
    "name",
    ["Makefile", "pyproject.toml", "environment.yml", "postBuild", "requirements.lock.txt", ".ci/run", "README.md"],
)
def test_nothing_that_installs_names_an_index_or_a_machine(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert not re.search(r"https?://|index-url|find-links|/root|/work|/home", text)


def test_the_licence_is_the_whole_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text and len(text) > 10_000
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_ci_runs_the_readme_s_test_command() -> None:
    run = ROOT / ".ci/run"
    assert run.stat().st_mode & stat.S_IXUSR
    text = run.read_text("utf-8")
    assert "set -euo pipefail" in text and text.rstrip().endswith("make test")
    assert "make test" in (ROOT / "README.md").read_text("utf-8")
    assert subprocess.run(["bash", "-n", run]).returncode == 0


def test_binder_puts_the_model_into_its_image() -> None:
    script = ROOT / "postBuild"
    assert script.stat().st_mode & stat.S_IXUSR and subprocess.run(["bash", "-n", script]).returncode == 0
    assert "python -m minispec fetch" in script.read_text("utf-8")
    # one of these folders would hide both files from Binder
    assert not (ROOT / "binder").exists() and not (ROOT / ".binder").exists()


# -- make ------------------------------------------------------------------------------------------------------------

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


def make(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """`make` in the repository, without what an outer make passes on."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    environment["PATH"] = f"{path}{os.pathsep}{os.environ['PATH']}" if path else os.environ["PATH"]
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


@needs_make
def test_an_old_or_missing_python_is_named_in_one_sentence(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\ncase "$2" in *print*) echo 3.8.18;; *) exit 1;; esac\n')
    old.chmod(0o755)
    for python, found in ((str(old), "is 3.8.18"), ("no-such-python", "is not there")):
        done = make("venv", f"PYTHON={python}", f"READY={tmp_path}/ready", f"VENV={tmp_path}/venv")
        assert done.returncode != 0 and not (tmp_path / "venv").exists()
        assert f"minispec needs Python 3.10 or newer, but PYTHON={python} {found}" in done.stdout


@needs_make
@pytest.mark.parametrize("driver", [False, True])
def test_torch_is_installed_first_and_the_driver_decides_which(driver: bool, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{'echo GPU 0' if driver else 'exit 1'}\n")
    smi.chmod(0o755)
    if not driver and Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a driver")
    done = make("--dry-run", "venv", f"READY={tmp_path}/ready", path=str(tmp_path))
    installs = [line for line in done.stdout.splitlines() if " install " in line]
    assert 'install "torch==' in installs[0] and "-e " not in installs[0], done.stderr
    assert "-c requirements.lock.txt" in installs[-1] and ("gpu" in installs[-1]) is driver
    assert ("+cpu" in done.stdout) is not driver


@needs_make
def test_a_ready_environment_is_not_built_again(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    done = make("--dry-run", "venv", f"READY={tmp_path}/ready")
    assert " install " not in done.stdout and done.returncode == 0


@needs_make
def test_the_lab_opens_at_the_start_page_as_a_page(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    commands = make("--dry-run", "lab", f"READY={tmp_path}/ready").stdout
    assert commands.rstrip().endswith("notebooks/README.md") and "notebooks/lab_settings.json" in commands
    settings = json.loads((ROOT / "notebooks/lab_settings.json").read_text("utf-8"))
    assert settings["@jupyterlab/docmanager-extension:plugin"]["defaultViewers"] == {"markdown": "Markdown Preview"}
