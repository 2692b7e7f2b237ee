"""The frameworks around PyTorch with a setting for the precision: what that is called, and which scripts use them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """What one writes in it, with `{}` for arguments; an empty text if it has no such argument."""

    modules: tuple[str, ...]  # those that take a script's steps: one of them, or all whose names begin so, with a dot
    call: str
    names: str  # the field of `Frameworks` in a precision's row
    precision: str = "{}"
    on_cpu: str | None = ""  # None if it has no autocast there
    clipping: str = ""
    accumulation: str = ""
    takes_techniques: bool = False


# In the order in which they are looked for and shown. Frameworks use a GPU by default, so a CPU has to be named:
# TrainingArguments refuse bf16 there otherwise. Source, besides that of the names: fastai 2.8 (callback.fp16), Keras
# 3.15 (config.set_dtype_policy), ignite
# 0.5 (create_supervised_trainer, whose autocast is "cuda"; a loop in `Engine` has autocast of its own), MONAI 1.6
# (SupervisedTrainer, likewise), open_clip 3.3 (open_clip_train.params), DeepSpeed 0.18 (docs/_pages/config-json.md).
FRAMEWORKS = {
    "Lightning": Framework(
        modules=("lightning.pytorch.", "pytorch_lightning."),
        call="Trainer({})",
        names="lightning",
        precision='precision="{}"',
        on_cpu='accelerator="cpu"',
        clipping="gradient_clip_val={:g}",
        accumulation="accumulate_grad_batches={}",
        takes_techniques=True,
    ),
    "Accelerate": Framework(
        modules=("accelerate.",),
        call="accelerator = Accelerator({})",
        names="accelerate",
        precision='mixed_precision="{}"',
        on_cpu="cpu=True",
        accumulation="gradient_accumulation_steps={}",
        takes_techniques=True,
    ),
    # Without max_grad_norm transformers clips to 1: whoever does not clip has said so already.
    "transformers": Framework(
        modules=("transformers.",),
        call="TrainingArguments({})",
        names="transformers",
        on_cpu="use_cpu=True",
        clipping="max_grad_norm={:g}",
        accumulation="gradient_accumulation_steps={}",
        takes_techniques=True,
    ),
    "Fabric": Framework(
        modules=("lightning.fabric.", "lightning_fabric."),
        call="Fabric({})",
        names="lightning",
        precision='precision="{}"',
        on_cpu='accelerator="cpu"',
    ),
    "fastai": Framework(modules=("fastai.",), call="learn.{}()", names="fastai"),
    "Keras": Framework(("keras.",), 'keras.config.set_dtype_policy("{}")', names="keras"),
    "MONAI": Framework(("monai.engines.",), "SupervisedTrainer(..., {})", names="monai", on_cpu=None),
    "ignite": Framework(("ignite.engine",), "create_supervised_trainer(..., {})", names="ignite", on_cpu=None),
    "open_clip": Framework(("open_clip_train.",), "--precision {}", names="open_clip"),
    "DeepSpeed": Framework(("deepspeed.",), "in DeepSpeed's configuration: {}", names="deepspeed"),
}
ANY_LOOP = ("Lightning", "Accelerate", "transformers")  # those that are named for a loop without a framework


def framework_of(modules: list[str]) -> str:
    """Return the framework of the first of some modules that is of one; empty if none is."""
    for module in modules:
        for name, framework in FRAMEWORKS.items():
            if any(module.startswith(own) if own.endswith(".") else module == own for own in framework.modules):
                return name
    return ""
