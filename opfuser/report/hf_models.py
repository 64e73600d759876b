"""Models of transformers by name: built from a class or a configuration, and never downloaded."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import TargetError
from ..integrations.hf.examples import input_shape
from ..runtime.libraries import imported
from .inputs import did_you_mean, said

PREFIX = "hf:"
_ROWS, _TOKENS = 8, 512
_COMMON = {  # what every configuration takes, whether its defaults name it or not
    "attn_implementation",
    "num_labels",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
}


def build(
    spec: str, config: Path | None, device: torch.device, dtype: torch.dtype | None
) -> nn.Module:
    """The model that ``hf:NAME`` names, in training mode and with weights as at its initialization.

    The name is a local ``config.json`` or its folder, or else a class of models or configurations
    of transformers or a type of models. The class of a configuration is the first of its
    ``architectures``, or the model without a head. Nothing is downloaded, and no code of a folder
    runs. Caches of keys and values are off, as in training.

    Args:
        config: a JSON file with a configuration, or with some settings of one.
        dtype: of the weights; None is that of the configuration.

    Raises:
        TargetError: transformers is not installed, it has no such model, or none can be built.
    """
    library = imported("transformers")
    if isinstance(library, str):
        raise TargetError.explained(
            f"{PREFIX} names a model of transformers",
            received=library,
            remedy="Run pip install opfuser[hf]",
        )
    settings = {} if config is None else _read(config)
    try:
        with quiet_and_offline():
            kind, made = _resolved(library, spec, settings)
            if getattr(made, "quantization_config", None):
                raise TargetError.explained(
                    "Quantised weights are read from files, and not built",
                    where=spec,
                    received="quantization_config",
                    remedy="Set it to null in the file of --config to see the model without",
                )
            for part in (made, made.get_text_config()):
                part.use_cache = False
            with device:
                if kind is None:
                    model = library.AutoModel.from_config(made, dtype=dtype or made.dtype)
                else:
                    model = kind._from_config(made, dtype=dtype or made.dtype)
    except TargetError:
        raise
    except Exception as error:  # whatever a configuration may cause
        raise TargetError.explained(
            f"{spec} has to be built from its configuration",
            where="" if config is None else str(config),
            received=said(error),
        ) from error
    trained: nn.Module = model.train()
    return trained


def call_inputs(spec: str, model: nn.Module) -> tuple[str, ...]:
    """The inputs of a call as texts: 8 rows of 512 tokens, or 8 images, as large as may be.

    Raises:
        TargetError: the model takes something else.
    """
    found = input_shape(model, _ROWS, _TOKENS)
    if found is not None:
        name, shape = found
        return ("x".join(map(str, shape)) + (":int64" if name == "input_ids" else ""),)
    parameters = [n for n in inspect.signature(type(model).forward).parameters if n != "self"]
    raise TargetError.explained(
        "A call is known for models that take input_ids or pixel_values",
        where=spec,
        received=f"{type(model).__name__}, whose forward takes {', '.join(parameters[:3])}",
        remedy="Pass --input for each of them, or build the model in a function of yours",
    )


def decide_without_values() -> None:
    """Lets models of transformers run on the meta device.

    Without a mask they look whether positions begin again within a row, which positions without
    values cannot say. They do not: what a model makes itself counts up.
    """
    masks = sys.modules.get("transformers.masking_utils")
    find = getattr(masks, "find_packed_sequence_indices", None)
    if find is None or hasattr(find, "decides_without_values"):
        return

    @functools.wraps(find)
    def found(position_ids: torch.Tensor) -> Any:
        return None if position_ids.is_meta else find(position_ids)

    found.decides_without_values = True  # type: ignore[attr-defined]
    masks.find_packed_sequence_indices = found  # type: ignore[union-attr]


@contextmanager
def quiet_and_offline() -> Iterator[None]:
    """Inside, transformers says nothing about configurations, and nothing reaches the Hub."""
    library: Any = imported("transformers")
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before, verbosity = constants.HF_HUB_OFFLINE, library.logging.get_verbosity()
    constants.HF_HUB_OFFLINE = True
    library.logging.set_verbosity_error()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        library.logging.set_verbosity(verbosity)


def _resolved(library: Any, spec: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The class of a model, None for the one without a head, and its configuration."""
    name = spec.removeprefix(PREFIX)
    path = Path(name)
    if name and path.exists():
        return _of_data(library, spec, _read(_file(path)), settings)
    found: Any = getattr(library, name, None) if name.isidentifier() else None
    if inspect.isclass(found) and issubclass(found, library.PreTrainedModel):
        kind = getattr(found, "config_class", None)
        if kind is None:
            raise TargetError.explained("An abstract class builds no model", received=spec)
        return found, _config(kind, spec, settings)
    if inspect.isclass(found) and issubclass(found, library.PretrainedConfig):
        return _class_of(library, spec, settings), _config(found, spec, settings)
    if name in library.CONFIG_MAPPING:
        config = _config(library.CONFIG_MAPPING[name], spec, settings)
        return _class_of(library, spec, settings), config
    names = [*library.CONFIG_MAPPING.keys(), *dir(library)]
    raise TargetError.explained(
        f"{PREFIX} is followed by a class or a model type of transformers, or by a local "
        "config.json or its folder",
        received=repr(spec),
        remedy=did_you_mean(name, names)
        or "Names of the Hugging Face Hub are not looked up: nothing is downloaded",
    )


def _of_data(
    library: Any, spec: str, data: dict[str, Any], settings: dict[str, Any]
) -> tuple[Any, Any]:
    """As :func:`_resolved`, of the content of a ``config.json``."""
    name = data.get("model_type")
    if not isinstance(name, str) or name not in library.CONFIG_MAPPING:
        raise TargetError.explained(
            "A configuration names a model_type of transformers",
            where=spec,
            received=repr(name),
            remedy=did_you_mean(str(name), library.CONFIG_MAPPING.keys())
            or "Code beside a configuration is not run: build the model in a function of yours",
        )
    kind = library.CONFIG_MAPPING[name]
    _check_settings(kind, spec, settings)
    data = _merged(data, settings)
    return _class_of(library, spec, data), kind.from_dict(data)


def _class_of(library: Any, spec: str, data: Mapping[str, Any]) -> Any:
    """The first of the architectures that a configuration states."""
    names = data.get("architectures") or ()
    if not names:
        return None
    found = getattr(library, str(names[0]), None)
    if not (inspect.isclass(found) and issubclass(found, library.PreTrainedModel)):
        raise TargetError.explained(
            "architectures of a configuration are classes of transformers",
            where=spec,
            received=str(names[0]),
            remedy="Code beside a configuration is not run: build the model in a function of yours",
        )
    return found


def _config(kind: Any, spec: str, settings: dict[str, Any]) -> Any:
    """A configuration of a class: its defaults, but for the settings."""
    _check_settings(kind, spec, settings)
    return kind.from_dict(settings)


def _check_settings(kind: Any, spec: str, settings: Mapping[str, Any]) -> None:
    """Raises TargetError for settings of another type of models, and for unknown names."""
    stated = settings.get("model_type")
    if stated is not None and stated != kind.model_type:
        raise TargetError.explained(
            f"A configuration of {spec} is of the type {kind.model_type}",
            received=f"model_type {stated!r}",
        )
    default = kind()
    # With its type it is a whole configuration, which may come from another version.
    for name in settings if stated is None else ():
        if not (hasattr(default, name) or name in _COMMON):
            known = [*default.to_dict(), *kind.attribute_map, *_COMMON]
            raise TargetError.explained(
                f"{kind.__name__} has no setting of this name",
                where=spec,
                received=repr(name),
                remedy=did_you_mean(name, known),
            )


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ``base`` with those of ``over``, mappings inside of them likewise."""
    out = dict(base)
    for name, value in over.items():
        inner = out.get(name)
        if isinstance(inner, dict) and isinstance(value, dict):
            out[name] = _merged(inner, value)
        else:
            out[name] = value
    return out


def _file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError.explained(
            "The configuration cannot be read", received=f"{file}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise TargetError.explained(
            "A configuration is JSON", received=f"{file}: {error}"
        ) from error
    if not isinstance(found, dict):
        raise TargetError.explained(
            "A configuration is an object of JSON", received=f"{file}: {type(found).__name__}"
        )
    return found
