"""Shares of processors as SGLang's settings, which are read as the same plan again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from simtune.emit import ENGINES
from simtune.emit.importing.imported_plan import ImportRequest, import_plan
from simtune.emit.multiplexed import Division, parts_of
from simtune.errors import SpecError, UsageError
from simtune.specs import yamlfile
from simtune.specs.catalog import load_hardware, load_model, load_plan, with_engines
from simtune.specs.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/shared-gpus/plan.yaml"
MODEL = load_model("llama-3.1-8b")
H100 = load_hardware("h100-sxm").device


def plan_of(*replaced: tuple[str, str]) -> Plan:
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return Plan.from_document(with_engines(yamlfile.parse(text, "plan.yaml")))


def written(plan: Plan, folder: Path) -> dict[str, str]:
    files = ENGINES["sglang"].files(plan, MODEL)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return files


def imported(folder: Path) -> Plan:
    script = folder / "engine/launch.sh"
    return import_plan(
        ImportRequest("h100-sxm", script.read_text(), file=str(script), folder=script.parent, engine="sglang-0.5")
    ).plan


def test_one_server_has_the_options_of_both_pools(tmp_path: Path) -> None:
    files = written(plan_of(), tmp_path)
    assert set(files) == {"engine/sglang-pdmux.yaml", "engine/pdmux.yaml", "engine/launch.sh"}
    settings = yaml.safe_load(files["engine/sglang-pdmux.yaml"])
    # The rules of SGLang's validation_hook.py.
    assert settings["enable-pdmux"] is True
    assert settings["pp-size"] == 1
    assert settings["chunked-prefill-size"] == -1
    assert settings["disable-overlap-schedule"] is True
    assert "disaggregation-mode" not in settings
    division = yaml.safe_load(files["engine/pdmux.yaml"])
    assert division == {"sm_group_num": 3, "manual_divisions": [[48, 84, 0]]}
    # Those of load_pdmux_config.
    assert division["sm_group_num"] >= 3
    assert len(division["manual_divisions"]) == division["sm_group_num"] - 2
    assert settings["sm-group-num"] == division["sm_group_num"]
    assert '--pdmux-config-path "$here/pdmux.yaml"' in files["engine/launch.sh"]
    assert "Not said here: share.bandwidth, share.kv_cache: both streams have all" in files["engine/sglang-pdmux.yaml"]


def test_what_is_written_is_read_as_the_same_plan(tmp_path: Path) -> None:
    plan = load_plan(str(EXAMPLE))
    written(plan, tmp_path)
    read = imported(tmp_path)
    assert read.link == plan.link
    for pool, again in zip(plan.pools, read.pools, strict=True):
        for key in ("name", "role", "instances", "share", "async_scheduling", "max_model_len", "parallelism"):
            assert getattr(again, key) == getattr(pool, key), key
        assert again.batching == pool.batching
        assert again.kv_cache == pool.kv_cache


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "chunked_prefill: false",
            "chunked_prefill: true",
            "batching.chunked_prefill: SGLang divides processors without",
        ),
        (
            "async_scheduling: false",
            "async_scheduling: true",
            "async_scheduling: SGLang divides processors without its",
        ),
        ("{tp: 1}", "{tp: 1, pp: 2}", "parallelism.pp: SGLang divides processors with pp 1 only; set it to 1"),
    ],
)
def test_what_sglang_would_refuse_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        ENGINES["sglang"].files(plan_of((old, new)), MODEL)
    assert message in str(error.value)


def test_pools_with_weights_of_their_own_are_no_single_process() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    for share in ("0.3636", "0.6364"):
        text = text.replace(f", kv_cache: {share}", "")
    text = text.replace("    share:", "    kv_cache: {memory_utilization: 0.4}\n    share:")
    with pytest.raises(
        UsageError, match=r"share\.kv_cache: SGLang's streams are of one process; give both pools a share"
    ):
        ENGINES["sglang"].files(Plan.from_document(with_engines(yamlfile.parse(text, "plan.yaml"))), MODEL)


def test_other_engines_name_shares_as_not_set() -> None:
    pool = plan_of().pools[0]
    for name, emitter in ENGINES.items():
        refused = any(why.startswith("share: ") for why in emitter.refusals(pool, MODEL, {}))
        assert refused == (name != "sglang"), name


def test_a_division_is_one_that_the_device_has() -> None:
    """Parts of 8 processors on Hopper and of 2 on Ampere and Ada, by get_arch_constraints of SGLang."""
    assert parts_of(H100) == (8, 8)
    assert parts_of(load_hardware("a100-sxm-80g").device) == (4, 2)
    for share in (0.01, 0.2, 0.37, 0.5, 0.8, 0.99):
        prefill, decode = Division.of(H100, share, 1 - share)
        assert prefill % 8 == 0
        assert min(prefill, decode) >= 4
        assert prefill + decode <= H100.processors
        most = (H100.processors - 8) // 8 * 8
        assert prefill in (8, most) or abs(prefill - share * H100.processors) <= 4
    assert Division(48, 84).shares(H100) == (0.3636, 0.6364)


def test_a_share_that_is_rounded_is_said(tmp_path: Path) -> None:
    files = written(plan_of(("0.3636", "0.40"), ("0.6364", "0.60")), tmp_path)
    said = " ".join(files["engine/sglang-pdmux.yaml"].split("\n# ")).replace("\n", " ")
    assert "share.processors: 56 and 76 of 132 here, the nearest to 0.4 and 0.6" in said


def test_a_division_that_changes_with_the_batch_is_refused(tmp_path: Path) -> None:
    written(plan_of(), tmp_path)
    (tmp_path / "engine/pdmux.yaml").write_text("sm_group_num: 4\nmanual_divisions: [[80, 52, 0], [48, 84, 32]]\n")
    with pytest.raises(
        SpecError, match="how many processors prompts and decodes have as the number of decodes changes"
    ):
        imported(tmp_path)
    (tmp_path / "engine/pdmux.yaml").write_text("sm_group_num: 3\nmanual_divisions: [[80, 52]]\n")
    with pytest.raises(SpecError, match="manual_divisions must be lists of three numbers"):
        imported(tmp_path)
    (tmp_path / "engine/pdmux.yaml").unlink()
    with pytest.raises(SpecError, match=r"pdmux\.yaml: no such file"):
        imported(tmp_path)
