"""Published benchmarks by name: their datasets on the Hub, and the prompts and pictures of their rows."""

from __future__ import annotations

import ast
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from mmspec.app.bench.command import BenchError, say
from mmspec.app.bench.questions import QuestionSource, Row, split_of
from mmspec.app.bench.report import Record
from mmspec.media import dataset_folders

QUESTION, CAPTION = "{question}", "Provide a one-sentence caption for the provided image."
SHORT = "\nAnswer the question using a single word or phrase."
NO_DATA = ("data", "picture", "pair", "clip")  # kinds of questions that are not dataset names
LETTER = "\nAnswer with the option's letter from the given choices directly."
FOUR = "{question}\nA. {choice_a}\nB. {choice_b}\nC. {choice_c}\nD. {choice_d}" + LETTER  # of SEED-Bench
MVBENCH, BRANCH = "OpenGVLab/MVBench", "video"  # the main branch has uncut videos in archives
COMMAND = f"hf download {MVBENCH} --repo-type dataset --revision {BRANCH}"
ADVICE = (
    f"download it: {COMMAND}; or name a folder with its json/ and its "
    f"videos, unpacked and cut as in the branch {BRANCH!r} (--local-dir FOLDER of the same command)"
)
VIDEOS = {  # folder of videos of MVBench → the tasks about them; the questions of a task are in json/TASK.json
    "Moments_in_Time_Raw/videos": "fine_grained_action",
    "clevrer/video_validation": "counterfactual_inference moving_attribute moving_count moving_direction "
    "object_existence object_interaction",
    "FunQA_test/test": "unexpected_action",
    "nturgbd_convert": "fine_grained_pose",
    "perception/videos": "action_count character_order object_shuffle state_change",
    "scene_qa/video": "scene_transition",
    "ssv2_video_mp4": "action_antonym",
    "sta/sta_video_segment": "action_localization",
    "star/Charades_segment": "action_prediction action_sequence",
    "tvqa/video_fps3_hq_segment": "episodic_reasoning",
    "vlnqa": "egocentric_navigation",
}


def _lettered(choices: Sequence[str]) -> str:
    return "\n".join(f"{chr(ord('A') + i)}. {choice}" for i, choice in enumerate(choices))


def _choices(row: Row) -> str:
    """ScienceQA: the hint, if there is one, the question, and its choices by letter."""
    hint = f"Context: {row['hint']}\n" if row.get("hint") else ""
    return f"{hint}{row['question']}\n{_lettered(row['choices'])}{LETTER}"


def _exam(row: Row) -> str:
    """MMMU: the question, and its options by letter, if any; these are stored as a Python list."""
    if row["question_type"] == "multiple-choice":
        return f"{row['question']}\n{_lettered(ast.literal_eval(row['options']))}\n{LETTER}"
    return f"{row['question']}\n{SHORT}"


def _numbered(row: Row) -> list[object]:
    """MMMU: the pictures that the question or its options mention as <image N>, in the order of N."""
    return [row[f"image_{n}"] for n in sorted(set(re.findall(r"<image (\d)>", f"{row['question']}{row['options']}")))]


@dataclass(frozen=True)
class Protocol:
    """A benchmark with the prompts of `lmms-eval` (0.7.3).

    Attributes:
        where: owner/name[/config]:split on the Hub.
        prompt: a row's prompt, as a function of the row or with its {fields}.
        category: the field whose values get separate rows in the bench's table.
        shown: a function that returns a row's picture or pictures.
        album: a separate data set with the pictures by `id`; a row's `imageId` names one.
    """

    where: str
    prompt: str | Callable[[Row], str]
    category: str | None = None
    shown: Callable[[Row], object] = itemgetter("image")
    album: str | None = None

    def source(self) -> QuestionSource:
        folders = dataset_folders(self.where.partition(":")[0])
        pictures = None if self.album is None else split_of(self.album)
        numbers = {} if pictures is None else {name: number for number, name in enumerate(pictures["id"])}

        def ask(row: Row) -> Row:
            try:
                if pictures is not None:
                    row = {**row, "image": pictures[numbers[row["imageId"]]]["image"]}
                prompt = self.prompt.format_map(row) if isinstance(self.prompt, str) else self.prompt(row)
                question = {"image": self.shown(row), "prompt": prompt}
            except KeyError as error:
                raise BenchError(f"{self.where} has no field {error}; its fields are {', '.join(row)}") from error
            return question | ({"category": row.get(self.category)} if self.category else {})

        return QuestionSource(split_of(self.where), folders, ask)


PROTOCOLS: dict[str, Protocol] = {
    "scienceqa": Protocol("lmms-lab-encoder/ScienceQA/ScienceQA-IMG:test", _choices, "subject"),
    "mm-vet": Protocol("lmms-lab-encoder/MMVet:test", QUESTION),
    "textvqa": Protocol("lmms-lab-encoder/textvqa:validation", QUESTION + SHORT),
    "mme": Protocol("lmms-lab-encoder/MME:test", QUESTION + SHORT, "category"),
    "vizwiz": Protocol("lmms-lab-encoder/VizWiz-VQA:val", QUESTION + SHORT),
    "seed-bench": Protocol("lmms-lab-encoder/SEED-Bench:test", FOUR),
    "chartqa": Protocol("lmms-lab-encoder/ChartQA:test", QUESTION + SHORT, "type"),
    "llava-bench": Protocol("lmms-lab-encoder/llava-bench-in-the-wild:train", QUESTION, "category"),
    "coco-captions": Protocol("lmms-lab-encoder/COCO-Caption2017:val", CAPTION),
    "gqa": Protocol(
        "lmms-lab-encoder/GQA/testdev_balanced_instructions:testdev",
        QUESTION + SHORT,
        album="lmms-lab-encoder/GQA/testdev_balanced_images:testdev",
    ),
    "mmmu": Protocol("lmms-lab-encoder/MMMU:validation", _exam, shown=_numbered),
}


NAMES = (*PROTOCOLS, "mvbench")


def find(path: Path) -> QuestionSource | None:
    """The questions of a benchmark by its name, or of a folder with a copy of MVBench; None for others."""
    if path.is_dir():
        tasks = [task for tasks in VIDEOS.values() for task in tasks.split()]
        return _mvbench(path) if any((path / "json" / f"{task}.json").is_file() for task in tasks) else None
    if str(path) == "mvbench":
        return _mvbench(_cached())
    return PROTOCOLS[str(path)].source() if str(path) in PROTOCOLS else None


def _cached() -> Path:
    """MVBench in the Hub's cache. BenchError if it is not there, since a download is large."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(MVBENCH, repo_type="dataset", revision=BRANCH, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise BenchError(f"mvbench is not on this machine; {ADVICE}") from error


def _mvbench(folder: Path) -> QuestionSource:
    """MVBench, in the layout of its branch `video`: the questions of all tasks whose videos are in the folder.

    Raises BenchError: there are none, or a single video is missing.
    """
    places = {task: place for place, tasks in VIDEOS.items() for task in tasks.split()}
    tasks = [task for task in sorted(places) if (folder / "json" / f"{task}.json").is_file()]
    there = [task for task in tasks if (folder / places[task]).is_dir()]
    if not there:
        raise BenchError(f"{folder} has questions of MVBench, but no videos in {places[tasks[0]]}; {ADVICE}")
    if left := [task for task in tasks if task not in there]:
        say(f"left out, since their videos are not in {folder}: {', '.join(left)}")
    rows = [
        {**row, "task": task, "video": f"{places[task]}/{row['video']}"}
        for task in there for row in json.loads((folder / "json" / f"{task}.json").read_text(encoding="utf-8"))
    ]  # fmt: skip
    missing = next((row["video"] for row in rows if not (folder / row["video"]).is_file()), None)
    if missing is not None:
        raise BenchError(f"{folder} has no {missing}; {ADVICE}")
    return QuestionSource(rows, [folder], _watch)


def _watch(row: Row) -> Row:
    """MVBench: the question, and the candidates by letter."""
    options = "".join(f"({chr(ord('A') + i)}) {one}\n" for i, one in enumerate(row["candidates"]))
    prompt = f"Question:{row['question']}\nOption:\n{options}Only give the best option.\n"
    return {"video": row["video"], "prompt": prompt, "category": row["task"]}


def data_tables(records: Sequence[Record]) -> dict[str, list[list[str]]]:
    """Tables of several data sets as in papers, by condition: rows are methods, columns are data sets and their mean.

    A cell has tokens per target call and the speed-up over stock. A condition with only one data set has no table.
    """
    conditions: dict[str, dict[str, dict[str, Record]]] = {}  # condition → data set → method → record
    for record in records:
        if record["suite"] == "vlm" and record["category"] == "all" and record["kind"] not in NO_DATA:
            prompt = f", {record['prompt']} prompt" if record["prompt"] else ""
            title = f"tokens/call, speedup: batch {record['batch']}, temperature {record['temperature']:g}{prompt}"
            conditions.setdefault(title, {}).setdefault(record["kind"], {})[record["method"]] = record
    tables = {}
    for title, sets in conditions.items():
        methods = {name: [one.get(name) for one in sets.values()] for each in sets.values() for name in each}
        rows = [[name, *(_mean([one]) for one in found), _mean(found)] for name, found in methods.items()]
        tables[title] = [["method", *sets, "mean"], *rows]
    return {title: rows for title, rows in tables.items() if len(conditions[title]) > 1}


def _mean(records: Sequence[Record | None]) -> str:
    """The means over these records; a dash if a value is missing."""
    pairs = [(r["tokens_per_target_call"], r["speedup_e2e"]) for r in records if r is not None]
    if len(pairs) < len(records) or not all(map(all, pairs)):
        return "-"
    return "{:.2f}, {:.2f}x".format(*map(statistics.fmean, zip(*pairs, strict=True)))
