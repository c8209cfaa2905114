"""The kernels of streams, norms, products and experts as their wrappers launch them at Pro's widths, for the ahead-of-time
check.

Source: docs/pool.md §7.
"""

from __future__ import annotations

from dataclasses import asdict

from .aot import Case


def model_cases() -> dict[str, Case]:
    """Kernel name -> case. Only for a process that compiles."""
    return {**_streams(), **_products(), **_router(), **_experts()}


def _streams() -> dict[str, Case]:
    from . import embed, hyper_connection, mtp_streams, norm

    tiles = asdict(hyper_connection.GPU)
    spread = {"STREAMS": 4, "ROWS": tiles.pop("MIX_ROWS"), "COLS": tiles.pop("COLS"), "num_warps": tiles["num_warps"]}
    mixes = {"STREAMS": 4, "MIXES": 24, "LANES": 32}
    one, two = ("D", "x_stride"), ("D", "z_stride", "x_stride")
    normed = {"LANES": 8192, **asdict(norm.GPU)}
    return {
        "embed": Case(embed.embed_kernel, "blbiii", {"STREAMS": 4, **asdict(embed.GPU)}, ("D", "table_stride")),
        "mtp_streams": Case(
            mtp_streams.mtp_streams_kernel, "bbbiii", {"STREAMS": 4, **asdict(mtp_streams.GPU)}, ("D", "e_stride"),
        ),
        "norm": Case(norm.norm_kernel, "bfbiiix", normed, one),
        "norm_quantize": Case(norm.norm_quantize_kernel, "bfbuuiiix", normed, one),
        "hc_project": Case(hyper_connection.project_kernel, "bffiii", mixes | tiles, one),
        "hc_post_project": Case(hyper_connection.post_project_kernel, "bbffbffiiii", mixes | tiles, two),
        "hc_post": Case(hyper_connection.post_kernel, "bbffbiiii", spread, two),
        "hc_mix": Case(hyper_connection.mix_kernel, "fffbbffiiiiixx", mixes | spread, one),
        "hc_head": Case(hyper_connection.head_kernel, "fffbbiiiixx", {"STREAMS": 4, "LANES": 16, **spread}, one),
    }  # fmt: skip


def _products() -> dict[str, Case]:
    from . import gemm_bf16

    tiles = asdict(gemm_bf16.GPU)
    strides = ("K", "x_stride", "w_stride")
    return {
        "gemm_bf16": Case(gemm_bf16.gemm_bf16_kernel, "bbfiiiii", tiles, ("N", *strides)),
        "grouped_gemm": Case(gemm_bf16.grouped_gemm_kernel, "buubiiiiiii", tiles, ("R", "x_group_stride", *strides)),
    }


def _router() -> dict[str, Case]:
    from . import router

    tiles = asdict(router.GPU)
    rows = {"ROWS": tiles.pop("CHOOSE_ROWS"), "num_warps": tiles["num_warps"]}
    slots = {"K": 6, "SLOTS": 8}
    return {
        "router_scores": Case(router.scores_kernel, "bbfiiiii", tiles, ("E", "D", "x_stride", "gate_stride")),
        "choose_experts": Case(router.choose_kernel, "ffpfiix", {**slots, "LANES": 512, **rows}, ("E",)),
        "look_up_experts": Case(router.look_up_kernel, "fllpfiix", {**slots, **rows}, ("E",)),
    }


def _experts() -> dict[str, Case]:
    from . import expert_sum, experts, swiglu

    weights = ("w1_stride", "w1_scale_stride", "w3_stride", "w3_scale_stride")

    def gate_up(fp4: bool) -> Case:
        constants = {"TOP_K": 6, "FP4": fp4, **asdict(experts.GPU_UP)}
        return Case(experts.gate_up_kernel, "uuuuuuppfuuiiiiiiiix", constants, ("N", "K", "x_stride", *weights))

    def down(fp4: bool) -> Case:
        constants = {"FP4": fp4, **asdict(experts.GPU_DOWN if fp4 else experts.GPU_DOWN_FP8)}
        return Case(experts.down_kernel, "uuuuppfiiiiii", constants, ("N", "K", "h_stride", "w2_stride", "w2_scale_stride"))

    return {
        "expert_gate_up": gate_up(fp4=True),
        "expert_down": down(fp4=True),
        "expert_gate_up_fp8": gate_up(fp4=False),
        "expert_down_fp8": down(fp4=False),
        "expert_sum": Case(
            expert_sum.sum_kernel, "fpfbiiii", {"K": 6, **asdict(expert_sum.GPU)}, ("D", "y_stride", "shared_stride"),
        ),
        "swiglu_quantize": Case(swiglu.swiglu_kernel, "bbuuiiiix", asdict(swiglu.GPU), ("N", "gate_stride", "up_stride")),
    }  # fmt: skip
