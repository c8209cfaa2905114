"""Bounds of a step: what binds, and the lines that say so."""

from __future__ import annotations

import pytest
import torch

from parity.bench import full
from parity.bench import limits as limits_of
from parity.bench.limits import Limits, bounds
from parity.cli import main
from parity.traffic import Machine, Work, bound_lines
from reference.checkpoint.procedural import ProceduralStore

MACHINE = Limits(read=30e9, read_one=16e9, fma=100e9)


def test_the_larger_bound_binds():
    assert bounds(60 * 10**9, 6 * 10**9, MACHINE).binds == "memory"
    assert bounds(60 * 10**9, 6 * 10**9, MACHINE).seconds == 2.0
    b = bounds(3 * 10**9, 600 * 10**9, MACHINE)
    assert (b.binds, b.memory) == ("arithmetic", 0.1) and b.seconds == pytest.approx(10)


def test_a_token_is_held_to_what_it_touched_itself():
    steps = [Work(n * 10**10, m * 10**11) for n, m in ((9, 6), (3, 0), (3, 0))]
    lines = bound_lines([20.0, 2.0, 4.0], steps, Machine(MACHINE))
    assert "prompt bound    3.00 s by memory (90.0 GB), 10.00 s by arithmetic: arithmetic binds, took 2.0x" in lines
    assert "token bound     1.00 s by memory (30.0 GB), 0.00 s by arithmetic: memory binds, took 3.0x" in lines


def test_measuring_leaves_the_threads_alone(monkeypatch):
    monkeypatch.setattr(limits_of, "LEAST", 1 << 20)
    monkeypatch.setattr(limits_of, "MOST", 1 << 20)
    monkeypatch.setattr(limits_of, "FMA_SIDE", 64)
    before = torch.get_num_threads()
    found = limits_of.measure()
    assert min(found.read, found.read_one, found.fma) > 0 and torch.get_num_threads() == before


def test_bench_full_measures_every_storage_at_every_length(capsys, monkeypatch):
    monkeypatch.setattr(limits_of, "measure", lambda: MACHINE)
    monkeypatch.setattr(limits_of, "FMA_SIDE", 64)
    monkeypatch.setattr(full, "SWEPT", 1 << 16)
    assert main(["bench", "full", "--model", "procedural:mini"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "read 30.0 GB/s, one thread 16.0; 100 G multiply-adds/s"
    for part in ("attn.wq_b", "ffn.experts.{e}.w2", "attn.compressor.wkv"):
        assert [line.split()[1] for line in lines if line.startswith(part)] == ["1", "4", "16", "1024", "1", "4", "16"]
    assert [line.split(",")[0] for line in lines if "prefill" in line] == ["layer 0 (window)", "layer 4 (csa)", "layer 3 (hca)"]


def test_shares_are_of_what_was_done(monkeypatch):
    """A second for each product: bytes and multiply-adds over that."""

    def second(products, linears, x):
        products([(w.weight, w.scale, x, 0, w.out_features) for w in linears])
        return 1.0

    monkeypatch.setattr(full, "_seconds", second)
    found = {(r.name, r.tokens): r for r in full.ratios(ProceduralStore("mini"), MACHINE.read, MACHINE.fma, (1, 2), swept=1)}
    one = found["attn.wq_b", 1]
    info = ProceduralStore("mini").tensors["layers.0.attn.wq_b.weight"]
    assert one.of_peak == info.nbytes / MACHINE.fma and found["attn.wq_b", 2].of_peak == 2 * one.of_peak
    assert one.of_read == (info.nbytes + ProceduralStore("mini").tensors["layers.0.attn.wq_b.scale"].nbytes) / MACHINE.read


def test_a_layers_share_is_of_its_products_and_of_all_it_does():
    """With a peak of one multiply-add a second."""
    (p,) = [p for p in full.prefill(ProceduralStore("mini"), 1.0, tokens=64) if p.kind == "csa"]
    done = sum(_multiply_adds(ProceduralStore("mini"), p.layer, 64))
    assert round(p.of_peak * p.seconds) == round(done) and p.in_products > p.of_peak


def _multiply_adds(store, layer, tokens):
    """Of each weight that products take: all but wo_a's and the experts' see every token with all they have."""
    c, prefix = store.config, f"layers.{layer}."
    for name, info in store.tensors.items():
        if name.startswith(prefix) and info.dtype in ("F8_E4M3", "BF16", "I8") and len(info.shape) == 2:
            columns = info.shape[1] * (2 if info.dtype == "I8" else 1)
            share = tokens * (c.num_experts_per_tok / c.n_routed_experts if ".experts." in name else 1)
            yield info.shape[0] * columns * share


def test_a_streamed_generation_prints_them(capsys, monkeypatch):
    monkeypatch.setattr(limits_of, "measure", lambda most: MACHINE)
    assert main(["generate", "--model", "procedural:mini", "--ids", "0,5,17", "--max-new-tokens", "2", "--memory", "1M"]) == 0
    err = capsys.readouterr().err
    assert "token bound" in err and "binds" in err and "read 30.0 GB/s (one thread 16.0)" in err
    assert "0.00 s by memory (0.0 GB), 0.00 s" in err and "products" in err
