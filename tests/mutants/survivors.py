"""Mistakes that no test can catch, for they change nothing that is promised. A campaign says so of those that survive.

What survives and is not here lacks a test.
"""

from __future__ import annotations

from typing import NamedTuple


class Survivor(NamedTuple):
    """A mistake in a file: the text of its line, and the code there before and after."""

    file: str
    line: str
    before: str
    after: str
    reason: str


SURVIVORS = (
    Survivor(
        "simtune/engine/batch.py",
        "self._admissions = 0",
        "0",
        "1",
        "admissions are compared with each other only: whether two are the same, and which is the earlier one",
    ),
    Survivor(
        "simtune/engine/drafting/asynchronous.py",
        "if tokens > budget or blocks > free:",
        "blocks > free",
        "blocks >= free",
        "where this has no answer the scheduler finds the same step the long way, and runs it once instead of often",
    ),
    Survivor(
        "simtune/engine/drafting/calendar.py",
        "if steps <= _FEW:",
        "steps <= _FEW",
        "steps < _FEW",
        "few rows are read as lists because that is faster; read as arrays they are the same",
    ),
    Survivor(
        "simtune/engine/drafting/counts.py",
        "return False",
        "False",
        "True",
        "it says whether drafts may be others; whoever looks finds none, for they were counted for these members",
    ),
    Survivor(
        "simtune/engine/drafting/rounds.py",
        "if reach.max() > self._limit:",
        "reach.max() > self._limit",
        "reach.max() >= self._limit",
        "where none is cut the mistake leaves none here, and they are asked for one by one, which gives the same",
    ),
    Survivor(
        "simtune/engine/vllm_scheduler.py",
        "if new_blocks > blocks_taken:",
        "new_blocks > blocks_taken",
        "new_blocks >= blocks_taken",
        "to take no blocks changes nothing, in a prefix cache too",
    ),
    Survivor(
        "simtune/sim/role_controller.py",
        "agenda.post((self._every, LOOK, 0, 0))",
        "0",
        "1",
        "there is one look at a time, so that its place among others does not matter, and it does not read its number",
    ),
    Survivor(
        "simtune/sim/router.py",
        "if best is None or self._credit[i] > self._credit[best] + 1e-9:",
        "self._credit[i] > self._credit[best] + 1e-09",
        "self._credit[i] >= self._credit[best] + 1e-09",
        "1e-9 is room for the rounding of sums; two credits that differ by exactly as much are as good as equal",
    ),
    Survivor(
        "simtune/sim/streamed.py",
        "self.live = _Live(-1), _Live(0), _Live(0), _Live(0), _Live(0)",
        "0",
        "1",
        "of a request in the system they are written when it arrives, and who takes one out that is not there says 0",
    ),
    Survivor(
        "simtune/sim/world.py",
        "if first_token[request.id] < 0:",
        "0",
        "1",
        "a first token comes at the end of a step, which takes a tick or more: there is none at tick 0",
    ),
    Survivor(
        "simtune/sim/idle.py",
        'plain = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value',
        "True",
        "False",
        "no value that is compared with a preset's has a field that may be none; presets leave out such fields",
    ),
    Survivor(
        "simtune/sim/recorder.py",
        "rows[:, 1], rows[:, 3] = 0, np.repeat(decodes, steps)",
        "0",
        "1",
        "each of these rows is one step, and the slope tells how much longer a second would take",
    ),
    Survivor(
        "simtune/engine/settling.py",
        "self.pending = False",
        "False",
        "True",
        "a settlement of no ended request frees nothing, and counts no preempted one, as there is none without an end",
    ),
    Survivor(
        "simtune/tuner/candidate_costs.py",
        "return sum(number * devices for number, devices in zip(numbers, gpus, strict=True))",
        "True",
        "False",
        "the two have one entry for each pool: the line above has returned if a number is missing",
    ),
    Survivor(
        "simtune/costs/tables/llmservingsim.py",
        "prefill = np.array([prefills.get(c, np.nan) for c in zip(chunk.tolist(), past.tolist(), strict=True)])",
        "True",
        "False",
        "both are columns of one table",
    ),
    Survivor(
        "simtune/sim/core.py",
        "self.version += 1",
        "1",
        "2",
        "versions are compared for equality only",
    ),
    Survivor(
        "simtune/sim/dispatch.py",
        "self._agenda.post((self._front_end.passed(now, request.prompt_tokens), ARRIVAL, number, 1))",
        "1",
        "2",
        "a request passes once, and any version but 0 marks one that has passed",
    ),
    Survivor(
        "simtune/sim/stepping.py",
        "if flight.last and end < horizon:",
        "end < horizon",
        "end <= horizon",
        "a horizon that is set to the same tick stays the same",
    ),
    Survivor(
        "simtune/workload/graphs.py",
        "of_families = alone_s.reshape(-1, graph.size)",
        "1",
        "2",
        "numpy computes any size that is below 0",
    ),
    Survivor(
        "simtune/costs/experts.py",
        "elif self._groups > 1 and self._locality < 1:",
        "self._locality < 1",
        "self._locality <= 1",
        "an exchange of no tokens takes no time",
    ),
    Survivor(
        "simtune/engine/policies/vllm_v0.py",
        "return self._steps_within(self.kv.free - 1, decoding, limit)",
        "1",
        "2",
        "a jump that is shorter is continued by the next one, with the same steps",
    ),
    Survivor(
        "simtune/sim/drafting/drawn_rounds.py",
        "more = 4 * np.sqrt(rounds * (squared - mean_accepted**2)) / (1 + mean_accepted)",
        "4",
        "5",
        "it decides how many rounds are drawn at a time, and each is drawn by its number",
    ),
    Survivor(
        "simtune/tuner/drafting/tree.py",
        "better = with_y > best[y:]",
        "with_y > best[y:]",
        "with_y >= best[y:]",
        "of trees that are equally good any one is the best",
    ),
    Survivor(
        "simtune/sim/drafting/drawn_rounds.py",
        "state += [states[after] if drafts >= num_needed else anew for drafts in range(window + 1)]",
        "1",
        "2",
        "no more drafts are right than the window has, so that a further entry is never read",
    ),
    Survivor(
        "simtune/costs/curve.py",
        "smaller, larger = sorted(n for n in curves if n < devices), sorted(n for n in curves if n > devices)",
        "n > devices",
        "n >= devices",
        "the line above has returned if there is a curve of as many devices",
    ),
    Survivor(
        "simtune/costs/curve.py",
        "smaller, larger = sorted(n for n in curves if n < devices), sorted(n for n in curves if n > devices)",
        "n < devices",
        "n <= devices",
        "the line above has returned if there is a curve of as many devices",
    ),
)
