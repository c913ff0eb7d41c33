"""`simtune fit`, on tables of a made-up device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from simtune.cli.check import check
from simtune.cli.fit import fit
from simtune.costs.predict import Profile
from simtune.errors import SpecError, UsageError
from simtune.specs.catalog import load_hardware
from simtune.specs.hardware import Hardware

FACTS = """\
schema: simtune/device@1
name: made-up
engine: none 1.0
device:
  name: Made-up X1
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
                lines.append(f"V,1,X1,bfloat16,{m},{n},{k},{1e3 * float(seconds)}")
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
    names = {path.name for path in written.parent.iterdir()}
    assert names == {"profile.yaml", "arrays.npz"}, "no temporary file is left"


def test_the_written_profile_predicts_the_table(tables: Path) -> None:
    run(tables)
    gemm = Profile(load_hardware(str(tables.parent / "out"))).predictor("gemm", "bf16")
    expected = 3e-6 + np.hypot(2 * 64 * 1024 * 4096 / 6e13, 2 * (64 * 4096 + 1024 * 4096 + 64 * 1024) / 8e11)
    assert gemm.seconds(m=64, n=1024, k=4096) == pytest.approx(expected, rel=0.05)


def test_same_tables_same_bytes(tables: Path) -> None:
    run(tables)
    files = [tables.parent / "out" / name for name in ("profile.yaml", "arrays.npz")]
    first = [path.read_bytes() for path in files]
    assert run(tables, "--force").exit_code == 0
    assert [path.read_bytes() for path in files] == first


def test_json_is_one_document(tables: Path) -> None:
    (tables / "other.csv").write_text("a,b\n1,2\n")
    result = run(tables, "--json")
    document = json.loads(result.stdout)
    assert document["profile"]["name"] == "made-up"
    assert document["written"].endswith("profile.yaml")
    assert "other.csv: passed over" in result.stderr


def test_what_became_of_the_rows_is_printed_and_stored(tables: Path) -> None:
    with (tables / "gemm.csv").open("a") as file:
        file.write("V,1,X1,bfloat16,64,1024,1024,0\n")  # no time
        file.write("V,1,X1,bfloat16,64,4096,4096,9.5\n")  # 160 times shorter before
        file.write("V,1,X1,bfloat16,100,4096,4096,9.5\n")  # 150 times longer than its neighbours
    told = json.loads(run(tables, "--json").stdout)["profile"]["operators"]["gemm.bf16"]["provenance"]["note"]
    assert told.startswith("83 rows read, 79 used; 1 merged with another row of the same shape (median); 1 shapes have")
    assert "1 left out: no positive time; " in told
    assert "random rows" not in told, "the base is fitted on all rows of a short table"
    assert "2 left out: more than 8 times off the rows around them" in told
    shown = run(tables, "--force").stdout
    assert "83 rows read, 79 used" in shown


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


def test_tables_of_another_device_need_a_word(tables: Path) -> None:
    (tables.parent / "facts.yaml").write_text(FACTS.replace("Made-up X1", "Made-up X2"))
    refused = run(tables)
    assert isinstance(refused.exception, UsageError)
    assert refused.exception.exit_code == 2
    assert "gemm.csv was measured on X1, the facts are of Made-up X2" in str(refused.exception)
    assert run(tables, "--allow-device").exit_code == 0


def test_tables_of_launches_are_refused_and_named(tables: Path) -> None:
    lines = (tables / "gemm.csv").read_text().splitlines()
    launched = [
        ",".join((*line.split(",")[:3], "fp8", *line.split(",")[4:7], str(max(0.06, float(line.split(",")[7])))))
        for line in lines[1:]
    ]
    (tables / "fp8.csv").write_text("\n".join([lines[0], *launched]) + "\n")
    (tables.parent / "facts.yaml").write_text(FACTS.replace("{bf16: 1e14}", "{bf16: 1e14, fp8: 2e14}"))
    result = run(tables)
    assert result.exit_code == 0, result.output
    assert "refused: gemm.fp8: no row is shorter than 60 us" in result.stderr
    assert set(Hardware.from_file(tables.parent / "out" / "profile.yaml").operators) == {"gemm.bf16"}
    assert run(tables, "--force", "--allow-launches").exit_code == 0
    assert set(Hardware.from_file(tables.parent / "out" / "profile.yaml").operators) == {"gemm.bf16", "gemm.fp8"}
    (tables / "gemm.csv").unlink()
    alone = run(tables, "--force")
    assert isinstance(alone.exception, UsageError)
    assert "fp8.csv must time launches" in str(alone.exception)


def test_one_impossible_operator_is_left_out_and_named(tables: Path) -> None:
    lines = (tables / "gemm.csv").read_text().splitlines()
    faster = [
        ",".join((*line.split(",")[:3], "fp8", *line.split(",")[4:7], str(float(line.split(",")[7]) / 1e3)))
        for line in lines[1:]
    ]
    (tables / "gemm.csv").write_text("\n".join([*lines, *faster]) + "\n")
    (tables.parent / "facts.yaml").write_text(FACTS.replace("{bf16: 1e14}", "{bf16: 1e14, fp8: 2e14}"))
    result = run(tables)
    assert result.exit_code == 0, result.output
    assert "refused: gemm.fp8: " in result.stderr
    assert "times faster than the data sheet allows; times in gemm.csv must be in another unit" in result.stderr
    assert set(Hardware.from_file(tables.parent / "out" / "profile.yaml").operators) == {"gemm.bf16"}


def test_tables_unlike_a_sister_card_are_refused(tables: Path) -> None:
    assert run(tables).exit_code == 0
    sister = str(tables.parent / "out")
    lines = (tables / "gemm.csv").read_text().splitlines()
    slower = [",".join((*line.split(",")[:7], str(8 * float(line.split(",")[7])))) for line in lines[1:]]
    facts = ("--facts", str(tables.parent / "facts.yaml"), "--out", str(tables.parent / "second"))
    alike = CliRunner().invoke(fit, [str(tables), *facts, "--sister", sister])
    assert alike.exit_code == 0, alike.output
    (tables / "gemm.csv").write_text("\n".join([lines[0], *slower]) + "\n")
    unlike = CliRunner().invoke(fit, [str(tables), *facts, "--force", "--sister", sister])
    assert isinstance(unlike.exception, UsageError)
    assert "80 of 80 rows take 8 times as long (median) as made-up's" in str(unlike.exception)


def test_facts_are_checked_like_any_spec(tables: Path) -> None:
    facts = tables.parent / "facts.yaml"
    good = CliRunner().invoke(check, [str(facts)], standalone_mode=False)
    assert (good.return_value, good.stdout) == (0, f"{facts}: ok: device made-up\n")
    facts.write_text(FACTS.replace("processors: 10", "procesors: 10"))
    bad = CliRunner().invoke(check, [str(facts)], standalone_mode=False)
    assert bad.return_value == 2
    assert "did you mean processors?" in bad.stderr


def test_tables_or_a_profile_but_not_both(tables: Path) -> None:
    assert run(tables, "--transfer-from", "h100-sxm").exit_code == 2
    facts = tables.parent / "facts.yaml"
    neither = CliRunner().invoke(fit, ["--facts", str(facts), "--out", str(tables.parent / "out")])
    assert neither.exit_code == 2
    assert "--transfer-from" in neither.output
