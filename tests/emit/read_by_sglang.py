"""What SGLang's own parser makes of a settings file: run by an interpreter that has it, `read_by_sglang.py FILE...`.

Written to stdout, in its last line, is a list with what it holds of each file, or {"error": ...}. Its values are not
resolved: that wants a GPU. Nothing of simtune is imported here.

torchvision, which decodes images and comes with one build of torch alone, is stood in for; and transformers is not
asked whether the packages beside it are of the releases that it was tested with.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and everything in it."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """See `importlib`."""
        found = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """See `importlib`."""
        return MagicMock(name=spec.name, __spec__=spec, __path__=[])

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib`."""


sys.meta_path.append(StandIn())
unchecked = ModuleType("transformers.dependency_versions_check")
unchecked.dep_version_check = lambda *_, **__: None  # type: ignore[attr-defined]
sys.modules[unchecked.__name__] = unchecked

from sglang.srt.server_args import ServerArgs  # noqa: E402

try:
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
except ImportError:  # before 0.5.19
    from sglang.srt.server_args_config_parser import ConfigArgumentMerger


def read(settings: str) -> dict[str, Any]:
    """As `python -m sglang.launch_server --config` reads it, options by their full names alone."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    merged = ConfigArgumentMerger(parser).merge_config_with_args(["--model-path", "a-model", "--config", settings])
    return {
        name: value for name, value in vars(parser.parse_args(merged)).items() if isinstance(value, str | int | float)
    }


def main() -> None:
    """Read all files."""
    answers: list[dict[str, Any]] = []
    for file in sys.argv[1:]:
        try:
            answers.append(read(file))
        except (Exception, SystemExit) as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


if __name__ == "__main__":
    main()
