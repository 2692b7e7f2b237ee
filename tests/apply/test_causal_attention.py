"""Causal attention of transformers' models under torch.compile, with and without a matrix for its mask."""

from typing import Any

import pytest
import torch
from torch import nn

from castwise.apply.techniques.causal_attention import use_causal_attention
from castwise.errors import TechniqueError

transformers: Any = pytest.importorskip("transformers")
_TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def model_of(kind: str, **options: object) -> Any:
    config = transformers.AutoConfig.for_model(kind, **options)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def gpt2() -> Any:
    return model_of("gpt2", n_layer=1, n_embd=32, n_head=2, vocab_size=64, use_cache=False)


def masks_of(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
    """Return the logits under torch.compile, and of each call of attention whether it was given a mask."""
    found: list[bool] = []

    def backend(graph: Any, _: object) -> Any:
        nodes = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        found.extend(node.kwargs["attn_mask"] is not None for node in nodes)
        return graph

    logits = torch.compile(lambda x: model(input_ids=x).logits, backend=backend)(tokens)
    return logits, found


@pytest.mark.parametrize("make", [gpt2, lambda: model_of("llama", **_TINY, num_key_value_heads=1, use_cache=False)])
@pytest.mark.slow
def test_attention_has_no_mask_and_computes_the_same(make: Any) -> None:
    model, tokens = make(), torch.randint(64, (2, 16))
    expected = model(input_ids=tokens).logits
    assert masks_of(model, tokens)[1] == [True]
    torch.compiler.reset()
    use_causal_attention(model)
    logits, masks = masks_of(model, tokens)
    assert masks == [False]
    torch.testing.assert_close(logits, expected)


def test_a_batch_with_a_mask_is_refused() -> None:
    model = gpt2()
    use_causal_attention(model)
    tokens = torch.randint(64, (2, 16))
    with pytest.raises(TechniqueError, match="batches without attention_mask"):
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    compiled = torch.compile(lambda x: model(input_ids=x, position_ids=x).logits, backend="eager")
    with pytest.raises(TechniqueError, match="batches without position_ids"):
        compiled(tokens)


@pytest.mark.parametrize("kind", ["bert", "qwen2", "mistral", "gpt2"])
def test_attention_that_is_not_merely_causal_is_refused(kind: str) -> None:
    if kind == "bert":
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model("bert", **_TINY))
    elif kind == "qwen2":
        window: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 0}
        model = model_of("qwen2", **_TINY, **window, num_key_value_heads=1)
    elif kind == "mistral":
        model = model_of("mistral", **_TINY, sliding_window=8, num_key_value_heads=1)
    else:
        model = gpt2()
        model.set_attn_implementation("eager")
    with pytest.raises(TechniqueError, match="not merely causal, or not by sdpa"):
        use_causal_attention(model)


def test_other_models_are_refused() -> None:
    with pytest.raises(TechniqueError, match="no model of transformers"):
        use_causal_attention(nn.Sequential(nn.Linear(2, 2)))
