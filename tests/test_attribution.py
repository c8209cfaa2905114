"""Drift split over rounding sites: the game where shares are known, the walk against the model itself, and a run that is
killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import pairwise
from math import fsum, isclose, sqrt
from pathlib import Path

import jsonschema
import pytest
import torch
from report_pages import attribution, sample
from test_report_html import Page

from parity import cli, records
from parity.attribution import files, game
from parity.attribution.keep import STATE, Kept
from parity.attribution.players import WAYS, gather, op_of, places, switches
from parity.attribution.split import Question, coalitions, split, steps
from parity.attribution.walk import Twin, drifts, plan, squared
from parity.report import attribution as report
from parity.report.html import render
from reference.checkpoint.open import open_store
from reference.errors import BadInput
from reference.model import Model
from reference.rounding import EXACT, Profile, Rounding, profile
from reference.state import SequenceState

ROOT = Path(__file__).parents[1]
STORE = open_store("procedural:mini")
IDS = torch.randint(512, (20,), generator=torch.Generator().manual_seed(3))
PLAYERS = ["a", "b", "c", "d", "e", "f"]
FAR = 0.05  # figures that do not add up miss by more than this share
ROUNDING = 2.0**-40  # relative: sums of a hundred float64 terms of one size
COVERED = game.CONFIDENCE - 3 * sqrt(game.CONFIDENCE * (1 - game.CONFIDENCE) / 40)  # of 40 independent games, three sigma


def vectors(seed: int, n: int = len(PLAYERS), width: int = 3) -> dict[str, list[float]]:
    drawn = random.Random(seed)
    return {p: [drawn.gauss(0, 1) for _ in range(width)] for p in PLAYERS[:n]}


def squares(effects: dict[str, list[float]]) -> dict[game.Coalition, float]:
    """The game of errors that add as vectors and are measured by the square of their sum."""
    sums = {c: [fsum(effects[p][i] for p in c) for i in range(3)] for c in game.subsets(list(effects))}
    return {c: fsum(x * x for x in total) for c, total in sums.items()}


def rough(seed: int) -> dict[game.Coalition, float]:
    """A game with effects that three and more have together, as flips have."""
    drawn = random.Random(seed)
    return {c: drawn.expovariate(1.0) * len(c) for c in game.subsets(PLAYERS)}


def close(a: float, b: float, size: float) -> bool:
    return abs(a - b) <= ROUNDING * size


@pytest.mark.parametrize("seed", range(5))
def test_shares_where_they_are_known(seed):
    """Of |Σ e|² every player has e·Σ e. What each does alone, |e|², does not add up to it."""
    effects = vectors(seed)
    value = squares(effects)
    everything = [fsum(e[i] for e in effects.values()) for i in range(3)]
    total = value[frozenset(PLAYERS)]
    walks = game.orders(PLAYERS, 4, seed)
    for shares in (game.exact(PLAYERS, value), game.sampled(PLAYERS, value, walks)):
        size = fsum(abs(s.share) for s in shares)
        for s in shares:
            assert close(s.share, fsum(x * y for x, y in zip(effects[s.player], everything, strict=True)), size)
            assert close(s.alone, fsum(x * x for x in effects[s.player]), size)
        assert close(fsum(s.share for s in shares), total, size)
        assert not isclose(fsum(s.alone for s in shares), total, rel_tol=FAR)
        assert not isclose(fsum(s.last for s in shares), total, rel_tol=FAR)


def test_an_order_without_its_reverse_is_not_enough():
    value = squares(vectors(1))
    one_way = [walk for walk in game.orders(PLAYERS, 8, 0)[::2]]
    exact = {s.player: s.share for s in game.exact(PLAYERS, value)}
    assert any(not close(s.share, exact[s.player], 1.0) for s in game.sampled(PLAYERS, value, one_way))


@pytest.mark.parametrize("seed", range(3))
def test_shares_of_any_game_add_up(seed):
    value = rough(seed)
    total = value[frozenset(PLAYERS)] - value[frozenset()]
    for shares in (game.exact(PLAYERS, value), game.sampled(PLAYERS, value, game.orders(PLAYERS, 4, seed))):
        assert close(fsum(s.share for s in shares), total, max(value.values()))


def covered(judge) -> float:
    """How many of the shares of 40 rough games lie within the intervals that `judge` makes of 8 pairs of orders."""
    hits = []
    for seed in range(40):
        value = rough(100 + seed)
        exact = {s.player: s.share for s in game.exact(PLAYERS, value)}
        found = game.sampled(PLAYERS, value, game.orders(PLAYERS, 8, seed))
        hits += [low <= exact[s.player] <= high for s in found for low, high in [judge(s)]]
    return sum(hits) / len(hits)


def test_intervals_hold_the_exact_share():
    assert covered(lambda s: (s.low, s.high)) >= COVERED


def test_intervals_that_are_too_narrow_or_elsewhere_are_seen():
    def narrow(s):
        margin = (s.high - s.low) / 4
        return s.share - margin, s.share + margin

    def around_alone(s):
        return s.alone - (s.high - s.low) / 2, s.alone + (s.high - s.low) / 2

    assert covered(narrow) < COVERED
    assert covered(around_alone) < COVERED


def test_quantiles_of_student():
    """Two-sided 95 % from a printed table."""
    assert [round(game.student(n), 3) for n in (4, 7, 9, 15, 29, 60)] == [2.776, 2.365, 2.262, 2.131, 2.045, 2.0]


def test_orders_come_with_their_reverse_and_from_the_seed():
    walks = game.orders(PLAYERS, 3, 5)
    assert all(a == tuple(reversed(b)) for a, b in zip(walks[::2], walks[1::2], strict=True))
    assert walks == game.orders(list(reversed(PLAYERS)), 3, 5) != game.orders(PLAYERS, 3, 6)
    needed = {frozenset(walk[:i]) for walk in walks for i in range(len(walk) + 1)}
    assert needed <= set(game.asked(PLAYERS, walks))


class Asked(dict[str, Rounding]):
    """The sites of a profile, which remembers those that were looked up."""

    def __init__(self, sites: dict[str, Rounding]) -> None:
        super().__init__(sites)
        self.seen: set[str] = set()

    def get(self, site, default=None):
        self.seen.add(site)
        return super().get(site, default)

    def __contains__(self, site):
        self.seen.add(site)
        return super().__contains__(site)


@pytest.mark.parametrize("name", ["pool-fp8", "official"])
def test_switches_are_what_the_model_rounds(name):
    """Place by place, the sites that a player switches are those that the computation asks its profile for."""
    sites = dict(profile(name).sites)
    where = places(STORE.config, range(5), True)
    every = switches(STORE.config, profile(name), where)
    seen: list[tuple[str, str]] = []
    model = Model(STORE, torch.float64)
    states = [SequenceState()]
    ids = torch.arange(129)  # one row of 128
    batch = model.batch([ids], states)
    x = torch.randn(len(ids), STORE.config.hc_mult, STORE.config.hidden_size, dtype=torch.float64)
    for place in where:
        asked = Asked(sites)
        model.sites = model.sites.__class__(Profile(name, profile(name).carrier, asked))
        if place == "embed":
            model.sites("embed", model.loader.embed(ids))
        elif place == "head":
            model.logits(x)
        else:
            block = model.loader.block(int(place.removeprefix("layer_")))
            block(x, batch, [block.attn.initial_state()], model.sites)
        seen += [(place, site) for site in asked.seen if site in sites]
    assert set(seen) == set(every)
    for by in WAYS:
        players = gather(every, profile(name), by)
        assert sum(map(len, players.values())) == len(every) and frozenset().union(*players.values()) == every


def test_parts_of_a_layer():
    assert op_of("attn.wq_a.input") == op_of("attn.wq_a") == "attn.wq_a"
    assert op_of("attn.indexer.compressor.row") == op_of("attn.indexer.wq_b.input") == "attn.indexer"
    assert op_of("attn.compressor.row") == "attn.compressor" and op_of("attn.q_head_norm.mean") == op_of("attn.q") == "attn.q"
    assert op_of("ffn.shared_experts.w2.input") == "ffn.shared_experts" and op_of("attn.o_rotated") == "attn.core"


EFFECTS = {("embed", "embed"): [3.0, 0, 0], ("layer_00", "attn.kv"): [0, 2.0, 0], ("layer_00", "ffn.out"): [1.0, 1.0, 0]}


class Linear(Twin):
    """A model whose sites add vectors: all drifts are known."""

    def step(self, place, sites, x):
        before = torch.tensor([0.0, 0, 10], dtype=torch.float64) if x is None else x
        return before + sum(torch.tensor(EFFECTS[place, s], dtype=torch.float64) for s in sites)


def test_the_walk_on_a_model_that_is_known(tmp_path):
    twin = Linear(STORE, EXACT, [IDS])
    wanted = [frozenset(), frozenset({("embed", "embed")}), frozenset({("layer_00", "attn.kv"), ("layer_00", "ffn.out")}),
              frozenset({("embed", "embed"), ("layer_00", "ffn.out")})]  # fmt: skip
    route = ["embed", "layer_00"]
    assert [len(nodes) for nodes in plan(route, wanted)[0]] == [2, 4]
    kept = Kept.open(tmp_path, {}, False)
    assert drifts(twin, route, wanted, kept, lambda done, place: None) == [0.0, 0.09, 0.1, 0.17]


def ask(ways: list[str], output: str = "streams", layers: tuple[int, ...] = (0, 1, 2), **fields) -> Question:
    twin = Twin(STORE, profile("pool-fp8"), [IDS])
    return Question(twin, layers, True, output, ways, **{"permutations": 8, "seed": 0, **fields})


def test_all_players_together_are_the_twin(tmp_path):
    """What the shares add up to is what two models put out, run as a whole."""
    question = ask(["format"], "logits", layers=tuple(range(5)))
    (splitting,) = question.splittings()
    wanted = [frozenset(), splitting.on(frozenset(splitting.players))]
    _, drift = drifts(question.twin, question.route(), wanted, Kept.open(tmp_path, {}, False), lambda done, place: None)
    out = {}
    for name in ("exact", "pool-fp8"):
        model = Model(STORE, torch.float64, profile(name))
        out[name] = model.logits(model.forward([IDS], [SequenceState()]))
    assert drift > 0 and close(drift, squared(out["pool-fp8"], out["exact"]), drift)


def test_layers_that_do_not_round_are_exact(tmp_path):
    """Only the chosen layer is split; and streams behind it are its own work."""
    question = Question(Twin(STORE, profile("pool-fp8"), [IDS]), (1,), False, "streams", ["layer", "op"], 8, 0)
    layer, op = split(question, Kept.open(tmp_path, {}, False), lambda done, place: None)
    assert [s["player"] for s in layer["shares"]] == ["layer_01"] and layer["behind"] == "layer_01"
    assert layer["drift"] == op["drift"] and layer["interaction"] == 0
    assert op["method"] == "orders" and op["permutations"] == 8
    assert all(s["low"] <= s["share"] <= s["high"] for s in op["shares"])
    assert close(fsum(s["share"] for s in op["shares"]), op["drift"], fsum(abs(s["share"]) for s in op["shares"]))


def test_coalitions_share_what_they_have_in_common():
    question = ask(["layer"])
    assert len(coalitions(question)) == 2 ** 4
    assert steps(question) == 2 + 4 + 8 + 16


TINY = ["attribute", "--layers", "0", "--by", "format,layer", "--tokens", "6"]

# Forks an attribution again and again, each resumed and killed a few steps on.
KILL = """
import os, signal, sys
from parity import cli
from parity.attribution import walk

honest, steps = walk.Twin.step, 0

def step(self, place, sites, x):
    global steps
    steps += 1
    if steps == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return honest(self, place, sites, x)

for _ in range(40):
    pid = os.fork()
    if not pid:
        walk.Twin.step = step
        os._exit(cli.main(sys.argv[1:]))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print("ended", code, flush=True)
    if code != -9:
        break
"""


def said(out: Path) -> list[records.Record]:
    return [records.deterministic(r) for r in files.read(out)]


def test_killed_again_and_again(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert cli.main([*TINY, "--out", str(whole)]) == 0
    command = [sys.executable, "-c", KILL, *TINY, "--resume", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.count("ended -9") >= 2 and done.stdout.endswith("ended 0\n"), done.stderr
    assert said(out) == said(whole)
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir()) == [
        "attribution.html", "attribution.jsonl"
    ]  # fmt: skip


def begun(out: Path, steps: int = 3) -> None:
    """An attribution that stopped after some steps."""

    class Stopped(BaseException):
        pass

    def listen(done, place):
        if done == steps:
            raise Stopped

    question = ask(["format"])
    with pytest.raises(Stopped):
        split(question, Kept.open(out, question.asked(), False), listen)


def test_another_question_is_not_resumed(tmp_path, capsys):
    begun(tmp_path)
    question = ask(["format"], seed=1)
    with pytest.raises(BadInput, match="began with another seed"):
        Kept.open(tmp_path, question.asked(), True)
    assert cli.main([*TINY, "--out", str(tmp_path)]) == 4
    assert "--resume goes on with it" in capsys.readouterr().err


def test_damage_is_named(tmp_path):
    begun(tmp_path)
    question = ask(["format"])
    (tmp_path / STATE / "embed" / "000000.safetensors").write_bytes(b"cut")
    with pytest.raises(BadInput, match=r"embed/000000\.safetensors: not readable"):
        split(question, Kept.open(tmp_path, question.asked(), True), lambda done, place: None)
    (tmp_path / files.FILE).write_text('{"record": "verdict"}\n')
    with pytest.raises(BadInput, match=r"attribution\.jsonl, line 1"):
        files.read(tmp_path)


@pytest.mark.parametrize(("words", "why"), [
    (["--by", "colour"], "no way of splitting is called 'colour'"),
    (["--permutations", "9"], "even and at least 8"),
    (["--permutations", "6"], "even and at least 8"),
    (["--profile", "exact"], "no profile 'exact' that rounds"),
    (["--layers", "mtp_0"], "no layer of the model itself"),
    (["--resume"], "--resume needs"),
])  # fmt: skip
def test_words_that_mean_nothing(words, why, capsys):
    assert cli.main(["attribute", *words]) == 2
    assert why in capsys.readouterr().err


def test_bars_are_as_long_as_the_figures():
    jsonschema.validate(attribution(), records.schema())
    (a,) = report.bars([attribution()])
    x, y = a["rows"]
    unit = report.WIDTH / 7  # from -1 to 6
    assert x["zero"] == y["zero"] == round(unit, 1)
    assert x["share_bar"] == {"x": round(unit, 1), "width": round(round(6 * unit, 1) - round(unit, 1), 1)}
    assert y["share_bar"] == {"x": 0.0, "width": round(unit, 1)} and y["whisker"] is None
    assert x["whisker"] == (round(5 * unit, 1), report.WIDTH) and x["of_drift"] == "+125.0 %"
    assert report.bars([attribution(0.0)])[0]["rows"][0]["of_drift"] == "–"


def test_a_page_of_its_own_and_in_a_run():
    for text in (report.render([attribution()]), render([*sample()[:-1], attribution(), sample()[-1]])):
        page = Page(text)
        assert page.loads == [] and "<b>x</b>" not in text and "Where the drift comes from" in page.said
        assert "+125.0 %" in page.said and "Interaction +37.5 %" in page.said
    assert "Where the drift comes from" not in Page(render(sample())).said


def test_beside_a_run(tmp_path, capsys):
    """In a run's directory the run's page shows the attribution, and `report` finds it again."""
    (tmp_path / records.FILE).write_text("".join(json.dumps(r) + "\n" for r in sample()))
    assert cli.main([*TINY, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "100 %" in printed and "interaction" in printed and "index.html" in printed
    page = (tmp_path / "index.html").read_text()
    assert "Where the drift comes from" in page
    assert cli.main(["report", str(tmp_path), "--html", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == page


def test_shares_add_up_and_are_listed_largest_first(tmp_path):
    (record,) = split(ask(["format"], layers=(0,)), Kept.open(tmp_path, {}, False), lambda done, place: None)
    jsonschema.validate(record, records.schema())
    size = fsum(abs(s["share"]) for s in record["shares"])
    assert record["method"] == "all subsets" and record["drift"] > 0
    assert close(fsum(s["share"] for s in record["shares"]), record["drift"], size)
    assert not isclose(record["alone"], record["drift"], rel_tol=FAR)
    assert all(a["share"] >= b["share"] for a, b in pairwise(record["shares"]))
