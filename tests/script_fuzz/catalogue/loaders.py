"""A DataLoader instead of a dataset. `rows()` are the records, as a list."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from tests.script_fuzz.mutation import Mutation
from tests.script_fuzz.script import SEED
from trireme_shared.datasets.random_state import seed_of

DATA = "torch.utils.data"
BATCH = 8
LOADER = f"{DATA}.DataLoader(rows(), batch_size={BATCH}{{}})"
IN_ORDER = {"shuffle": False}
STREAM = f"""
class Stream({DATA}.IterableDataset):
    def __iter__(self): return iter(rows())
"""
SEVERAL = f"""
class Several({DATA}.Dataset):
    def __init__(self): self.rows = rows()
    def __len__(self): return len(self.rows)
    def __getitem__(self, number): return self.rows[number]
    def __getitems__(self, numbers): return [self.rows[number] for number in reversed(numbers)]
"""


GATHER = f"""
class Bag:
    def __init__(self, x, y): self.x, self.y = x, y
    def __getitem__(self, name): return getattr(self, name)

def gather(records):
    batch = {DATA}.default_collate(records)
    return {{made}}
"""
WEIGHTS = [1.0 + number % 5 for number in range(28)]
WEIGHTED = f", sampler={DATA}.WeightedRandomSampler({{}}, {{}})"
SUBSET = f"{DATA}.Subset(rows(), list(reversed(range(28))))"


def loader(name: str, arguments: str, *names: str, **more: object) -> Mutation:
    own = {"global_batch_size": BATCH}  # another one of the script would be refused
    settings = own | more.pop("settings", {})  # type: ignore[arg-type, operator]
    given = {"loader": LOADER.format(arguments), "alone": bool(names), "settings": settings, **more}
    return Mutation(f"a loader {name}", names, **given)  # type: ignore[arg-type]


def gathers(name: str, made: str) -> Mutation:
    more = {"head": GATHER.format(made=made), "collator": "gather"}
    return loader(name, ", shuffle=True, collate_fn=gather", **more)


def by_weight(epoch: int, number: int) -> int:
    """Row of a WeightedRandomSampler, from one random number of (seed, epoch, number)."""
    sums = list(accumulate(WEIGHTS))
    return bisect_right(sums, seed_of(SEED, "weights", epoch, number) / 2**63 * sums[-1])


def backwards(_: int, number: int) -> int:
    return len(WEIGHTS) - 1 - number


LOADERS = [
    loader("that shuffles", ", shuffle=True"),
    loader("in order", "", settings=IN_ORDER),
    loader("with its own collate", f", shuffle=True, collate_fn=lambda rows: {DATA}.default_collate(rows)"),
    gathers("whose batch is an object", "Bag(batch['x'], batch['y'])"),
    gathers("whose collate draws", "batch | {'x': batch['x'] + 0.1 * torch.randn_like(batch['x'])}"),
    gathers("whose batch has text", "batch | {'names': ['row'] * len(records)}"),
    loader("with workers", ", shuffle=True, num_workers=2, pin_memory=True"),
    loader(
        "without the last batch",
        ", shuffle=True, drop_last=True",
        settings={"drop_last": True},
        async_names=("schedule counts",),
    ),
    loader("by weight", WEIGHTED.format(WEIGHTS, 28), item=by_weight, settings=IN_ORDER),
    loader(
        "over a part", "", loader=f"{DATA}.DataLoader({SUBSET}, batch_size=8, shuffle=True)", item=backwards
    ),
    loader(
        "over two datasets",
        "",
        loader=f"{DATA}.DataLoader({DATA}.ConcatDataset([rows()[:9], rows()[9:]]), batch_size=8, "
        "shuffle=True)",
    ),
    loader("with a generator", ", shuffle=True, generator=torch.Generator()", "generator"),
    loader("with a sampler of indices", ", sampler=list(reversed(range(28)))", "the sampler list"),
    loader(
        "with a sampler of a part", f", sampler={DATA}.SubsetRandomSampler([1, 2])", "SubsetRandomSampler"
    ),
    loader(
        "with a sampler of a rank",
        f", sampler={DATA}.DistributedSampler(rows(), num_replicas=2, rank=0)",
        "DistributedSampler",
    ),
    loader(
        "that draws with replacement",
        f", sampler={DATA}.RandomSampler(rows(), replacement=True)",
        "RandomSampler",
    ),
    loader("that draws some", f", sampler={DATA}.RandomSampler(rows(), num_samples=8)", "RandomSampler"),
    loader("by weight, each once", WEIGHTED.format(WEIGHTS, "8, replacement=False"), "WeightedRandomSampler"),
    loader("by too few weights", WEIGHTED.format(WEIGHTS[:20], 28), "20 weights"),
    loader("with code for workers", ", shuffle=True, worker_init_fn=print", "worker_init_fn"),
    loader("of single rows", "", "batch_size=None", loader=f"{DATA}.DataLoader(rows(), batch_size=None)"),
    loader(
        "and a collate",
        ", shuffle=True, collate_fn=gather",
        "collate",
        head=GATHER.format(made="batch"),
        collate="return gather(records)",
    ),
    loader(
        "of a class of its own",
        "",
        "__iter__",
        head=f"class Twice({DATA}.DataLoader):\n    def __iter__(self):\n"
        "        for batch in super().__iter__():\n            yield batch",
        loader="Twice(rows(), batch_size=8)",
    ),
    loader(
        "with a batch sampler",
        "",
        "batch_sampler",
        loader=f"{DATA}.DataLoader(rows(), batch_sampler=[[0, 1], [2, 3]])",
    ),
    loader(
        "over a stream",
        "",
        head=STREAM,
        settings=IN_ORDER,
        streams=True,
        loader=f"{DATA}.DataLoader(Stream(), batch_size=8)",
    ),
    loader(
        "that reads several rows at once",
        "",
        "__getitems__",
        head=SEVERAL,
        loader=f"{DATA}.DataLoader(Several(), batch_size=8, shuffle=True)",
    ),
]
