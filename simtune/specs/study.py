"""Study: what `optimize` is asked. Model, hardware and how much of it, load, objective, search space."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from simtune.specs.base import Count, Gpus, Name, NonNegative, Part, Seats, Seq, Spec
from simtune.specs.drafters import AnyDrafter
from simtune.specs.plan import Policy, RoundRobinRouting, Routing
from simtune.specs.schemes import AnyScheme
from simtune.specs.speculation import check_scheme
from simtune.specs.workload import Slo

Objective = Literal["goodput_per_gpu", "goodput", "gpus", "e2el"]

Choices = Annotated[Seq[Seats], Field(min_length=1, strict=False)]


class HardwareCount(Part):
    """A hardware profile and how many devices of it may be used."""

    profile: str
    devices: Gpus


class Search(Part):
    """The space, and how finely it is searched."""

    tp: Choices = (1, 2, 4, 8)
    pp: Choices = (1, 2, 4)
    max_num_seqs: Choices = (64, 128, 256, 512)
    max_num_batched_tokens: Choices = (1024, 2048, 4096, 8192)
    instances: Choices | None = Field(None, description="as many as the devices allow unless given")
    requests: Count | None = Field(None, description="simulated per evaluation; the workload's own number unless given")
    rate_tolerance: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.02, description="relative width at which the search for the highest rate stops"
    )


class StudyBatching(Part):
    """What all plans have in common of their batching; the sizes are searched."""

    policy: Policy = "vllm-fcfs"
    chunked_prefill: bool = True
    safety_margin: Annotated[float, Field(ge=0, le=1)] | None = None
    prediction_sigma: NonNegative | None = None
    options: dict[str, Any] | None = Field(None, description="of a policy of your own")


class DrafterChoice(Part):
    """A drafter that may be used, and how often the target keeps what it proposes."""

    name: Name | None = Field(None, description="in the names of candidates; the drafter's method or kind unless given")
    drafter: AnyDrafter
    acceptance: str = Field(description="an acceptance spec, by name or file")
    scheme: AnyScheme | None = Field(None, description="the best chain for every batch size unless given")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.scheme is not None:
            check_scheme(self.drafter, self.scheme)
        return self

    @property
    def label(self) -> str:
        """What candidates are named by."""
        return self.name or self.drafter.label.replace("_", "-")


class Study(Spec):
    """The question put to `simtune optimize`.

    objective goodput_per_gpu and goodput look for the highest request rate that meets the SLO;
    gpus (fewest devices) and e2el (lowest mean end-to-end latency) are judged at the workload's own rate.
    Every candidate is tried without drafts, and with each drafter of `speculation`.
    """

    KIND: ClassVar[str] = "study"
    model: str
    hardware: HardwareCount
    workload: str
    slo: Slo
    objective: Objective = "goodput_per_gpu"
    engine: str | None = Field(
        None,
        description="an engine preset, by name or file: what the search leaves open stands as that release sets it",
    )
    batching: StudyBatching | None = Field(None, description="the policy of all plans; vllm-fcfs unless given")
    router: Routing | None = Field(None, description="of all plans; round_robin unless given")
    speculation: Annotated[Seq[DrafterChoice], Field(strict=False)] = ()
    search: Search = Search()
    seed: Annotated[int, Field(ge=0)] = 0

    @field_validator("router")
    @classmethod
    def _one_pool(cls, router: Routing | None) -> Routing | None:
        if isinstance(router, RoundRobinRouting) and router.weights:
            raise ValueError("the plans of a study have one pool; leave weights out")
        return router

    @field_validator("speculation")
    @classmethod
    def _distinct_labels(cls, speculation: tuple[DrafterChoice, ...]) -> tuple[DrafterChoice, ...]:
        labels = [choice.label for choice in speculation]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"{labels.count(label)} drafters are called {label}; give each a name of its own")
        return speculation
