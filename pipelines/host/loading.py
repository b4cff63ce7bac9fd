"""Loads models of transformers, processors and text encoders by name, and drafters with what they need of targets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    BatchFeature,
    CompileConfig,
    PreTrainedTokenizerFast,
    T5EncoderModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from mmspec.checkpoints import load
from mmspec.drafters.feature import FeatureDrafter
from mmspec.pipelines.drawing.weight_files import listed
from mmspec.pipelines.host.kinds import GenerativeModel, PretrainedConfig, Processor
from mmspec.protocols import TargetInfo

__all__ = [  # re-exported
    "AutoProcessor", "BatchFeature", "CompileConfig", "PreTrainedTokenizerFast", "T5EncoderModel", "load_drafter",
]  # fmt: skip
WITH_PICTURES = frozenset(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())  # class names


def model_and_processor(where: str | Path, dtype: torch.dtype | str) -> tuple[GenerativeModel, Processor]:
    """Load the model and its processor, which is a tokenizer for a text-only model.

    Args:
        where: a folder or a name on the hub.
        dtype: of the weights; "auto": that of the files.

    Raises:
        OSError, ValueError: there is no such model, it is a PEFT adapter, it does not generate text, or its files are
            damaged.
    """
    folder = Path(where)
    if (folder / "adapter_config.json").is_file() and not [*folder.glob("model*"), *folder.glob("pytorch_model*")]:
        raise ValueError(
            "it is a PEFT adapter: merge it into the model that it adapts (peft's merge_and_unload), save the result "
            "and its processor by save_pretrained, and name that folder"
        )
    auto = _auto(AutoConfig.from_pretrained(where))
    processor = AutoTokenizer if auto is AutoModelForCausalLM else AutoProcessor
    return checked(auto, where, dtype=dtype), processor.from_pretrained(where)


def checked(cls: Any, where: str | Path, **how: Any) -> Any:
    """`cls.from_pretrained`, with a warning if transformers initializes weights that the files lack.

    ValueError: the files are damaged, or have weights of other shapes.
    """
    model, missing = _loaded(cls, where, **how)
    if missing:
        warnings.warn(
            f"the files of {str(where)!r} lack {listed(missing)}, which have initial values now, most of them random: "
            "its answers are nonsense, unless the model does not use them. Is the checkpoint complete?",
            stacklevel=2,
        )
    return model


def _loaded(cls: Any, where: str | Path, **how: Any) -> tuple[Any, list[str]]:
    """`cls.from_pretrained`, and the names of weights that the files lack, if they are not quantized."""
    try:
        model, info = cls.from_pretrained(where, output_loading_info=True, ignore_mismatched_sizes=True, **how)
    except (SafetensorError, UnpicklingError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"a file of its weights is damaged ({why}); download it again") from error
    wrong = [f"{name} {tuple(found)} instead of {tuple(own)}" for name, found, own in sorted(info["mismatched_keys"])]
    if wrong:
        raise ValueError(f"its files have {listed(wrong)}. Do they fit its config?")
    return model, sorted(info["missing_keys"]) if getattr(model, "hf_quantizer", None) is None else []


def encoder_and_tokenizer(where: str | Path) -> tuple[T5EncoderModel, Any]:
    """Load LlamaGen's T5 and its tokenizer from a folder or the hub, in the dtype of the files."""
    return checked(T5EncoderModel, where, dtype="auto"), AutoTokenizer.from_pretrained(where)


def draft_model(name: str | Path) -> GenerativeModel:
    """Load a model from a folder or from the hub's cache; nothing is downloaded, and no code of a checkpoint runs.

    Raises:
        ValueError: there is none on this machine, or it is damaged, incomplete or needs code of its own.
    """
    said = f"draft={str(name)!r} is no model on this machine that can be loaded"
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model, missing = _loaded(_auto(AutoConfig.from_pretrained(name, **here)), name, dtype="auto", **here)
    except Exception as error:  # of any kind: it depends on what is damaged
        why = str(error).strip().partition("\n")[0]
        absent = isinstance(error, OSError) or "trust_remote_code" in str(error)
        raise ValueError(
            f"{said} ({type(error).__name__}: {why}); "
            + ("enable downloads nothing and runs no code of a checkpoint: load it with from_pretrained, and pass the "
               "model" if absent else "mend or replace its files")
        ) from error  # fmt: skip
    if missing:
        raise ValueError(f"{said}: its files lack {listed(missing)}. Is the checkpoint complete?")
    loaded: GenerativeModel = model.eval()
    return loaded


def _auto(config: PretrainedConfig) -> Any:
    """The auto class for a model with this config: AutoModelForCausalLM only for a text-only model."""
    images = type(config) in AutoModelForImageTextToText._model_mapping
    text = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if text and not images else AutoModelForImageTextToText


def is_model(thing: object) -> bool:
    """Whether it is a model of transformers, of any kind."""
    return isinstance(thing, transformers.PreTrainedModel)


def stock_class(name: str) -> type[GenerativeModel]:
    """A model class of transformers by name, since not every release has it."""
    return getattr(transformers, name)


def generates(architectures: Iterable[str]) -> bool:
    """Whether one of these is a model class of transformers with `generate`."""
    return any(hasattr(getattr(transformers, str(name), None), "generate") for name in architectures)


def load_drafter(
    name_or_path: str | Path, *, target: GenerativeModel | TargetInfo | str | Path | None = None,
    revision: str | None = None, allow_pickle: bool = False, layout: str | None = None,
) -> FeatureDrafter:  # fmt: skip
    """Load a drafter with its weights, frozen, in eval mode and in the dtype of the file; `enable` fits it to a target.

    Args:
        name_or_path: a folder, a file with config.json beside it, or owner/name on the hub.
        target: the model that it drafts for: the model itself, its TargetInfo, or its name or folder. Needed if the
            file does not say which layers it reads (EAGLE-3 as published). A name also replaces that in the file.
        revision: branch, tag or commit on the hub.
        allow_pickle: run the code that a .bin file contains; only for files whose author you trust.
        layout: one of `layouts.LAYOUTS`; None: detect it from config.json and the tensors' names. An MSD drafter whose
            config.json was lost needs it, since its tensors are those of an EAGLE drafter.

    Returns:
        The drafter; pass it to `enable(model, drafter=...)`. It can be used several times.

    Raises:
        FileNotFoundError: there is nothing, or no config.json or weights in it.
        ValueError: an unknown layout, missing, extra or misshapen tensors, a damaged file, an unknown network.
    """
    info = target if target is None or isinstance(target, TargetInfo) else partial(_number, target)
    drafter = load.load_drafter(name_or_path, target=info, revision=revision, allow_pickle=allow_pickle, layout=layout)
    if isinstance(target, (str, Path)):
        drafter.config = replace(drafter.config, target=str(target))
    return drafter


def _number(target: object, what: str) -> int:
    """The number of decoder "layers" or the "vocab" size of a model, given itself or by its name or folder."""
    config = getattr(target, "config", None)
    if isinstance(target, (str, Path)):
        try:
            config = AutoConfig.from_pretrained(target)
        except (OSError, ValueError) as error:
            raise ValueError(f"the config of the target {str(target)!r} could not be read: {error}") from error
    if config is None or not hasattr(config, "get_text_config"):
        raise ValueError(f"target must be a model, or the name or folder of one; got a {type(target).__name__}")
    text = config.get_text_config(decoder=True)
    return int(text.num_hidden_layers if what == "layers" else text.vocab_size)
