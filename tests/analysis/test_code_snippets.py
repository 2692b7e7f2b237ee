"""What is to be pasted does what was measured; the frameworks take the words they are given."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import fake_environment, fake_facts, fake_spec, fake_trial
from small_step import make_batch, make_net, trained_weights
from torch import Tensor, nn

from castwise.analysis.code_snippets import (
    framework_lines,
    framework_snippets,
    loop_code,
    loop_patch,
    script_code,
    written_in_words,
)
from castwise.analysis.decide import decide
from castwise.analysis.result_table import rows_of_steps
from castwise.apply.precision import numeric_state
from castwise.records.schema import Facts, LostUpdates, Trial
from castwise.registry.frameworks import framework_of
from castwise.registry.precisions import NARROW_PRECISIONS, PRECISIONS, Precision, find_precision, precision_row
from castwise.spec.user_model import UserModel

LR, NORM = 0.125, 0.0625
ON_CPU, ON_GPU = fake_spec(device="cpu"), fake_spec()
# Those that are more than switches.
on_cpu = [row for row in PRECISIONS if row.on_cpu and row.name not in ("default", "fp32")]
each_precision = pytest.mark.parametrize("row", on_cpu, ids=lambda row: row.name)


def facts(clip: float | None = None, accumulate: int = 1) -> Facts:
    return Facts(
        num_parameters=1,
        units_per_sample=1,
        param_dtypes={},
        optimizer="",
        fp32_precision={},
        clip_grad_norm=clip,
        accumulate=accumulate,
    )


def parts(count: int) -> tuple[Any, ...]:
    images, labels = make_batch()
    return tuple(zip(images.chunk(count), labels.chunk(count), strict=True))


def pasted(row: Precision, clip: float | None, accumulate: int) -> list[Tensor]:
    """Return the weights after the lines to paste were run as two steps of a loop written by hand."""
    net = make_net()
    net.train()
    images, labels = make_batch()
    names: dict[str, Any] = {
        "torch": torch,
        "model": net,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=LR),
    }
    lines = loop_code(row, ON_CPU, facts(clip, accumulate))
    start = next(index for index, line in enumerate(lines) if line.startswith("with applied.autocast"))
    stop = next(index for index, line in enumerate(lines) if line.startswith("applied.step"))
    exec("\n".join(lines[:start]), names)
    for _ in range(2):
        for x, y in parts(accumulate) if accumulate > 1 else [(images, labels)]:
            exec("\n".join(lines[start:stop]), names | {"x": x, "y": y})
        exec(lines[stop], names)
    return [parameter.detach().float() for parameter in net.parameters()]


@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (NORM, 1), (None, 2), (NORM, 4)])
@each_precision
def test_lines_to_paste_give_the_measured_weights(row: Precision, clip: float | None, accumulate: int) -> None:
    with numeric_state(row):
        batch = parts(accumulate) if accumulate > 1 else make_batch()
        ours = trained_weights(row, [batch] * 2, clip=clip, accumulate=accumulate)
        theirs = pasted(row, clip, accumulate)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(other, own, rtol=1e-3, atol=1e-4)


ALL = ("channels-last", "cudnn-search", "fused-optimizer", "compile")
ONES_OWN = ("cuda-graph", "max-pool-kernel")  # that need a loop of their own


@pytest.mark.parametrize("row", PRECISIONS, ids=lambda row: row.name)
def test_a_patch_is_short_says_what_each_change_bought_and_never_switches_clipping_off(row: Precision) -> None:
    techniques = (*ALL, "no-step-sync", *ONES_OWN)
    gains = {name: f"{name}: 1.10×" for name in (row.name, *techniques)}
    for known in (None, facts(), facts(1.0, 4)):
        text = loop_patch(row, fake_spec(techniques=techniques), known, gains)
        ast.parse(text)
        lines = text.splitlines()
        assert len(lines) <= 15
        assert f"# {', '.join(gains.values())}" in lines
        applied = "channels-last+cudnn-search+fused-optimizer+no-step-sync+compile"
        assert f'precision="{row.name}", techniques="{applied}")' in text
        assert "# castwise tune resnet50 --emit train.py writes this loop, with max-pool-kernel, cuda-graph" in lines
        assert "max_grad_norm=0" not in text
        assert (known is None or known.clip_grad_norm is None) is ("applied.step(clip_grad_norm=1)" not in text)


def test_a_precision_of_few_lines_comes_with_them() -> None:
    assert loop_code(find_precision("tf32"), ON_GPU) == find_precision("tf32").code.splitlines()
    assert loop_code(find_precision("fp32"), ON_CPU) == [], "there is no TF32"
    lines = loop_code(find_precision("bf16-mixed"), ON_CPU)
    plain = lines[lines.index("# or, without castwise:") + 1 :]
    assert plain[0] == 'with torch.autocast(device_type="cpu", dtype=torch.bfloat16):'
    assert "# or, without castwise:" not in loop_code(find_precision("bf16-mixed"), ON_CPU, facts(1.0))


@pytest.mark.parametrize("row", NARROW_PRECISIONS, ids=lambda row: row.name)
def test_a_loop_in_fp8_is_compiled(row: Precision) -> None:
    assert ('techniques="compile")' in loop_code(row, ON_GPU)[1]) is bool(row.float8_recipe)


OWN = """\
import torch
from torch.utils.data import DataLoader
batches = DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""


@pytest.mark.parametrize("is_recorded", [False, True])
def test_arguments_are_added_to_the_user_s_own_calls(is_recorded: bool, tmp_path: Path) -> None:
    """A new call would lose their arguments, such as momentum."""
    file = tmp_path / "train.py"
    file.write_text(OWN)
    path = file.name if is_recorded else str(file)
    model = UserModel(kind="script", path=path, name="")
    spec = fake_spec("as-written", user_model=model, techniques=("pinned-transfer", "fused-optimizer"))
    known = facts().model_copy(update={"optimizer": "SGD(lr=0.1, momentum=0.9)"})
    text = loop_patch(precision_row("as-written"), spec, known, {})
    ast.parse(text)
    assert "SGD(" not in text
    assert "DataLoader(" not in text
    for argument, called, line in (("fused=True", "SGD", 4), ("pin_memory=True", "DataLoader", 3)):
        at = "" if is_recorded else f" at train.py:{line}"
        assert f"# add {argument} to your call of {called}{at}" in text


def code_of(precision: str, framework: str, known: Facts | None = None, device_type: str = "cuda") -> str:
    snippets = framework_snippets(find_precision(precision), device_type, known)
    return next(snippet.code for snippet in snippets if snippet.framework == framework)


def written(framework: str = "", device: str = "cuda:0", conv: str = "tf32", **own: tuple[str, ...]) -> Trial:
    """Return a script as it is written, with PyTorch's defaults but for what is said."""
    switches = {"cuda.matmul": "none", "cudnn.conv": conv}
    own_precision = {name.replace("_", " ", 1).replace("_", "-"): lines for name, lines in own.items()}
    known = fake_facts(framework=framework, own_precision=own_precision, fp32_precision=switches)
    model = UserModel(kind="script", path="train.py", name="")
    environment = fake_environment(None) if device == "cpu" else None
    spec = fake_spec("as-written", device=device, user_model=model)
    return fake_trial(spec, facts=known, environment=environment)


def taking(trial: Trial, precision: str, **changes: object) -> Trial:
    """Return the script in another precision, or with other changes."""
    row = find_precision(precision)
    update = {"precision": precision, "loss_scale": row.loss_scale, **changes}
    return trial.model_copy(update={"spec": trial.spec.model_copy(update=update)})


OWN_BF16: dict[str, Any] = {"autocast_bfloat16": ("train.py:25",)}
OWN_FP16: dict[str, Any] = {"autocast_float16": ("train.py:25", "train.py:40"), "GradScaler": ("train.py:9",)}
LOW: dict[str, Any] = {"weights_bfloat16": ("train.py:7",)}
MATMUL, CONV = "torch.backends.cuda.matmul.allow_tf32 = True", "torch.backends.cudnn.allow_tf32 = False"


@pytest.mark.parametrize(
    ("trial", "precision", "expected"),
    [
        (written(device="cpu", **OWN_BF16), "fp32", ["# remove the autocast at train.py:25"]),
        (written(**OWN_BF16), "fp32", ["# remove the autocast at train.py:25"]),
        (
            written(**OWN_FP16),
            "tf32",
            ["# remove the autocast at train.py:25 and train.py:40", "# remove the GradScaler at train.py:9"],
        ),
        (
            written(**OWN_FP16),
            "bf16-mixed",
            [
                "# the autocast at train.py:25 and train.py:40: dtype=torch.bfloat16",
                "# remove the GradScaler at train.py:9",
            ],
        ),
        (written(**OWN_BF16), "bf16-mixed", []),
        (written(device="cpu"), "fp32", []),
        (written(device="cpu"), "bf16-mixed", loop_code(find_precision("bf16-mixed"), ON_CPU)),
        (written(), "default", []),
        (written(), "tf32", [MATMUL]),
        (written(), "fp32", [CONV]),
        (written(conv="ieee"), "default", [CONV.replace("False", "True")]),
        (written("Lightning", **OWN_BF16), "fp32", ['Trainer(..., precision="32-true")  # Lightning']),
        (written("Accelerate"), "bf16-mixed", ['accelerator = Accelerator(..., mixed_precision="bf16")  # Accelerate']),
        (written("transformers"), "bf16-master", ["# transformers: no such precision"]),
        (written("transformers"), "as-written", []),
        # trl's arguments have it on by default.
        (written("transformers", **OWN_BF16), "default", ["TrainingArguments(..., bf16=False)  # transformers"]),
        (written("Fabric"), "bf16-mixed", ['Fabric(..., precision="bf16-mixed")  # Fabric']),
        (written("fastai"), "fp16-mixed", ["learn.to_fp16()  # fastai"]),
        (written("open_clip", device="cpu"), "bf16-mixed", ["--precision amp_bf16  # open_clip"]),
        (written("MONAI"), "fp16-mixed", ["SupervisedTrainer(..., amp=True)  # MONAI"]),
        (written("MONAI", device="cpu"), "fp16-mixed", ["# MONAI: no such precision"]),
        (written("ignite"), "bf16-mixed", ["# ignite: no such precision"]),
        (
            written("DeepSpeed"),
            "bf16-master",
            ['in DeepSpeed\'s configuration: "bf16": {"enabled": true}  # DeepSpeed'],
        ),
        (
            written("transformers", **LOW),
            "bf16-mixed",
            [
                "# weights in float32, by dtype=torch.float32 or model.float(): train.py:7",
                "TrainingArguments(..., bf16=True)  # transformers",
            ],
        ),
    ],
)
def test_a_script_is_told_what_differs_from_what_it_does_itself(
    trial: Trial, precision: str, expected: list[str]
) -> None:
    assert script_code(trial, taking(trial, precision)).splitlines() == expected


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        (written(), ""),
        (written(**OWN_BF16), "Your script already trains in bf16-mixed (autocast at train.py:25)."),
        (
            written("Fabric", **OWN_BF16),
            'Your script already trains in bf16-mixed (Fabric(precision="bf16-mixed")).',
        ),
        (
            written(**OWN_FP16),
            "Your script already trains in fp16-mixed (autocast at train.py:25 and train.py:40).",
        ),
        (written(autocast_float16=("train.py:25",)), ""),  # without loss scaling it is none of castwise's
        (
            written(**LOW | OWN_BF16),
            "Your script trains in pure bfloat16 (train.py:7): its weights have no float32 copy.",
        ),
        (
            written(weights_bfloat16=tuple(f"model.py:{line}" for line in range(9))),  # a library's, layer by layer
            "Your script trains in pure bfloat16 (model.py:0 and 8 more lines): its weights have no float32 copy.",
        ),
        (
            written(frozen_bfloat16=("train.py:7",), **OWN_BF16),
            "Your script already trains in bf16-mixed (autocast at train.py:25). Its frozen weights stay in bfloat16 "
            "in every precision.",
        ),
        (written(state_8_bit=("train.py:41",)), "Your script keeps Fake's state in 8 bits (train.py:41)."),
    ],
)
def test_what_a_script_trains_in_as_written_is_a_sentence(trial: Trial, expected: str) -> None:
    assert written_in_words(trial) == expected


def test_updates_that_weights_in_16_bits_lose_are_a_sentence() -> None:
    trial = written(**LOW)
    assert trial.facts is not None
    lost = LostUpdates(share=0.4, weight="norm.weight", weight_share=1.0, learning_rate=2e-5)
    update = {"lost_updates": lost, "optimizer": "AdamW(lr=2e-05)"}
    said = written_in_words(trial.model_copy(update={"facts": trial.facts.model_copy(update=update)}))
    seen = "A step of AdamW at a learning rate of 2e-05 leaves 40 % of them as they are, of norm.weight 100 %."
    assert said.endswith(seen)


def test_a_script_s_own_precision_is_not_undecided() -> None:
    trial = written(**OWN_BF16)
    (advice,) = decide(rows_of_steps([trial, taking(trial, "bf16-mixed")]))
    assert advice.decision == "stay"
    (advice,) = decide(rows_of_steps([trial, taking(trial, "fp16-mixed")]))
    assert advice.decision == "undecided"


def test_a_script_that_begins_to_scale_its_loss_leaves_autocast_to_castwise() -> None:
    trial = written(**OWN_BF16)
    lines = script_code(trial, taking(trial, "fp16-mixed")).splitlines()
    assert lines == ["# remove the autocast at train.py:25", *loop_code(find_precision("fp16-mixed"), ON_GPU)]


def test_techniques_of_a_script_come_without_a_precision() -> None:
    trial = written(**OWN_BF16)
    code = script_code(trial, taking(trial, "as-written", techniques=("fused-optimizer",)))
    assert "fused=True" in code
    assert "autocast" not in code


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["__main__", "lightning.pytorch.trainer.trainer", "lightning.fabric.wrappers"], "Lightning"),
        (["__main__", "lightning.fabric.wrappers"], "Fabric"),
        (["__main__", "ignite.engine.engine", "__main__", "torch.optim.optimizer"], ""),  # the step is the script's
        (["__main__", "ignite.engine.engine", "ignite.engine"], "ignite"),
        (["__main__", "transformers.trainer", "accelerate.optimizer"], "transformers"),
    ],
)
def test_the_framework_is_the_outermost_that_takes_the_steps(modules: list[str], expected: str) -> None:
    assert framework_of(modules) == expected


def test_framework_snippets_on_a_cpu() -> None:
    assert code_of("bf16-mixed", "Lightning", None, "cpu") == 'Trainer(accelerator="cpu", precision="bf16-mixed")'
    assert code_of("bf16-mixed", "Accelerate", None, "cpu").endswith('Accelerator(cpu=True, mixed_precision="bf16")')
    line = code_of("bf16-mixed", "transformers", None, "cpu")
    assert line == "TrainingArguments(use_cpu=True, bf16=True)"
    assert code_of("fp16-mixed", "Lightning", None, "cpu") == "", "Lightning would take bfloat16"
    arguments = pytest.importorskip("transformers").TrainingArguments
    assert eval(line, {"TrainingArguments": arguments}).bf16


def test_framework_snippets_clip_and_accumulate() -> None:
    known = facts(1.5, 4)
    assert code_of("bf16-mixed", "Lightning", known) == (
        'Trainer(precision="bf16-mixed", gradient_clip_val=1.5, accumulate_grad_batches=4)'
    )
    assert code_of("fp16-mixed", "Accelerate", known) == (
        'accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)  '
        "# after backward: accelerator.clip_grad_norm_(model.parameters(), 1.5)"
    )
    assert code_of("bf16-mixed", "transformers", known) == (
        "TrainingArguments(bf16=True, max_grad_norm=1.5, gradient_accumulation_steps=4)"
    )
    assert code_of("fp16-master", "Lightning", known) == ""


RUNS: list[tuple[str, str]] = [
    (row.name, framework)
    for row in PRECISIONS
    for framework in ("Lightning", "Accelerate", "transformers")
    if row.frameworks.lightning and not (row.name in ("tf32", "fp32") and framework == "transformers")  # needs a GPU
]


@pytest.mark.parametrize(("precision", "framework"), RUNS)
def test_framework_snippets_run(precision: str, framework: str, tmp_path: Any) -> None:
    names: dict[str, Any] = {"torch": torch, "model": nn.Linear(2, 2)}
    code = code_of(precision, framework, facts(1.0, 2 if framework != "Lightning" else 1))
    if framework == "Lightning":
        names["Trainer"] = _trainer(pytest.importorskip("lightning"))
    elif framework == "Accelerate":
        names["Accelerator"] = _accelerator(pytest.importorskip("accelerate"))
    else:
        pytest.importorskip("accelerate")
        names["TrainingArguments"] = _arguments(pytest.importorskip("transformers"), str(tmp_path))
    before = torch.get_float32_matmul_precision()
    try:
        exec(code, names)
    finally:
        torch.set_float32_matmul_precision(before)


def _trainer(lightning: Any) -> Callable[..., Any]:
    return lambda **words: lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **words
    )


def _accelerator(accelerate: Any) -> Callable[..., Any]:
    def make(**words: Any) -> Any:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return accelerate.Accelerator(cpu=True, **words)

    return make


def _arguments(transformers: Any, folder: str) -> Callable[..., Any]:
    return lambda **words: transformers.TrainingArguments(output_dir=folder, use_cpu=True, **words)


def lines_of(**seconds: float) -> list[str]:
    """Return the framework lines of the advice from two processes of each precision, by its step time."""
    trials = [
        fake_trial(fake_spec(name.replace("_", "-"), repeat=repeat), step_seconds=(each,))
        for repeat in (0, 1)
        for name, each in seconds.items()
    ]
    (advice,) = decide(rows_of_steps(trials))
    return framework_lines(advice.snippets)


def test_advice_to_take_a_precision_has_framework_snippets() -> None:
    assert lines_of(fp32=0.3, bf16_mixed=0.1) == [
        '# Lightning: Trainer(precision="bf16-mixed")',
        '# Accelerate: accelerator = Accelerator(mixed_precision="bf16")',
        "# transformers: TrainingArguments(bf16=True)",
    ]
    assert lines_of(default=0.3, fp32=0.4) == []
    assert lines_of(fp32=0.3) == []
    assert lines_of(fp32=0.3, fp16_master=0.1) == ["# Lightning, Accelerate, transformers: no such precision"]
