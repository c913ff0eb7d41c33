"""Images in vLLM's schedulers on random small worlds: against a plain engine, jumps against steps, and what holds."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtune.engine import Request
from simtune.engine.encoder import EncoderCache, EncoderLimits
from simtune.engine.encoding import EncodingFcfs, EncodingPriority
from simtune.engine.media import MediaItem
from simtune.specs.tower import MEDIA_KINDS
from tests.engine.plain import PlainEngine, PlainRequest
from tests.engine.plain_images import PlainEncodingEngine, PlainImage

many = settings(max_examples=60, deadline=None)
FEATURES: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "priority": {"priority": True},
    "caching": {"prefix_caching": True},
    "async": {"async_scheduling": True},
    "priority, caching, async": {"priority": True, "prefix_caching": True, "async_scheduling": True},
    "threshold": {"long_prefill_token_threshold": 5},
    "whole images": {"whole": True},
    "sound": {},
    "sound, caching, async": {"prefix_caching": True, "async_scheduling": True},
    "sound, whole images": {"whole": True},
}


@dataclass(frozen=True)
class Shown:
    """A request with images, and the step before which it comes."""

    at_step: int
    prompt: int
    output: int
    priority: int
    images: tuple[PlainImage, ...]


@dataclass(frozen=True)
class ImageWorld:
    blocks: int
    block_size: int
    seqs: int
    budget: int
    room: int
    limit: int
    load: tuple[Shown, ...]
    features: dict[str, Any]

    def engine(self) -> EncodingFcfs:
        features = dict(self.features)
        limits = EncoderLimits(self.room, self.limit, not features.pop("whole", False))
        return (EncodingPriority if features.pop("priority", False) else EncodingFcfs)(
            num_blocks=self.blocks,
            block_size=self.block_size,
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.blocks * self.block_size,
            encoder=limits,
            **features,
        )

    def plain(self) -> PlainEngine:
        f = self.features
        return PlainEncodingEngine(
            self.blocks,
            self.block_size,
            self.seqs,
            self.budget,
            images={number: [*shown.images] for number, shown in enumerate(self.load)},
            room=self.room,
            limit=self.limit,
            whole=f.get("whole", False),
            max_model_len=self.blocks * self.block_size,
            priority=f.get("priority", False),
            caching=f.get("prefix_caching", False),
            asynchronous=f.get("async_scheduling", False),
            threshold=f.get("long_prefill_token_threshold", 0),
        )

    def request(self, number: int) -> Request:
        shown = self.load[number]
        media = tuple(
            MediaItem(i.start, i.tokens, i.vectors, i.name, (1, i.vectors), MEDIA_KINDS[i.name % 3], runs_of(i.seen))
            for i in shown.images
        )
        names = self.names(shown)
        return Request(number, shown.prompt, shown.output, shown.priority, blocks=names, media=media)

    def names(self, shown: Shown) -> tuple[Any, ...]:
        """Names of its blocks up to the end of its last image: what stands before, and the images so far."""
        end = max((image.start + image.tokens for image in shown.images), default=0)
        names = []
        for block in range(min(end, shown.prompt) // self.block_size):
            last = (block + 1) * self.block_size
            names.append((block, tuple((i.start, i.name) for i in shown.images if i.start < last)))
        return tuple(names)


def runs_of(seen: str) -> tuple[tuple[int, int], ...]:
    """Where tokens with embeddings begin and end."""
    return tuple(match.span() for match in re.finditer("x+", seen))


def in_turns(rng: random.Random, at: int, name: int, vectors: int, sound: int) -> list[PlainImage]:
    """A video and its sound, two markers before and behind both, and their tokens in any order."""
    order = rng.choice([["v"] * vectors + ["s"] * sound, rng.sample(["v"] * vectors + ["s"] * sound, vectors + sound)])
    turns = ".." + "".join(order) + ".."
    videos, sounds = (turns.replace(other, ".").replace(kind, "x") for kind, other in ("vs", "sv"))
    tokens = len(turns)
    return [PlainImage(at, tokens, vectors, name, videos), PlainImage(at, tokens, sound, 100 + name, sounds)]


def image_worlds(features: str) -> st.SearchStrategy[ImageWorld]:
    return st.integers(0, 2**32).map(lambda seed: image_world(features, seed))


def image_world(features: str, seed: int) -> ImageWorld:
    """Memory, room and budget are tight, and images come again."""
    rng = random.Random(seed)
    block_size, blocks = rng.choice([1, 2, 4]), rng.choice([20, 30, 60])
    seqs, longest = rng.randint(1, 8), blocks * block_size
    most = rng.choice([(6,), (6,), (3, 8)])
    # images, videos and recordings: some are much larger than others
    vectors = {name: rng.randint(1, rng.choice(most)) for name in range(rng.randint(1, 8))}
    limit = max(max(vectors.values()), rng.choice([1, 6, 12]))
    sounds = {name: rng.randint(1, 4) if features.startswith("sound") and rng.random() < 0.7 else 0 for name in vectors}
    limit = max(limit, *(vectors[name] + sounds[name] for name in vectors))
    load, step = [], 0
    for _ in range(rng.randint(1, 18)):
        step += rng.choice([0, 0, 0, 1, 3, 20])
        images, at = [], rng.choice([0, 0, 1, 5])
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            name = rng.choice([*vectors])
            # markers around an item, and timestamps of a video
            tokens = vectors[name] + name % 2 + 2 * (name % 3 == 1)
            if sounds[name] and at + vectors[name] + sounds[name] + 4 <= longest // 2:
                images += in_turns(rng, at, name, vectors[name], sounds[name])
                at = images[-1].start + images[-1].tokens
                continue
            if at + tokens > longest // 2:
                break
            images.append(PlainImage(at, tokens, vectors[name], name))
            at += tokens + rng.choice([0, 0, 2])
        prompt = min(longest // 2 + 1, at + rng.randint(1, 8))
        load.append(Shown(step, prompt, rng.randint(1, max(1, longest // 3)), rng.randint(0, 2), tuple(images)))
    largest = max(vectors[name] + sounds[name] for name in vectors)
    # without chunks that end within an image, a step has room for the largest one
    budget = max(seqs, rng.choice([1, 6, 20]), largest + 4 if "whole images" in features else 1)
    room = max(largest, limit if rng.random() < 0.5 else rng.choice([6, 20]))
    return ImageWorld(blocks, block_size, seqs, budget, room, limit, tuple(load), FEATURES[features])


def follow(world: ImageWorld) -> None:
    """Step by step beside the plain engine."""
    ours, plain, sent, step, done = world.engine(), world.plain(), 0, 0, 0
    assert isinstance(plain, PlainEncodingEngine)
    while done < len(world.load):
        while sent < len(world.load) and (world.load[sent].at_step <= step or sent == done):
            request, shown = world.request(sent), world.load[sent]
            assert ours.add(request)
            plain.add(PlainRequest(sent, shown.prompt, shown.output, shown.priority, request.blocks))
            sent += 1
        expected, coming = plain.step(), ours.schedule()
        assert coming is not None
        assert [(r.id, n) for r, n in ours.composition().items()] == list(expected.scheduled.items())
        assert [image.name for image in coming.encoded] == plain.encoded
        assert [r.id for r in coming.preempted] == expected.preempted
        assert sum(image.vectors for image in coming.encoded) <= world.limit
        progress = ours.complete()
        assert [r.id for r in progress.first_token] == expected.first
        assert sorted(r.id for r in progress.finished) == sorted(expected.finished)
        done += len(expected.finished)
        step += 1


@pytest.mark.parametrize("features", FEATURES)
def test_every_step_encodes_what_the_plain_engine_encodes(features: str) -> None:
    @given(world=image_worlds(features))
    @many
    def check(world: ImageWorld) -> None:
        follow(world)

    check()


@pytest.mark.parametrize("features", FEATURES)
def test_a_jump_beside_images_is_as_many_single_steps(features: str) -> None:
    def run(world: ImageWorld, jumps: bool) -> list[tuple[Any, ...]]:
        engine, sent, step, done = world.engine(), 0, 0, 0
        log: list[tuple[Any, ...]] = []
        while done < len(world.load):
            while sent < len(world.load) and (world.load[sent].at_step <= step or sent == done):
                engine.add(world.request(sent))
                sent += 1
            coming = engine.schedule()
            assert coming is not None
            times = coming.repeat if jumps else 1
            while sent < len(world.load) and world.load[sent].at_step < step + times:
                if engine.would_notice():
                    times = max(1, world.load[sent].at_step - step)
                    break
                engine.add(world.request(sent))
                sent += 1
            log += [(step, "chunk", c.request.id, c.tokens) for c in coming.chunks]
            log += [(step, "encoded", image.name) for image in coming.encoded]
            progress = engine.complete(times)
            step += times
            log += [(step, "finished", r.id) for r in progress.finished]
            done += len(progress.finished)
        return log

    @given(world=image_worlds(features))
    @many
    def check(world: ImageWorld) -> None:
        assert run(world, jumps=True) == run(world, jumps=False)

    check()


@given(world=image_worlds("fcfs"))
@many
def test_room_is_conserved_and_images_are_encoded_once_or_found(world: ImageWorld) -> None:
    """With memory for all and one request at a time, an image is encoded only if it is not in the cache."""
    engine = world.engine()
    encoded: list[int] = []
    for number in range(len(world.load)):
        engine.add(world.request(number))
        while engine.has_work and (coming := engine.schedule()) is not None:
            encoded += [image.name for image in coming.encoded]
            engine.complete()
    needed = sum(len({image.name for image in shown.images}) for shown in world.load)
    assert engine.encoder.encoded == len(encoded)
    assert engine.encoder.encoded + engine.encoder.hits >= needed
    if world.room >= sum({i.name: i.vectors for shown in world.load for i in shown.images}.values()):
        assert len(encoded) == len(set(encoded))
        assert engine.encoder.encoded + engine.encoder.hits <= sum(len(shown.images) for shown in world.load)
    engine.encoder.clear()
    assert engine.encoder.limits.room == world.room


def test_a_chunk_ends_before_an_image_without_budget() -> None:
    """Two images of 4 vectors, a budget of 6: the second one waits for the next step, and the text before it does not.

    Tokens: 2 of text, image a (2 to 6), 1 of text, image b (7 to 11), 3 of text."""
    media = MediaItem(2, 4, 4, 0, (1, 16)), MediaItem(7, 4, 4, 1, (1, 16))
    engine = EncodingFcfs(
        num_blocks=20, block_size=4, max_num_seqs=2, max_num_batched_tokens=50, max_model_len=80,
        encoder=EncoderLimits(8, 6),
    )  # fmt: skip
    engine.add(Request(0, 14, 2, media=media))
    engine.add(Request(1, 5, 1))
    first = engine.schedule()
    assert first is not None
    # the other request goes on beside it
    assert [(c.request.id, c.past, c.tokens) for c in first.chunks] == [(0, 0, 7), (1, 0, 5)]
    assert [image.name for image in first.encoded] == [0]
    engine.complete()
    second = engine.schedule()
    assert second is not None
    assert [(c.request.id, c.past, c.tokens) for c in second.chunks] == [(0, 7, 7)]
    assert [image.name for image in second.encoded] == [1]


def test_the_oldest_unused_image_makes_room() -> None:
    cache = EncoderCache(EncoderLimits(10, 10))
    a, b, c, again = (Request(n, 5, 1, media=(MediaItem(0, 4, 4, n % 3 if n < 3 else 1, (1, 4)),)) for n in range(4))
    for request in (a, b):
        assert cache.grant(request, 0, 5) == 5
        cache.commit(request)
    assert [image.name for image in cache.take()] == [0, 1]
    cache.begin_step()
    # both are held: no room for a third one
    assert cache.grant(c, 0, 5) == 0
    cache.release(a)
    assert cache.grant(c, 0, 5) == 5
    cache.commit(c)
    assert [image.name for image in cache.take()] == [2]
    # the first was evicted, the second is still found
    assert cache.grant(again, 0, 5) == 5
    cache.commit(again)
    assert (cache.encoded, cache.hits) == (3, 1)
