"""RoPE and YaRN: pairs, tables of each kind of layer, positions, and turning back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..change import edit, wrap
from ..fault import OWN, Fault, at
from .indexer import HALF_SPLIT

Q, KV, TABLE, CORE = "attn.q", "attn.kv", "attn.rope.table", "attn.core"
ROPE, ROWS, ATTENTION = "rope", "kernels.qk_norm_rope", "kernels.decode_attention"
WINDOW = 'if config.kind(layer) == "window":'
PLAIN = "return 1.0 / config.rope_theta**pairs"
TURN_Q = "y = rotate_tail(x * inverse_rms(x, eps, HEAD_DIM), cos, sin, t, live, 1.0, HEAD_DIM, LANES)"
TURN_BACK = "result = rotate_tail(result, cos, sin, token, head, -1.0, HEAD_DIM, LANES)"
SCALED = "tl.zeros((HEADS, ROWS), tl.float32)) * scale"


def _table_in_bf16(rope_table: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    return lambda *args: tuple(x.bfloat16().float() for x in rope_table(*args))


FAULTS = (
    Fault("rope.half-split", "swapped halves", "NVIDIA-NeMo/Automodel#2039", "S1",
          "queries and rows are rotated in halves, not in neighbours", Q,
          edit("kernels.row_tiles", *HALF_SPLIT, within=ROWS), at("window", "decode", (3,))),
    Fault("rope.inverse-frequencies", "wrong table", "ml-explore/mlx-lm#1189", "S1",
          "a table that divides is given inverse frequencies", TABLE,
          edit(ROPE, ("positions.float()[:, None] * frequencies", "positions.float()[:, None] / frequencies")),
          at("window", "decode", (3,))),
    Fault("rope.one-table-for-all", "wrong table", "Avarok-Cybersecurity/atlas#276", "S2",
          "window layers use the base and YaRN of the compressed ones", TABLE, edit(ROPE, (WINDOW, "if False:")),
          at("window", "decode", (129,))),
    Fault("rope.plain-base-everywhere", "wrong table", "ml-explore/mlx-lm#1189", "S1",
          "compressed layers use the base of the window ones", TABLE, edit(ROPE, (WINDOW, "if True:")),
          at("csa", "decode", starts=(255,)),
          also=("hw-native-sys/pypto-lib#951", "huggingface/transformers#45910")),
    Fault("rope.yarn-in-window-layers", "wrong table", "sgl-project/sglang#34788", "S2",
          "window layers keep their base and get YaRN too", TABLE,
          edit(ROPE, (PLAIN, "plain = 1.0 / config.rope_theta**pairs\n        blend = _interpolated_share(config)\n"
                      "        return plain / config.rope_scaling.factor * blend + plain * (1 - blend)")),
          at("window", "decode", (17,)), also=("vllm-project/vllm#54815", "1CatAI/1Cat-vLLM#251")),
    Fault("rope.no-yarn", "wrong table", OWN, "S2", "compressed layers miss YaRN", TABLE,
          edit(ROPE, ("blend = _interpolated_share(config)", "blend = 0 * _interpolated_share(config)")),
          at("hca", "decode", starts=(255,))),
    Fault("rope.mscale-in-softmax", "wrong scale", "AMD-AGI/Primus#930", "S2",
          "scores are 0.1 ln 16 + 1 times too large", CORE, edit(ATTENTION, (SCALED, f"{SCALED} * 1.27726")),
          at("hca", "decode", starts=(127,)),
          also=("onnxruntime/mobius#548", "turboderp-org/exllamav3#259", "huggingface/transformers#47435",
                "kekzl/imp#880", "NVIDIA/Megatron-LM#1429")),
    Fault("rope.mscale-squared", "wrong scale", OWN, "S2", "scores carry the square of YaRN's factor, as in V3", CORE,
          edit(ATTENTION, (SCALED, f"{SCALED} * 1.63139")), at("hca", "decode", starts=(127,))),
    Fault("rope.output-not-turned-back", "missing step", "Avarok-Cybersecurity/atlas#186", "S1",
          "attention's output keeps the rotation of its rows", CORE, edit(ATTENTION, (TURN_BACK, "result = result")),
          at("window", "decode", (3,)), also=("AMD-AGI/Primus#928", "AMD-AGI/Primus#930")),
    Fault("rope.output-turned-on", "sign", OWN, "S1", "attention's output is rotated once more, not back", CORE,
          edit(ATTENTION, (TURN_BACK, TURN_BACK.replace("-1.0", "1.0"))), at("window", "decode", (3,))),
    Fault("rope.output-at-first-token", "wrong table", OWN, "S1",
          "every token's output is turned back by the first token's angle", CORE,
          edit(ATTENTION, (TURN_BACK, TURN_BACK.replace("token, head", "0 * token, head"))), at("window", "decode", (3, 17))),
    Fault("rope.one-offset-for-batch", "wrong table", "raullenchai/Rapid-MLX#1365", "S1",
          "the first sequence's position rotates the queries of all", Q,
          edit(ROWS, (TURN_Q, TURN_Q.replace("sin, t,", "sin, 0 * t,"))), at("window", "decode", (3, 129))),
    Fault("rope.first-channels", "axis", OWN, "S1", "the first 64 channels are rotated, not the last", Q,
          edit("kernels.row_tiles", ("- (WIDTH - 64) // 2", "- 0 * WIDTH"), within=ROWS), at("window", "decode", (3,))),
    Fault("rope.rows-turned-back", "sign", OWN, "S1", "window rows are rotated the other way", KV,
          edit(ROWS, ("y = rotate_tail(y, cos, sin, t, t < T, 1.0", "y = rotate_tail(y, cos, sin, t, t < T, -1.0")),
          at("window", "decode", (3,))),
    Fault("rope.sine-for-cosine", "swapped halves", OWN, "S1", "sine and cosine of queries change places", Q,
          edit(ROWS, (TURN_Q, TURN_Q.replace("cos, sin", "sin, cos"))), at("window", "decode", (3,))),
    Fault("rope.position-one-late", "off by one", OWN, "S2", "positions count from 1", TABLE,
          edit(ROPE, ("positions.float()[:, None]", "(positions + 1).float()[:, None]")), at("window", "decode", (3,))),
    Fault("rope.table-in-bf16", "lost bits", OWN, "S2", "cosine and sine are stored in bfloat16", TABLE,
          wrap("rope:rope_table", _table_in_bf16), at("hca", "decode", starts=(127,))),
    Fault("rope.angle-in-bf16", "lost bits", OWN, "S2", "positions are rounded to bfloat16 before the product", TABLE,
          edit(ROPE, ("positions.float()[:, None]", "positions.bfloat16().float()[:, None]")),
          at("hca", "decode", starts=(257,))),
)  # fmt: skip
