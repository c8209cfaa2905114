"""What stays and what comes next, by bytes alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reference.checkpoint.residency import Part, ReadAhead, Residency

MEMORY, SPARE, TOGETHER = 100, 20, 2
uses = st.lists(st.tuples(st.sampled_from("de"), st.integers(0, 9)), max_size=60)


def size(kind: str, number: int) -> int:
    return {"d": 17, "e": 6}[kind] + number


class Slow:
    """The same rules with a list of what is there, oldest first."""

    def __init__(self) -> None:
        self.held: list[Part] = []
        self.passing: list[Part] = []
        self.experts: list[Part] = []

    def there(self) -> int:
        return sum(part.nbytes for part in self.held + self.passing + self.experts)

    def use(self, kind: str, part: Part) -> set[str]:
        before = {p.name for p in self.passing + self.experts}
        if kind == "d" and part not in self.passing:
            self.passing = []
            if part not in self.held:
                fits = sum(p.nbytes for p in self.held) + part.nbytes + SPARE <= MEMORY
                (self.held if fits else self.passing).append(part)
        if kind == "e":
            self.experts = [p for p in self.experts if p != part] + [part]
        while self.there() > MEMORY and len(self.experts) > TOGETHER:
            self.experts.pop(0)
        return before - {p.name for p in self.passing + self.experts}


@given(uses)
def test_any_history_leaves_what_the_slow_account_leaves(history):
    quick, slow = Residency(MEMORY, SPARE, TOGETHER), Slow()
    for kind, number in history:
        part = Part(f"{kind}{number}", size(kind, number))
        left = quick.use(part) if kind == "e" else quick.enter(part)
        assert set(left) == slow.use(kind, part) and len(left) == len(set(left))
        assert quick.nbytes == slow.there() and part.name in quick
        assert not any(name in quick for name in left)


@given(uses)
def test_memory_holds_what_it_says(history):
    """Beyond it there are at most one dense part and the experts of a call."""
    residency = Residency(MEMORY, SPARE, TOGETHER)
    for kind, number in history:
        part = Part(f"{kind}{number}", size(kind, number))
        (residency.use if kind == "e" else residency.enter)(part)
        assert residency.nbytes <= MEMORY or residency.nbytes <= MEMORY - SPARE + size("d", 9) + TOGETHER * size("e", 9)


def test_dense_parts_come_first_and_push_experts_out():
    residency = Residency(MEMORY, SPARE, TOGETHER)
    for e in range(5):
        residency.use(Part(f"e{e}", 16))
    assert residency.enter(Part("a", 40)) == ["e0", "e1"] and residency.stays("a")
    assert residency.enter(Part("b", 40)) == ["e2"] and residency.stays("b")  # 80 and 20 spare: it just fits
    assert residency.enter(Part("c", 1)) == [] and not residency.stays("c")
    assert residency.enter(Part("d", 1)) == ["c"]
    assert residency.enter(Part("a", 40)) == ["d"] and residency.enter(Part("a", 40)) == []


def test_what_must_stay_does():
    residency = Residency(10, SPARE, TOGETHER)
    residency.hold(Part("head", 50))
    residency.hold(Part("head", 50))
    assert residency.enter(Part("head", 50)) == [] and residency.nbytes == 50


def test_no_more_is_asked_for_than_the_window_holds():
    asked: list[str] = []
    ahead = ReadAhead(asked.append, window=10)
    ahead.expect([Part("a", 4), Part("b", 6), Part("c", 1)])
    assert asked == ["a", "b"]
    ahead.expect([Part("b", 6), Part("d", 30)])  # b is on its way
    ahead.take("a")
    assert asked == ["a", "b", "c"]
    ahead.take("b")
    assert asked == ["a", "b", "c"]
    ahead.take("c")  # larger than the window, it comes alone
    assert asked == ["a", "b", "c", "d"]


def test_a_part_taken_before_its_turn_is_not_asked_for():
    asked: list[str] = []
    ahead = ReadAhead(asked.append, window=5)
    ahead.expect([Part("a", 5), Part("b", 5), Part("c", 5)])
    ahead.take("b")
    ahead.take("a")
    assert asked == ["a", "c"]
    ahead.clear()
    ahead.expect([Part("c", 5)])
    assert asked == ["a", "c", "c"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40), st.integers(1, 30))
def test_everything_expected_is_asked_for_once_and_within_the_window(history, window):
    out: dict[str, int] = {}
    sent: list[str] = []

    def prefetch(name: str) -> None:
        sent.append(name)
        out[name] = int(name)
        assert sum(out.values()) <= window or len(out) == 1

    ahead, taken = ReadAhead(prefetch, window), set()
    for expected, number in history:
        name = str(number)
        if expected and name not in taken:
            ahead.expect([Part(name, number)])
        elif not expected:
            out.pop(name, None)
            taken.add(name)
            ahead.take(name)
    assert len(sent) == len(set(sent))
