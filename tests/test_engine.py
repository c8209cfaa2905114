"""The engine: its numbers are the twin's, and any way of cutting a prompt, in any company, gives the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from engine_cases import equal, left_behind, with_numerator
from kernel_cases import mutant
from torch import Tensor

from optimized import engine as engine_module
from optimized import step as step_module
from optimized.engine import Engine
from optimized.pool.allocator import PoolFull
from reference.checkpoint.procedural import ProceduralStore
from reference.errors import BadInput
from reference.model import Model
from reference.presets import preset
from reference.rounding import Profile, profile
from reference.state import SequenceState

# One layer of each kind, with mini's widths; CSA drops rows from position 3 * 4 + 3 on.
CONFIG = replace(preset("mini"), num_hidden_layers=3, compress_ratios=(0, 128, 4, 0), num_hash_layers=1, index_topk=3)
STORE = ProceduralStore(CONFIG)
LOOKAHEAD = 2
PROFILES = ["pool-fp8", "pool-bf16"]


def ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


TOKENS = ids(20)  # the window of 16 wraps, five CSA groups end, three rows of four are picked


@dataclass(frozen=True)
class OneShot:
    """`TOKENS` in one step: streams after each layer, logits, MTP's logits, and what the sequence left in the pool."""

    engine: Engine
    layers: list[Tensor]
    logits: Tensor
    drafts: Tensor
    left: list[Tensor]


@pytest.fixture(scope="module", params=PROFILES)
def one_shot(request: pytest.FixtureRequest) -> OneShot:
    engine = Engine(STORE, request.param, blocks=4, slots=4, lookahead=LOOKAHEAD)
    sequence, layers = engine.allocator.open(), []
    x = engine.step([TOKENS], [sequence], lambda _, streams: layers.append(streams))
    logits = engine.logits(x)
    left = left_behind(engine, sequence)
    drafts = engine.draft_logits(engine.draft(x[:-1], [TOKENS[1:]], [sequence]))
    return OneShot(engine, layers, logits, drafts, left)


def name_of(engine: Engine) -> str:
    return "pool-fp8" if engine.geometry.build == "2buff" else "pool-bf16"


def twin_layers(rounding: Profile) -> tuple[list[Tensor], Tensor]:
    """Streams after each layer and logits of `TOKENS` in float64."""
    layers: list[Tensor] = []
    model = Model(STORE, torch.float64, rounding)
    return layers, model.logits(model.forward([TOKENS], [SequenceState()], lambda _, x: layers.append(x)))


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def test_every_layer_is_nearer_to_the_twin_than_leaving_out_any_one_rounding(one_shot: OneShot) -> None:
    """Free running, so no bound on elements: one flipped code moves everything after it. But a rounding that the engine does
    not do, or does elsewhere, moves a layer as far as leaving it out of the twin does."""
    own = with_numerator(profile(name_of(one_shot.engine)))
    layers, logits = twin_layers(own)
    moved = [twin_layers(own.without(site))[0][0] for site in sorted(own.sites) if site not in ("rope.angle", "rope.table")]
    least = min(d for d in (distance(m, layers[0]) for m in moved) if d)
    assert distance(one_shot.layers[0], layers[0]) < least / 2
    flipped = distance(twin_layers(own.without("attn.p"))[1], logits)
    assert distance(one_shot.logits, logits) < flipped
    other = with_numerator(profile(PROFILES[1 - PROFILES.index(own.name)]))
    assert distance(one_shot.layers[0], twin_layers(other)[0][0]) > least / 2  # rows in the other form are seen


def test_drafts_are_the_reference_s(one_shot: OneShot) -> None:
    own = with_numerator(profile(name_of(one_shot.engine)))

    def drafts(rounding: Profile) -> Tensor:
        model = Model(STORE, torch.float64, rounding)
        x = one_shot.layers[-1][:-1].double()  # the engine's own streams
        return model.mtp_logits(x, [TOKENS[1:]], [SequenceState()])

    sites = ("enorm", "hnorm", "e_proj", "h_proj", "e_proj.input", "h_proj.input", "attn.kv")
    want = drafts(own)
    least = min(distance(drafts(own.without(site)), want) for site in sites)
    assert distance(one_shot.drafts, want) < least


def test_bits_depend_neither_on_the_schedule_nor_on_company(one_shot: OneShot) -> None:
    """Chunk, single token, long chunk, verify step; in the bf16 build long chunk and verify step. The company stands in
    front, so that every token has another place in each tile."""
    engine = one_shot.engine
    cuts = [3, 1, 13, 3] if name_of(engine) == PROFILES[0] else [17, 3]
    sequence, other, parts = engine.allocator.open(), engine.allocator.open(), []
    for n, part in enumerate(TOKENS.split(cuts)):
        parts.append(engine.step([ids(n + 1, seed=n), part], [other, sequence])[n + 1 :])
    streams = torch.cat(parts)
    assert equal([engine.logits(streams[:7]), engine.logits(streams[7:])], one_shot.logits.split([7, 13]))
    assert equal(left_behind(engine, sequence), one_shot.left)
    drafts = [engine.draft(streams[:9], [TOKENS[1:10]], [sequence])]
    drafts.append(engine.draft(streams[9:19], [TOKENS[10:]], [sequence]))
    assert equal([engine.draft_logits(torch.cat(drafts))], [one_shot.drafts])
    engine.allocator.free(sequence)
    engine.allocator.free(other)


def test_rows_written_before_attention_are_seen(
    one_shot: OneShot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted mistake of long chunks: the ring takes their rows while their first tokens still need the old ones."""
    if name_of(one_shot.engine) != PROFILES[0]:
        return  # one build is enough: the rows are placed by the same code
    late = "    direct = int(places.extend.max()) <= geometry.lookahead + 1\n"
    monkeypatch.setattr(engine_module, "plan_step", mutant(step_module, tmp_path, (late, "    direct = True\n")).plan_step)
    engine = one_shot.engine
    sequence = engine.allocator.open()
    wrong = engine.logits(engine.step([TOKENS], [sequence]))
    engine.allocator.free(sequence)
    assert not torch.equal(wrong, one_shot.logits)


def test_a_step_that_is_refused_changes_nothing(one_shot: OneShot) -> None:
    engine = one_shot.engine
    sequence = engine.allocator.open()
    before = engine.memory.pool.memory.clone(), engine.memory.index.memory.clone()
    for tokens, sequences, message in [
        ([], [], "needs tokens"),
        ([ids(0)], [sequence], "has no tokens"),
        ([torch.tensor([1, 512])], [sequence], "token id 512"),
        ([torch.tensor([-1])], [sequence], "token id -1"),
        ([ids(1), ids(1)], [sequence, sequence], "each sequence once"),
    ]:
        with pytest.raises(BadInput, match=message):
            engine.step(tokens, sequences)
    with pytest.raises(PoolFull):
        engine.step([ids(256 * 5)], [sequence])
    with pytest.raises(BadInput, match="MTP cannot run to 2"):  # one past nothing: LOOKAHEAD - 1 drafts on its own streams
        engine.draft(one_shot.layers[-1][:2], [ids(2)], [sequence])
    assert equal(before, (engine.memory.pool.memory, engine.memory.index.memory)) and sequence.length == 0
    engine.allocator.free(sequence)


@pytest.mark.parametrize("name", ["exact", "qat", "official", "pool-fp4"])
def test_a_profile_that_no_build_follows_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="pool-fp8 and pool-bf16"):
        Engine(STORE, name)


@pytest.mark.slow
@pytest.mark.parametrize("profile_name", PROFILES)
def test_bits_stay_across_hca_groups_and_blocks(profile_name: str) -> None:
    """270 tokens: two HCA groups end, and a second block begins, inside a chunk and at single tokens. Resident weights in
    one engine, experts one by one in the other."""
    tokens, left, logits = ids(270), [], []
    for memory, cuts in ((1 << 30, [270]), (1, [125, 1, 1, 1, 1, 124, 3, 1, 1, 1, 11])):
        engine = Engine(STORE, profile_name, blocks=2, slots=1, lookahead=LOOKAHEAD, memory=memory)
        assert engine.weights.resident == (memory > 1)
        sequence = engine.allocator.open()
        x = torch.cat([engine.step([part], [sequence]) for part in tokens.split(cuts)])
        logits.append(engine.logits(x))
        left.append(left_behind(engine, sequence))
    assert logits[0].isfinite().all()
    assert equal([logits[0]], [logits[1]]) and equal(*left)
