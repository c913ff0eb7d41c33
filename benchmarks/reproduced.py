"""Writes what all published systems come to, and the line of README.md that sums them up: `make reproduce`.

The stored numbers are compared by tests/reproduce: a change that moves one is seen.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from simtune.validation.published import Finding, Findings, headline, reproduce, select
from simtune.validation.published.collection import STORED, folder

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r"^\d+ of \d+ reproduced, .*\.$", re.MULTILINE)


def readme_line(findings: list[Finding] | tuple[Finding, ...]) -> str:
    """What README.md says of them."""
    return f"{headline(findings)}."


def main() -> None:
    """Run all of them."""
    findings = []
    for finding in reproduce(select([]), jobs=1):
        findings.append(finding)
        sys.stderr.write(f"{finding.system}: {finding.status}\n")
    document = Findings.of(findings)
    text = json.dumps(document.to_data(), indent=1, sort_keys=True, allow_nan=False)
    (folder() / STORED).write_text(text + "\n", encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(LINE.sub(readme_line(findings), readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
