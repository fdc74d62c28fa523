"""Operators that compute in fp32, or in 16 bits, besides those on autocast's lists for CUDA."""

FP32_OURS = frozenset(
    [
        "cross_entropy_loss",
        "ctc_loss",
        "binary_cross_entropy",
        "nll_loss_nd",
        "mean",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "norm",
        "nansum",
    ]
)
"""Composite operators that call a listed one, and sums that are on no list."""

KERNELS_SUM_IN_FP32 = frozenset(
    [
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "group_norm",
        "native_group_norm",
        "batch_norm",
        "native_batch_norm",
        "instance_norm",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
    ]
)
"""Operators whose kernels take 16 bits, compute in fp32 and round once, also where autocast lists them for fp32."""
