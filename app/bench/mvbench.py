"""MVBench: questions of twenty tasks about videos, in the layout of its data set's branch `video`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspec.app.bench.command import BenchError, say

NAME, BRANCH = "OpenGVLab/MVBench", "video"  # the main branch has uncut videos in archives
COMMAND = f"hf download {NAME} --repo-type dataset --revision {BRANCH}"
ADVICE = (
    f"download it: {COMMAND}; or name a folder with its json/ and its "
    f"videos, unpacked and cut as in the branch {BRANCH!r} (--local-dir FOLDER of the same command)"
)
VIDEOS = {  # task → folder of its videos; its questions are in json/TASK.json
    "action_antonym": "ssv2_video_mp4",
    "action_count": "perception/videos",
    "action_localization": "sta/sta_video_segment",
    "action_prediction": "star/Charades_segment",
    "action_sequence": "star/Charades_segment",
    "character_order": "perception/videos",
    "counterfactual_inference": "clevrer/video_validation",
    "egocentric_navigation": "vlnqa",
    "episodic_reasoning": "tvqa/video_fps3_hq_segment",
    "fine_grained_action": "Moments_in_Time_Raw/videos",
    "fine_grained_pose": "nturgbd_convert",
    "moving_attribute": "clevrer/video_validation",
    "moving_count": "clevrer/video_validation",
    "moving_direction": "clevrer/video_validation",
    "object_existence": "clevrer/video_validation",
    "object_interaction": "star/Charades_segment",
    "object_shuffle": "perception/videos",
    "scene_transition": "scene_qa/video",
    "state_change": "perception/videos",
    "unexpected_action": "FunQA_test/test",
}


def ask(row: Mapping[str, Any]) -> str:
    """The prompt: the question, and the candidates by letter."""
    options = "".join(f"({chr(ord('A') + i)}) {one}\n" for i, one in enumerate(row["candidates"]))
    return f"Question:{row['question']}\nOption:\n{options}Only give the best option.\n"


def cached() -> Path:
    """The copy in the Hub's cache. BenchError if there is none, since a download is large."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(NAME, repo_type="dataset", revision=BRANCH, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise BenchError(f"mvbench is not on this machine; {ADVICE}") from error


def tasks(folder: Path) -> list[str]:
    """The tasks with questions in a folder; none if it is not a copy of MVBench."""
    return [task for task in VIDEOS if (folder / "json" / f"{task}.json").is_file()]


def rows(folder: Path) -> list[dict[str, str]]:
    """The questions of all tasks whose videos are in the folder, each with its task and the path of its video.

    Raises BenchError: there are none, or a single video is missing.
    """
    there = [task for task in tasks(folder) if (folder / VIDEOS[task]).is_dir()]
    if not there:
        raise BenchError(f"{folder} has questions of MVBench, but no videos in {VIDEOS[tasks(folder)[0]]}; {ADVICE}")
    if left := [task for task in tasks(folder) if task not in there]:
        say(f"left out, since their videos are not in {folder}: {', '.join(left)}")
    questions = [
        {**row, "task": task, "video": f"{VIDEOS[task]}/{row['video']}"}
        for task in there for row in json.loads((folder / "json" / f"{task}.json").read_text(encoding="utf-8"))
    ]  # fmt: skip
    missing = next((row["video"] for row in questions if not (folder / row["video"]).is_file()), None)
    if missing is not None:
        raise BenchError(f"{folder} has no {missing}; {ADVICE}")
    return questions
