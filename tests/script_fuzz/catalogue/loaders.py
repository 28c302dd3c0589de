"""A DataLoader instead of a dataset. `rows()` are the records, as a list."""

from __future__ import annotations

from tests.script_fuzz.mutation import Mutation

DATA = "torch.utils.data"
LOADER = f"{DATA}.DataLoader(rows(), batch_size=8{{}})"
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


def loader(name: str, arguments: str, *names: str, **more: object) -> Mutation:
    given = {"loader": LOADER.format(arguments), "alone": True, **more}
    return Mutation(f"a loader {name}", names, **given)  # type: ignore[arg-type]


LOADERS = [
    loader("that shuffles", ", shuffle=True"),
    loader("in order", "", settings=IN_ORDER),
    loader("with its own collate", f", shuffle=True, collate_fn=lambda rows: {DATA}.default_collate(rows)"),
    loader("with workers", ", shuffle=True, num_workers=2, pin_memory=True"),
    loader("with a generator", ", shuffle=True, generator=torch.Generator()", "generator"),
    loader("with a sampler of indices", ", sampler=list(reversed(range(28)))", "the sampler list"),
    loader("with code for workers", ", shuffle=True, worker_init_fn=print", "worker_init_fn"),
    loader(
        "with a batch sampler",
        "",
        "batch_sampler",
        loader=f"{DATA}.DataLoader(rows(), batch_sampler=[[0, 1], [2, 3]])",
    ),
    loader(
        "over a stream",
        "",
        "IterableDataset",
        head=STREAM,
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
