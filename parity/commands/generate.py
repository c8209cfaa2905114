"""`v4parity generate`: text from a model of any size, its layers streamed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .. import options
from ..progress import Progress
from ..tokens import FileTokenizer, load_tokenizer

PRODUCTS = ("avx512", "vector", "plain", "torch")

if TYPE_CHECKING:
    from torch import Tensor

    from reference.checkpoint.loader import Loader
    from reference.checkpoint.store import WeightStore

    from ..bench.limits import Limits


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate text with the reference or the engine, layer by layer",
        description="Greedy or sampled generation. A model larger than --memory is streamed: each layer is read, used "
        "and dropped, experts are read when a token asks for them. Tokens go to stdout, everything else to stderr.",
    )
    options.add_model(parser, "procedural:mini")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text, encoded with the model's tokenizer after a bos token")
    prompt.add_argument("--ids", type=options.token_ids, metavar="IDS", help="token ids as they are, 0,5,17")
    parser.add_argument("--max-new-tokens", type=options.positive, default=16, metavar="N", help="default 16")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (default 0)")
    options.add_engine(parser)
    options.add_arithmetic(parser)
    parser.add_argument("--products", choices=PRODUCTS, help="who multiplies with the reference's weights (docs/cpu.md; "
                        "default: the quickest that this CPU can run)")  # fmt: skip
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    import torch

    from reference.checkpoint.open import open_store
    from reference.errors import BadInput

    if options.wrong_engine(args):
        return 2
    if args.temperature < 0:
        raise BadInput(f"temperature {args.temperature} is negative")
    store = open_store(args.model)
    tokenizer = load_tokenizer(args.model, store.config.vocab_size) if args.prompt is not None else None
    ids = [store.config.bos_token_id, *tokenizer.encode(args.prompt)] if tokenizer else args.ids
    began, shown = time.perf_counter(), ""
    seconds: list[float] = []
    work: list[tuple[int, int]] = []  # bytes touched and multiply-adds, up to each token
    made: list[int] = []
    with Progress(store.config.num_hidden_layers, "layer") as progress:
        tokens, loader = start(args, store, torch.tensor(ids), lambda i, _: progress.at(i + 1))
        for token in tokens:
            seconds.append(time.perf_counter() - began)
            work.append((store.bytes_read, loader.products.multiply_adds if loader and loader.products else 0))
            began = time.perf_counter()
            made.append(token)
            shown = _show(progress, tokenizer, made, shown)
            progress.note(f"token {len(made)}: {seconds[-1]:.1f} s, {options.show_bytes(store.bytes_read)} touched")
    print()
    _summary(args, len(ids), made, seconds, store, loader)
    if loader and not loader.resident:
        print("\n".join(bound_lines(seconds, work, measure_limits())), file=sys.stderr)
    return 0


def measure_limits() -> Limits:
    from ..bench.limits import measure

    return measure()


def bound_lines(seconds: list[float], work: list[tuple[int, int]], limits: Limits) -> list[str]:
    """The prompt's and the mean later token's time beside its bounds; `work` adds up from token to token."""
    from ..bench.limits import SHARE_OF_PEAK, bounds

    peak = f"{limits.fma / 1e9:.0f} G multiply-adds/s ({SHARE_OF_PEAK:.0%} granted)"
    lines = [f"limits          read {limits.read / 1e9:.1f} GB/s (one thread {limits.read_one / 1e9:.1f}), {peak}"]
    later = len(seconds) - 1
    steps = [("prompt bound", seconds[0], work[0])]
    if later:
        nbytes, multiply_adds = ((last - first) // later for first, last in zip(work[0], work[-1], strict=True))
        steps.append(("token bound", sum(seconds[1:]) / later, (nbytes, multiply_adds)))
    for what, took, (nbytes, multiply_adds) in steps:
        b = bounds(nbytes, multiply_adds, limits)
        lines.append(f"{what:15} {b.memory:.2f} s by memory ({nbytes / 1e9:.1f} GB), {b.arithmetic:.2f} s by arithmetic: "
                     f"{b.binds} binds, took {took / b.seconds:.1f}x")  # fmt: skip
    return lines


def start(
    args: argparse.Namespace, store: WeightStore, prompt: Tensor, on_layer: Callable[[int, Tensor], None]
) -> tuple[Iterator[int], Loader | None]:
    """The tokens after the prompt, and, where the reference computes, what loads its weights."""
    import torch

    from optimized.cpu.fused import Products
    from reference.generate import Sampling, generate, sample
    from reference.model import Model
    from reference.rounding import profile

    sampling = Sampling(args.temperature, args.seed)
    if args.engine == "reference":
        products = Products(args.products)
        model = Model(store, options.DTYPES[args.dtype], profile(args.profile), args.memory, products=products)
        return generate(model, prompt, args.max_new_tokens, sampling, on_layer), model.loader
    from optimized import generate as optimized

    engine = options.open_engine(args, store, [len(prompt) + args.max_new_tokens])
    random = torch.Generator().manual_seed(args.seed)

    def choose(logits: Tensor) -> int:
        return sample(logits.cpu(), sampling, random)

    return optimized.generate(engine, prompt, args.max_new_tokens, choose, on_layer), None


def products_of(loader: Loader) -> str:
    """Who multiplied, and on how many threads."""
    import numba

    return f"{getattr(loader.products, 'kernels', 'torch')}, {numba.get_num_threads()} threads"


def _show(progress: Progress, tokenizer: FileTokenizer | None, made: list[int], shown: str) -> str:
    """Write what the last token adds; half a character waits for its other half. Returns all text so far."""
    text = tokenizer.decode(made) if tokenizer else " ".join(map(str, made))
    if text.endswith("\ufffd"):
        return shown
    progress.write(text[len(shown) :])
    return text


def _summary(
    args: argparse.Namespace, prompt: int, made: list[int], seconds: list[float], store: WeightStore, loader: Loader | None
) -> None:
    later = seconds[1:] or seconds
    total = store.config.n_routed_experts * store.config.num_hidden_layers
    kept = ("resident, " if loader.resident else "streamed, ") if loader else ""
    how = f"{kept}{options.arithmetic(args)}, {args.profile}"
    lines = [
        f"model           {store.identity} ({how})",
        f"tokens          {prompt} prompt, {len(made)} new: {' '.join(map(str, made))}",
        f"first token     {seconds[0]:.2f} s; then {sum(later) / len(later):.2f} s per token",
        f"bytes touched   {store.bytes_read:,} ({options.show_bytes(store.bytes_read)})",
    ]
    if loader:
        lines.append(f"products        {products_of(loader)}")
        lines.append(f"experts hit     {len(loader.experts_used):,} of {total:,}, read {loader.experts_read:,} times")
    lines.append(f"peak RSS        {options.show_bytes(options.peak_rss())}")
    print("\n" + "\n".join(lines), file=sys.stderr)
