"""A pair of transformers whose output and agreement are known beforehand: what speculation is checked with.

Random weights agree always or never. Here the next token is a permutation of the one before, made of one cycle, and
the draft follows another permutation that equals it on a chosen share of the tokens. All weights are random and of
full size; the permutation wins because the embeddings that run through the residual stream are much larger than what
the blocks add to it, and the head compares the stream with the embeddings, permuted. A walk shorter than the cycle
meets no token twice, so where the draft agrees along it is an independent draw at each token, and known.

What is known of the answer does not depend on the KV cache: such a pair cannot check how that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simtune.arrays import Ints, Mask

if TYPE_CHECKING:
    import torch


RESERVED = 3
"""Tokens that are never walked on: padding, begin, end."""


class RiggedPair(NamedTuple):
    """Which token follows which: (vocabulary) for target and draft."""

    target: Ints
    draft: Ints

    def walk(self, start: int, length: int) -> Ints:
        """The target's answer of `length` tokens to a prompt that ends in `start`."""
        walked = [start]
        for _ in range(length):
            walked.append(int(self.target[walked[-1]]))
        return np.array(walked[1:])

    def starts(self, length: int) -> Ints:
        """As many tokens as there are, answers of `length` to which have no token in common."""
        cycle = self.walk(RESERVED, len(self.target) - RESERVED)
        return cycle[: len(cycle) // length * length : length]

    def agreement(self, start: int, length: int) -> Mask:
        """Whether the draft, at the right place, guesses each token of the answer."""
        before = np.concatenate([[start], self.walk(start, length)[:-1]])
        agrees: Mask = self.target[before] == self.draft[before]
        return agrees


def rig(vocab_size: int, acceptance: float, seed: int) -> RiggedPair:
    """Permutations that agree on the share `acceptance` of the tokens, nearly: on a whole number, and never on all
    but one of them.
    """
    rng = np.random.default_rng(seed)
    cycle = rng.permutation(np.arange(RESERVED, vocab_size))
    target = np.arange(vocab_size)
    target[cycle] = np.roll(cycle, -1)
    wrong = rng.choice(cycle, round((1 - acceptance) * len(cycle)), replace=False)
    draft = target.copy()
    draft[wrong] = np.roll(target[wrong], 1)
    return RiggedPair(target, draft)


def llama(following: Ints, hidden: int, layers: int, seed: int) -> Any:
    """A transformers Llama of random weights that answers each token with the one that follows it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    vocab_size = len(following)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # The blocks, of weights around .02, add about .1 to each component.
        embedding = torch.randn(vocab_size, hidden)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight[torch.from_numpy(following)] = embedding
    return model


class Assisted(NamedTuple):
    """What assisted generation did with one prompt."""

    answer: Ints
    verifies: int


def generate(target: Any, draft: Any, start: int, length: int, draft_tokens: int) -> Assisted:
    """`length` tokens, greedily, by transformers' assisted generation with always `draft_tokens` draft tokens a round;
    fewer only where the answer ends.
    """
    import torch

    settings = draft.generation_config
    settings.num_assistant_tokens = draft_tokens
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    verifies = 0

    def count(module: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal verifies
        verifies += 1

    hook = target.register_forward_hook(count)
    try:
        with torch.inference_mode():
            prompt = torch.tensor([[start]])
            tokens = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                assistant_model=draft,
                max_new_tokens=length,
                do_sample=False,
                use_cache=True,
            )
    finally:
        hook.remove()
    return Assisted(tokens[0, 1:].numpy(), verifies)


def rounds(agreement: Sequence[bool] | Mask, draft_tokens: int) -> int:
    """Verifications that an answer takes whose agreement is known, each round drafting `draft_tokens` or as many as
    are left but one.
    """
    done, number = 0, 0
    while done < len(agreement):
        drafted = agreement[done : done + min(draft_tokens, len(agreement) - done - 1)]
        done += 1 + int(np.argmin([*drafted, False]))
        number += 1
    return number
