"""Names from closed lists, which specs, the registry and records share."""

from typing import Literal

TrialKind = Literal["steady", "training"]
Parallelism = Literal["none", "ddp", "dp", "fsdp"]
Numerics = Literal["bits", "rounding", "draws", "sums", "state", "shape"]  # what a technique changes at the most
Unit = Literal["images", "tokens", "samples"]
Family = Literal[
    "mlp",
    "mnist_cnn",
    "wide_resnet",
    "resnet9",
    "dpn",
    "torchvision",
    "timm",
    "rnn_lm",
    "transformer",
    "fastai_resnet",
    "own",
]
# Why a step is no faster (docs/why.md).
CauseName = Literal[
    "no-hardware",  # the device emulates the precision
    "baseline-tf32",  # what it is compared with uses Tensor Cores already
    "float64",  # products in float64
    "float32-units",  # products in float32 without Tensor Cores
    "grouped-convolutions",  # for which there are no Tensor Core kernels
    "no-tensor-cores",  # other products that could use them and do not
    "missing-kernel",  # one kernel that is a fallback takes most of the step
    "alignment",  # sizes that Tensor Core kernels cannot load at full speed
    "attention",  # that is slower than flash attention
    "recomputation",  # of forward in backward, for which there is memory
    "slower-kernel",  # the library's kernels are slower than in another precision
    "library-fault",  # a version of torch that is known to be slow there
    "layout",  # conversions between NCHW and NHWC
    "synchronisation",  # the host waits for the device within a step
    "settings",  # for debugging, which slow each step
    "launches",  # the device waits for the host to launch kernels
    "host-work",  # the device waits for other work of the host
    "input",  # the step waits for its batch
    "host-copies",  # between host and device, while no kernel runs
    "gradient-sync",  # gradients are reduced after each of several backward passes of an update
    "rank-imbalance",  # ranks wait for the slowest one
    "communication",  # ranks exchange what no other work hides
    "recompilation",  # torch.compile compiles in the midst of training
    "padding",  # of sequences to the longest one's length
    "casts",  # between float32 and 16 bits
    "indexing",  # gathers and scatters
    "optimizer",
    "memory",  # work whose time is that of the bytes that it moves
    "small-kernels",  # kernels that do not fill the device
    "power-limit",  # the clock is held down
]

# Settings that are read with a profile, as records name them.
DETERMINISTIC = "torch.use_deterministic_algorithms(True)"
WITHOUT_CUDNN = "torch.backends.cudnn.enabled = False"
NO_CACHE = "autocast(cache_enabled=False)"
PROFILER = "torch.profiler"  # one of the script's own
# What the host does, as records name it.
IN_PYTHON = "Python between operators"
STARTING_COLLECTIVES = "starting collectives"
FINDING_UNUSED = "looking for unused parameters"

SYNTHETIC = "synthetic"  # the data set of random samples
