"""Plans as `transformers serve` with continuous batching reads them: its long options without their dashes.

Names are those of cli/serve.py of transformers 5.23; `tests/emit/test_other_parsers.py` has its own parser read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from simtune.emit.emitter import EngineFiles, LaunchArgs
from simtune.emit.launch import SETTINGS_AS_OPTIONS, Server
from simtune.emit.option import Option, written
from simtune.emit.serving import ServingEmitter
from simtune.specs.drafters import Drafter
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.pool import Pool
from simtune.specs.schemes import Scheme


class Transformers(ServingEmitter):
    """Options of `transformers serve`, one GPU and one model to a server."""

    name = "transformers"
    title = "transformers"
    version = "5.23"
    options: ClassVar[Mapping[str, type]] = {}
    schemes: ClassVar[Mapping[type[Scheme], Callable[[Any], LaunchArgs]]] = {}
    drafters: ClassVar[Mapping[type[Drafter], Callable[[Any, str | None], LaunchArgs]]] = {}
    policies: ClassVar[Mapping[str, str]] = {"transformers-fifo": "fifo"}
    own_defaults = ()
    takes = "its server drafts nothing"
    server = Server(
        name="transformers",
        title="transformers",
        command=f"""CUDA_VISIBLE_DEVICES="$2" transformers serve "$MODEL" --port "$((PORT + $3))" \\
        $({SETTINGS_AS_OPTIONS} "$here/$1")""",
    )
    serving_options: ClassVar[Mapping[str, Option]] = {
        "continuous-batching": Option(bool),
        "cb-block-size": Option(int, "kv_cache.block_size"),
        "cb-num-blocks": Option(int, "kv_cache.num_blocks"),
        "cb-max-batch-tokens": Option(int, "batching.max_num_batched_tokens"),
        "cb-use-cuda-graph": Option(bool, "cuda_graphs", {True: True}),
        "no-cb-use-cuda-graph": Option(bool, "cuda_graphs", {False: True}),
    }
    kv_dtypes: ClassVar[Mapping[str, str]] = {}

    def serving(self, pool: Pool, model: Model) -> LaunchArgs:
        """See `ServingEmitter.serving`."""
        return written(self.serving_options, pool, continuous_batching=True)

    def refusals(self, pool: Pool, model: Model, draft_models: Mapping[str, Model]) -> Iterator[str]:
        """Yield the refusals: the engine takes one pool of instances of one GPU that cut prompts."""
        yield from super().refusals(pool, model, draft_models)
        if pool.role != "mixed":
            yield f"role: {self.title} hands no KV cache from one server to another; take a mixed pool"
        if pool.model_devices > 1:
            yield f"parallelism: {self.title} serves on one GPU here; set tp, pp and attention_dp to 1"
        if not pool.batching.chunked_prefill:
            yield f"batching.chunked_prefill: {self.title} always cuts prompts to its batch"

    def unsaid(self, pool: Pool) -> Iterator[str]:
        """Yield the settings that are not written; the server is given only its batch and its blocks."""
        yield from super().unsaid(pool)
        yield "batching.max_num_seqs: it takes as many as its memory has room for"
        if pool.max_model_len is not None:
            yield "max_model_len: the model's own limit holds"
        if pool.kv_cache.num_blocks is None:
            yield "kv_cache.memory_utilization: it measures what is free, and takes most of it"
        if not pool.kv_cache.prefix_caching:
            yield "kv_cache.prefix_caching: its server shares blocks of equal text"
        if pool.async_scheduling:
            yield "async_scheduling: it chooses by the device"

    def router_files(self, plan: Plan, devices_per_node: int, names: str) -> EngineFiles:
        """Return no files: the engine has no prefill and decode pools."""
        return {}
