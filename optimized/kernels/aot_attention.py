"""The kernels around attention as their wrappers launch them at Pro's widths, for the ahead-of-time check.

Source: docs/pool.md §7.
"""

from __future__ import annotations

from dataclasses import asdict

from .aot import Case

HEAD = {"HEAD_DIM": 512, "LANES": 512}
INDEX = {"LANES": 128, "STEPS": 7}
ROWS = ("main_stride", "rope_stride")


def attention_cases() -> dict[str, Case]:
    """Kernel name -> case. Only for a process that compiles."""
    from . import decode_attention, indexer, inverse_rope, qk_norm_rope, window_write

    tiles = asdict(decode_attention.tiles_for_heads(128))
    join = {**HEAD, "JOIN": tiles.pop("JOIN"), "SPLIT": tiles["SPLIT"]}
    core, query = "iippxfffi", "bfffuufiiiix"
    attend = decode_attention.attend_kernel
    strides = (*ROWS, "step_main_stride", "step_rope_stride")
    step, pool = {"TWO_SOURCES": True, **HEAD, **tiles}, {"TWO_SOURCES": False, **HEAD, **tiles}

    fused = {**HEAD, **asdict(qk_norm_rope.GPU)}
    projections = ("q_stride", "kv_stride")
    return {
        **_compressors(),
        **_selection(),
        "qk_norm_rope": Case(
            qk_norm_rope.qk_norm_rope_kernel, "bbfffxbubliiiiii",
            {"BF16": False, **fused}, (*projections, *ROWS),
        ),
        "qk_norm_rope_bf16": Case(
            qk_norm_rope.qk_norm_rope_kernel, "bbfffxbbbliiiiii", {"BF16": True, **fused}, (*projections, *ROWS),
        ),
        "window_write": Case(
            window_write.window_write_kernel, "ububliiiii", {"BF16": False, **HEAD, **asdict(window_write.GPU)},
            (*ROWS, "main_row_stride", "rope_row_stride"),
        ),
        "inverse_rope": Case(
            inverse_rope.inverse_rope_kernel, "bffbiiii", {**HEAD, **asdict(inverse_rope.GPU)}, ("x_stride", "out_stride"),
        ),
        "attend": Case(attend, "bubiiub" + core, {"BF16": False, **pool}, strides),
        "attend_bf16": Case(attend, "bbbiibb" + core, {"BF16": True, **pool}, strides),
        "attend_step": Case(attend, "bubiiub" + core, {"BF16": False, **step}, strides),
        "attend_step_bf16": Case(attend, "bbbiibb" + core, {"BF16": True, **step}, strides),
        "index_query_fp4": Case(
            indexer.index_query_kernel, query, {"FP4": True, **INDEX, **asdict(indexer.GPU)}, ("q_stride",)
        ),
        "index_query_fp8": Case(
            indexer.index_query_kernel, query, {"FP4": False, **INDEX, **asdict(indexer.GPU)}, ("q_stride",)
        ),
        "combine": Case(decode_attention.combine_kernel, "fffpfffbii", {"TURN": True, **join}),
    }  # fmt: skip


def _compressors() -> dict[str, Case]:
    """The one compressor kernel over its groups, builds and forms of index keys."""
    from . import compress, compress_index

    strides = ("kv_stride", "score_stride", "kv_slot_stride", "score_slot_stride", *ROWS)
    hca = {"ORDER": 0, "STEPS": 9, "RATIO": 128, "POOLED": 128, "BLOCK_ROWS": 2, **HEAD, **asdict(compress.GPU)}
    csa = {"ORDER": 0, "STEPS": 9, "RATIO": 4, "POOLED": 8, "BLOCK_ROWS": 64, **HEAD, **asdict(compress.GPU)}
    key = csa | {"HEAD_DIM": 128, **INDEX, **asdict(compress_index.GPU)}
    forms = {
        "compress_hca": ("ub", {"FORM": "2buff", **hca}),
        "compress_csa": ("ub", {"FORM": "2buff", **csa}),
        "compress_hca_bf16": ("bb", {"FORM": "bf16", **hca}),
        "compress_csa_bf16": ("bb", {"FORM": "bf16", **csa}),
        "compress_index_fp4": ("uu", {"FORM": "fp4", **key}),
        "compress_index_fp8": ("uf", {"FORM": "fp8", **key}),
    }
    types = "ffiiffiiippffxff{}iipii"
    return {
        name: Case(compress.compress_kernel, types.format(target), constants, strides)
        for name, (target, constants) in forms.items()
    }


def _selection() -> dict[str, Case]:
    """Scores over paged keys in every form and order that a target uses, top-k, and translation."""
    from . import index_logits, topk, translate

    scored = {"LANES": 128, "HEADS": 64, **asdict(index_logits.GPU)}
    strides = ("keys_stride", "scales_stride")
    forms = {
        "index_logits_fp4": ("uuf" + "uu", {"FP4": True, "ORDER": 0}),
        "index_logits_flydsl": ("uuf" + "uu", {"FP4": True, "ORDER": 2}),
        "index_logits_fp8": ("uuf" + "uf", {"FP4": False, "ORDER": 0}),
        "index_logits_preshuffled": ("uuf" + "uf", {"FP4": False, "ORDER": 1}),
    }
    tail = "iipippfii"
    kernel = index_logits.index_logits_kernel
    cases = {name: Case(kernel, types + tail, {**form, **scored}, strides) for name, (types, form) in forms.items()}
    return {
        **cases,
        "topk": Case(topk.topk_kernel, "fppii", {"K": 1024, "LANES": 1024, **asdict(topk.GPU)}, ("row_stride",)),
        "translate": Case(translate.translate_kernel, "pppppp" + 7 * "i", asdict(translate.GPU), ("picks_stride",)),
    }
