"""Starts of servers in what people have: a command line, a script, a compose file, a manifest, a settings file.

Nothing is run. Files that a text names are read only if they lie in its folder, or if the script writes them itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from simtune.emit.importing import inferencex
from simtune.emit.importing.engine_readers import READERS
from simtune.emit.importing.launches import (
    MODEL_OPTIONS,
    Given,
    Launch,
    family_of_image,
    find_program,
    inner_script,
    options_of,
    plain,
)
from simtune.emit.importing.pool_draft import Note
from simtune.emit.importing.shell import Command, Script, read_script
from simtune.emit.importing.shell_values import OPEN
from simtune.errors import Problem, SpecError, UsageError
from simtune.specs import yamlfile
from simtune.specs.input_files import read_text
from simtune.specs.yamlfile import Document

MOST_SERVERS = 1000
MOST_YAML = 4 << 20
"""Most characters of a text: the largest InferenceX config has some 300,000."""
_MOST_DOCUMENTS = 100
_YAML = re.compile(r"(---|\{|[\w./-]+\s*:(\s|$)|[\"'][\w./-]+[\"']\s*:)")
_EMITTED = re.compile(r"option names of (?:vLLM|SGLang) (\d+(?:\.\d+)+)\.")
_PLAN = re.compile(r"^# (?:Starts plan|Plan) (\S{1,100}?)(?:\. Written by| for NVIDIA|, pool)", re.MULTILINE)
_TAG = re.compile(r"(?:vllm-openai|vllm|sglang|tensorrt-llm/release):v?(\d+(?:\.\d+)+)")


@dataclass
class Source:
    """Text to import, and what was found in it."""

    file: str
    folder: Path | None
    variables: Mapping[str, str]
    family: str | None = None
    """Family of the engine that the user names."""
    entry: str | None = None
    launches: list[Launch] = field(default_factory=list)
    roles: dict[tuple[str, str], str] = field(default_factory=dict)
    """Role of the server on a node (its number, or nothing) and a port."""
    release: str = ""
    plan: str = ""
    router: str = ""
    notes: list[Note] = field(default_factory=list)

    def read(self, text: str, depth: int = 0) -> None:
        """Find the servers that a text starts. Raises SpecError for what cannot be read."""
        if len(text) > MOST_YAML:
            message = f"is longer than {MOST_YAML:,} characters; cut it to what starts the servers"
            raise SpecError(Problem(self.file, message))
        self._facts(text)
        if _is_yaml(text, self.file):
            for document in _documents(text, self.file):
                self._document(document)
        else:
            self._script(read_script(text, self.file, self.variables), depth)
        if len(self.launches) > MOST_SERVERS:
            raise SpecError(Problem(self.file, f"starts more than {MOST_SERVERS:,} servers; cut it to one deployment"))

    def words(self, words: Sequence[str]) -> None:
        """Find the server that a command line starts."""
        self._command(Command(tuple(words), {}, None, "", False), Script((), {}), 0)

    def _facts(self, text: str) -> None:
        emitted, plan = _EMITTED.search(text), _PLAN.search(text)
        self.release = self.release or (emitted[1] if emitted else "")
        self.plan = self.plan or (plan[1] if plan else "")

    # --- commands ---

    def _script(self, script: Script, depth: int) -> None:
        for command in script.commands:
            self._command(command, script, depth)

    def _command(self, command: Command, script: Script, depth: int) -> None:
        inner = inner_script(command.words)
        if inner is not None and find_program(command.words[:2]) is None and depth < 3:
            variables = {**self.variables, **command.environment}
            self._script(read_script(inner, self.file, variables, command.line or 1), depth + 1)
            return
        self._router(command.words)
        program = find_program(command.words)
        if program is None:
            return
        family, at = program
        launch = self._launch(family, command.words[at:], command, script)
        launch.image = next((word for word in command.words[:at] if family_of_image(word)), "")
        self.launches.append(launch)

    def _launch(self, family: str, words: Sequence[str], command: Command, script: Script) -> Launch:
        reader = READERS[family]
        free, options = options_of(words, self.file, command.line, reader.canonical, reader.is_flag)
        launch = Launch(family, None, options, self.file, command.line, command.environment, command.branch)
        launch.conditional = command.conditional
        settings: list[Given] = []
        for option in options:
            if option.name in reader.settings_files:
                settings += self._settings(str(option.value), family, launch, script, option)
        launch.given = [*settings, *launch.without(*reader.settings_files)]
        for at, option in enumerate(launch.given):
            if option.name in reader.data_files:
                text, file = self._text_of(str(option.value), script, option)
                launch.given[at] = replace(option, value=yamlfile.parse(text, file).data)
        model = launch.value(*MODEL_OPTIONS) or next(iter(free), None)
        launch.model = None if model is None or model is True else str(model)
        launch.given = launch.without(*MODEL_OPTIONS)
        launch.follows = launch.value("headless") is True or _rank(launch) > 0
        self.notes += [
            Note("unknown", word, "neither an option nor the model") for word in free if word != launch.model
        ]
        return launch

    def _settings(self, name: str, family: str, launch: Launch, script: Script, option: Given) -> list[Given]:
        """Return the options of a settings file that the script writes, or that lies in its folder."""
        text, file = self._text_of(name, script, option)
        self._facts(text)
        pool = re.fullmatch(rf"{re.escape(READERS[family].emitter.name)}-(.+)\.ya?ml", PurePosixPath(name).name)
        launch.pool = pool[1] if pool else launch.pool
        return options_in(yamlfile.parse(text, file), family)

    def _text_of(self, name: str, script: Script, option: Given) -> tuple[str, str]:
        """Return text and name of a file that the script writes, or that lies in its folder."""
        refused = OPEN.search(name)
        if refused is not None:
            raise SpecError(option.problem(f"{name}: its name is not known; give --env {refused[1] or 'NAME'}=VALUE"))
        text, file = script.files.get(name), f"{self.file} ({name})"
        if text is None:
            path = self._beside(name)
            if path is None:
                where = "the folder of the file that is imported" if self.folder else "a file that is imported with it"
                raise SpecError(option.problem(f"{name}: no such file in {where}; copy it there, the text is needed"))
            text, file = read_text(path), str(path)
        return text, file

    def _beside(self, name: str) -> Path | None:
        """Return a file in the folder of the imported one, None if it lies elsewhere or is not there."""
        if self.folder is None or "\0" in name:
            return None
        try:
            folder = self.folder.resolve()
            path = (folder / name).resolve()
            return path if path.is_relative_to(folder) and path.is_file() else None
        except OSError:
            return None

    # --- routers ---

    def _router(self, words: Sequence[str]) -> None:
        """Keep the roles that a router's command states."""
        for option, role in (("--prefiller", "prefill"), ("--decoder", "decode")):
            ports, hosts = _values(words, f"{option}-ports"), _values(words, f"{option}-hosts")
            for host, port in zip(hosts or [""] * len(ports), ports, strict=False):
                self.roles[_node(host), port] = role
        self._encoding_proxy(words)
        if "disaggregated" in words and "-c" in words[:-1]:
            path = self._beside(words[words.index("-c") + 1])
            if path is not None:
                self.servers(yamlfile.parse(read_text(path), str(path)).data)

    def _encoding_proxy(self, words: Sequence[str]) -> None:
        """Keep the roles that a proxy before servers that encode states; without prefill servers the others do both."""
        of_roles = {role: _values(words, f"--{role}-servers-urls") for role in ("prefill", "decode")}
        if not of_roles["prefill"] or not of_roles["prefill"][0].startswith("http"):
            return
        for role, texts in of_roles.items():
            for url in ",".join(texts).split(","):
                host, _, port = url.removeprefix("http://").rpartition(":")
                self.roles[_node(host), port] = role

    def servers(self, data: Any) -> None:
        """Keep the roles in the file of `trtllm-serve disaggregated`."""
        for key, role in (("context_servers", "prefill"), ("generation_servers", "decode")):
            block = data.get(key) if isinstance(data, dict) else None
            for url in (block or {}).get("urls") or [] if isinstance(block, dict) else []:
                host, _, port = str(url).rpartition(":")
                self.roles[_node(host), port] = role

    def look_beside(self) -> None:
        """Read the router's file in the folder of a launch script, as `simtune optimize` writes it."""
        for name in ("router.sh", "tensorrt-llm-disaggregated.yaml"):
            path = self._beside(name)
            if path is None:
                continue
            if name.endswith(".yaml"):
                self.servers(yamlfile.parse(read_text(path), str(path)).data)
            else:
                for command in read_script(read_text(path), str(path), self.variables).commands:
                    self._router(command.words)

    # --- YAML ---

    def _document(self, document: Document) -> None:
        data = document.data
        if not isinstance(data, dict):
            raise SpecError(Problem(document.file, "a mapping was expected: a compose file, a manifest or settings"))
        if isinstance(data.get("services"), dict):
            self._compose(document, data["services"])
        elif "apiVersion" in data and "kind" in data:
            self._manifest(document, data)
        elif inferencex.is_config(data):
            entry = inferencex.chosen(document, self.entry)
            self.launches += inferencex.launches(document, entry)
            self.notes += inferencex.notes(entry)
        elif "context_servers" in data:
            self.servers(data)
        elif self.family is not None and _are_settings(document, self.family):
            launch = Launch(self.family, None, options_in(document, self.family), document.file, 1)
            pool = re.fullmatch(
                rf"{re.escape(READERS[self.family].emitter.name)}-(.+)\.ya?ml", PurePosixPath(document.file).name
            )
            launch.pool = pool[1] if pool else ""
            model = launch.value(*MODEL_OPTIONS)
            launch.model, launch.given = None if model is None else str(model), launch.without(*MODEL_OPTIONS)
            self.launches.append(launch)
        else:
            message = (
                "is no compose file, Kubernetes manifest or InferenceX config; of a settings file give --engine too"
            )
            raise SpecError(Problem(document.file, message, "", 1))

    def _compose(self, document: Document, services: Mapping[str, Any]) -> None:
        for name, service in services.items():
            if not isinstance(service, dict):
                continue
            shared = service.get("<<")
            service = {**shared, **service} if isinstance(shared, dict) else service
            line = document.position(["services", name])[0]
            variables = {**self.variables, **_pairs(service.get("environment"))}
            parts = (service.get("entrypoint"), service.get("command"))
            words = [word for part in parts for word in _as_words(part, variables, document.file, line)]
            deploy = service.get("deploy")
            replicas = deploy.get("replicas") if isinstance(deploy, dict) else service.get("scale")
            self._container(words, service.get("image"), variables, line, str(name), replicas)

    def _manifest(self, document: Document, data: Mapping[str, Any]) -> None:
        before = len(self.launches)
        containers = _containers(data)
        # Workers of a LeaderWorkerSet are often started by the command of their leader, with a rank not known here.
        has_leader = any("leaderTemplate" in path for path, _, _ in containers)
        for path, block, replicas in containers:
            line = document.position(path)[0]
            variables = {**self.variables, **_pairs(block.get("env"))}
            parts = (block.get("command"), block.get("args"))
            words = [word for part in parts for word in _as_words(part, variables, document.file, line)]
            service = path[2] if path[:2] == ("spec", "services") else block.get("name", "")
            begin = len(self.launches)
            self._container(words, block.get("image"), variables, line, str(service), replicas)
            for launch in self.launches[begin:]:
                launch.follows |= has_leader and "workerTemplate" in path
        self._dynamo(data, self.launches[before:])

    def _dynamo(self, data: Mapping[str, Any], launches: Iterable[Launch]) -> None:
        """Keep the pools, the plan's name and the router of a DynamoGraphDeployment."""
        if data.get("kind") != "DynamoGraphDeployment":
            return
        metadata = data.get("metadata")
        self.plan = str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
        for launch in launches:
            words = re.findall(r"[A-Z]+[a-z0-9]*|[a-z0-9]+", launch.pool.removesuffix("Worker"))
            launch.pool = "-".join(words).lower()
            mode = launch.value("disaggregation-mode")
            launch.role = str(mode) if mode in ("prefill", "decode") else launch.role

    def _container(
        self, words: list[str], image: Any, variables: Mapping[str, str], line: int | None, name: str, replicas: Any
    ) -> None:
        before = len(self.launches)
        mode = _values(words, "--router-mode") if any(word.startswith("dynamo.frontend") for word in words) else []
        self.router = mode[0] if mode else self.router
        self._command(Command(tuple(words), variables, line, "", False), Script((), {}), 0)
        family = family_of_image(str(image)) if image is not None else None
        if len(self.launches) == before and family is not None and words and words[0].startswith(("-", "serve")):
            arguments = words[1:] if words[0] == "serve" else words
            command = Command(tuple(words), variables, line, "", False)
            self.launches.append(self._launch(family, arguments, command, Script((), {})))
        instances = replicas if isinstance(replicas, int) and replicas > 0 else 1
        for launch in self.launches[before:]:
            _fill(launch, str(image or ""), name, instances)


def join_nodes(source: Source) -> None:
    """Keep the process on the first node of a server that runs on several; its options are those of the server."""
    first = [launch for launch in source.launches if not launch.follows]
    if first and len(first) < len(source.launches):
        source.launches = first
        source.notes.append(Note("ignored", "", "processes on further nodes, which are of the server on the first"))


def _rank(launch: Launch) -> int:
    """Return the rank of a process among the nodes of its server; 0 if it is not stated, or not known here."""
    rank = str(launch.value("node-rank"))
    return int(rank) if rank.isdecimal() else 0


def release_of_image(image: str) -> str:
    """Return the release in the tag of an image, empty if it has none."""
    match = _TAG.search(image)
    return match[1] if match else ""


def options_in(document: Document, family: str) -> list[Given]:
    """Return the options of a settings file. Raises SpecError if it is no mapping."""
    data = document.data
    if data is None:
        return []
    if not isinstance(data, dict):
        raise SpecError(Problem(document.file, "settings were expected: one `option: value` a line", "", 1))
    reader = READERS[family]
    return [
        Given(reader.canonical(plain(str(name))), value, document.file, document.position([str(name)])[0])
        for name, value in data.items()
        if value is not False or reader.knows(reader.canonical(plain(str(name))))
    ]


def _are_settings(document: Document, family: str) -> bool:
    """True if an engine knows one of the options of a file."""
    reader = READERS[family]
    return any(reader.knows(option.name) or option.name in MODEL_OPTIONS for option in options_in(document, family))


def _is_yaml(text: str, file: str) -> bool:
    if file.endswith((".yaml", ".yml", ".json")):
        return True
    if file.endswith((".sh", ".bash")) or text.startswith("#!"):
        return False
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return _YAML.match(first) is not None


def _documents(text: str, file: str) -> list[Document]:
    """Return the documents of a YAML file, each with the lines of the file."""
    starts = [match.start() for match in re.finditer(r"^---", text, re.MULTILINE)]
    if len(starts) > _MOST_DOCUMENTS:
        raise UsageError(f"{file}: more than {_MOST_DOCUMENTS} documents; cut it to one deployment")
    parts = [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]
    lines = [text.count("\n", 0, start) for start in [0, *starts]]
    parsed = [yamlfile.parse("\n" * line + part, file) for line, part in zip(lines, parts, strict=True) if part.strip()]
    return [document for document in parsed if document.data is not None]


def _containers(data: Any, path: tuple[str | int, ...] = (), replicas: Any = None) -> list[tuple[Any, Any, Any]]:
    """Return (path, container, replicas) of every container in a manifest."""
    containers: list[tuple[Any, Any, Any]] = []
    if isinstance(data, dict):
        replicas = data.get("replicas", replicas)
        for key, value in data.items():
            if key == "containers" and isinstance(value, list):
                blocks = [((*path, key, at), block) for at, block in enumerate(value) if isinstance(block, dict)]
                containers += [(where, block, replicas) for where, block in blocks]
            elif key == "mainContainer" and isinstance(value, dict):
                containers.append(((*path, key), value, replicas))
            else:
                containers += _containers(value, (*path, str(key)), replicas)
    elif isinstance(data, list):
        for at, value in enumerate(data):
            containers += _containers(value, (*path, at), replicas)
    return containers


def _as_words(value: Any, variables: Mapping[str, str], file: str, line: int | None) -> list[str]:
    """Return a command of a container as words; $(NAME), ${NAME} and $NAME are its variables."""
    if value is None:
        return []
    if isinstance(value, str):
        script = read_script(re.sub(r"\$\((\w+)\)", r"${\1}", value), file, variables, line or 1)
        return list(script.commands[0].words) if script.commands else []

    def filled(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, f"${{{name}}}")

    words = value if isinstance(value, list) else [value]
    return [re.sub(r"\$\((\w+)\)|\$\{(\w+)\}", filled, str(word)) for word in words]


def _pairs(environment: Any) -> dict[str, str]:
    """Return the variables of a container: a mapping, or a list of NAME=VALUE or {name, value}."""
    if isinstance(environment, dict):
        return {str(name): str(value) for name, value in environment.items() if value is not None}
    pairs: dict[str, str] = {}
    for item in environment if isinstance(environment, list) else ():
        if isinstance(item, dict) and "value" in item:
            pairs[str(item.get("name"))] = str(item["value"])
        elif isinstance(item, str) and "=" in item:
            name, _, value = item.partition("=")
            pairs[name] = value
    return pairs


def _values(words: Sequence[str], option: str) -> list[str]:
    """Return the words behind an option, up to the next one."""
    if option not in words:
        return []
    after = list(words[words.index(option) + 1 :])
    end = next((at for at, word in enumerate(after) if word.startswith("--")), len(after))
    return after[:end]


def _node(host: str) -> str:
    """Return the number of a node in HOST0, or nothing."""
    match = re.search(r"HOST(\d+)", host)
    return match[1] if match else ""


def _fill(launch: Launch, image: str, pool: str, instances: int) -> None:
    """Give a launch what its container states."""
    launch.image, launch.pool = launch.image or image, launch.pool or pool
    launch.instances = instances
