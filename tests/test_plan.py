"""The plan command: published sizes from configs alone, the bound by hand, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minispec.cli import main
from minispec.config import ConfigError
from minispec.models.config import ModelConfig, ModelLoadError
from minispec.models.llama import CausalLM
from minispec.models.loading import find_model, read_config
from minispec.models.mtp import MTPModule
from minispec.plan import CONFIGS, find_config, make_plan, rows_read

R1, MIMO = "deepseek-ai/DeepSeek-R1", "XiaomiMiMo/MiMo-7B-RL"
LARGE, SMALL = "Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.mark.parametrize(
    ("name", "published", "drafting"),
    [(R1, 671e9, 11.5e9), (LARGE, 72.7e9, 0), (SMALL, 1.54e9, 0), (MIMO, 7.62e9, 0.21e9)],
)
def test_parameters_are_those_that_were_published(name: str, published: float, drafting: float) -> None:
    plan = make_plan(name)
    assert plan.parameters == pytest.approx(published, rel=0.02)
    assert plan.draft_parameters == pytest.approx(drafting, rel=0.02)
    if name == MIMO:
        assert plan.parameters + plan.draft_parameters == pytest.approx(7.83e9, rel=0.02)
    if name == R1:
        assert plan.read == pytest.approx(37e9, rel=0.02)


def test_every_config_names_its_source() -> None:
    for path in CONFIGS.glob("*.json"):
        source = json.loads(path.read_text())["_source"]
        assert source.startswith("https://") and path.stem in source
        assert find_config(path.stem) == find_config("/".join(source.split("/")[3:5])) == find_config(str(path))


def test_the_count_is_that_of_the_tensors_that_would_be_made() -> None:
    for name in (R1, MIMO):
        config = find_config(name)
        model = CausalLM(config, device="meta")
        assert sum(p.numel() for p in model.parameters()) == config.num_parameters
        module = MTPModule(config, device="meta")
        norms = 3 * config.hidden_size  # which the plan leaves out
        assert sum(p.numel() for p in module.parameters()) == make_plan(name).draft_parameters + norms


def test_the_bound_by_hand() -> None:
    config = find_config(LARGE)
    plain = 2 * (config.num_parameters - config.vocab_size * config.hidden_size)  # all but the embedding
    small = 2 * find_config(SMALL).num_parameters  # its head is its embedding
    plan = make_plan(LARGE, draft=SMALL, acceptance=0.5, candidate_length=3, bandwidth=1000)
    assert plan.bound == pytest.approx(1e12 / plain)
    assert plan.emitted == 1 + 0.5 + 0.25 + 0.125
    assert plan.drafted_bound == pytest.approx(plan.emitted * 1e12 / (plain + 3 * small))
    assert make_plan(LARGE, candidate_length=0).drafted_bound == make_plan(LARGE).bound
    assert make_plan(LARGE, acceptance=1, candidate_length=3).drafted_bound == 4 * make_plan(LARGE).bound


def test_more_rows_read_more_experts() -> None:
    config = find_config(R1)
    assert rows_read(config, 1) == pytest.approx(config.num_parameters_read())
    twice = rows_read(config, 2) - rows_read(config, 1)
    expected = 256 * (1 - (248 / 256) ** 2) - 8  # of each layer, by two rows that choose independently
    assert twice == pytest.approx(58 * expected * 3 * 7168 * 2048)
    assert rows_read(config, 10**6) == pytest.approx(config.num_parameters - config.vocab_size * config.hidden_size)
    assert rows_read(find_config(LARGE), 9) == find_config(LARGE).num_parameters_read()


def test_what_devices_share_and_what_each_of_them_has() -> None:
    one, two = (make_plan(MIMO, tp=tp).memory for tp in (1, 2))
    config = find_config(MIMO)
    whole = 2 * (2 * config.vocab_size + 2 * 36 + 1) * config.hidden_size  # embedding, head and norms
    assert two.whole["weights"] == whole + (one.whole["weights"] - whole) / 2
    assert two.per_slot["K/V"] == one.per_slot["K/V"] / 2
    assert two.per_slot["hidden states"] == one.per_slot["hidden states"] == 2 * 2 * config.hidden_size
    latent = [make_plan(R1, tp=tp).memory.per_slot["K/V"] for tp in (8, 16)]
    assert latent == [61 * 576 * 2] * 2  # which all heads share
    assert make_plan(R1).memory.slots == 0 and "do not fit" in str(make_plan(R1))


def test_the_slots_fit_and_no_more_would() -> None:
    plan = make_plan(MIMO, memory=40).memory
    room = (40e9 - sum(plan.whole.values())) * 0.8
    size = sum(plan.per_slot.values())
    assert plan.slots * plan.per_slot["K/V"] <= room * 0.8 < (plan.slots + 1) * plan.per_slot["K/V"]
    assert plan.slots * size <= room
    same = make_plan(SMALL, draft=SMALL, memory=10).memory  # where a draft takes more than its reserve
    assert same.slots == (10e9 - 2 * same.whole["weights"]) * 0.8 // (2 * same.per_slot["K/V"])
    plan = make_plan(MIMO, draft="ngram", memory=40).memory
    assert (plan.reserve, plan.per_slot["hidden states"]) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance": 1.5}, "acceptance must be a number from 0 to 1, got 1.5"),
        ({"candidate_length": -1}, "candidate_length"),
        ({"tp": 3}, "tensor_parallel_size 3 does not divide the model's 32 attention heads"),
        ({"bandwidth": 0}, "bandwidth"),
        ({"dtype": "int3"}, "int3"),
    ],
)
def test_refusals_name_the_value(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(MIMO, **options)


def test_no_mtp_module_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="promises no MTP"):
        make_plan(SMALL, draft="mtp")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match="not the config of a model"):
        find_config(str(tmp_path / "config.json"))


def test_folders_and_the_small_deepseek() -> None:
    small = find_config("deepseek-mini")
    assert isinstance(small, ModelConfig) and small == read_config(find_model("deepseek-mini"))
    assert find_config(str(find_model("deepseek-mini"))) == small


def test_the_command_prints_it_and_loads_no_weights(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", LARGE, "--tp", "2", "--draft", SMALL, "--acceptance", "0.8", "--candidate-length", "5"]) == 0
    assert (
        capsys.readouterr().out == str(make_plan(LARGE, tp=2, draft=SMALL, acceptance=0.8, candidate_length=5)) + "\n"
    )
    assert main(["plan", MIMO, "--acceptance", "2"]) == 2
    assert "acceptance" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = "import sys; import minispec.cli; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
