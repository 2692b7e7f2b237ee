"""Classes of kernels by real names of cuBLAS, cuDNN, CUTLASS, ATen, Inductor, NCCL and castwise."""

# ruff: noqa: E501  names are long

import re
from collections.abc import Iterator

import pytest

from castwise.registry.kernel_classes import (
    KERNEL_CLASSES,
    Classified,
    classify_kernel,
    classify_operator,
    classify_ptx,
)

TENSOR = "tensor_core_product"
ATEN = "void at::native::"
ANON = "void at::native::(anonymous namespace)::"
# The beginning of a name that CUPTI leaves mangled, as it is too long for it; measured on an H100.
MANGLED = (
    "_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22ImplicitGemmMultistage"
)

# Class, format of products and attention, and name; ATEN, ANON and MANGLED stand for a name's beginning.
_TABLE = """
# cuBLAS
tensor_core_product fp16 nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT
tensor_core_product bf16 nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT
tensor_core_product bf16 nvjet_tss_192x192_64x3_2x1_v_bz_coopB_NTN
tensor_core_product tf32 nvjet_sss_128x128_32x5_2x1_v_bz_TNN
tensor_core_product bf16 nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT
tensor_core_product tf32 nvjet_sm90_sss_128x128_32x5_2x1_v_bz_TNN
plain_product - void RNN_blockPersist_bp_RNN_FMA<__half, __half, float, 224>(block_bp_args_rnn<__half>)
tensor_core_product fp8 nvjet_qqtst_128x256_128x4_1x2_h_bz_coopA_TNT
tensor_core_product fp16 sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas
tensor_core_product bf16 sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_kernel__5x_cublas
tensor_core_product tf32 sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32_warpgroupsize1x1x1_execute_kernel__5x_cublas
tensor_core_product fp8 sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1_bias_f16_kernel__5x
tensor_core_product bf16 sm100_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_cta2_execute_kernel__5x_cublas
plain_product - sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel__51_cublas
plain_product - ampere_sgemm_128x64_tn
plain_product - ampere_sgemm_32x32_sliced1x4_nt
plain_product - volta_sgemm_128x64_nn
plain_product - maxwell_sgemm_fp16_128x64_nn
tensor_core_product fp16 ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_nn
tensor_core_product bf16 ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn
tensor_core_product fp16 ampere_h16816gemm_128x128_ldg8_stages_32x5_tn
tensor_core_product fp16 turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_nn
tensor_core_product fp16 volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn
tensor_core_product fp16 volta_h884gemm_256x64_ldg8_nn
tensor_core_product tf32 cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4
tensor_core_product tf32 void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x256_16x4_tn_align4>(cutlass_80_tensorop_s1688gemm_64x256_16x4_tn_align4::Params)
tensor_core_product fp16 void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_64x128_32x6_tn_align8>(Params)
tensor_core_product bf16 void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)
tensor_core_product fp64 void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x32_16x4_nn_align1>(Params)
plain_product - void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)
tensor_core_product int8 void cutlass::Kernel<cutlass_75_tensorop_i16832gemm_s8_256x128_64x2_tn_align16>(Params)
tensor_core_product fp8 void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int>, cutlass::float_e4m3_t> > >(Params)
tensor_core_product bf16 cutlass3x_sm100_tensorop_s128x256x16gemm_bf16_bf16_f32_bf16_bf16_128x256x64
plain_product - void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, true>(float)
plain_product - void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024>(int)
plain_product - void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>(int)
plain_product - void gemmk1_kernel<int, float, 256, 5, false, false, false>(int)
plain_product - void dot_kernel<float, 128, 0, cublasDotParams<float> >(float)
unknown_product - void gemm_kernel1x1_core<float, false, false, false>(float)
reduction - void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(int)
tensor_core_product fp16 Cijk_Alik_Bljk_HHS_BH_MT128x128x32_MI16x16x16x1_SN_1LDSB0
tensor_core_product bf16 Cijk_Ailk_Bljk_BBS_BH_MT256x128x64_MI16x16x16x1_SN

# cuDNN
tensor_core_product tf32 sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warpsize2x2x1_g1_tensor16x8x8_execute_kernel__5x_cudnn
tensor_core_product fp16 sm80_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage4_warpsize2x2x1_g1_tensor16x8x16
tensor_core_product bf16 sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage4
tensor_core_product bf16 sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1
plain_product - sm80_xmma_fprop_implicit_gemm_indexed_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize32x32x8_ffma_kernel_cudnn
tensor_core_product tf32 void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x64_16x4_nhwc_align4>(Params)
tensor_core_product fp16 void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s16816wgrad_optimized_f16_128x128_32x4_nhwc_align8>(Params)
tensor_core_product bf16 void cutlass_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_analytic_bf16_64x64_32x5_nhwc_unity_stride_align8>(Params)
plain_product - ampere_scudnn_128x64_relu_interior_nn_v1
plain_product - ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1
tensor_core_product fp16 volta_fp16_s884cudnn_fp16_256x64_ldg8_relu_f2f_exp_small_nhwc_tn_v1
plain_product - void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int)
plain_product - void cudnn::cnn::implicit_convolveNd_sgemm<float, 3, 128, 5, 5, 3, 3, 3, 1>(int)
plain_product - void cudnn::cnn::dgrad2d_grouped_direct_kernel<false, true, false, false, 0, 0, int, __half, __half, float>(Params)
plain_product - void cudnn::cnn::wgrad2d_grouped_direct_kernel<true, int, __half, __half, __half, float>(Params)
plain_product - void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false, 0, 0, int, float, float>(Params)
plain_product - void cudnn::cnn::wgrad_alg0_engine<float, 512, 6, 5, 3, 3, 3, false, 512>(int)
plain_product - void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)
plain_product - void fft2d_r2c_32x32<float, false, 0u, false>(float2*)
unknown_product - void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(Params)
normalisation - void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1, true>(Params)
normalisation - void cudnn::bn_bw_1C11_kernel_new<__half, float, float2, 512, true, 1>(Params)
normalisation - void cudnn::batchnorm_fwtr_nhwc_semiPersist<__nv_bfloat16, __nv_bfloat16, float, 512, 2, 6>(Params)
normalisation - void cudnn::batchnorm_bwtr_nhwc_semiPersist<__half, __half, __half, float, 256, 1>(Params)
layout_conversion - void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true, (cudnnKernelDataType_t)0>(Params)
layout_conversion - void cudnn::engines_precompiled::nhwcToNchwKernel<float, float, float, true, false>(Params)
layout_conversion - void cudnn::ops::nhwcAddPaddingKernel<__half, __half, float, true>(Params)
layout_conversion - void cudnn::cnn::convertTensor_kernel<float, __half>(float)
elementwise - void cudnn::ops::scalePackedTensor_kernel<float, float>(long, float*, float)
unknown_product - void RNN_blockPersist_fp_LSTM<float, float, float, 64>(Params)
elementwise - void elemWiseRNNcell<float, float, float, 4, 0>(int)
elementwise - void LSTM_elementWise_fp<float, float, float>(int)
attention fp16 cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64_4x1x1_kernel0_0
attention bf16 cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_bf16_knob_7_64x64x64_4x1x1_kernel0_0

# Attention of PyTorch
attention fp16 void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::half_t> >(Params)
attention bf16 void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Traits<64, cutlass::bfloat16_t> >(Params)
attention - fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)
attention bf16 fmha_cutlassB_bf16_aligned_64x64_k64_sm80(Params)
attention bf16 void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<cutlass::bfloat16_t> > >(Params)

# ATen
elementwise - ATEN vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)
cast - ATEN unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::lambda>(int)
cast - ATEN vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::lambda>(int)
cast - ATEN vectorized_elementwise_kernel<8, at::native::float16_copy_kernel_cuda(at::TensorIteratorBase&)::lambda>(int)
cast - ATEN vectorized_elementwise_kernel<4, at::native::bfloat16tofloat32_copy_kernel_cuda(at::TensorIteratorBase&)>(int)
elementwise - ATEN elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::MulFunctor<float> > >(int)
elementwise - ATEN vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)::lambda>(int)
elementwise - ANON distribution_elementwise_grid_stride_kernel<float, 4, at::native::templates::cuda::normal_and_transform>(long)
elementwise - ANON fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(Params)
reduction - ATEN reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float> > >(int)
reduction - ATEN reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float, float> > >(int)
reduction - ANON softmax_warp_forward<float, float, float, 10, true, false>(float*)
reduction - ANON cunn_SoftMaxForward<4, float, float, float, at::native::(anonymous namespace)::Epilogue>(float*)
reduction - ANON nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)
normalisation - ATEN batch_norm_collect_statistics_kernel<at::native::InvStd, float, float, float, int>(Params)
normalisation - ATEN batch_norm_backward_reduce_channels_last_kernel<4, at::native::ParallelTag>(float*)
normalisation - ANON vectorized_layer_norm_kernel<float, float>(int, float)
normalisation - ANON GammaBetaBackwardCUDAKernelTemplate<float, float, 64u, 1u, 32u>(long)
normalisation - ANON RowwiseMomentsCUDAKernel<float>(long, float)
normalisation - ATEN layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float>(float)
plain_product - ANON conv_depthwise2d_forward_kernel<3, float, int>(at::GenericPackedTensorAccessor<float>)
plain_product - ANON conv_depthwise2d_grad_weight_kernel<c10::Half, unsigned int>(Params)
plain_product - dgrad2d_c1_k1_nhwc_specialized
plain_product - conv2d_c1_k1_nhwc_specialized
tensor_core_product tf32 MANGLED NS_10tfloat32_tENS6_4warp11MmaTensorOpINS7_
tensor_core_product bf16 MANGLED NS_10bfloat16_tENS6_4warp11MmaTensorOpINS7_
layout_conversion - ATEN im2col_kernel<float>(long, float const*)
layout_conversion - ATEN vol2col_kernel<c10::BFloat16>(long)
copy - ANON CatArrayBatchedCopy_vectorized<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int, 2>(char*)
elementwise - ANON multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<2>, at::native::BinaryOpListAlphaFunctor<float> >(int)
optimizer - ANON multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float> >(int)
optimizer - ANON multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<3>, at::native::FusedSgdMathFunctor<float> >(int)
reduction - ANON multi_tensor_apply_kernel<TensorListMetadata<1>, at::native::LpNormFunctor<float, (at::native::NormType)1> >(int)
loss_scaling - ANON multi_tensor_apply_kernel<TensorListMetadata<1>, UnaryOpFunctor<float>, at::native::_amp_foreach_non_finite_check_and_unscale_cuda_(at::TensorList)::lambda>(int)
loss_scaling - at::native::amp_update_scale_cuda_kernel(float*, int*, float const*, double, double, int)
reduction - ANON max_pool_forward_nhwc<float, int>(float const*)
indexing - ANON embedding_backward_feature_kernel<float, float, long>(long const*)
indexing - ATEN indexFuncLargeIndex<float, long, unsigned int, 2, 2, -2, true, at::native::ReduceAdd>(int)
indexing - ATEN _scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel<true> >(int)
indexing - ATEN index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_put_kernel_impl> >(int)
indexing - ATEN vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)
indexing - void cusparse::csrmm_v2_kernel<float>(int)
indexing - void cub::CUB_200802_SM_900::DeviceRadixSortOnesweepKernel<cub::Policy800, (cub::SortOrder)0, long>(long*)

# Inductor
normalisation - triton_red_fused__native_batch_norm_legit_functional_0
normalisation - triton_per_fused_native_layer_norm_native_layer_norm_backward_3
reduction - triton_red_fused_sum_7
reduction - triton_per_fused__log_softmax_nll_loss_forward_2
elementwise - triton_poi_fused_add_relu_threshold_backward_12
elementwise - triton_poi_fused_convolution_0
unknown_product - triton_tem_fused_addmm_relu_5
attention - triton_tem_fused_flex_attention_0

# Libraries of communication, copies, castwise's own
communication - ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)
communication - ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
communication - ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)
copy - Memcpy DtoD (Device -> Device)
host_copy - Memcpy HtoD (Pageable -> Device)
copy - Memset (Device)
normalisation - statistics_kernel
communication - scatter_kernel
other - my_own_kernel
"""
_BEGINNINGS = {"ATEN ": ATEN, "ANON ": ANON, "MANGLED ": MANGLED}


def _names() -> Iterator[tuple[str, str, str]]:
    for line in _TABLE.splitlines():
        if line and not line.startswith("#"):
            kind, number_format, name = line.split(maxsplit=2)
            for short, beginning in _BEGINNINGS.items():
                name = re.sub(f"^{short}", beginning, name)
            yield name, kind, number_format.strip("-")


NAMES = tuple(_names())


@pytest.mark.parametrize(("name", "kind", "number_format"), NAMES, ids=[name[:60] for name, _, _ in NAMES])
def test_real_names(name: str, kind: str, number_format: str) -> None:
    assert classify_kernel(name) == Classified(kind, number_format)  # type: ignore[arg-type]


def test_every_class_has_a_name_but_each_name_one_class() -> None:
    assert {kind for _, kind, _ in NAMES} == set(KERNEL_CLASSES)
    assert len({name for name, _, _ in NAMES}) == len(NAMES) >= 80


@pytest.mark.parametrize(
    ("name", "ptx", "expected"),
    [
        ("triton_tem_fused_mm_0", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}", (TENSOR, "bf16")),
        ("triton_tem_fused_mm_0", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}", (TENSOR, "tf32")),
        ("triton_tem_fused_mm_0", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}", (TENSOR, "fp16")),
        ("triton_tem_fused_mm_0", "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%f1}", (TENSOR, "fp8")),
        ("triton_tem_fused_mm_0", "fma.rn.f32 %f1, %f2, %f3, %f4;", ("plain_product", "")),
        ("_matmul_of_a_user", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", (TENSOR, "bf16")),
        (
            "triton_tem_fused_flex_attention_0",
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
            ("attention", "bf16"),
        ),
        ("triton_poi_fused_add_0", "add.f32 %f1, %f2, %f3;", ("elementwise", "")),
    ],
)
def test_ptx_decides_on_triton_kernels(name: str, ptx: str, expected: tuple[str, str]) -> None:
    assert classify_ptx(name, ptx) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mkldnn_convolution", "plain_product"),
        ("aten::convolution_backward", "plain_product"),
        ("aten::addmm", "plain_product"),
        ("aten::native_batch_norm_backward", "normalisation"),
        ("aten::native_layer_norm", "normalisation"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_softmax", "reduction"),
        ("aten::sum", "reduction"),
        ("aten::threshold_backward", "elementwise"),
        ("aten::add_", "elementwise"),
        ("aten::_to_copy", "cast"),
        ("aten::copy_", "copy"),
        ("aten::mm", "plain_product"),
        ("aten::baddbmm", "plain_product"),
        ("aten::linear", "plain_product"),
        ("aten::_cudnn_rnn_backward", "plain_product"),
        ("aten::linalg_vector_norm", "reduction"),
        ("aten::max_pool2d_with_indices", "reduction"),
        ("aten::empty", None),
        ("aten::as_strided", None),
    ],
)
def test_operators_of_a_cpu(name: str, kind: str | None) -> None:
    assert classify_operator(name) == kind
