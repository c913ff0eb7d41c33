"""Sessions of a workload, drawn or replayed: their turns, the lengths of these, and the text that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from simtune.arrays import Array, Ints
from simtune.costs.ticks import TICKS_PER_SECOND
from simtune.specs.base import LONGEST_S
from simtune.specs.text_blocks import TextBlocks, leading
from simtune.specs.trace_turns import TraceTurns
from simtune.specs.workload import Lengths, RequestClass, Sessions, SubAgents, TurnCount, Workload
from simtune.workload.sampling import FORK, GROUP, PAUSE, SUB_TURNS, TURNS, spread_values, uniforms
from simtune.workload.sessions import SessionTurns

FIRST, LATER, SUB_FIRST, SUB_LATER = range(4)
"""Kinds of turns: of a session, and of its sub-agents."""
KINDS = 4


@dataclass
class Layout:
    """Turns of sessions in order: which turn waits for which, and whose text each continues. Numbers are those of
    all turns, unless stated otherwise."""

    first: list[int] = field(default_factory=lambda: [0])
    """Number of the first turn of each session, and after the last session the number of all turns."""
    after: list[tuple[int, ...]] = field(default_factory=list)
    """Turns that each turn waits for, numbered within the session."""
    kind: list[int] = field(default_factory=list)
    continues: list[int] = field(default_factory=list)
    """Turn whose text each prompt continues; -1 if it begins anew."""
    reads: list[tuple[int, ...]] = field(default_factory=list)
    """Turns whose answers are also in each prompt."""
    text_of: list[int] = field(default_factory=list)
    """Text that each turn continues: that of its session or of its sub-agent."""
    text_begins: list[int] = field(default_factory=list)
    """First turn of each text."""

    def new_text(self) -> int:
        """Begin a text with the next turn, and return its number."""
        self.text_begins.append(len(self.after))
        return len(self.text_begins) - 1

    def add(self, kind: int, text: int, continues: int, waits_for: Sequence[int], reads: tuple[int, ...] = ()) -> int:
        """Add a turn, and return its number."""
        begin = self.first[-1]
        self.after.append(tuple(turn - begin for turn in waits_for))
        self.kind.append(kind)
        self.text_of.append(text)
        self.continues.append(continues)
        self.reads.append(reads)
        return len(self.after) - 1

    def end_session(self) -> None:
        """End the session of the turns that were added."""
        self.first.append(len(self.after))


def turn_counts(turns: TurnCount, levels: Array) -> Ints:
    """Return whole numbers of turns, at least one, at levels in [0, 1)."""
    return np.maximum(1, np.rint(spread_values(turns, levels))).astype(np.int64)


def layout_of(sessions: Sessions, count: int, seed: int) -> Layout:
    """Draw the turns of `count` sessions; more sessions append to them."""
    turns = turn_counts(sessions.turns, uniforms(seed, TURNS, count))
    layout, agents = Layout(), sessions.subagents
    forks, of_agents = _forks(agents, turns, seed)
    agent = 0
    for begin, num_turns in zip((np.cumsum(turns) - turns).tolist(), turns.tolist(), strict=True):
        text, last = layout.new_text(), -1
        waits_for: tuple[int, ...] = ()
        reads: tuple[int, ...] = ()
        for turn in range(num_turns):
            last = layout.add(FIRST if turn == 0 else LATER, text, last, waits_for, reads)
            waits_for, reads = (last,), ()
            if agents is not None and forks[begin + turn]:
                reads = tuple(
                    _add_agent(layout, last, num, agents.inherits) for num in of_agents[agent : agent + agents.count]
                )
                waits_for, agent = reads, agent + agents.count
        layout.end_session()
    return layout


def _forks(agents: SubAgents | None, turns: Ints, seed: int) -> tuple[list[bool], list[int]]:
    """Return True for each turn of a session that sub-agents follow, and the turns of each of these."""
    if agents is None:
        return [], []
    forks = uniforms(seed, FORK, int(turns.sum())) < agents.share
    forks[np.cumsum(turns) - 1] = False
    count = int(forks.sum()) * agents.count
    return forks.tolist(), turn_counts(agents.turns, uniforms(seed, SUB_TURNS, count)).tolist()


def _add_agent(layout: Layout, parent: int, num_turns: int, inherits: bool) -> int:
    """Add the turns of a sub-agent that a turn starts, and return its last one."""
    text, before, last = layout.new_text(), parent, parent if inherits else -1
    for turn in range(num_turns):
        before = last = layout.add(SUB_FIRST if turn == 0 else SUB_LATER, text, last, (before,))
    return last


def turns_of(sessions: Sessions, layout: Layout, seed: int) -> SessionTurns:
    """Return the turns with their pauses; first turns have none."""
    levels, kind = uniforms(seed, PAUSE, len(layout.after)), np.array(layout.kind)
    pause_s = np.where(kind == LATER, spread_values(sessions.pause_s, levels), 0.0)
    if sessions.subagents is not None:
        pause_s = np.where(kind == SUB_LATER, spread_values(sessions.subagents.pause_s, levels), pause_s)
    return session_turns(TraceTurns(np.array(layout.first), tuple(layout.after), pause_s))


def session_turns(recorded: TraceTurns) -> SessionTurns:
    """Return turns with their pauses in ticks."""
    pause = np.rint(np.minimum(recorded.pause_s, LONGEST_S) * TICKS_PER_SECOND).astype(np.int64)
    return SessionTurns(recorded.first, recorded.after, pause)


def lengths_by_kind(workload: Workload, sessions: Sessions, side: str) -> list[Lengths]:
    """Return the distributions of the tokens that a turn adds, class by class, and within a class by kind of turn."""
    agents = sessions.subagents
    distributions: list[Lengths] = []
    for of_class in workload.classes or (RequestClass(name="default"),):
        if side == "prompt":
            later: Lengths = of_class.prompt or workload.prompt
            sub_later: Lengths = (agents and agents.prompt) or later
            first: Lengths = sessions.first_prompt or later
            distributions += [first, later, (agents and agents.first_prompt) or sub_later, sub_later]
        else:
            output = of_class.output or workload.output
            of_agents: Lengths = (agents and agents.output) or output
            distributions += [output, output, of_agents, of_agents]
    return distributions


def session_prompts(
    workload: Workload, sessions: Sessions, layout: Layout, added: Ints, output: Ints, seed: int
) -> tuple[Ints, TextBlocks]:
    """Return prompts that contain the text before them, and the blocks that they share with it; `added` is what each
    turn adds to its prompt."""
    prompts, answers = added.tolist(), output.tolist()
    for turn, (parent, reads) in enumerate(zip(layout.continues, layout.reads, strict=True)):
        if parent >= 0:
            prompts[turn] += prompts[parent] + answers[parent]
        prompts[turn] += sum(answers[node] for node in reads)
    prompt_tokens = np.array(prompts, dtype=np.int64)
    blocks = (prompt_tokens + output) // sessions.block_tokens
    texts = _texts(workload, sessions, layout, added, blocks, seed)
    return prompt_tokens, TextBlocks(texts, np.array(layout.text_of), blocks)


def _texts(
    workload: Workload, sessions: Sessions, layout: Layout, added: Ints, blocks: Ints, seed: int
) -> list[tuple[range, ...]]:
    """Return the names of the blocks of each text: the prefix of its group or the text that it continues, and then its
    own."""
    size, prefix = sessions.block_tokens, workload.shared_prefix
    groups, most = (1, 0) if prefix is None else (prefix.groups, prefix.tokens // size)
    group = (uniforms(seed, GROUP, len(layout.first) - 1) * groups).astype(np.int64).tolist()
    longest = np.zeros(len(layout.text_begins), dtype=np.int64)
    np.maximum.at(longest, np.array(layout.text_of), blocks)
    texts: list[tuple[range, ...]] = []
    name, session = groups * most, 0
    for begin, num_blocks in zip(layout.text_begins, longest.tolist(), strict=True):
        lead: tuple[range, ...] = ()
        parent = layout.continues[begin]
        if parent >= 0:
            lead = leading(texts[layout.text_of[parent]], int(blocks[parent]))
        elif layout.kind[begin] == FIRST:
            shared = min(most, int(added[begin]) // size)
            lead = (range(group[session] * most, group[session] * most + shared),)
            session += 1
        num_own = max(0, num_blocks - sum(map(len, lead)))
        texts.append((*lead, range(name, name + num_own)))
        name += num_own
    return texts


def repeated_turns(recorded: TraceTurns, count: int) -> tuple[SessionTurns, Ints]:
    """Return the turns of the first `count` sessions of a trace that is repeated end to end, and the number of each
    request in the repeated trace."""
    sessions, rows = len(recorded.first) - 1, int(recorded.first[-1])
    round_, session = np.divmod(np.arange(count), sessions)
    sizes = np.diff(recorded.first)[session]
    first: Ints = np.concatenate([[0], np.cumsum(sizes)])
    within = np.arange(int(first[-1])) - np.repeat(first[:-1], sizes)
    row = np.repeat(recorded.first[session], sizes) + within
    repeated = TraceTurns(first, tuple(recorded.after[i] for i in row.tolist()), recorded.pause_s[row])
    return session_turns(repeated), row + np.repeat(round_, sizes) * rows
