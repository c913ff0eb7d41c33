"""`simtune fit`, on tables of a made-up device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from simtune.cli.fit import fit
from simtune.errors import SpecError, UsageError
from simtune.specs.hardware import Hardware

FACTS = """\
schema: simtune/device@1
name: made-up
engine: none 1.0
device:
  name: Made-up 1
  vendor: nobody
  memory_bytes: 1e9
  memory_bytes_per_s: 1e12
  processors: 10
  flops_per_s: {bf16: 1e14}
  source: made up
"""


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A GEMM table that reads 0.8 TB/s and computes 60 TFLOP/s after 3 us."""
    folder = tmp_path / "tables"
    folder.mkdir()
    lines = ["framework,version,device,gemm_dtype,m,n,k,latency"]
    for m in (1, 8, 64, 512, 4096):
        for n in (512, 1024, 4096, 8192):
            for k in (512, 1024, 4096, 8192):
                seconds = 3e-6 + np.hypot(2 * m * n * k / 6e13, 2 * (m * k + n * k + m * n) / 8e11)
                lines.append(f"V,1,X,bfloat16,{m},{n},{k},{1e3 * float(seconds)}")
    (folder / "gemm.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "facts.yaml").write_text(FACTS)
    return folder


def run(tables: Path, *more: str) -> Result:
    facts, out = tables.parent / "facts.yaml", tables.parent / "out"
    return CliRunner().invoke(fit, [str(tables), "--facts", str(facts), "--out", str(out), *more])


def test_writes_a_profile_and_shows_its_errors(tables: Path) -> None:
    result = run(tables)
    assert result.exit_code == 0, result.output
    written = tables.parent / "out" / "profile.yaml"
    profile = Hardware.from_file(written)
    assert profile.operators["gemm.bf16"].base.bytes_per_s == pytest.approx(8e11, rel=0.1)
    assert profile.operators["gemm.bf16"].base.flops_per_s == pytest.approx(6e13, rel=0.1)
    assert profile.host.provenance.kind == "assumed", "there was no table of host times"
    assert "gemm.bf16" in result.stdout
    assert "p90" in result.stdout
    assert [path.name for path in written.parent.iterdir()] == ["profile.yaml"], "no temporary file is left"


def test_same_tables_same_bytes(tables: Path) -> None:
    run(tables)
    first = (tables.parent / "out" / "profile.yaml").read_bytes()
    assert run(tables, "--force").exit_code == 0
    assert (tables.parent / "out" / "profile.yaml").read_bytes() == first


def test_json_is_one_document(tables: Path) -> None:
    (tables / "other.csv").write_text("a,b\n1,2\n")
    result = run(tables, "--json")
    document = json.loads(result.stdout)
    assert document["profile"]["name"] == "made-up"
    assert document["written"].endswith("profile.yaml")
    assert "other.csv: passed over" in result.stderr


def test_an_existing_profile_is_kept(tables: Path) -> None:
    run(tables)
    written = tables.parent / "out" / "profile.yaml"
    written.write_text("mine")
    result = run(tables)
    assert isinstance(result.exception, UsageError)
    assert "--force" in str(result.exception)
    assert written.read_text() == "mine"


def test_facts_that_do_not_suffice(tables: Path) -> None:
    facts = tables.parent / "facts.yaml"
    facts.write_text(FACTS.replace("{bf16: 1e14}", "{fp8: 1e14}"))
    assert "device.flops_per_s.bf16" in str(run(tables).exception)
    facts.write_text(FACTS.replace("processors: 10", "procesors: 10"))
    result = run(tables)
    assert isinstance(result.exception, SpecError)
    assert "did you mean processors?" in str(result.exception)
    assert not (tables.parent / "out").exists()
