"""Finding specs by name: the user's folders first, then what is built in.

A reference with a slash, or ending in .yaml, .yml or .json, is a path; anything else is a name. Names are looked up as
NAME.yaml or NAME/profile.yaml in the folders of SIMTUNE_PATH (separated as in PATH), then among the built-in ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args

from simtune.errors import Problem, SpecError, UsageError, suggest
from simtune.specs import hf, yamlfile
from simtune.specs.acceptance import Acceptance
from simtune.specs.base import Dtype, Spec, SpecCheck, override, spec_name
from simtune.specs.columns import replay
from simtune.specs.hardware import Facts, Hardware
from simtune.specs.hf import hub
from simtune.specs.input_files import decoded, read_bytes, read_text
from simtune.specs.launch import LaunchFacts
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Role
from simtune.specs.preset import NO_ENGINE, EngineFamily, EnginePreset, merged
from simtune.specs.references import SPEC_SUFFIXES, TRACE_SUFFIXES, beside, from_folder, is_path, on_word, with_places
from simtune.specs.schema_versions import REWRITE, schema_problem
from simtune.specs.study import Study
from simtune.specs.systems import Systems
from simtune.specs.systems import problems as problems_of_systems
from simtune.specs.trace_formats import FORMATS, binary_title, stranger, title_of
from simtune.specs.traces import Trace, read_trace
from simtune.specs.workload import Workload

S = TypeVar("S", bound=Spec)


class LikeLaunch(Protocol):
    """Function that puts launch facts in place of an engine's defaults, for a pool of a role."""

    def __call__(self, preset: EnginePreset, *, role: Role = "mixed") -> EnginePreset:
        """Return the preset with the launch facts over it."""


_SPECS: tuple[type[Spec], ...] = (
    Model,
    Hardware,
    Facts,
    Workload,
    Acceptance,
    EnginePreset,
    LaunchFacts,
    Plan,
    Study,
    Systems,
)
KINDS: dict[str, type[Spec]] = {spec.KIND: spec for spec in _SPECS}
FOLDERS = {
    "model": "models",
    "hardware": "hwprofiles",
    "workload": "workloads",
    "acceptance": "workloads/acceptance",
    "engine": "presets",
    "launch": "launches",
}
_HEAD = 1 << 16
"""Characters at the start of a file in which its schema line must be."""


def names(kind: str) -> list[str]:
    """Names that can be loaded without a path, the user's and the built-in ones."""
    return sorted({name for name, _ in _named_files(kind)})


def load_model(reference: str, settings: Sequence[str] = ()) -> Model:
    """Load a model by name, from a spec, from a Hugging Face config.json (or the folder that contains it), or by its
    Hugging Face id if it is in the cache of huggingface_hub. A reference `./config.json as LlamaForCausalLM` is read as
    that architecture, whatever the config states.
    """
    full_reference, (reference, architecture) = reference, on_word(reference)
    path, name = Path(reference), None
    if hub.is_id(reference) and path.suffix not in SPEC_SUFFIXES and not path.exists():
        path, name = _cached(reference), path.name
    else:
        path = _locate("model", reference)
    if path.is_dir():
        path = path / "config.json"
    title = log_title(path)
    if title is not None:
        raise UsageError(f"{path}: looks like {title}, which is a load and no model; give it as --workload")
    document = yamlfile.parse(read_text(path), str(path))
    if path.suffix == ".json" and isinstance(document.data, dict) and "schema" not in document.data:
        default_name = path.resolve().parent.name if path.name == "config.json" else path.stem
        modelopt, notes = _formats_beside(path, document.data)
        notes = [] if any(setting.startswith("weight_dtype=") for setting in settings) else notes
        return hf.from_config(
            document,
            spec_name(name or default_name, "model"),
            settings,
            modelopt=modelopt,
            notes=notes,
            architecture=architecture,
        )
    if architecture is not None:
        raise UsageError(
            f"model {full_reference}: an architecture is stated of a Hugging Face config.json only, not of a spec"
        )
    return Model.from_document(override(document, settings))


_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


def _formats_beside(config: Path, data: dict[str, Any]) -> tuple[yamlfile.Document | None, list[str]]:
    """Return the hf_quant_config.json beside a config.json that names no number format, and what is assumed without.

    A folder with weights and without that file is an unquantised checkpoint. A config.json alone may belong to any.
    """
    if any(part.get(key) for part in (data, *hf.language_parts(data)) for key in hf.ALIASES["quantization"]):
        return None, []
    path = config.parent / hf.MODELOPT
    if path.is_file():
        return yamlfile.parse(read_text(path), str(path)), []
    if any(next(config.parent.glob(pattern), None) for pattern in _WEIGHTS):
        return None, []
    return None, [
        f"nothing says whether the checkpoint is quantised: {config.name} names no number format, and neither "
        f"{hf.MODELOPT} nor weights are beside it; taken as not quantised, --set model.weight_dtype=fp8 takes another"
    ]


def _cached(model_id: str) -> Path:
    """Raise UsageError if Hugging Face's cache does not hold the model."""
    path = hub.cached_config(model_id)
    if path is None:
        hint = suggest(model_id.rpartition("/")[2].lower(), names("model"))
        raise UsageError(
            f"model {model_id}: no such file, and no such model in {hub.folder()}{hint or ''}; "
            "download its config.json and give that"
        )
    return path


def load_hardware(reference: str, settings: Sequence[str] = ()) -> Hardware:
    """Load a hardware profile by name, from profile.yaml, or from the folder that contains it."""
    path = _locate("hardware", reference)
    path = path / "profile.yaml" if path.is_dir() else path
    if settings:
        return _stated(_read(Hardware, path, settings), settings)
    return _hardware(read_text(path), str(path)).reopened()


_FITTED_BY = (
    "architecture", "attained_flops_per_s", "cache_bytes", "flops_per_s", "memory_bytes_per_s", "processors"
)  # fmt: skip
"""Facts of a device that its operators were fitted with: another value changes only what no fit covers."""


def _stated(hardware: Hardware, settings: Sequence[str]) -> Hardware:
    """Return the profile with the links that `settings` state marked as stated, so that they outrank its tables.

    Raises UsageError for a setting of a fact that fitted operators would not follow.
    """
    links = dict(hardware.links)
    for setting in settings:
        block, _, inner = setting.partition("=")[0].partition(".")
        name, _, key = inner.partition(".")
        if block == "device" and name in _FITTED_BY and hardware.operators:
            raise UsageError(
                f"--set hardware.{setting}: the {len(hardware.operators)} fitted operators of {hardware.name} would "
                f"not follow it; change device.{name} in a facts file, and carry the profile over with `simtune fit "
                f"--transfer-from {hardware.name} --facts FILE`"
            )
        for link in (name,) if name else tuple(links):
            if block == "links" and key not in ("source", "stated"):
                stated = {*(links[link].stated or ()), key or "bytes_per_s"}
                links[link] = links[link].model_copy(update={"stated": tuple(sorted(stated))})
    return hardware.model_copy(update={"links": links}).with_arrays(hardware.arrays)


@lru_cache(maxsize=16)
def _hardware(text: str, file: str) -> Hardware:
    """Cache the parsed profile: its file is long and often loaded. It is parsed again only if its text has changed."""
    return Hardware.from_document(yamlfile.parse(text, file))


def load_workload(reference: str, settings: Sequence[str] = ()) -> tuple[Workload, Trace | None]:
    """A workload by name, from a spec, or a published trace file as it is; with the trace it replays, if any."""
    path = _locate("workload", reference)
    _refuse_stranger(path)
    if path.name.endswith(TRACE_SUFFIXES) or log_title(path) is not None:
        trace = read_trace(path)
        workload = replay(trace, path.name.split(".")[0])
        if settings:
            document = yamlfile.Document(str(path), workload.to_data(), None)
            workload = Workload.from_document(override(document, settings))
        return workload, trace
    if path.suffix == ".json":
        _check_schema(path)
    workload = _read(Workload, path, settings)
    return workload, None if workload.trace is None else _replayed(path, workload.trace)


def _refuse_stranger(path: Path, *, even_models: bool = True) -> None:
    """Raise UsageError for a log or a result of a kind that contains no requests; `read_trace` checks traces.
    `even_models` refuses a model's config.json too.
    """
    if not path.is_file() or path.name.endswith((".yaml", ".yml", *TRACE_SUFFIXES)):
        return
    raw = read_bytes(path)
    wrong = binary_title(raw) or stranger(decoded(path, raw))
    if wrong is not None and (even_models or "config.json" not in wrong):
        raise UsageError(f"{path}: {wrong}")


def _check_schema(path: Path) -> None:
    """Raise UsageError for JSON that is no spec and of no known tool: a list of the keys it lacks as a spec would not
    help.
    """
    document = yamlfile.parse(read_text(path), str(path))
    if not isinstance(document.data, dict) or "schema" not in document.data:
        tools = ", ".join(form.title for form in FORMATS)
        raise UsageError(
            f"{path}: is no workload spec, for it has no `schema: simtune/workload@1`, and looks like nothing that a "
            f"tool known here writes ({tools})"
        )


def _replayed(path: Path, trace: str) -> Trace:
    """Read the trace that a workload's file names. Raises SpecError naming both files if it cannot be read."""
    try:
        return read_trace(path.parent / trace)
    except UsageError as error:
        raise SpecError(Problem(str(path), str(error), "trace")) from None


def load_acceptance(reference: str, settings: Sequence[str] = ()) -> Acceptance:
    """Acceptance rates by name or path."""
    return _read(Acceptance, _locate("acceptance", reference), settings)


def engine_family(engine: str | None) -> EngineFamily | None:
    """Return the family of an engine preset, by name or path; None for no engine."""
    if engine is None or engine == NO_ENGINE:
        return None
    # Files of users may change while a process runs; a preset that comes with simtune does not.
    changeable = is_path(engine) or os.environ.get("SIMTUNE_PATH")
    return load_engine(engine).family if changeable else _built_in_family(engine)


@cache
def _built_in_family(name: str) -> EngineFamily:
    # Every simulation of prefill and decode pools needs it, for their links; without the cache each reads files.
    return load_engine(name).family


def load_engine(reference: str, settings: Sequence[str] = ()) -> EnginePreset:
    """Load an engine preset by name or path; by a family the newest of its releases, by a family and a release
    (`vllm@0.21`) the nearest at or below. Raises UsageError if there is none.
    """
    name = engine_name(reference)
    preset = _read(EnginePreset, _locate("engine", name), settings)
    return preset if name == reference else preset.model_copy(update={"asked": reference})


def load_launch(reference: str) -> LaunchFacts:
    """Load the facts of a published launch file by name or path."""
    return _read(LaunchFacts, _locate("launch", reference), ())


_FAMILY = re.compile(r"([a-z]+)(?:@(\d+(?:\.\d+)*))?")
_OF_RELEASE = re.compile(r"([a-z]+)-(\d+(?:\.\d+)*)")


def engine_name(reference: str) -> str:
    """Return the name of the preset that a family, or a family and a release, mean; any other reference unchanged."""
    family = _FAMILY.fullmatch(reference)
    presets = names("engine")
    if family is None or reference in presets:
        return reference
    releases = {
        tuple(map(int, match[2].split("."))): match[0]
        for match in map(_OF_RELEASE.fullmatch, presets)
        if match is not None and match[1] == family[1]
    }
    if not releases:
        return reference
    if family[2] is None:
        return releases[max(releases)]
    most = tuple(map(int, family[2].split(".")))
    if not (below := [release for release in releases if release <= most]):
        oldest = releases[min(releases)]
        raise UsageError(f"engine {reference}: no preset of that release or an earlier one; the oldest is {oldest}")
    return releases[max(below)]


def load_plan(
    reference: str,
    settings: Sequence[str] = (),
    check: SpecCheck | None = None,
    like: LikeLaunch | None = None,
) -> Plan:
    """Load a plan from its file, filled in if a pool names an engine, by its preset or what `like` makes of it. Files
    that it names are beside it, or else where they are from the present folder. Raises SpecError, also for what `check`
    finds.
    """
    path = Path(reference)
    document = yamlfile.parse(read_text(path), str(path))
    if isinstance(document.data, dict):
        document = replace(document, data=with_places(document.data, from_folder(path.parent)))
    return Plan.from_document(with_engines(override(document, settings), like=like), check)


def with_engines(
    document: yamlfile.Document,
    key: str = "pools",
    folder: Path = Path(),
    like: LikeLaunch | None = None,
) -> yamlfile.Document:
    """Return a plan's document in which settings that a pool leaves out are those of its engine; pools without an
    engine are unchanged. `key` has the pools, `fixed` in a study, whose names that are paths are relative to `folder`.

    The engine's settings are those for the plan's model on the pool's hardware. Errors in the plan itself are reported
    when the plan is read.
    """
    data = document.data
    pools = data.get(key) if isinstance(data, dict) else None
    if not isinstance(pools, list):
        return document
    filled = []
    for at, pool in enumerate(pools):
        try:
            filled.append(_with_engine(pool, data.get("model"), folder, like))
        except UsageError as error:
            line, column = document.position([key, at, "engine"])
            raise SpecError(Problem(document.file, str(error), f"{key}.{at}.engine", line, column)) from None
    return replace(document, data={**data, key: filled})


def _with_engine(pool: Any, model: Any, folder: Path, like: LikeLaunch | None = None) -> Any:
    """A pool that names an engine and hardware, of a plan that names a model, filled in; any other as it is."""
    if not isinstance(pool, dict):
        return pool
    engine, hardware = pool.get("engine"), pool.get("hardware")
    if engine == NO_ENGINE or not (isinstance(engine, str) and isinstance(hardware, str) and isinstance(model, str)):
        return pool
    engine, hardware, model = (beside(folder, name) for name in (engine, hardware, model))
    served = load_model(model).with_weights(next((d for d in get_args(Dtype) if d == pool.get("weight_dtype")), None))
    parallelism = pool.get("parallelism")
    pp = parallelism.get("pp") if isinstance(parallelism, dict) else None
    # Another value is refused when the plan is read.
    stages = pp if isinstance(pp, int) else 1
    role: Role = next((r for r in get_args(Role) if r == pool.get("role")), "mixed")
    preset = load_engine(engine) if like is None else like(load_engine(engine), role=role)
    filled: dict[str, Any] = merged(pool, preset.settings(load_hardware(hardware).device, served, stages))
    return filled if preset.asked is None else {**filled, "engine": preset.name}


def kernels_of(hardware: str, engine: str | None) -> str:
    """Return the profile with the kernels of an engine: NAME-FAMILY if it is built in beside NAME, else NAME itself."""
    if engine in (None, NO_ENGINE) or is_path(hardware):
        return hardware
    engine_profile = f"{hardware}-{engine_family(engine)}"
    return engine_profile if engine_profile in names("hardware") else hardware


_RECIPES = "recipes.yaml"
CARRIED = "at load"
"""Value of `carried` in the recipe of a profile that is no file: it is carried over when it is loaded."""


def sister_of(hardware: str, engine: str | None) -> str | None:
    """Return the profile of a sister card with the kernels of an engine, which were not measured on a built-in card;
    None if the recipes name none."""
    if engine in (None, NO_ENGINE) or is_path(hardware) or kernels_of(hardware, engine) != hardware:
        return None
    path = resources.files("simtune") / FOLDERS["hardware"] / _RECIPES
    recipes = yamlfile.parse(path.read_text(encoding="utf-8"), str(path)).data
    recipe = recipes.get(f"{hardware}-{engine_family(engine)}", {})
    sister: str | None = recipe.get("transfer") if recipe.get("carried") == CARRIED else None
    return sister


def load_study(reference: str, settings: Sequence[str] = (), check: SpecCheck | None = None) -> Study:
    """Load a study from its file; a fixed pool that names an engine is filled in. Raises SpecError, also for what
    `check` finds."""
    path = Path(reference)
    document = override(yamlfile.parse(read_text(path), str(path)), settings)
    return Study.from_document(with_engines(document, "fixed", path.parent), check)


def load(reference: str, check: SpecCheck | None = None, settings: Sequence[str] = ()) -> Spec:
    """Load any spec, by path or by built-in name; its kind is found in its `schema`. `check` checks the names in plans
    and studies.
    """
    return load_with_trace(reference, check, settings)[0]


def load_with_trace(
    reference: str, check: SpecCheck | None = None, settings: Sequence[str] = ()
) -> tuple[Spec, Trace | None]:
    """The same, and of a workload the trace that it replays, if any."""
    kind = kind_of(reference)
    if kind == "workload":
        return load_workload(reference, settings)
    return _load_other(kind, reference, check, settings), None


def _load_other(kind: str, reference: str, check: SpecCheck | None, settings: Sequence[str]) -> Spec:
    if kind == "model":
        return load_model(reference, settings)
    if kind == "hardware":
        return load_hardware(reference, settings)
    if kind == "acceptance":
        return load_acceptance(reference, settings)
    if kind == "engine":
        return load_engine(reference, settings)
    if kind == "launch":
        return _read(LaunchFacts, _locate(kind, reference), settings)
    if kind == "plan":
        return load_plan(reference, settings, check)
    if kind == "study":
        return load_study(reference, settings, check)
    return _read(KINDS[kind], Path(reference), settings, problems_of_systems if kind == "systems" else check)


def kind_of(reference: str) -> str:
    """The kind of spec that a reference leads to. Raises UsageError if it is none."""
    reference = on_word(reference)[0]
    path = Path(reference)
    if hub.is_id(reference) and path.suffix not in SPEC_SUFFIXES and not path.exists():
        return "model"
    return _kind_of_file(path) if is_path(reference) else _kind_of_name(reference)


def _kind_of_name(name: str) -> str:
    all_names: list[str] = []
    for kind in FOLDERS:
        of_kind = names(kind)
        if name in of_kind:
            return kind
        all_names += of_kind
    hint = suggest(name, all_names)
    raise UsageError(
        f"nothing built in is called {name!r}{hint or '.'} `simtune list` shows what is; a file is given by its path, "
        "for example ./mine.yaml"
    )


def _kind_of_file(path: Path) -> str:
    """Return the kind of a file by its suffix or its `schema`; a Hugging Face model is a config.json, or the folder
    that contains it.
    """
    if path.name.endswith(TRACE_SUFFIXES) or log_title(path) is not None:
        return "workload"
    if path.is_dir():
        return "hardware" if (path / "profile.yaml").exists() else "model"
    _refuse_stranger(path, even_models=False)
    data = yamlfile.parse(read_text(path), str(path)).data
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema is None and path.suffix == ".json":
        return "model"
    for kind, spec in KINDS.items():
        if schema == spec.schema_id():
            return kind
    schemas = [spec.schema_id() for spec in KINDS.values()]
    for readable in schemas:
        if str(schema).startswith(f"{readable.rpartition('@')[0]}@"):
            raise UsageError(f"{path}: schema: {schema_problem(schema, readable, REWRITE)}")
    hint = suggest(str(schema), schemas)
    raise UsageError(f"{path}: `schema` is {schema!r}{hint or '; it must be one of ' + ', '.join(schemas)}")


def log_title(path: Path) -> str | None:
    """Return the title of a .json file that a load generator or a gateway wrote; None for any other file."""
    if path.suffix != ".json" or not path.is_file():
        return None
    return title_of(read_text(path))


def _read(kind: type[S], path: Path, settings: Sequence[str], check: SpecCheck | None = None) -> S:
    return kind.from_document(override(yamlfile.parse(read_text(path), str(path)), settings), check)


def _locate(kind: str, reference: str) -> Path:
    if is_path(reference):
        path = Path(reference)
        if not path.exists():
            raise UsageError(
                f"{kind} {reference}: no such file; give the path of one, or a name of `simtune list {kind}`"
            )
        return path
    for name, path in _named_files(kind):
        if name == reference:
            return path
    known_names = names(kind)
    raise UsageError(
        f"no {kind} is called {reference!r}{suggest(reference, known_names) or '.'} Known: {', '.join(known_names)}. "
        "A file is given by its path, for example ./mine.yaml"
    )


def _named_files(kind: str) -> Iterator[tuple[str, Path]]:
    folders = [Path(p) for p in os.environ.get("SIMTUNE_PATH", "").split(os.pathsep) if p]
    folders.append(Path(str(resources.files("simtune") / FOLDERS[kind])))
    for folder in folders:
        if not folder.is_dir():
            continue
        for path in sorted(folder.iterdir()):
            if (path / "profile.yaml").is_file():
                yield path.name, path / "profile.yaml"
            elif path.suffix in (".yaml", ".yml") and path.is_file() and _schema_of(path) == KINDS[kind].schema_id():
                yield path.stem, path


def _schema_of(path: Path) -> str | None:
    """Return the schema line without parsing the whole file: user folders may contain any file."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file.read(_HEAD).splitlines():
                if line.startswith("schema:"):
                    return line.split(":", 1)[1].split("#")[0].strip(" \t\n'\"")
    except (OSError, UnicodeDecodeError):
        return None
    return None
