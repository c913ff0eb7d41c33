"""Loads with images, videos and recordings at once: one request in closed form, repeated items, jumps, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simtune.costs.encoder import EncoderCosts, Work
from simtune.costs.ticks import to_ticks
from simtune.engine import Request
from simtune.engine.encoder import EncoderLimits
from simtune.engine.encoding import EncodingFcfs
from simtune.errors import Infeasible, UsageError
from simtune.sim.deployment import Deployment, deploy
from simtune.sim.source import media_items
from simtune.specs.catalog import load_hardware, load_model
from simtune.specs.model import Model
from simtune.specs.plan import Plan
from simtune.specs.tower import media_words
from simtune.specs.towers import Towers
from simtune.specs.video import SoundTurns
from simtune.specs.workload import Workload
from simtune.workload import media as media_of_loads
from simtune.workload.media import check_sees
from simtune.workload.requests import RequestStream, build_stream
from simtune.workload.trace_media import media_kinds
from tests.sim.test_images import same

SEES, HEARS, H100 = load_model("qwen2.5-vl-7b"), load_model("voxtral-mini-3b"), load_hardware("h100-sxm")
assert HEARS.audio is not None
# it keeps room for 1,500 embeddings of sound, and joins them to a model as wide as Qwen's
MODEL = SEES.model_copy(update={"audio": HEARS.audio.model_copy(update={"projector": (3584, 3584), "reserved": 1500})})
PICTURE: dict[str, Any] = {"sizes": [{"width": 1280, "height": 720}]}
CLIP: dict[str, Any] = {"sizes": [{"width": 640, "height": 360}], "seconds": 5}
SPEECH: dict[str, Any] = {"seconds": 40}
LENGTHS: dict[str, Any] = {
    "images": {**PICTURE, "per_request": [1, 2], "share": 0.5, "repeats": {"share": 0.5, "images": 4}},
    "videos": {
        "sizes": [{"width": 320, "height": 240}],
        "seconds": {"levels": [0, 1], "seconds": [1, 20]},
        "share": 0.6,
        "repeats": {"share": 0.5, "items": 3},
    },
    "audio": {"seconds": {"levels": [0, 1], "seconds": [1, 70]}, "share": 0.7},
}


def load(**more: Any) -> Workload:
    lengths = {"prompt": {"kind": "fixed", "tokens": 100}, "output": {"kind": "fixed", "tokens": 40}}
    settings = {"name": "w", "arrivals": {"kind": "gamma", "rate_rps": 4.0, "cv": 2.0}, **lengths, **more}
    return Workload.model_validate(settings)


def requests(number: int, *, towers: Towers = MODEL.towers, **media: Any) -> RequestStream:
    return build_stream(load(**media), None, requests=number, seed=0, towers=towers)


def deployed(
    encoder: dict[str, Any] | None, *, stages: list[dict[str, Any]] | None = None, model: Model = MODEL, **more: Any
) -> Deployment:
    """Memory is that of 8,000 blocks, whatever the encoders take."""
    batching = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, **more.pop("batching", {})}
    kv_cache = {"num_blocks": 8001, **more.pop("kv_cache", {})}
    pool = {"hardware": "h100-sxm", "instances": 1, "batching": batching, "kv_cache": kv_cache, "max_model_len": 16384}
    pools = [{**pool, "encoder": encoder, **more}]
    return deploy(Plan.model_validate({"name": "p", "model": "m", "pools": pools, "stages": stages}), model, H100)


def test_a_request_with_all_kinds_is_encoded_kind_by_kind() -> None:
    """An image of 46 x 26 tokens; ten frames of 23 x 13 tokens in five groups; two chunks of 375 tokens of sound."""
    deployment = deployed({}, async_scheduling=False)
    stream = requests(1, images=PICTURE, videos=CLIP, audio=SPEECH)
    assert stream.media is not None
    image, video, sound = stream.media.of(0)
    assert [item.kind for item in (image, video, sound)] == ["image", "video", "audio"]
    assert (image.shape, video.shape, sound.shape) == (
        (1, 4784, 1196, 1198), (5, 1196, 1495, 1497), (2, 1500, 750, 751),
    )  # fmt: skip
    assert [item.start for item in (image, video, sound)] == [0, 1198, 1198 + 1497]
    assert stream.prompt_tokens.tolist() == [100 + 1198 + 1497 + 751]
    costs = EncoderCosts(MODEL, H100, deployment.plan.pools[0])
    works = [Work(1, 4784, 1196), Work(5, 1196, 1495, "video"), Work(2, 1500, 750, "audio")]
    apart = [costs.seconds([work]) for work in works]
    assert costs.seconds(works) == pytest.approx(sum(apart))
    outcome = deployment.simulate(stream).outcome
    prefill = deployment.costs.mixed(0, 0, [(0, 3546)], 1)
    assert outcome.first_token[0] - outcome.arrival[0] == to_ticks(costs.seconds(works)) + prefill


def test_groups_of_frames_are_not_one_large_image() -> None:
    """As many patches take less, since a group attends to itself alone."""
    costs = EncoderCosts(MODEL, H100, deployed({}).plan.pools[0])
    clip, picture = costs.seconds([Work(20, 4784, 23920, "video")]), costs.seconds([Work(1, 95680, 23920)])
    assert clip < 0.8 * picture


@pytest.mark.parametrize("kv_cache", [{}, {"prefix_caching": True}, {"num_blocks": 1100}])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_jumps_beside_media_are_exact_to_the_tick(kv_cache: dict[str, Any], async_scheduling: bool) -> None:
    deployment = deployed({"tp_mode": "data"}, kv_cache=kv_cache, async_scheduling=async_scheduling)
    stream = requests(60, **LENGTHS)
    result = deployment.simulate(stream)
    assert result.completed.all()
    assert same(result, deployment.simulate(stream, single_steps=True))


def test_recordings_that_come_again_are_found() -> None:
    """Ten clips and ten recordings are all there are, and the cache has room for all of them: each is encoded once."""
    clips = {"sizes": [{"width": 280, "height": 280}], "seconds": 2, "repeats": {"share": 1.0, "items": 10}}
    sound = {"seconds": 8, "repeats": {"share": 1.0, "items": 10}}
    (work,) = deployed({}).simulate(requests(200, videos=clips, audio=sound)).summary().encoders
    assert (work.encoded_images, work.cache_hits) == (20, 380)
    assert "20 media items encoded" in work.sentence


def test_items_of_different_kinds_are_not_the_same() -> None:
    """The first clip and the first recording of their sets have different names, and so do the blocks behind them."""
    alike = {"repeats": {"share": 1.0, "items": 1}, "seconds": 12}
    small = {**alike, "sizes": [{"width": 280, "height": 280}]}
    clip, sound = requests(1, videos=small), requests(1, audio=alike)
    assert clip.media is not None
    assert sound.media is not None
    assert clip.media.name[0] != sound.media.name[0]
    assert clip.hash_ids is not None
    assert sound.hash_ids is not None
    assert not set(clip.hash_ids[0]) & set(sound.hash_ids[0])
    # 12 tokens of 10 x 10, and two around them, in blocks of 16
    assert len(clip.hash_ids[0]) == (12 * 100 + 2) // 16


def test_the_sound_of_a_video_is_a_recording_of_its_length() -> None:
    """It stands behind the video, takes what such a recording takes, and comes again with the video."""
    clip = {**CLIP, "seconds": 12}
    silent, heard, alone = (
        requests(1, videos=clip),
        requests(1, videos={**clip, "sound": True}),
        requests(1, audio={"seconds": 12}),
    )
    assert heard.media is not None
    assert alone.media is not None
    video, sound = heard.media.of(0)
    (recording,) = alone.media.of(0)
    assert (video.kind, sound.kind, sound.shape, sound.start) == ("video", "audio", recording.shape, video.shape.tokens)
    assert sound.name not in (video.name, recording.name)
    assert heard.prompt_tokens[0] == silent.prompt_tokens[0] + recording.shape.tokens
    costs = EncoderCosts(MODEL, H100, deployed({}).plan.pools[0])
    works = [Work.of(item.shape, item.kind) for item in (video, sound)]
    assert costs.seconds(works) == pytest.approx(sum(costs.seconds([work]) for work in works))
    again = requests(60, videos={**clip, "sound": True, "repeats": {"share": 1.0, "items": 2}}).media
    assert again is not None
    assert {(video.name, sound.name) for video, sound in map(again.of, range(60))} == {
        (name, name + sound.name - video.name) for name in (video.name, video.name + 1)
    }
    (work,) = deployed({}).simulate(requests(60, videos={**clip, "sound": True})).summary().encoders
    assert work.encoded_images == 120


def in_turns(**video: Any) -> Model:
    """Return the model with turns of frames and sound, a second a turn."""
    assert MODEL.vision is not None
    assert MODEL.vision.video is not None
    rules = MODEL.vision.video.model_copy(update={"sound": SoundTurns(positions_per_s=12.5), **video})
    return MODEL.model_copy(update={"vision": MODEL.vision.model_copy(update={"video": rules})})


def test_sound_in_turns_is_one_range_of_the_prompt_with_its_video() -> None:
    """Ten groups of frames of 299 tokens a second; thirteen or twelve tokens of sound behind each."""
    clip = {**CLIP, "seconds": 10, "per_request": 2, "sound": True}
    behind, between = (requests(3, videos=clip, towers=model.towers) for model in (MODEL, in_turns()))
    assert behind.prompt_tokens.tolist() == between.prompt_tokens.tolist()
    assert between.media is not None
    video, sound, second, last = between.media.of(1)
    assert [item.kind for item in (video, sound, second, last)] == ["video", "audio", "video", "audio"]
    tokens = video.shape.tokens + sound.shape.tokens
    assert [item.tokens for item in (video, sound, second, last)] == [tokens] * 4
    assert [item.start for item in (video, sound, second, last)] == [0, 0, tokens, tokens]
    assert [end - begin for begin, end in video.runs] == [299] * 10
    assert [end - begin for begin, end in sound.runs[:4]] == [13, 12, 13, 12]
    assert sum(end - begin for begin, end in sound.runs) == sound.shape.vectors
    assert not behind.media or [item.start for item in behind.media.of(1)][:2] == [0, video.shape.tokens]


def test_blocks_of_a_video_with_sound_end_with_both() -> None:
    clip = {**CLIP, "seconds": 10, "sound": True, "repeats": {"share": 1.0, "items": 1}}
    stream = requests(2, videos=clip, towers=in_turns().towers)
    assert stream.media is not None
    assert stream.hash_ids is not None
    assert stream.hash_ids[0] == stream.hash_ids[1]
    assert len(stream.hash_ids[0]) == stream.media.of(0)[1].tokens // 16


def test_sound_in_turns_is_encoded_with_the_first_chunk_that_has_some() -> None:
    """A chunk of 256 tokens has frames of the first second alone; behind the video sound came in the last chunk."""
    clip = {**CLIP, "seconds": 5, "sound": True}
    model = in_turns()
    stream = requests(1, videos=clip, towers=model.towers)
    assert stream.media is not None
    request = Request(0, int(stream.prompt_tokens[0]), 4, media=media_items(stream.media, 0))
    assert [item.reaches(0, 256) for item in request.media] == [True, False]
    limits = EncoderLimits(4096, 4096)
    sizes: dict[str, Any] = {"num_blocks": 500, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    engine = EncodingFcfs(**sizes, max_model_len=8000, encoder=limits)
    assert engine.add(request)
    kinds = []
    for _ in range(3):
        step = engine.schedule()
        assert step is not None
        kinds.append([item.kind for item in step.encoded])
        engine.complete()
    assert kinds == [["video"], ["audio"], []]
    deployment = deployed({}, model=model, batching={"max_num_batched_tokens": 256, "max_num_seqs": 8})
    result = deployment.simulate(requests(20, videos=clip, towers=model.towers))
    assert result.completed.all()
    assert same(result, deployment.simulate(result.stream, single_steps=True))


@pytest.mark.parametrize(
    ("encoder", "batching", "why"),
    [
        ({"disable_chunked_mm_input": True}, {"max_num_batched_tokens": 16_500},
         r"needs a step for a video and its sound \(16,758 tokens\); raise max_num_batched_tokens \(16,500\)"),
        ({}, {}, r"16,755 embeddings with its sound, .* keep \(16,384\), and would wait for ever; raise max_num"),
    ],
)  # fmt: skip
def test_a_video_whose_sound_never_fits_is_refused(encoder: Any, batching: Any, why: str) -> None:
    clip = {"sizes": [{"width": 980, "height": 1008}], "seconds": 13, "sound": True}
    model = in_turns()
    stream = requests(1, videos=clip, towers=model.towers)
    deployment = deployed(encoder, model=model, batching=batching, max_model_len=17_000)
    with pytest.raises(UsageError, match=why):
        deployment.simulate(stream)


def test_the_sound_of_videos_needs_a_model_that_hears() -> None:
    workload = load(videos={**CLIP, "sound": True})
    with pytest.raises(UsageError, match=r"w has videos\.sound, and model qwen2\.5-vl-7b states no audio encoder"):
        check_sees(SEES.towers, workload, SEES.name, media_kinds(workload, None))


def test_a_request_has_the_same_items_whatever_else_is_drawn() -> None:
    few, many = requests(40, **LENGTHS), requests(400, **LENGTHS)
    assert few.media is not None
    assert many.media is not None
    assert [few.media.of(i) for i in range(40)] == [many.media.of(i) for i in range(40)]
    kept = many.kept(np.arange(400) % 3 == 1)
    assert kept.media is not None
    assert [kept.media.of(i) for i in range(10)] == [many.media.of(3 * i + 1) for i in range(10)]
    # images are those of a load that has nothing else
    alone = requests(400, images=LENGTHS["images"])
    assert alone.media is not None
    of_images = many.media.kind == 0
    assert (many.media.name[of_images] == alone.media.name).all()
    assert many.media.kinds == ("image", "video", "audio")
    assert media_words(many.media.kinds) == "images, videos and recordings"
    assert [many.media.most(kind) for kind in many.media.kinds] == [2, 1, 1]


def test_media_are_encoded_on_servers_in_front_of_a_pool() -> None:
    """A server encodes kind after kind; embeddings of all are as wide as the model."""
    stage = {"name": "encode", "pool": "mixed", "encoder": "weights", "devices": 1, "bytes_per_s": 1e9}
    deployment = deployed(None, stages=[stage], async_scheduling=False)
    outcome = deployment.simulate(requests(1, images=PICTURE, videos=CLIP, audio=SPEECH)).outcome
    works = [Work(1, 4784, 1196), Work(5, 1196, 1495, "video"), Work(2, 1500, 750, "audio")]
    encoding = EncoderCosts(MODEL, H100, deployment.plan.pools[0]).seconds(works)
    sent = (1196 + 1495 + 750) * 3584 * 2 / 1e9
    prefill = deployment.costs.mixed(0, 0, [(0, 3546)], 1)
    assert outcome.first_token[0] - outcome.arrival[0] == pytest.approx(to_ticks(encoding + sent) + prefill, abs=2)


def test_media_are_encoded_in_front_of_a_prefill_pool() -> None:
    """The prefill instance gets the request with its embeddings; keys and values then go to the decode instance."""
    stage = {"name": "encode", "pool": "prefill", "encoder": "weights", "devices": 1, "bytes_per_s": 1e9}
    alike = {"hardware": "h100-sxm", "instances": 1, "max_model_len": 16384, "async_scheduling": False}
    alike |= {"batching": {"max_num_seqs": 64, "max_num_batched_tokens": 4096}, "kv_cache": {"num_blocks": 8001}}
    pools = [{**alike, "name": role, "role": role} for role in ("prefill", "decode")]
    plan = {"name": "p", "model": "m", "pools": pools, "stages": [stage], "link": {}}
    deployment = deploy(Plan.model_validate(plan), MODEL, H100)
    assert deployment.plan.num_devices == 3
    outcome = deployment.simulate(requests(1, images=PICTURE)).outcome
    encoding = EncoderCosts(MODEL, H100, deployment.plan.pools[0]).seconds([Work(1, 4784, 1196)])
    sent = 1196 * 3584 * 2 / 1e9
    prefill = deployment.pools[0].costs.mixed(0, 0, [(0, 1298)], 1)
    assert outcome.prefilled[0] - outcome.arrival[0] == pytest.approx(to_ticks(encoding + sent) + prefill, abs=2)
    without = deploy(Plan.model_validate({**plan, "stages": None}), MODEL, H100)
    with pytest.raises(UsageError, match="pool prefill does not encode them"):
        without.simulate(requests(1, images=PICTURE))


@pytest.mark.parametrize(
    ("encoder", "media", "why"),
    [
        (
            {"limit_per_prompt": {"video": 0}},
            {"videos": CLIP},
            "takes 0 videos in one prompt, and the load has up to 1",
        ),
        ({"limit_per_prompt": {"image": 1}}, LENGTHS, r"raise encoder\.limit_per_prompt\.image"),
        ({}, {"audio": {"seconds": 1800}}, r"an item of the load \(audio\) has 22,500 embeddings, .* \(16,384\)"),
        (None, LENGTHS, "the load has images, videos and recordings, and pool mixed does not encode them"),
    ],
)
def test_items_that_an_instance_rejects_are_refused(
    encoder: dict[str, Any] | None, media: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        deployed(encoder).simulate(requests(20, **media))


def test_an_instance_that_takes_nothing_is_refused() -> None:
    with pytest.raises(Infeasible, match="encoder takes no kind of media that the model reads"):
        deployed({"limit_per_prompt": {"image": 0, "video": 0, "audio": 0}})
    # without images, the largest item is that of a video: 16,384 embeddings in a prompt of 16,384 tokens
    deployed({"limit_per_prompt": {"image": 0}})


@pytest.mark.parametrize(
    ("model", "media", "why"),
    [
        (
            SEES,
            {"audio": SPEECH},
            "w has audio, and model qwen2.5-vl-7b states no audio encoder; add audio to the model",
        ),
        (HEARS, {"images": PICTURE}, "w has images, and model voxtral-mini-3b states no vision encoder; add vision"),
        (load_model("gemma-3-27b"), {"videos": CLIP}, "states no vision encoder that reads them; add vision.video"),
    ],
)
def test_a_model_that_does_not_read_a_kind_is_refused(model: Any, media: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why.replace(".", r"\.")):
        check_sees(model.towers, load(**media), model.name, media_kinds(load(**media), None))


@pytest.mark.parametrize(
    ("media", "why"),
    [
        ({"videos": {**CLIP, "seconds": 0.03}}, r"videos\.seconds: a video of 0\.03 s .* has 1 of the 2 frames"),
        ({"audio": {"seconds": 0.005}}, r"audio\.seconds: a recording of 0\.005 s has 1 frames, too few for a token"),
    ],
)
def test_an_item_without_a_token_is_refused(media: dict[str, Any], why: str) -> None:
    assert SEES.towers.vision is not None
    few = MODEL.towers._replace(audio=HEARS.audio and HEARS.audio.model_copy(update={"padded": False}))
    with pytest.raises(UsageError, match=why):
        requests(3, towers=few, **media)


@pytest.mark.parametrize(
    ("media", "why"),
    [
        ({"videos": {**CLIP, "fps": 0}}, "greater than 0"),
        ({"videos": {**CLIP, "fps": 1, "frames": 8}}, "frames that clients send are not sampled again; remove fps"),
        ({"videos": {**CLIP, "frames": 0}}, "greater than or equal to 1"),
        ({"videos": {**CLIP, "seconds": 0}}, "must be above 0"),
        ({"videos": {**CLIP, "seconds": "long"}}, "must be a number of seconds, or quantiles of it"),
        ({"audio": {"seconds": {"levels": [0, 1], "seconds": [3, 2]}}}, "seconds must not fall"),
        ({"audio": {"seconds": {"levels": [0, 1], "seconds": [3]}}}, "at least 2 items"),
        ({"images": PICTURE, "audio": {**SPEECH, "block_tokens": 32}}, "give each the same block_tokens"),
    ],
)
def test_impossible_media_are_refused(media: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        load(**media)


def test_items_are_sized_as_the_encoder_sizes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that come again, in one draw or in the next one, are looked up; more of them than are kept change
    nothing."""
    monkeypatch.setattr(media_of_loads, "MOST_SIZES", 3)
    vision, sides = MODEL.towers.vision, {"levels": [0, 1], "pixels": [28, 1900]}
    assert vision is not None
    for seed in (0, 1, 0):
        drawn = build_stream(load(images={"sizes": [{"width": sides, "height": 448}]}), None, requests=40, seed=seed,
                             towers=MODEL.towers).media  # fmt: skip
        assert drawn is not None
        expected = [vision.shape(int(width), int(height)) for width, height, _ in drawn.size.tolist()]
        assert [tuple(row) for row in drawn.shape.tolist()] == expected
