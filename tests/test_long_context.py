"""Long prompts stay affordable: no mask over all pairs of tokens, scores in blocks."""

from __future__ import annotations

import subprocess
import sys

GIB = 1 << 30
CHILD = """
import sys, torch
from parity.options import peak_rss
from reference.checkpoint.loader import Loader
from reference.checkpoint.open import open_store
from reference.rounding import Sites
from reference.state import Batch
tokens, layer = int(sys.argv[1]), 2
block = Loader(open_store("procedural:v4-pro-slim"), torch.float32, 0).block(layer)
assert block.attn.indexer is not None
x = torch.randn(tokens, 4, 512, generator=torch.Generator().manual_seed(0))
batch = Batch(torch.arange(tokens) % 1024, torch.arange(tokens), [0, tokens])
with torch.inference_mode():
    y, (state,) = block(x, batch, [block.attn.initial_state()], Sites())
assert len(state.compressor.rows) == tokens // 4 and torch.isfinite(y).all()
print(peak_rss())
"""


def test_a_prefill_of_16384_tokens_of_one_csa_layer_fits_in_2_gib():
    child = subprocess.run([sys.executable, "-c", CHILD, "16384"], capture_output=True, text=True, check=True)
    assert int(child.stdout) < 2 * GIB
