"""A plan in words: what it does, and what each of its settings has to do with model and hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from simtune.errors import plural
from simtune.report.info import gib, number, percent
from simtune.sim.deployment import Deployment
from simtune.sim.pools import DeployedPool
from simtune.specs.autoscaling import RateRule, SaturationRule, SlaRule, TargetRule, ThresholdRule
from simtune.specs.hardware import Hardware
from simtune.specs.plan_words import of_plan
from simtune.specs.pool import Pool
from simtune.specs.preset import NO_ENGINE
from simtune.specs.tower import media_words

POLICIES = {
    "vllm-fcfs": "vLLM's order: running requests first, then newcomers as they came",
    "vllm-priority": "vLLM's order by priority",
    "sglang": "SGLang's order: prompts first, in batches of their own",
    "tensorrt-llm": "TensorRT-LLM's order: who decodes goes on, newcomers as there is room",
}


def explain(deployment: Deployment) -> list[tuple[str, tuple[str, ...]]]:
    """Return (pool, sentences) for each pool, after a pair for the whole deployment."""
    plan, model = deployment.plan, deployment.model
    sentences = [
        f"{model.name} ({model.parameters / 1e9:.1f}B parameters, {model.weight_dtype} weights) "
        f"on {plural(plan.num_devices, 'GPU')} in {plural(len(plan.pools), 'pool')}",
        of_plan(plan).words(),
    ]
    if sum(pool.most_instances for pool in plan.pools) > 1:
        sentences.append(f"requests are routed by {plan.router.kind}")
    for link in plan.links or ():
        sentences.append(f"links: KV caches go from {link.source} to {link.to} over a link of their own")
    if plan.control is not None:
        sentences.append(f"control: every {plan.control.every_s:g} s one instance may take the other role")
    pools = [(f"pool {pool.spec.name}", tuple(_sentences(pool))) for pool in deployment.pools]
    return [(plan.name, tuple(sentences)), *pools]


def _sentences(deployed: DeployedPool) -> Iterator[str]:
    pool = deployed.spec
    spare = f" and {pool.spare} to stand by" if pool.spare else ""
    yield f"{plural(pool.instances, 'instance')}{spare} on {deployed.hardware.device.name}, role {pool.role}"
    chosen = f", chosen for {pool.engine_asked}" if pool.engine_asked else ""
    if pool.engine == NO_ENGINE:
        yield f"engine none: no engine can run it; {_kernels(deployed.hardware)}"
    elif pool.engine is not None:
        yield f"engine {pool.engine}{chosen}: {_kernels(deployed.hardware)}"
    yield from _autoscaling(pool)
    yield from _beside_engine(pool)
    yield from _parallelism(deployed)
    yield from _memory(deployed)
    yield from _batching(deployed)
    cache = pool.kv_cache
    yield (
        "prefix_caching: prompts that begin alike share their blocks"
        if cache.prefix_caching
        else "no prefix_caching: every prompt is computed from its first token"
    )
    for tier in deployed.tiers:
        size = "without a limit" if tier.bytes is None else f"of {tier.bytes / 1e9:,.4g} GB"
        sharing = ", shared by all instances" if tier.shared else ""
        rate = f"{(tier.bytes_per_s or 0.0) / 1e9:,.4g} GB/s"
        yield f"tier {tier.name} {size}{sharing}: blocks that were {tier.written} come back at {rate}"
    if pool.lora is not None:
        yield (
            f"lora: {plural(pool.lora.slots, 'slot')} for adapters of up to rank {pool.lora.rank}, "
            f"{pool.lora.in_host} in host memory; products of {pool.lora.targets}, by an assumed roofline"
        )
    yield from _encoder(deployed)
    yield f"preemption by {cache.preemption}: when blocks run out, the last to come in gives up its own"
    if pool.speculation is not None:
        yield f"speculation: drafts of {pool.speculation.drafter.label}, {pool.speculation.scheme.in_words()}"


def _encoder(deployed: DeployedPool) -> Iterator[str]:
    """Yield the limits of the encoders of media, if the pool has one."""
    if deployed.encoder is not None and deployed.spec.encoder is not None:
        limits, mode = deployed.encoder.limits, deployed.spec.encoder.tp_mode
        shared = f", {'weights' if mode == 'weights' else 'images and videos'} divided over tp ranks"
        yield (
            f"encoder: {media_words(deployed.encoder.kinds)} are encoded in the steps, up to {limits.budget:,} "
            f"embeddings in one, and {limits.room:,} are kept{shared * (deployed.spec.parallelism.tp > 1)}"
        )


def _kernels(hardware: Hardware) -> str:
    """Profile of the kernels, and the numbers of operators that are another engine's, or of another release."""
    borrowed = [operator for operator in hardware.operators.values() if operator.other_engine is not None]
    another = f", but {plural(len(borrowed), 'operator')} of another engine" if borrowed else ""
    releases = Counter(operator.other_release for operator in hardware.operators.values() if operator.other_release)
    counted = ", ".join(f"{count} of {release}" for release, count in sorted(releases.items()))
    return f"kernels of profile {hardware.name}{another}" + (f", and of other releases {counted}" if counted else "")


def _autoscaling(pool: Pool) -> Iterator[str]:
    """Yield a sentence on the rule by which instances come and go, if they do."""
    scaling = pool.autoscaling
    if scaling is None:
        return
    rule = scaling.rule
    match rule:
        case RateRule():
            words = f"one for each {rule.requests_per_s:g} requests/s of the last interval"
        case ThresholdRule():
            words = f"one more if {rule.watch} of any reaches {rule.up:g}, one less if all are at {rule.down:g} or less"
        case TargetRule():
            words = f"as many as bring {rule.watch} to {rule.load:g} each, within {percent(rule.tolerance)}"
        case SlaRule():
            limits = [f"{name} of {x:g} s" for name, x in (("TTFT", rule.ttft_s), ("TPOT", rule.tpot_s)) if x]
            words = (
                f"one more if all are estimated to miss a {' or '.join(limits)}, one less if the others would stay "
                f"within {percent(rule.sensitivity)} of it"
            )
        case SaturationRule():
            words = (
                f"one more if less than {percent(rule.kv_cache_spare)} of KV cache or {rule.waiting_spare:g} waiting "
                "requests are to spare, one less if the others can take over"
            )
    if scaling.scales_ranks:
        pause = "while experts are sent" if scaling.pause_s is None else f"{scaling.pause_s:g} s"
        yield (
            f"autoscaling of ranks: every {scaling.interval_s:g} s {words}; {scaling.min_ranks} to "
            f"{pool.parallelism.attention_dp} ranks in each instance, which join it {scaling.startup_s:g} s after "
            f"their start and leave it drained; all ranks pause then, {pause}"
        )
        return
    yield (
        f"autoscaling: every {scaling.interval_s:g} s {words}; {scaling.min_instances} to {scaling.max_instances} "
        f"instances, up {scaling.startup_s:g} s after their start; they are drained before their GPUs are free"
    )


def _beside_engine(pool: Pool) -> Iterator[str]:
    """Yield sentences on what is in front of an engine, on its GPUs, and in host memory."""
    if pool.front_end is not None and pool.role != "decode":
        request_ms, token_us = pool.front_end.request_s * 1e3, pool.front_end.token_s * 1e6
        yield (
            f"front_end: requests pass it one by one, {request_ms:g} ms each and {token_us:g} us for each prompt token"
        )
    if pool.share is not None:
        processors, bandwidth = percent(pool.share.processors), percent(pool.share.bandwidth)
        yield f"share: {processors} of the processors and {bandwidth} of the memory bandwidth of its GPUs"
    if pool.studied.offload is not None:
        weights, kv_cache = percent(pool.studied.offload.weights), percent(pool.studied.offload.kv_cache)
        yield f"offload: {weights} of the weights and {kv_cache} of the KV cache stand in host memory"


def _parallelism(deployed: DeployedPool) -> Iterator[str]:
    p, memory, afd = deployed.spec.parallelism, deployed.memory, deployed.spec.studied.afd
    if p.context_ranks > 1:
        yield f"cp {p.cp}: groups of tp ranks share every sequence, each with 1/{p.cp} of its tokens and KV cache"
    if p.prompt_groups > 1:
        yield (
            f"prefill_context_parallel {p.prompt_groups}: groups of tp ranks divide the tokens of steps with prompts, "
            "and each keeps the whole KV cache"
        )
    if p.expert_replicas is not None:
        yield f"expert_replicas {p.expert_replicas}: experts are placed by their load, the busiest more than once"
    if p.elastic_experts:
        yield "elastic_experts: an instance goes on with fewer ranks if some fail or leave"
    if afd is not None:
        yield (
            f"afd: feed-forward blocks are on {plural(afd.ffn_devices, 'GPU')} of their own; "
            f"{plural(afd.batches, 'part')} of a batch under way at a time"
        )
    if p.tp == p.pp == 1:
        yield f"tp 1, pp 1: {gib(memory.weights_bytes)} of weights fit into {gib(memory.total_bytes)} of one GPU"
        return
    weights_on_each = f"{gib(memory.weights_bytes)} of weights stand on each"
    if p.tp > 1:
        yield f"tp {p.tp}: every layer is cut over {p.tp} GPUs, which exchange its results; {weights_on_each}"
    if p.pp > 1:
        yield f"pp {p.pp}: the layers are cut into {p.pp} stages that work on batches of their own; {weights_on_each}"


def _memory(deployed: DeployedPool) -> Iterator[str]:
    memory, cache = deployed.memory, deployed.spec.kv_cache
    tokens = memory.num_blocks * cache.block_size
    of = " of what is free beside weights and all else" if cache.memory_utilization_of == "free" else ""
    yield (
        f"memory_utilization {cache.memory_utilization:g}{of}: {gib(memory.kv_bytes)} are left for the KV cache, "
        f"{number(memory.num_blocks)} blocks of {cache.block_size} tokens, {number(tokens)} tokens"
    )
    longest = deployed.spec.max_model_len
    if longest:
        yield f"max_model_len {longest:,}: longer requests are refused; {number(tokens / longest)} of that length fit"


def _batching(deployed: DeployedPool) -> Iterator[str]:
    pool: Pool = deployed.spec
    batching = pool.batching
    tokens = deployed.memory.num_blocks * pool.kv_cache.block_size
    yield f"policy {batching.policy}" + (f": {POLICIES[batching.policy]}" if batching.policy in POLICIES else "")
    seats = deployed.memory.seats
    fit = f", of which {seats:,} find memory for their states" if seats < batching.max_num_seqs else ""
    yield (
        f"max_num_seqs {batching.max_num_seqs:,}{fit}: most requests that share a step; with all seats taken "
        f"each has {number(tokens / seats)} tokens of KV cache"
    )
    budget = batching.max_num_batched_tokens
    decodes = percent(min(1.0, seats / budget))
    cut = "longer prompts are cut into chunks" if batching.chunked_prefill else "longer prompts are refused"
    yield f"max_num_batched_tokens {budget:,}: tokens of a step, of which decodes take {decodes} at most; {cut}"
