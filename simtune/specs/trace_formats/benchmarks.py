"""Files of load generators: `vllm bench serve`, aiperf, guidellm, genai-perf.

Field names as these tools write them: vLLM 0.6 to 0.24 (`vllm/benchmarks/serve.py`), aiperf's export guide, guidellm's
`GenerativeRequestStats`, Triton's `perf_analyzer` profile export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simtune.specs.trace_formats.log_rows import (
    LogReading,
    LogRequests,
    Problems,
    estimated,
    first_of,
    first_value,
    left_out,
    look_up,
    parsed_json,
    sessions_of,
    tokens_of,
)


def _mapping(first: Any) -> Mapping[str, Any]:
    return first if isinstance(first, Mapping) else {}


def _chosen(runs: Sequence[Any], what: str, reading: LogReading, problems: Problems) -> Any:
    """Return the run that was selected, if a file contains several. Stops if none was selected."""
    if len(runs) > 1 and reading.part is None:
        problems.stop(f"holds {len(runs)} {what}; choose one, --part 1 to --part {len(runs)}", None)
    part = reading.part or 1
    if not 1 <= part <= len(runs):
        problems.stop(f"has no part {part}: it holds {len(runs)} {what}", None)
    return runs[part - 1]


class VllmBench:
    """The result file of `vllm bench serve --save-result --save-detailed`, and of SGLang's `bench_serving`."""

    title = "vllm bench serve"

    def recognises(self, first: Any) -> bool:
        """True if it has the totals (the lists of requests may be missing), or the lists without the totals."""
        keys = _mapping(first).keys()
        return {"request_throughput", "total_input_tokens"} <= keys or {"input_lens", "output_lens"} <= keys

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """Read answered requests, by the time each was sent; lengths only if the file has no start_times."""
        run = _chosen(objects, "results", reading, problems)
        present = self._lists(run, lines[0], problems)
        errors = look_up(run, "errors")
        count = len(run["input_lens"])
        good = list(range(count))
        if isinstance(errors, list) and len(errors) == count:
            good = [i for i in good if not errors[i]]
        notes = left_out(count - len(good), "failed requests")
        if "arrival" not in present:
            notes.append("it has no start_times, so it is lengths only")
        values = {field: [run[key][i] for i in good] for field, key in present.items()}
        return LogRequests(present, values, [lines[0]] * len(good), notes=notes)

    def _lists(self, run: Any, line: int, problems: Problems) -> dict[str, str]:
        """Return the keys of the lists that exist, by field. Stops if one is missing or of another length."""
        for key in ("input_lens", "output_lens"):
            if not isinstance(look_up(run, key), list):
                command = (
                    "sglang.bench_serving with --output-details"
                    if "sharegpt_output_len" in run or str(run.get("backend")).startswith("sglang")
                    else "vllm bench serve with --save-detailed"
                )
                problems.stop(f"the requests are missing, only totals are here; run {command}", line, key)
        columns = {"prompt": "input_lens", "output": "output_lens", "arrival": "start_times"}
        present = {field: key for field, key in columns.items() if isinstance(run.get(key), list)}
        for key in present.values():
            if len(run[key]) != len(run["input_lens"]):
                problems.stop(f"has {len(run[key])} entries, input_lens has {len(run['input_lens'])}", line, key)
        return present


class AiPerf:
    """`profile_export.jsonl` of aiperf: a line for each request."""

    title = "aiperf"
    _prompt = ("metrics.input_sequence_length.value",)
    _output = ("metrics.output_sequence_length.value", "metrics.output_token_count.value")
    _arrival = ("metadata.request_start_ns", "metadata.timestamp_ns")
    """Keys of the arrival time; the first releases wrote the second."""

    def recognises(self, first: Any) -> bool:
        """True if the metadata have the time of the request."""
        return first_of(first, self._arrival) is not None and "metrics" in first

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """Read the requests that were answered in the profiling phase; turns of one conversation are a session."""
        measured = [_phase(row) for row in objects]
        good = [i for i, row in enumerate(objects) if measured[i] and not look_up(row, "error")]
        rows, at = [objects[i] for i in good], [lines[i] for i in good]
        notes = left_out(measured.count(False), "requests of the warm-up")
        notes += left_out(sum(measured) - len(good), "failed requests")
        output = next((key for key in self._output if any(look_up(row, key) is not None for row in rows)), "")
        arrival = first_of(objects[0], self._arrival) or self._arrival[0]
        names = {"arrival": arrival, "prompt": self._prompt[0], "output": output or self._output[0]}
        values = _columns(rows, at, names, problems)
        values |= sessions_of(rows, ("metadata.x_correlation_id", "metadata.conversation_id"))
        return LogRequests(names, values, at, per_s=1e9, notes=notes)


def _phase(row: Any) -> bool:
    phase = first_value(row, ("metadata.benchmark_phase", "metadata.credit_phase"))
    return phase in (None, "profiling")


def _columns(
    rows: Sequence[Any], lines: Sequence[int], names: Mapping[str, str], problems: Problems
) -> dict[str, list[Any]]:
    """The values at these keys; what is not there is reported."""
    values = {field: [look_up(row, key) for row in rows] for field, key in names.items()}
    for field, key in names.items():
        for i, value in enumerate(values[field]):
            if value is None:
                problems.stop("is missing here", lines[i], key)
    return values


class GuideLlm:
    """`benchmarks.json` of guidellm."""

    title = "guidellm"
    _fields = {  # noqa: RUF012 - never changed
        "arrival": ("request_start_time", "start_time", "info.timings.request_start"),
        "prompt": ("prompt_tokens", "input_metrics.text_tokens", "request_args.prompt_tokens"),
        "output": ("output_tokens", "output_metrics.text_tokens"),
    }

    def recognises(self, first: Any) -> bool:
        """True if it has benchmarks with requests by how they ended."""
        runs = _mapping(first).get("benchmarks")
        return isinstance(runs, list) and bool(runs) and "requests" in _mapping(runs[0])

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """The requests of one benchmark that were successful; turns of one conversation are a session."""
        run = _chosen(objects[0]["benchmarks"], "benchmarks", reading, problems)
        rows = look_up(run, "requests.successful")
        if not isinstance(rows, list) or not rows:
            problems.stop("no successful request is in this benchmark", lines[0], "requests.successful")
        assert isinstance(rows, list)
        names = {field: first_of(rows[0], keys) or keys[0] for field, keys in self._fields.items()}
        at = [lines[0]] * len(rows)
        notes = [
            note
            for end in ("incomplete", "errored")
            if isinstance(ended := look_up(run, f"requests.{end}"), list)
            for note in left_out(len(ended), f"{end} requests")
        ]
        values = _columns(rows, at, names, problems) | sessions_of(rows, ("info.conversation_id",))
        return LogRequests(names, values, at, notes=notes)


class GenAiPerf:
    """`profile_export.json` of genai-perf (Perf Analyzer): texts and times, without token counts."""

    title = "genai-perf"

    def recognises(self, first: Any) -> bool:
        """True if it has experiments with requests."""
        runs = _mapping(first).get("experiments")
        return isinstance(runs, list) and bool(runs) and "requests" in _mapping(runs[0])

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """Return lengths as the server counted them if it did, else estimates from the texts."""
        requests = look_up(_chosen(objects[0]["experiments"], "experiments", reading, problems), "requests")
        if not isinstance(requests, list):
            problems.stop("has no list of requests", None)
        rows = [row for row in requests if _answered(row)]
        at = [lines[0]] * len(rows)
        names = {"arrival": "timestamp", "prompt": "request_inputs.payload", "output": "response_outputs"}
        values: dict[str, list[Any]] = {"arrival": [look_up(row, "timestamp") for row in rows]}
        lengths = [_counted(row) or _guessed(row, reading) for row in rows]
        values["prompt"], values["output"] = [a for a, _ in lengths], [b for _, b in lengths]
        notes = left_out(len(requests) - len(rows), "requests that nothing came back for")
        notes += [] if all(_counted(row) for row in rows) else [estimated(reading)]
        values |= sessions_of(rows, ("request_inputs.session_id",))
        return LogRequests(names, values, at, per_s=1e9, notes=notes)


def _answered(row: Any) -> bool:
    """True if something came back for a request, or if it is no request, which is then reported as a problem."""
    outputs = _mapping(row).get("response_outputs")
    return not isinstance(outputs, list) or any(look_up(output, "response") for output in outputs)


def _messages(row: Any) -> Iterator[Any]:
    """Yield the messages that came back, each message of a stream for itself; Perf Analyzer may have one in pieces, or
    several at once.
    """
    stream = ""
    outputs = look_up(row, "response_outputs")
    for output in outputs if isinstance(outputs, list) else ():
        piece = str(look_up(output, "response") or "")
        rest_of_one = "data:" in stream and not piece.startswith(("data:", "event:", ":"))
        stream += piece if rest_of_one else "\n" + piece
    for line in stream.splitlines():
        message = parsed_json(line.removeprefix("data:").strip())
        if message is not None:
            yield message


def _counted(row: Any) -> tuple[int, int] | None:
    """Return prompt and output tokens as the server counted them; None if it did not."""
    for message in _messages(row):
        usage = look_up(message, "usage.prompt_tokens"), look_up(message, "usage.completion_tokens")
        if isinstance(usage[0], int) and isinstance(usage[1], int):
            return usage[0], usage[1]
    return None


def _guessed(row: Any, reading: LogReading) -> tuple[int, int]:
    """Estimate prompt and output tokens from the texts of the request and of its output."""
    inputs = look_up(row, "request_inputs")
    request = parsed_json(look_up(inputs, "payload")) or inputs
    answer = "".join(_texts([_mapping(message).get("choices") or message for message in _messages(row)]))
    return tokens_of(" ".join(_texts(request)), reading), tokens_of(answer, reading)


_TEXTS = ("content", "prompt", "text", "text_input", "inputs", "generated_text", "text_output")


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts under keys that contain them, however deep."""
    if isinstance(value, list):
        for below in value:
            yield from _texts(below)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            if key in _TEXTS and isinstance(below, str):
                yield below
            elif key in _TEXTS and isinstance(below, list) and all(isinstance(text, str) for text in below):
                yield from below
            elif isinstance(below, (list, Mapping)):
                yield from _texts(below)


class PerfSummary:
    """The summary of aiperf or genai-perf, which contains no requests."""

    title = "the summary of aiperf or genai-perf"

    def recognises(self, first: Any) -> bool:
        """True if it has statistics in place of numbers."""
        return "avg" in _mapping(_mapping(first).get("request_throughput"))

    def read(
        self, objects: Sequence[Any], lines: Sequence[int], reading: LogReading, problems: Problems
    ) -> LogRequests:
        """Stops: the requests are in another file of the same folder."""
        message = f"is {self.title} and holds no requests; give profile_export.jsonl (aiperf) or profile_export.json"
        problems.stop(message, lines[0])
        raise AssertionError("stop returned")
