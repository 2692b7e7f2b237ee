"""Models of transformers from a configuration, with random weights and random inputs; nothing is downloaded."""

import os
import sys
from functools import partial
from typing import Any

import torch

from castwise.errors import UsageError, unknown_name
from castwise.spec.user_model import UserModel

# Tokens a sample, if the model can take as many. Source: chosen here; it is BERT's longest, and half of GPT-2's.
_MOST_TOKENS = 512

# Heads by task, in order of preference: a model may have several.
_TEXT_HEADS = ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM")
_CLASS_HEADS = ("AutoModelForSequenceClassification",)
_IMAGE_HEADS = ("AutoModelForImageClassification",)


def build(model: UserModel) -> dict[str, Any]:
    """Return the model of a configuration's file, or of a model type, with its batch maker; the loss is its own."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    constants = sys.modules.get("huggingface_hub.constants")  # imported already, it has read the variables
    if constants is not None:
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"'transformers:{model.name}' needs transformers, which is not installed. Install it with: "
            "pip install transformers"
        ) from error
    config = _read_config(transformers, model)
    made = _make_model(transformers, config, model.name)
    if _is_one_of(transformers, made, _IMAGE_HEADS):
        return {"model": made, "batch": partial(_images, config), "unit": "images"}
    of_classes = _is_one_of(transformers, made, _CLASS_HEADS)
    if not of_classes and not _is_one_of(transformers, made, _TEXT_HEADS):
        raise UsageError(
            f"castwise knows no inputs for {type(made).__name__} of transformers:{model.name}. Write a function that "
            "returns the model and a batch: castwise init FILE."
        )
    num_tokens = min(_MOST_TOKENS, getattr(config, "max_position_embeddings", None) or _MOST_TOKENS)
    batch = partial(_tokens, config, num_tokens, of_classes)
    return {"model": made, "batch": batch, "unit": "tokens", "units_per_sample": num_tokens}


def _refuse_kernels(values: Any) -> None:
    """Raise UsageError if a configuration names an attention that transformers downloads, with its code."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if "attn_implementation" in name and "/" in str(value):
            raise UsageError(
                f"'{name}': '{value}' names a kernel that is downloaded, and castwise downloads nothing. Take it out."
            )
        _refuse_kernels(value)


def _read_config(transformers: Any, model: UserModel) -> Any:
    if model.path:
        values, _ = transformers.PretrainedConfig.get_config_dict(model.path, local_files_only=True)
        _refuse_kernels(values)
        model_type = values.get("model_type")
        if model_type is None:
            raise UsageError(f"The configuration '{model.path}' has no model_type, which names its class.")
        arguments = {name: value for name, value in values.items() if name != "model_type"}
    else:
        model_type, arguments = model.name, {}
    known = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known:
        hint = "`python -c 'import transformers; print(*transformers.CONFIG_MAPPING)'` lists them."
        raise unknown_name("model type of transformers", model_type, known, hint)
    config = transformers.AutoConfig.for_model(model_type, **arguments)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # as published models have it
    return config


def _make_model(transformers: Any, config: Any, name: str) -> Any:
    named = config.architectures or ()
    for architecture in named:
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)(config)
    if named:
        raise UsageError(f"transformers has no {' or '.join(named)}, which the configuration of {name} names.")
    heads = _TEXT_HEADS if getattr(config, "is_encoder_decoder", False) else _TEXT_HEADS[1:]
    for head in (*heads, *_IMAGE_HEADS):
        maker = getattr(transformers, head)
        if type(config) in maker._model_mapping:
            return maker.from_config(config)
    raise UsageError(
        f"castwise knows no head for transformers:{name} that has a loss of its own. Name one under 'architectures' in "
        "the configuration, or write a function that returns the model and a batch: castwise init FILE."
    )


def _is_one_of(transformers: Any, model: Any, heads: tuple[str, ...]) -> bool:
    mappings = (getattr(transformers, head)._model_mapping for head in heads)
    return any(type(model.config) in mapping and isinstance(model, mapping[type(model.config)]) for mapping in mappings)


def _tokens(config: Any, num_tokens: int, of_classes: bool, batch_size: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(config.vocab_size, (batch_size, num_tokens))
    labels = torch.randint(config.num_labels, (batch_size,)) if of_classes else tokens.clone()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _images(config: Any, batch_size: int) -> dict[str, torch.Tensor]:
    side, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    images = torch.rand(batch_size, channels, height, width) * 2 - 1
    return {"pixel_values": images, "labels": torch.randint(config.num_labels, (batch_size,))}
