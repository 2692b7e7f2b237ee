import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from castwise.errors import UsageError
from castwise.spec.user_model import UserModel, locate
from castwise.trial.user_model.transformers import build

transformers = pytest.importorskip("transformers")

SMALL_BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 99,
    "max_position_embeddings": 24,
}
SMALL_GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 99, "n_positions": 20}
SMALL_T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 99}
SMALL_T5 |= {"is_encoder_decoder": True}
SMALL_VIT = {
    "model_type": "vit",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
}


def made(tmp_path: Path, config: dict[str, Any]) -> dict[str, Any]:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    return build(locate(f"transformers:{file}"))


@pytest.mark.parametrize(
    ("config", "name", "tokens"),
    [
        (SMALL_BERT, "BertForMaskedLM", 24),
        (SMALL_GPT2, "GPT2LMHeadModel", 20),
        (SMALL_T5, "T5ForConditionalGeneration", 512),
        (SMALL_BERT | {"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification", 24),
    ],
)
def test_text_model(config: dict[str, Any], name: str, tokens: int, tmp_path: Path) -> None:
    parts = made(tmp_path, config)
    assert type(parts["model"]).__name__ == name
    assert (parts["unit"], parts["units_per_sample"]) == ("tokens", tokens)
    batch = parts["batch"](3)
    assert batch["input_ids"].shape == (3, tokens)
    assert 0 <= int(batch["input_ids"].min()) <= int(batch["input_ids"].max()) < 99
    loss = parts["model"](**batch).loss
    assert torch.isfinite(loss)
    loss.backward()


def test_image_model(tmp_path: Path) -> None:
    parts = made(tmp_path, SMALL_VIT)
    assert type(parts["model"]).__name__ == "ViTForImageClassification"
    assert parts["unit"] == "images"
    batch = parts["batch"](3)
    assert batch["pixel_values"].shape == (3, 3, 16, 16)
    assert torch.isfinite(parts["model"](**batch).loss)


TINY_BERT = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
KERNEL = {"_attn_implementation": "org/kernel"}  # of the hub: transformers would download it, and run its code


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SMALL_BERT | {"architectures": ["BertModel"]}, "knows no inputs for BertModel"),
        (SMALL_BERT | {"architectures": ["NoSuchHead"]}, "transformers has no NoSuchHead"),
        ({"hidden_size": 3}, "has no model_type"),
        (TINY_BERT | {"model_type": "wav2vec2", "hidden_size": 16, "num_attention_heads": 2}, "castwise knows no"),
        (TINY_BERT | KERNEL, "castwise downloads nothing"),
        (TINY_BERT | {"text_config": KERNEL}, "castwise downloads nothing"),
    ],
)
def test_a_configuration_that_cannot_be_trained_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        made(tmp_path, config)


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UsageError, match=r"No model type of transformers named 'brt'. Did you mean .*bert"):
        build(UserModel(kind="transformers", path="", name="brt"))
    assert constants.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == "1"
