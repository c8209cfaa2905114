"""`v4parity generate`: text from a model of any size, its layers streamed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import options
from ..progress import Progress
from ..tokens import FileTokenizer, load_tokenizer
from ..traffic import Machine, Meter, Work, bound_lines

PRODUCTS = ("vnni", "avx512", "vector", "plain", "torch")

if TYPE_CHECKING:
    from torch import Tensor

    from reference.checkpoint.loader import Loader
    from reference.checkpoint.store import WeightStore
    from reference.generate import Text
    from reference.model import Model


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
    prompt.add_argument("--resume", type=Path, metavar="FILE", help="go on with a saved text, and keep saving it there")
    parser.add_argument("--save-state", type=Path, metavar="FILE", help="save text and state there after each token")
    parser.add_argument("--max-new-tokens", type=options.positive, default=16, metavar="N",
                        help="after the prompt, those of a resumed text included (default 16)")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (default 0)")
    options.add_engine(parser)
    options.add_arithmetic(parser)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda: the reference keeps packed weights on the GPU, "
                        "up to --memory (never run on one; default cpu); the engine runs there (its default)")  # fmt: skip
    parser.add_argument("--products", choices=PRODUCTS, help="who multiplies with the reference's weights (docs/cpu.md; "
                        "default: the quickest that this CPU can run)")  # fmt: skip
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from reference.checkpoint.open import open_store
    from reference.errors import BadInput

    if options.wrong_engine(args):
        return 2
    if args.engine != "reference" and (args.resume or args.save_state):
        print("error: --save-state and --resume need --engine reference", file=sys.stderr)
        return 2
    if args.temperature < 0:
        raise BadInput(f"temperature {args.temperature} is negative")
    options.settle_device(args.device)
    store = open_store(args.model)
    return by_reference(args, store) if args.engine == "reference" else by_engine(args, store)


def by_reference(args: argparse.Namespace, store: WeightStore) -> int:
    import torch

    from reference.generate import Sampling, extend
    from reference.saved import save_text

    if args.device == "cuda":
        torch.set_default_device("cuda")
    machine = measure(args) if streams(args, store) else None
    model = open_model(args, store)
    if machine:
        draw(store)
        warm(model.loader)
    text, how = open_text(args, store, model.loader)
    meter = Meter(lambda: work_of(model.loader), machine)
    sampling = Sampling(args.temperature, args.seed)
    with Progress(store.config.num_hidden_layers, "layer") as progress:
        tokens = extend(model, text, args.max_new_tokens, sampling, lambda i, _: progress.at(i + 1, meter.now()))
        for _ in show(args, store, progress, meter, tokens, text.made):
            if args.save_state or args.resume:
                save_text(args.save_state or args.resume, text, how)
    summary(args, text.prompt, text.made, meter, store)
    lines = [f"products        {products_of(model.loader)}", experts_line(model.loader)]
    print("\n".join(lines + (bound_lines(meter.seconds, meter.steps, machine) if machine else [])), file=sys.stderr)
    return 0


def by_engine(args: argparse.Namespace, store: WeightStore) -> int:
    import torch

    from optimized import generate as optimized
    from reference.generate import Sampling, sample

    prompt = torch.tensor(prompt_ids(args, store))
    engine = options.open_engine(args, store, [len(prompt) + args.max_new_tokens])
    random, sampling = torch.Generator().manual_seed(args.seed), Sampling(args.temperature, args.seed)

    def choose(logits: Tensor) -> int:
        return sample(logits.cpu(), sampling, random)

    meter, made = Meter(lambda: Work(store.bytes_read, 0), None), []
    with Progress(store.config.num_hidden_layers, "layer") as progress:
        tokens = optimized.generate(engine, prompt, args.max_new_tokens, choose, lambda i, _: progress.at(i + 1, meter.now()))
        made = list(show(args, store, progress, meter, tokens, []))
    summary(args, len(prompt), made, meter, store)
    return 0


def show(
    args: argparse.Namespace, store: WeightStore, progress: Progress, meter: Meter, tokens: Iterator[int], before: list[int]
) -> Iterator[int]:
    """The tokens as they come, timed and written to stdout behind those `before` them, which another run made."""
    tokenizer, made = tokenizer_for(args, store), list(before)
    shown = write(progress, tokenizer, made, "")
    for token in tokens:
        meter.token()
        made.append(token)
        shown = write(progress, tokenizer, made, shown)
        step = meter.steps[-1]
        progress.note(f"token {len(made)}: {meter.seconds[-1]:.1f} s, {options.show_bytes(step.touched)} touched")
        yield token
    print()


def tokenizer_for(args: argparse.Namespace, store: WeightStore) -> FileTokenizer | None:
    """None where ids were given, or where a resumed run finds no tokenizer: then ids are shown."""
    from reference.errors import BadInput

    if args.ids is not None:
        return None
    with suppress(*[BadInput] if args.resume else []):
        return load_tokenizer(args.model, store.config.vocab_size)
    return None


def prompt_ids(args: argparse.Namespace, store: WeightStore) -> list[int]:
    """The ids asked for: as they are, or those of a text after bos."""
    if args.prompt is None:
        return list(args.ids)
    return [store.config.bos_token_id, *load_tokenizer(args.model, store.config.vocab_size).encode(args.prompt)]


def streams(args: argparse.Namespace, store: WeightStore) -> bool:
    """Whether the model is larger than the memory for it."""
    from reference.checkpoint.loader import dense_bytes

    return dense_bytes(store, options.DTYPES[args.dtype]) > options.room_for_weights(args.memory)


def measure(args: argparse.Namespace) -> Machine:
    """What memory, multipliers and, for a directory, the disk allow; in a quarter of the memory at most."""
    from ..bench import disk
    from ..bench.limits import measure as of_memory

    files = [] if args.model.startswith("procedural:") else disk.shards(Path(args.model))
    return Machine(of_memory(args.memory // 4), disk.cold(files) if files else None)


def draw(store: WeightStore) -> None:
    """Weights that a generator makes are there before the clock starts: it is the machine that is measured."""
    from reference.checkpoint.procedural import ProceduralStore

    if isinstance(store, ProceduralStore):
        began = time.perf_counter()
        store.draw()
        print(f"weights drawn   {time.perf_counter() - began:.1f} s", file=sys.stderr)


def warm(loader: Loader) -> None:
    """And so are the kernels."""
    from optimized.cpu.fused import Products

    if isinstance(loader.products, Products):
        began = time.perf_counter()
        loader.products.warm(loader.dtype)
        print(f"kernels ready   {time.perf_counter() - began:.1f} s", file=sys.stderr)


def open_model(args: argparse.Namespace, store: WeightStore) -> Model:
    from optimized.cpu.fused import Products
    from reference.model import Model
    from reference.rounding import profile

    dtype, rounding = options.DTYPES[args.dtype], profile(args.profile)
    if args.device == "cuda":
        from reference.checkpoint.device import Cuda, DeviceStore

        return Model(DeviceStore(store, Cuda()), dtype, rounding, args.memory)
    return Model(store, dtype, rounding, options.room_for_weights(args.memory), products=Products(args.products))


def open_text(args: argparse.Namespace, store: WeightStore, loader: Loader) -> tuple[Text, dict[str, Any]]:
    """The text to go on with, new or saved, and how it is made: what must be the same when it is resumed."""
    import torch

    from reference.generate import Sampling, Text
    from reference.saved import load_text

    how = {"model": store.identity, "dtype": args.dtype, "profile": args.profile, "products": kernels_of(loader),
           "temperature": args.temperature, "seed": args.seed}  # fmt: skip
    if args.resume:
        return load_text(args.resume, how), how
    return Text.begin(torch.tensor(prompt_ids(args, store)), Sampling(args.temperature, args.seed)), how


def work_of(loader: Loader) -> Work:
    """What a loader's model has done so far."""
    from ..bench.disk import bytes_from_disk

    return Work(loader.touched, loader.products.multiply_adds if loader.products else 0, bytes_from_disk())


def kernels_of(loader: Loader) -> str:
    return str(getattr(loader.products, "kernels", "torch"))


def products_of(loader: Loader) -> str:
    """Who multiplied, and on how many threads."""
    import numba

    return f"{kernels_of(loader)}, {numba.get_num_threads()} threads"


def write(progress: Progress, tokenizer: FileTokenizer | None, made: list[int], shown: str) -> str:
    """Write what the last token adds; half a character waits for its other half. Returns all text so far."""
    text = tokenizer.decode(made) if tokenizer else " ".join(map(str, made))
    if text.endswith("\ufffd"):
        return shown
    progress.write(text[len(shown) :])
    return text


def experts_line(loader: Loader) -> str:
    total = loader.config.n_routed_experts * loader.config.num_hidden_layers
    how = "resident" if loader.resident else "streamed"
    return f"experts hit     {len(loader.experts_used):,} of {total:,}, read {loader.experts_read:,} times ({how})"


def summary(args: argparse.Namespace, prompt: int, made: list[int], meter: Meter, store: WeightStore) -> None:
    touched = sum(step.touched for step in meter.steps)
    lines = [
        f"model           {store.identity} ({options.arithmetic(args)}, {args.profile})",
        f"tokens          {prompt} prompt, {len(made)} new: {' '.join(map(str, made))}",
        f"bytes touched   {touched:,} ({options.show_bytes(touched)})",
        f"peak RSS        {options.show_bytes(options.peak_rss())}",
    ]
    if meter.seconds:
        later = meter.seconds[1:] or meter.seconds
        lines.insert(2, f"first token     {meter.seconds[0]:.2f} s; then {sum(later) / len(later):.2f} s per token")
    print("\n" + "\n".join(lines), file=sys.stderr)
