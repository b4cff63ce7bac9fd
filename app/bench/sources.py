"""Where the questions of a benchmark come from: lists, folders, data sets of the Hub, and published benchmarks."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from mmspec.app.bench.command import BenchError, say
from mmspec.app.media.hub import Dataset
from mmspec.app.media.inputs import images
from mmspec.app.media.tables import Columns
from mmspec.media import MediaError, dataset_folders

Row = Mapping[str, Any]
LISTS = (".jsonl", ".json", ".parquet")
QUESTION, CAPTION = "{question}", "Provide a one-sentence caption for the provided image."
SHORT = "\nAnswer the question using a single word or phrase."
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


@dataclass(frozen=True)
class QuestionSource:
    """Questions as rows.

    Attributes:
        folders: where the files that a row names are looked for.
        ask: a row's question, with the usual fields.
    """

    rows: Sequence[Row]
    folders: Sequence[Path] = ()
    ask: Callable[[Row], Row] = lambda row: row


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
        prompt: a row's prompt, as a function of the row or with its {fields}; None: the row has the usual fields.
        category: the field whose values get separate rows in the bench's table.
        shown: a function that returns a row's picture or pictures.
        album: a separate data set with the pictures by `id`; a row's `imageId` names one.
    """

    where: str
    prompt: str | Callable[[Row], str] | None = None
    category: str | None = None
    shown: Callable[[Row], object] = itemgetter("image")
    album: str | None = None

    def source(self) -> QuestionSource:
        folders = dataset_folders(self.where.partition(":")[0])
        pictures = None if self.album is None else _split(self.album)
        numbers = {} if pictures is None else {name: number for number, name in enumerate(pictures["id"])}

        def ask(row: Row) -> Row:
            if self.prompt is None:
                return row
            try:
                if pictures is not None:
                    row = {**row, "image": pictures[numbers[row["imageId"]]]["image"]}
                prompt = self.prompt.format_map(row) if isinstance(self.prompt, str) else self.prompt(row)
                question = {"image": self.shown(row), "prompt": prompt}
            except KeyError as error:
                raise BenchError(f"{self.where} has no field {error}; its fields are {', '.join(row)}") from error
            return question | ({"category": row.get(self.category)} if self.category else {})

        return QuestionSource(_split(self.where), folders, ask)


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


def source_of(path: Path) -> QuestionSource:
    """The questions of a list, a folder, hf:owner/name[/config][:split], or a published benchmark by its name.

    Raises BenchError: there are none.
    """
    name = str(path)
    if not path.exists():
        if name == "mvbench":
            return _mvbench(_cached())
        if (protocol := PROTOCOLS.get(name)) is not None or name.startswith("hf:"):
            return (protocol or Protocol(name.removeprefix("hf:"))).source()
    if path.is_dir():
        if any((path / "json" / f"{task}.json").is_file() for tasks in VIDEOS.values() for task in tasks.split()):
            return _mvbench(path)
        lists = sorted(p for p in path.iterdir() if p.suffix in LISTS)
        if len(lists) > 1:
            raise BenchError(f"{path} holds {len(lists)} lists ({', '.join(p.name for p in lists)}); name one of them")
        if not lists:
            return QuestionSource([{"image": str(picture.resolve())} for picture in images(path)])
        path = lists[0]
    if path.suffix not in LISTS or not path.is_file():
        raise BenchError(
            f"no questions in {name!r}; give a folder, a file ending in {', '.join(LISTS)}, "
            f"hf:owner/name[:split], or one of {', '.join(NAMES)}"
        )
    try:
        return QuestionSource(_listed(path), [path.parent / sub for sub in ("", "images", "videos")])
    except (OSError, ValueError) as error:  # pyarrow's are among these
        raise BenchError(f"{path} cannot be read as a list of questions: {error}") from error


def _listed(path: Path) -> list[dict[str, Any]]:
    """The rows of a file. ValueError: it is no list of objects."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise BenchError("a parquet list needs pyarrow: pip install pyarrow, or convert it to .jsonl") from error
        return pyarrow.parquet.read_table(path).to_pylist()  # type: ignore[no-any-return]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        rows: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        rows = json.loads(text)
        if isinstance(rows, dict):
            rows = next((value for value in rows.values() if isinstance(value, list)), None)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it must have an object for each question")
    return rows


def _split(where: str) -> Any:
    """The rows of one split of a data set."""
    try:
        parts = Dataset(f"hf:{where}", Columns()).parts
    except MediaError as error:
        raise BenchError(str(error)) from error
    if len(parts) > 1:
        raise BenchError(f"hf:{where} has the splits {', '.join(parts)}; name one, as in owner/name:split")
    return next(iter(parts.values()))


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
