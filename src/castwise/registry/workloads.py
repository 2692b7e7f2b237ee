"""The workloads castwise knows by name: one row each, data only; `trial/models/` builds them.

Sources are the public benchmarks whose workloads these are; docs/workloads.md describes each.
"""

import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from castwise.errors import UsageError, unknown_name
from castwise.spec.types import SYNTHETIC, Family, Unit
from castwise.spec.user_model import is_user_model, shown_name


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of `torch.optim` by class name, with its arguments."""

    name: str
    arguments: tuple[tuple[str, float | bool | tuple[float, float]], ...]
    group_rates: tuple[float, ...] = ()  # learning rates of the task's layer groups, in their order; empty: the same


@dataclass(frozen=True)
class Workload:
    """A model with its data, loss and optimizer."""

    name: str
    family: Family  # the module of `trial/models/` that builds it
    unit: Unit
    batch_size: int  # of a step on a GPU, unless the user says otherwise; the source's own
    cpu_batch_size: int  # small enough for steps of about a second
    input_shape: tuple[int, ...]  # one sample's, channels first; empty for token sequences
    optimizer: OptimizerSpec  # the source's; docs/workloads.md says where the learning rate is another
    resident_batches: int  # synthetic batches that lie on the device and are used in turn
    source: str
    summary: str
    num_parameters: int | None = None  # if the source states them; tested
    macs_per_sample: int | None = None  # multiply-accumulates of one forward pass, if the source states them
    clip_grad_norm: float | None = None
    data_sets: tuple[str, ...] = ()  # real ones that it can be run on
    options: tuple[tuple[str, str | int | float], ...] = ()  # arguments for the family's builder
    longest: int | None = None  # sequence that the model has positions for, in tokens; None if it has no choice

    @property
    def pretrained(self) -> str | None:
        """Return the torchvision model whose pretrained weights its source starts from, None where it has none."""
        return str(dict(self.options)["model"]) if self.family == "fastai_resnet" else None


_ADAM = OptimizerSpec("Adam", (("lr", 2e-4), ("betas", (0.9, 0.999)), ("eps", 1e-8), ("weight_decay", 1e-5)))
# The sources train at lr 0.1, which diverges on random labels from the first step: wrn-cifar10 reaches it after 650
# steps of warm-up, dpn-cifar10 has real labels. A learning rate costs no time; suites use the published schedules.
_SGD_CIFAR = OptimizerSpec("SGD", (("lr", 0.01), ("momentum", 0.9), ("weight_decay", 5e-4)))
_SGD_LM = OptimizerSpec("SGD", (("lr", 20.0),))
# fastai's Adam with decoupled weight decay; its one cycle moves the first beta.
_ADAMW_FASTAI = OptimizerSpec("AdamW", (("lr", 3e-3), ("betas", (0.9, 0.99)), ("weight_decay", 1e-2)))

# nanoGPT's, which most GPTs are trained with; BERT's and ViT's are their papers', at rates that random labels bear.
_ADAMW_GPT = OptimizerSpec("AdamW", (("lr", 3e-4), ("betas", (0.9, 0.95)), ("weight_decay", 0.1)))
_ADAMW_BERT = OptimizerSpec("AdamW", (("lr", 1e-4), ("weight_decay", 0.01)))
_ADAMW_VIT = OptimizerSpec("AdamW", (("lr", 3e-4), ("weight_decay", 0.3)))

_AMP_RECIPE = "pytorch/tutorials, AMP recipe; leolui2004/tensorcore sample_0.py, sample_1.py"
_TENSORCORE = "leolui2004/tensorcore mnist_0_512.py, mnist_1_512.py"
_WRN = "ceshine/apex_pytorch_cifar_experiment, colab_snapshots"
_CIFAR_FAST = "davidcpage/cifar10-fast dawn.py"
_DPN = "kuangliu/pytorch-cifar models/dpn.py, as run on a Titan RTX with apex FP16_Optimizer"
_AMD_NVIDIA = "jorism1993/nvidia_amd_gpu_comparison"
_FASTAI = "init27/RTX-2080Ti-Vs-GTX-1080Ti-CIFAR-100-Benchmarks; fastai 1.0.41 create_cnn"
_GPT2 = "Radford et al. 2019; openai/gpt-2; optimizer of karpathy/nanoGPT"
_WORD_LM = "pytorch/examples word_language_model; NVIDIA/apex examples/word_language_model"


def _imagenet(name: str, batch_size: int, cpu_batch_size: int, side: int = 224, source: str = _AMD_NVIDIA) -> Workload:
    return Workload(
        name=name,
        family="torchvision",
        unit="images",
        batch_size=batch_size,
        cpu_batch_size=cpu_batch_size,
        input_shape=(3, side, side),
        optimizer=_ADAM,
        resident_batches=2,
        source=source,
        summary=f"torchvision {name}, random weights, 1000 classes, {side}² synthetic images, Adam",
        options=(("model", name),),
    )


def _language_model(name: str, kind: str, *, width: int = 200, batch_size: int = 20, dropout: float = 0.2) -> Workload:
    return Workload(
        name=name,
        family="rnn_lm",
        unit="tokens",
        batch_size=batch_size,
        cpu_batch_size=batch_size,
        input_shape=(),
        optimizer=_SGD_LM,
        resident_batches=32,
        source=_WORD_LM,
        summary=f"2-layer {kind} language model, {width} wide, 35 tokens a sample, vocabulary 33,278, SGD",
        num_parameters=13_987_678 if name == "lstm-lm" else None,
        clip_grad_norm=0.25,
        data_sets=("wikitext-2",),
        options=(("kind", kind), ("width", width), ("dropout", dropout)),
    )


def _transformer(  # noqa: PLR0913  a row's fields, by keyword
    name: str,
    kind: str,
    summary: str,
    *,
    source: str,
    batch_size: int,
    optimizer: OptimizerSpec = _ADAMW_GPT,
    num_parameters: int | None = None,
    longest: int | None = None,
    **shape: int,
) -> Workload:
    """Return a row of a model with these sizes, which are arguments of `trial.models.transformer.Architecture`."""
    return Workload(
        name=name,
        family="transformer",
        unit="images" if kind == "vit" else "tokens",
        batch_size=batch_size,
        cpu_batch_size=4 if kind == "vit" else 1,
        input_shape=(3, 224, 224) if kind == "vit" else (),
        optimizer=optimizer,
        resident_batches=4,
        source=source,
        summary=summary,
        num_parameters=num_parameters,
        clip_grad_norm=1.0,
        data_sets=() if kind == "vit" else ("wikitext-2",),
        options=(("kind", kind), *shape.items()),
        longest=None if kind == "vit" else longest or shape["length"],
    )


_WIDE_GPT = re.compile(r"gpt-d([1-9]\d{2,4})(?:x([1-9]\d?))?")  # gpt-d2048, gpt-d2048x12
_HEAD_SIZE, _WIDE_DEPTH = 128, 4


def _wide_gpt(width: int, depth: int, others: str = "") -> Workload:
    """Return a GPT of a width; without a depth in its name it has 4 layers."""
    return _transformer(
        f"gpt-d{width}" + (f"x{depth}" if depth != _WIDE_DEPTH else ""),
        "gpt2",
        f"{depth} layers of a GPT {width} wide, 1,024 tokens a sample, AdamW{others}",
        source="the shape of larger models' layers (4096: 7B parameters), with GPT-2's vocabulary",
        batch_size=max(1, min(32, 8 * 4096 // width)),
        width=width,
        depth=depth,
        heads=width // _HEAD_SIZE,
        length=1024,
        vocabulary=50_257,
    )


def _fastai_resnet(depth: int, batch_size: int, cpu_batch_size: int) -> Workload:
    return Workload(
        name=f"fastai-resnet{depth}",
        family="fastai_resnet",
        unit="images",
        batch_size=batch_size,
        cpu_batch_size=cpu_batch_size,
        input_shape=(3, 224, 224),
        optimizer=_ADAMW_FASTAI,
        resident_batches=2,
        source=_FASTAI,
        summary=f"ResNet-{depth}, frozen but for its batch norm, under fastai's head, 100 classes, 224² images, AdamW",
        data_sets=("cifar100",),
        options=(("model", f"resnet{depth}"),),
    )


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        name="mlp-4096",
        family="mlp",
        unit="samples",
        batch_size=512,
        cpu_batch_size=64,
        input_shape=(4096,),
        optimizer=OptimizerSpec("SGD", (("lr", 0.001),)),
        resident_batches=50,
        source=_AMP_RECIPE,
        summary="3 linear layers of 4096, mean squared error, SGD: the model of PyTorch's AMP recipe",
        num_parameters=50_343_936,
        macs_per_sample=50_331_648,
    ),
    Workload(
        name="mnist-cnn",
        family="mnist_cnn",
        unit="images",
        batch_size=512,
        cpu_batch_size=512,
        input_shape=(1, 28, 28),
        optimizer=OptimizerSpec("Adadelta", (("lr", 0.001),)),
        resident_batches=32,
        source=_TENSORCORE,
        summary="2 convolutions and 2 linear layers on 28² digits, Adadelta",
        num_parameters=1_199_882,
        macs_per_sample=11_992_448,
        data_sets=("mnist",),
    ),
    Workload(
        name="wrn-28-10",
        family="wide_resnet",
        unit="images",
        batch_size=128,
        cpu_batch_size=4,
        input_shape=(3, 32, 32),
        optimizer=_SGD_CIFAR,
        resident_batches=16,
        source=_WRN,
        summary="Wide ResNet 28-10 with dropout on 32² images, 10 classes, SGD with momentum",
        num_parameters=36_489_290,
        macs_per_sample=5_951_117_568,
        clip_grad_norm=10.0,
        data_sets=("cifar10",),
        options=(("depth", 28), ("widen", 10), ("dropout", 0.3)),
    ),
    Workload(
        name="resnet9",
        family="resnet9",
        unit="images",
        batch_size=512,
        cpu_batch_size=32,
        input_shape=(3, 32, 32),
        optimizer=_SGD_CIFAR,
        resident_batches=16,
        source=_CIFAR_FAST,
        summary="ResNet-9 on 32² images, 10 classes, SGD with momentum: made to be trained fast",
        data_sets=("cifar10",),
    ),
    Workload(
        name="dpn92",
        family="dpn",
        unit="images",
        batch_size=128,
        cpu_batch_size=4,
        input_shape=(3, 32, 32),
        optimizer=_SGD_CIFAR,
        resident_batches=16,
        source=_DPN,
        summary="Dual path network 92 (grouped convolutions) on 32² images, 10 classes, SGD with momentum",
        num_parameters=34_236_634,
        macs_per_sample=2_042_422_272,
        data_sets=("cifar10",),
    ),
    _imagenet("resnet18", 256, 16, source="torchvision; CIFAR-100 at 224² in init27's benchmark"),
    _imagenet("resnet34", 256, 8, source="torchvision; CIFAR-100 at 224² in init27's benchmark"),
    _imagenet("resnet50", 256, 8),
    _imagenet("resnet101", 128, 4),
    _imagenet("resnet152", 128, 4, source="torchvision; CIFAR-100 at 224² in init27's benchmark"),
    _imagenet("inception_v3", 128, 4, side=299),
    _imagenet("efficientnet_b0", 128, 8),
    _imagenet("efficientnet_b4", 64, 4),
    _imagenet("efficientnet_b7", 32, 2),
    # The source's batches of float32 on 11 GB.
    _fastai_resnet(18, 408, 16),
    _fastai_resnet(34, 248, 8),
    _fastai_resnet(50, 98, 8),
    _fastai_resnet(101, 64, 4),
    _fastai_resnet(152, 48, 4),
    _language_model("lstm-lm", "LSTM"),
    _language_model("gru-lm", "GRU"),
    _language_model("rnn-lm", "RNN_TANH"),
    _language_model("lstm-lm-1500", "LSTM", width=1500, batch_size=80, dropout=0.65),
    _transformer(
        "gpt2",
        "gpt2",
        "GPT-2 of 124M parameters, 1,024 tokens a sample, vocabulary 50,257, AdamW",
        source=_GPT2,
        batch_size=16,
        num_parameters=124_439_808,
        width=768,
        depth=12,
        heads=12,
        length=1024,
        vocabulary=50_257,
    ),
    _transformer(
        "gpt2-xl",
        "gpt2",
        "GPT-2 of 1.5B parameters: 48 layers, 1600 wide, 1,024 tokens a sample, AdamW",
        source=_GPT2,
        batch_size=4,
        num_parameters=1_557_611_200,
        width=1600,
        depth=48,
        heads=25,
        length=1024,
        vocabulary=50_257,
    ),
    _wide_gpt(4096, 4, "; others as gpt-d2048x12: 12 layers 2048 wide"),
    _transformer(
        "llama-1b",
        "llama",
        "Llama 3.2 of 1.2B parameters (RMSNorm, SwiGLU, rotary, grouped-query attention), 2,048 tokens a sample, AdamW",
        source="meta-llama/Llama-3.2-1B",
        batch_size=4,
        num_parameters=1_235_814_400,
        longest=8_192,
        width=2048,
        depth=16,
        heads=32,
        key_heads=8,
        hidden=8192,
        length=2048,
        vocabulary=128_256,
    ),
    _transformer(
        "bert-base",
        "bert",
        "BERT-base with its masked language model, 512 tokens a sample, vocabulary 30,522, AdamW",
        source="Devlin et al. 2018; google-research/bert (uncased); BertForMaskedLM of transformers",
        batch_size=64,
        optimizer=_ADAMW_BERT,
        num_parameters=109_514_298,
        width=768,
        depth=12,
        heads=12,
        length=512,
        vocabulary=30_522,
    ),
    _transformer(
        "vit-b16",
        "vit",
        "ViT-B/16 on 224² images, 1000 classes, AdamW",
        source="Dosovitskiy et al. 2021; torchvision vit_b_16",
        batch_size=256,
        optimizer=_ADAMW_VIT,
        num_parameters=86_567_656,
        width=768,
        depth=12,
        heads=12,
        length=197,
    ),
)

# Model zoos by prefix: any image classifier of theirs, with the optimizer and loss of the ResNets.
_ZOOS: dict[str, Family] = {"torchvision:": "torchvision", "timm:": "timm"}


def find_workload(name: str) -> Workload:
    """Return the row with this name, or one made for a model of a zoo (`torchvision:NAME`) or of the user's own.

    Whether there is such a model is known only where torch is, in the trial's process.

    Raises:
        UsageError: No row has the name; the message offers the nearest.
    """
    found = known_workload(name)
    if found is not None:
        return found
    if os.path.exists(name):
        what = "a folder" if os.path.isdir(name) else "no Python file"
        raise UsageError(
            f"'{name}' is {what}. Name a Python file, train_me.py, or one with a function, train_me.py:build."
        )
    hint = (
        "`castwise list workloads` shows them; any other image model is torchvision:NAME or timm:NAME, "
        "and a model of your own FILE.py:FUNCTION."
    )
    raise unknown_name("workload", name, (row.name for row in WORKLOADS), hint)


@lru_cache(maxsize=1024)  # a report asks for every configuration, many times
def known_workload(name: str) -> Workload | None:
    """Return what `find_workload` does, and None for a name that no row has: a record may come from elsewhere."""
    wanted = name.strip()
    for prefix, family in _ZOOS.items():
        if wanted.lower().startswith(prefix):
            model = wanted[len(prefix) :]
            if not model:
                raise UsageError(f"'{prefix}' needs a model's name behind the colon, for example {prefix}resnet18.")
            # Inception's stem needs more than the others. Source: torchvision.models.Inception_V3_Weights
            # (crop_size=299). Of timm's models the builder knows the side.
            side = 299 if model.lower() == "inception_v3" else 224
            row = _imagenet(model, 64, 4, side, source=prefix.removesuffix(":"))
            name = f"{prefix}{model}"
            return replace(row, name=name, family=family, summary=f"{name}, random weights, Adam")
    name, mark, length = wanted.lower().partition("@")
    found = next((row for row in WORKLOADS if row.name == name), None)
    shape = _WIDE_GPT.fullmatch(name)
    if found is None and shape and not int(shape[1]) % _HEAD_SIZE:
        found = _wide_gpt(int(shape[1]), int(shape[2] or _WIDE_DEPTH))
    if found is not None:
        return found if not mark else at_length(found, int(length)) if length.isdecimal() else None
    return _own_model(shown_name(wanted)) if is_user_model(wanted) else None


def at_length(row: Workload, length: int) -> Workload:
    """Return a transformer on sequences of another length, as many tokens a batch; its name is `gpt2@512`.

    Raises:
        UsageError: It is no transformer, or has no positions for so many tokens.
    """
    options = dict(row.options)
    if row.longest is None:
        names = ", ".join(known.name for known in WORKLOADS if known.longest is not None)
        raise UsageError(f"{row.name} has no choice of sequence length. {names} have.")
    if not 1 <= length <= row.longest:
        raise UsageError(f"{row.name} takes sequences of 1 to {row.longest:,} tokens, not {length:,}.")
    usual = int(options["length"])
    if length == usual:
        return row
    return replace(
        row,
        name=f"{row.name}@{length}",
        batch_size=max(1, row.batch_size * usual // length),
        options=(*(options | {"length": length, "positions": row.longest}).items(),),
        summary=f"{row.summary}, at {length:,} tokens",
    )


def check_data_set(workload: Workload, data_set: str) -> None:
    """Raise UsageError if a workload does not take a data set."""
    takes = (SYNTHETIC, *workload.data_sets)
    if data_set not in takes:
        raise UsageError(f"{workload.name} does not take the data set '{data_set}'. It takes: {', '.join(takes)}.")


def unit_of(name: str) -> Unit:
    """Return what a workload's throughput counts; samples, if the workload is not known here."""
    try:
        row = known_workload(name)
    except UsageError:  # a record from elsewhere may name anything
        row = None
    return row.unit if row is not None else "samples"


def _own_model(name: str) -> Workload:
    return Workload(
        name=name,
        family="own",
        unit="samples",
        # If the user's code does not say: few, since their size is unknown.
        batch_size=32,
        cpu_batch_size=8,
        input_shape=(),
        optimizer=OptimizerSpec("AdamW", (("lr", 1e-4),)),
        resident_batches=4,
        source="the user",
        summary=name,
    )
