"""What a GPU kernel is for, by its name: the one table of name patterns, and what PTX adds for Triton kernels.

A matrix product or convolution whose name does not say whether it uses Tensor Cores is an `unknown_product`.
To add a kernel: a line in `_PATTERNS`, of which the first that matches counts, and one in test_kernel_classes.py.
"""

import re
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

KernelClass = Literal[
    "tensor_core_product",  # matrix products and convolutions on Tensor Cores
    "plain_product",  # without them
    "unknown_product",
    "attention",
    "normalisation",
    "elementwise",
    "cast",  # element-wise, from one float format to another
    "layout_conversion",
    "reduction",
    "indexing",  # gathers, scatters, sorts and sparse products: what reads or writes by index
    "optimizer",
    "loss_scaling",
    "copy",  # within the device
    "host_copy",  # between host and device
    "communication",
    "other",
]
KERNEL_CLASSES: tuple[KernelClass, ...] = get_args(KernelClass)
PRODUCTS: tuple[KernelClass, ...] = ("tensor_core_product", "plain_product", "unknown_product", "attention")
VECTOR_BYTES = 16  # that a Tensor Core kernel loads at once: rows must be a multiple of it
# Operators with these names are PyTorch's own: it is known of each whether it multiplies matrices.
OWN_NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler")

# Of a product's inputs; "" if it is not known.
Format = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", ""]


class Classified(NamedTuple):
    """A kernel's class; of products on Tensor Cores, and of attention, the format too."""

    kind: KernelClass
    format: Format = ""


# Names are demangled C++, as CUPTI gives them. Sources: profiles that users published of cuBLAS 10 to 13 and cuDNN 7 to
# 9; the sources of PyTorch (aten/src/ATen/native/cuda, torch/_inductor), CUTLASS and NCCL.
_PATTERNS: tuple[tuple[str, KernelClass], ...] = (
    (r"^Memcpy (HtoD|DtoH)", "host_copy"),
    (r"^Mem(cpy|set)\b|CatArrayBatchedCopy|^__amd_rocclr_(copy|fill)Buffer", "copy"),
    (r"^(nccl|rccl|mscclKernel)|multimem_|(one|two)_shot_all_reduce|^(address|scatter|mean)_kernel$", "communication"),
    (r"flash_?(fwd|bwd|attn|fprop|bprop|attention)|\bflash::|pytorch_flash|fmha|sdpa|flex_attention", "attention"),
    (r"efficient_attention|^_?(attn|attention)_(fwd|bwd)", "attention"),
    (r"amp_(foreach_)?non_finite_check_and_unscale|amp_update_scale|amp_non_finite", "loss_scaling"),
    (r"(nchw|nhwc|nhcw|kcrs|krsc)\w*To(Nchw|Nhwc|Kcrs|Krsc|C32)|(nchw|nhwc)2(nchw|nhwc)", "layout_conversion"),
    (r"convertTensor_kernel|AddPaddingKernel|transpose_readWrite|(im2col|col2im|vol2col|col2vol)", "layout_conversion"),
    (r"batched_transpose|tensorTransformGeneric|SubTensorOpWithScalar|permute_kernel", "layout_conversion"),
    # Triton kernels that Inductor names after what it fused.
    (r"^triton_(red|per|poi)_\w*(batch_norm|layer_norm|group_norm|rms_norm|native_batch_norm)", "normalisation"),
    (r"^triton_(red|per)_", "reduction"),
    (r"^triton_(poi|for)_", "elementwise"),
    (r"^triton_(tem_|mm|bmm)|^triton_\w*(matmul|gemm)", "unknown_product"),
    (r"Fused(Optimizer|Adam|Sgd|SGD|Adagrad)|fused_(adam|sgd)|(Adam|LAMB|SGD|Adagrad)Functor", "optimizer"),
    (r"\bbn_(fw|bw)|bnorm|(batch|layer|group|instance|rms)_?norm|(Layer|RMS|Batch)Norm", "normalisation"),
    (r"GammaBeta|RowwiseMoments|ComputeFusedParams|ComputeInternalGradients|Compute1dBackwardFused", "normalisation"),
    (r"^(statistics|combine|normalise|gradient_sums|combine_sums|gradient)_kernel$", "normalisation"),  # castwise's own
    (r"index_?(Func|Select|elementwise|put)|indexing_backward|scatter_?gather|vectorized_gather|take_put", "indexing"),
    (r"(segment|scatter|gather)_(reduce|csr|coo|add)|^void scatter_kernel|cusparse::|csrmm|[sS]p[mM][mM]", "indexing"),
    (r"embedding_backward|EmbeddingBag_|compute_grad_weight|sum_and_scatter|krn_partial", "indexing"),
    (r"RadixSort|bitonicSort|TopK", "indexing"),
    # "unrolled": its input and output differ in format.
    (r"float16\w*copy_kernel|float8\w*copy_kernel|unrolled_elementwise_kernel<at::native::direct_copy", "cast"),
    (r"LpNormFunctor|l2norm", "reduction"),
    (r"multi_tensor_apply_kernel|[eE]lem(ent)?_?[wW]ise|fused_dropout", "elementwise"),
    (r"\bop_generic_tensor_kernel|cudnn::ops::(add|scalePack|op_)|activation_(fw|bw)", "elementwise"),
    # Products. Those without Tensor Cores come first: their other words are in names of both kinds.
    (r"ffma|[sS]imt|RNN_FMA|[_ ]sgemm|^sgemm|scudnn|implicit_convolve\w*sgemm|explicit_convolve", "plain_product"),
    (r"gemv|gemm[SN]N_|gemmk1_kernel|\bdot_kernel|conv_depthwise|2d_c1_k1|_direct_kernel|fft2d|fft1d", "plain_product"),
    (r"(wgrad_alg\d|dgrad|wgrad2d|dgrad2d|conv2d)\w*_engine<(float|double)", "plain_product"),
    (r"^nvjet_|tensorop|TensorOp|hmma|imma|dmma|wgmma", "tensor_core_product"),
    (r"[hsid](884|1688|16816|16832|161616)[a-z_]", "tensor_core_product"),
    (r"sm(7\d|8\d|9\d|1\d\d)a?_xmma|\bgemm::kernel::GemmUniversal|^Cijk_\w+_MI\d|xdlops", "tensor_core_product"),
    (r"gemm|gemmk|^Cijk_|matmul|fprop|dgrad|wgrad|winograd|cudnn\w*conv|conv(olve|olution|\dd)", "unknown_product"),
    (r"RNN_block|persistRNN|PersistRNN|cutlass|igemm|Sp3AsmConv|ConvAsm|ConvBin", "unknown_product"),
    (r"reduce|splitK|(max|avg|average)_?pool|softmax|SoftMax|cumsum|nll_loss|scan_", "reduction"),
    (r"DeviceReduce|DeviceScan|arg_?m(ax|in)", "reduction"),
    (r"distribution_|dropout|lstm_cell|gru_cell|fill|relu|gelu|pointwise", "elementwise"),
)

# The first that matches counts: a name also spells out the formats of accumulator and output.
_FORMATS: tuple[tuple[str, Format], ...] = (
    (r"e4m3|e5m2|fp8|float8|^nvjet_(sm\d+_)?[qo]|_F8|f8f8", "fp8"),
    (r"tf32|tfloat32|^nvjet_(sm\d+_)?s(?!m\d)", "tf32"),
    (r"bf16|bfloat16|BFloat16|^nvjet_(sm\d+_)?t|_BBS_|_BB_|_BSS_", "bf16"),
    (r"fp16|(?<!b)f16|half|Half|^nvjet_(sm\d+_)?h|h(884|1688|16816)|_HHS_|_HSS_|_HH_|hgemm", "fp16"),
    (r"imma|i8i8|_s8|int8|^nvjet_(sm\d+_)?i|16832", "int8"),
    (r"f64|dmma|d884|double|^nvjet_(sm\d+_)?d", "fp64"),
    (r"tensorop_s1688(?!_?(f16|bf16))|s1688", "tf32"),  # CUTLASS leaves out the type of float32 inputs
)

# PTX ISA: wgmma.mma_async, tcgen05.mma and mma.sync run on Tensor Cores; their types are in the instruction's name.
_PTX_PRODUCT = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync|wmma\.mma)[\w.:]*")


@lru_cache(maxsize=4096)
def classify_kernel(name: str) -> Classified:
    kind: KernelClass = next((kind for pattern, kind in _PATTERNS if re.search(pattern, name)), "other")
    return Classified(kind, format_of(name) if kind in ("tensor_core_product", "attention") else "")


def format_of(name: str) -> Format:
    """Return the format of a product's inputs by what its name spells out, "" if it does not."""
    return next((found for pattern, found in _FORMATS if re.search(pattern, name)), "")


def short_name(name: str, length: int = 60) -> str:
    """Return a kernel's name without namespaces, cut to a length."""
    short = re.sub(r"^void |\w+::(?=\w)|\(anonymous namespace\)::", "", name)
    return short if len(short) <= length else short[: length - 1] + "…"


def classify_ptx(name: str, ptx: str) -> Classified:
    """Return the class of a compiled Triton kernel: a product if it has Tensor Core instructions."""
    by_name = classify_kernel(name)
    instruction = _PTX_PRODUCT.search(ptx)
    if instruction is not None:
        kind: KernelClass = "attention" if by_name.kind == "attention" else "tensor_core_product"
        return Classified(kind, format_of(instruction.group()))
    return Classified("plain_product") if by_name.kind == "unknown_product" else by_name


# Operators: on a CPU, whose kernels have no names of their own, the innermost known one counts; on a GPU it decides on
# kernels of unknown names. There an operator does not tell whether a product uses Tensor Cores.
_OPERATORS: tuple[tuple[str, KernelClass], ...] = (
    (r"^aten::(_?convolution|conv\dd|\w*conv_depthwise|_slow_conv)", "plain_product"),
    (r"^aten::(mkldnn_(convolution|rnn)|_cudnn_rnn)", "plain_product"),
    (r"^(aten|mkldnn)::(mm|bmm|mv|addmm|addmv|addbmm|baddbmm)\b|::(_?linear|matmul|dot$|_scaled_mm)", "plain_product"),
    (r"^aten::(_scaled_dot_product|_flash_attention|scaled_dot_product)", "attention"),
    (r"^aten::\w*(batch_norm|layer_norm|group_norm|rms_norm)", "normalisation"),
    (r"^aten::_amp_", "loss_scaling"),
    (r"^aten::(_to_copy|to$)", "cast"),
    (r"^aten::(contiguous|clone)", "layout_conversion"),
    (r"^aten::(_fused_(adam|sgd|adagrad)\w*)", "optimizer"),
    (r"^(c10d|gloo|nccl)", "communication"),
    (r"^aten::_?(index(_\w+)?|gather|scatter\w*|embedding\w*|take|put)_?$", "indexing"),
    (r"^aten::_?(segment_reduce\w*|sparse_mm|sort|topk)_?$", "indexing"),
    (r"^aten::(copy_|cat|stack|_foreach_copy_)", "copy"),
    (r"^aten::\w*(softmax|nll_loss|cross_entropy|norm$|cumsum|_pool\dd)", "reduction"),
    (r"^aten::(sum|mean|amax|argmax|var|std)$", "reduction"),
    (r"^aten::(_foreach_\w+|\w*(relu|gelu|silu|tanh|sigmoid|threshold|clamp|dropout|hardtanh)\w*)", "elementwise"),
    (r"^aten::(add|sub|mul|div|neg|exp|log|r?sqrt|pow|fill|zero|lerp|where|bernoulli|addc\w+)_?$", "elementwise"),
)


@lru_cache(maxsize=4096)
def classify_operator(name: str) -> KernelClass | None:
    """Return the class of an operator, None if its caller decides."""
    return next((kind for pattern, kind in _OPERATORS if re.search(pattern, name)), None)
