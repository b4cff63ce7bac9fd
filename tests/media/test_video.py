"""Videos give the frames that the policy asks for, upright and right, whatever the codec; or say what is wrong."""

from __future__ import annotations

import argparse
import io
import struct
from pathlib import Path

import av
import clips
import hostile_files
import numpy as np
import pytest
from PIL import Image

from mmspec.app.media import video
from mmspec.app.media.video import FramePolicy
from mmspec.media import MediaError, MediaLimits

KINDS = {  # what is tested of what PyAV's wheels can write
    "mpeg4": ".mp4",
    "libx264": ".mp4",
    "libx265": ".mp4",
    "libvpx-vp9": ".webm",
    "ffv1": ".mkv",
    "mpeg2video": ".ts",
}


def frames_of(data: bytes, policy: str = "uniform:8", max_frames: int = 64, **limits: float) -> list[Image.Image]:
    frames, _ = video.decode(data, "x.mp4", FramePolicy.parse(policy, max_frames), MediaLimits(**limits))
    return list(frames)


def places(data: bytes, policy: str, max_frames: int = 64) -> list[int]:
    return [clips.place_of(frame) for frame in frames_of(data, policy, max_frames)]


@pytest.fixture(scope="module")
def ruler(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """48 frames that say their own place, 8 a second, a key frame every 12."""
    path = tmp_path_factory.mktemp("clips") / "ruler.mp4"
    return clips.write_clip(path, clips.grey_steps(48), fps=8, gop=12).read_bytes()


@pytest.mark.parametrize(
    ("policy", "max_frames", "expected"),
    [
        ("uniform:1", 64, [24]),
        ("uniform:4", 64, [6, 18, 30, 42]),
        ("uniform:8", 4, [6, 18, 30, 42]),
        ("uniform:48", 64, list(range(48))),
        ("uniform:100", 64, list(range(48))),
        ("fps:1", 64, [0, 8, 16, 24, 32, 40]),
        ("fps:0.5", 64, [0, 16, 32]),
        ("fps:4", 3, [8, 24, 40]),
        ("fps:1000", 64, list(range(48))),
        ("keyframes", 64, [0, 12, 24, 36]),
        ("keyframes", 2, [12, 36]),
    ],
)
def test_policies_choose_the_frames_they_name(ruler: bytes, policy: str, max_frames: int, expected: list[int]):
    assert places(ruler, policy, max_frames) == expected


@pytest.mark.parametrize(
    "text", ["", "uniform", "uniform:0", "uniform:2.5", "uniform:x", "fps:0", "fps:-1", "fps:nan", "keyframes:3", "all"]
)
def test_other_policies_are_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="choose N"):
        FramePolicy.parse(text)


@pytest.mark.parametrize("codec", KINDS)
def test_every_codec_gives_the_right_frames(codec: str, tmp_path: Path):
    path = clips.write_clip(tmp_path / f"x{KINDS[codec]}", clips.grey_steps(40), fps=25, codec=codec, gop=10)
    data = path.read_bytes()
    assert places(data, "uniform:5") == [4, 12, 20, 28, 36]
    assert places(data, "uniform:40") == list(range(40))


def test_only_what_is_needed_is_decoded(ruler: bytes, monkeypatch: pytest.MonkeyPatch):
    fed: list[int] = []
    decode = video._decoded
    monkeypatch.setattr(
        video, "_decoded", lambda stream, packet: fed.append(packet is not None) or decode(stream, packet)
    )
    assert places(ruler, "uniform:1") == [24]
    assert sum(fed) <= 12  # the frames of one key frame's run, out of 48


def test_uneven_times(tmp_path: Path):
    times = [0, 1, 2, 3, 40, 41, 80, 81]  # in eighths of a second
    data = clips.write_clip(tmp_path / "x.mp4", clips.grey_steps(8), fps=8, times=times).read_bytes()
    assert places(data, "fps:1") == [0, 4, 6]
    assert places(data, "uniform:4") == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("rotation", "top_left"), [(90, hostile_files.GREEN), (180, hostile_files.GREEN), (270, hostile_files.RED)]
)
def test_rotation_is_applied(rotation: int, top_left: tuple[int, int, int], tmp_path: Path):
    halves = hostile_files.two_halves().resize((80, 40))
    path = clips.write_clip(tmp_path / "x.mp4", [halves] * 4, rotation=rotation)
    frame = frames_of(path.read_bytes(), "uniform:1")[0]
    assert frame.size == ((40, 80) if rotation % 180 else (80, 40))
    assert np.abs(np.subtract(frame.getpixel((2, 2)), top_left)).max() < 12
    frame = video.decode(path.read_bytes(), path, FramePolicy(), MediaLimits(), max_side=40)[0][0]
    assert frame.size == ((20, 40) if rotation % 180 else (40, 20))


def test_a_broken_tail_costs_only_itself(ruler: bytes):
    assert places(hostile_files.cut(ruler, 0.9), "uniform:4")[0] in range(3, 7)
    with pytest.raises(MediaError, match=r"cut off: .* of its 48 frames"):
        frames_of(hostile_files.cut(ruler, 0.4))


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
def test_broken_frames_are_left_out_and_too_many_are_an_error(codec: str, tmp_path: Path):
    path = clips.write_clip(tmp_path / "x.mp4", clips.grey_steps(48), codec=codec, gop=8, faststart=False)
    data = bytearray(path.read_bytes())
    start, stop = data.index(b"mdat") + 4, data.index(b"moov") - 4
    hole = range(start + (stop - start) * 5 // 8, start + (stop - start) * 7 // 8)
    data[hole.start : hole.stop] = b"\xff" * len(hole)
    left = places(bytes(data), "uniform:12")
    assert 6 <= len(left) < 12 and left[:4] == places(path.read_bytes(), "uniform:12")[:4]
    data[start:stop] = b"\xff" * (stop - start)
    with pytest.raises(MediaError, match=r"damaged: (0 of 12 frames|the size of its frames)") as caught:
        frames_of(bytes(data), "uniform:12")
    assert caught.value.what_to_do


def test_length_times_size_is_capped_before_decoding(ruler: bytes, tmp_path: Path):
    with pytest.raises(MediaError, match=r"lasts 6 s .* 5 s are allowed"):
        frames_of(ruler, max_duration=5)
    assert len(frames_of(ruler, max_duration=7)) == 8
    large = clips.write_clip(tmp_path / "x.mp4", [Image.new("RGB", (1920, 2160))] * 2, fps=1, times=[0, 9]).read_bytes()
    with pytest.raises(MediaError, match=r"lasts \d+ s at 1920 x 2160 pixels, where 5 s are allowed"):
        frames_of(large, max_duration=10)  # half of it, at twice the pixels
    with pytest.raises(MediaError, match="over 4 million"):
        frames_of(large, max_pixels=4_000_000)


def test_a_playlist_opens_no_other_file(tmp_path: Path):
    secret = clips.write_clip(tmp_path / "secret.ts", 8, codec="libx264")
    playlists = {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{secret}\n#EXT-X-ENDLIST\n",
        "concat": f"ffconcat version 1.0\nfile {secret}\n",
        "dash": f'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>{secret}</BaseURL></MPD>',
    }
    for name, text in playlists.items():
        with pytest.raises(MediaError, match="no video"):
            assert not frames_of(text.encode()), name


def test_the_sleeve_of_a_song_is_no_video(tmp_path: Path):
    song = clips.write_sound(tmp_path / "x.flac", "flac").read_bytes()
    cover = hostile_files.plain("RGB", hostile_files.RED)
    block = struct.pack(">II9sIIIIII", 3, 9, b"image/png", 0, 8, 8, 24, 0, len(cover)) + cover
    song = song[:42] + b"\x06" + len(block).to_bytes(3, "big") + block + song[42:]  # after fLaC and STREAMINFO
    with av.open(io.BytesIO(song)) as container:
        assert len(container.streams.video) == 1
    with pytest.raises(MediaError, match="no video"):
        frames_of(song)


def test_sound_beside_the_video_does_no_harm(tmp_path: Path):
    assert len(frames_of(clips.write_clip(tmp_path / "x.mp4", 8, sound=True).read_bytes())) == 8


@pytest.mark.parametrize("kind", ["GIF", "PNG"])
def test_an_animated_picture_taken_as_a_video(kind: str):
    frames = [Image.new("RGB", (8, 8), (20 * place,) * 3) for place in range(10)]
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=250, lossless=True)

    def levels(policy: str) -> list[int]:
        return [round(frame.getpixel((0, 0))[0] / 20) for frame in frames_of(out.getvalue(), policy)]

    assert levels("uniform:5") == [1, 3, 5, 7, 9]
    assert levels("fps:1") == [0, 4, 8]
    assert levels("keyframes") == (list(range(10)) if kind == "PNG" else [0])
    assert video.decode(out.getvalue(), "x", FramePolicy(), MediaLimits())[1] == pytest.approx(2.5)
    with pytest.raises(MediaError, match="lasts"):
        frames_of(out.getvalue(), max_duration=1)


def test_a_cut_off_animation_gives_the_frames_before_the_cut():
    pictures = [hostile_files.noise(32, 32).rotate(place * 40) for place in range(10)]
    out = io.BytesIO()
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=100)
    assert 4 <= len(frames_of(hostile_files.cut(out.getvalue(), 0.75), "uniform:10")) < 10


def test_no_damage_gives_anything_but_frames_or_a_media_error(ruler: bytes):
    draw = np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(ruler)
        for place in draw.integers(0, len(data), 20):
            data[place] = draw.integers(0, 256)
        try:
            frames = frames_of(bytes(data), "uniform:4")
        except MediaError as error:
            assert error.what_to_do
        else:
            assert frames and all(frame.mode == "RGB" for frame in frames)
