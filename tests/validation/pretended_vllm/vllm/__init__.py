"""Of vLLM what `simtune.validation.servers.vllm_steps` calls, without a model: a scheduler that can be worked out by
hand.

A step has `max_num_batched_tokens`; requests take their part in the order in which they came. With `speculative_config`
every decode verifies so many drafts, of which one is kept. A request with `kv_transfer_params` comes a step late, and
its cache is there already but for the last token. A request of 99 tokens is preempted once.
"""

from types import SimpleNamespace

__version__ = "0.pretended"


class SamplingParams:
    def __init__(self, *, max_tokens, extra_args, **rest):
        self.max_tokens, self.kv = max_tokens, (extra_args or {}).get("kv_transfer_params")


class EngineArgs:
    def __init__(self, model, **given):
        if given.get("breaks"):
            raise ValueError("breaks as it was told to")
        self.model, self.given = model, given


class Request:
    def __init__(self, prompt, params):
        self.num_prompt_tokens, self.max_tokens, self.kv = len(prompt), params.max_tokens, params.kv
        self.num_computed_tokens = self.num_output_tokens = 0
        self.late = self.kv is not None
        self.began = self.preempted = False


class Scheduler:
    def __init__(self, given):
        self.requests = {}
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=77))
        self.budget = given["max_num_batched_tokens"]
        self.drafts = given.get("speculative_config", {}).get("num_speculative_tokens", 0)

    def get_request_counts(self):
        running = sum(request.began for request in self.requests.values())
        return running, len(self.requests) - running

    def schedule(self):
        out = SimpleNamespace(
            num_scheduled_tokens={}, scheduled_new_reqs=[], preempted_req_ids=set(), scheduled_spec_decode_tokens={}
        )
        left = self.budget
        for name, request in self.requests.items():
            if request.late:
                request.late = False
                continue
            if request.num_prompt_tokens == 99 and request.num_output_tokens and not request.preempted:
                request.preempted, request.num_computed_tokens = True, 0
                out.preempted_req_ids.add(name)
                continue
            past, prompt = request.num_computed_tokens, request.num_prompt_tokens
            if not request.began:
                past = request.num_computed_tokens = prompt - 1 if request.kv else 0
                out.scheduled_new_reqs.append(SimpleNamespace(num_computed_tokens=past))
                request.began = True
            tokens = prompt - past if past < prompt else 1 + self.drafts
            if past >= prompt and self.drafts:
                out.scheduled_spec_decode_tokens[name] = list(range(self.drafts))
            tokens = min(left, tokens)
            if tokens:
                out.num_scheduled_tokens[name] = tokens
                request.num_computed_tokens += tokens
                left -= tokens
        out.total_num_scheduled_tokens = sum(out.num_scheduled_tokens.values())
        return out

    def update_from_output(self, scheduled, output):
        told = []
        for name in scheduled.num_scheduled_tokens:
            request, sampled = self.requests[name], output.sampled_token_ids[output.req_id_to_index[name]]
            if name in scheduled.scheduled_spec_decode_tokens:
                request.num_computed_tokens -= self.drafts - (len(sampled) - 1)
            sampled = sampled[: request.max_tokens - request.num_output_tokens]
            request.num_output_tokens += len(sampled)
            done = request.num_output_tokens == request.max_tokens
            kv = {"kept": request.num_prompt_tokens} if done and request.kv else None
            one = SimpleNamespace(token_ids=sampled)
            told.append(SimpleNamespace(request_id=name, outputs=[one], finished=done, kv_transfer_params=kv))
            if done:
                del self.requests[name]
        return told


class LLMEngine:
    def __init__(self, args):
        self.args, scheduler = args, Scheduler(args.given)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))

    @classmethod
    def from_engine_args(cls, args):
        return cls(args)

    @property
    def scheduler(self):
        return self.engine_core.engine_core.scheduler

    def add_request(self, name, prompt, params):
        self.scheduler.requests[name] = Request(prompt["prompt_token_ids"], params)

    def has_unfinished_requests(self):
        return bool(self.scheduler.requests)

    def step(self):
        scheduler = self.scheduler
        scheduled = scheduler.schedule()
        sampled = []
        for name in scheduled.num_scheduled_tokens:
            request = scheduler.requests[name]
            samples = request.num_computed_tokens >= request.num_prompt_tokens
            sampled.append([7, 7] if name in scheduled.scheduled_spec_decode_tokens else [7] * samples)
        index = {name: i for i, name in enumerate(scheduled.num_scheduled_tokens)}
        return scheduler.update_from_output(
            scheduled, SimpleNamespace(sampled_token_ids=sampled, req_id_to_index=index)
        )
