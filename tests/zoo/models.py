"""The zoo: small models of the kinds that people bring, each as parts of a script, with what it is in plain
PyTorch where that is written otherwise there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Records = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
RECORDS = 60
SGD = "def optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)\n"
CROSS_ENTROPY = "def loss(model, batch):\n    return F.cross_entropy(model(batch['x']), batch['y'])\n"


def of_classes(numbers: np.random.Generator) -> Records:
    """Three classes of points that planes separate."""
    x = numbers.standard_normal((RECORDS, 5)).astype(np.float32)
    return x, (x @ numbers.standard_normal((5, 3))).argmax(1)


def graphs(numbers: np.random.Generator) -> Records:
    """Of three to six nodes: three numbers and a row of the adjacency matrix for each; rows of nodes that are
    not there are NaN. The class: whether more than half of the edges are there."""
    sizes = numbers.integers(3, 7, (RECORDS, 1, 1))
    there = np.arange(6).reshape(1, 6, 1) < sizes
    edges = np.triu(numbers.random((RECORDS, 6, 6)) < numbers.random((RECORDS, 1, 1)), 1)
    edges &= there & there.transpose(0, 2, 1)
    x = np.concatenate([numbers.standard_normal((RECORDS, 6, 3)), edges + edges.transpose(0, 2, 1)], axis=2)
    most = (sizes * (sizes - 1) / 2)[:, 0, 0]
    x = np.where(there, x, np.nan).astype(np.float32)
    return x, (edges.sum((1, 2)) > most / 2).astype(np.int64)


def points(numbers: np.random.Generator) -> Records:
    """A cloud around (2, -1)."""
    x = numbers.standard_normal((RECORDS, 2)) * 0.3 + (2, -1)
    return x.astype(np.float32), np.zeros(RECORDS, np.int64)


@dataclass(frozen=True)
class Model:
    """An entry of ZOO, from which all follows: plain PyTorch's bits with one lane, learning with four, killed
    processes, both strategies."""

    #: All but the head, and the dataset if it is arrays.
    script: str
    #: Learning is sensible if ten epochs with four lanes divide the script's `measured(model, batch)`, else
    #: the loss of all records, by this at least.
    falls: float
    #: What plain PyTorch has in place of parts of the script.
    plain: Mapping[str, str] = field(default_factory=dict)
    #: What it has beside the script, such as a `step(model, optimizers, batch)` of its own.
    beside: str = ""
    data: Callable[[np.random.Generator], Records] = of_classes
    #: Strategies with which processes are killed in every run of the tests; with the others in the soak.
    killed: tuple[str, ...] = ()
    #: The dataset is an iterable in so many shards; `by_loader`: a DataLoader gives it.
    shards: int = 0
    by_loader: bool = False


AVERAGES_IN_BUFFERS = """
class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
        for name, value in self.body.named_parameters():
            self.register_buffer("average_" + name.replace(".", "_"), value.detach().clone())

    def averages(self):
        return {n: getattr(self, "average_" + n.replace(".", "_")) for n, _ in self.body.named_parameters()}

    def forward(self, x):
        if not self.training:
            return torch.func.functional_call(self.body, self.averages(), (x,))
        with torch.no_grad():
            for (_, value), average in zip(self.body.named_parameters(), self.averages().values()):
                average.lerp_(value, 0.2)
        return self.body(x)

def model():
    return Averaged()
"""
EMA = """
class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
        self.ema = trireme.nn.Ema(self.body, 0.8)

    def forward(self, x):
        return self.body(x) if self.training else self.ema(x)

def model():
    return Averaged()
"""
# torch's first update copies, so the first one that counts is the second
BY_TORCH = """AveragedModel(self.body, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.ema.n_averaged += 1"""
UPDATED_BY_TORCH = """
def step(model, optimizers, batch):
    stepped(model, optimizers, loss(model, batch))
    model.ema.update_parameters(model.body)
"""
MOCO = """
class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.key = trireme.nn.Ema(self.query, 0.9)
        self.register_buffer("queue", F.normalize(torch.randn(32, 8), dim=1))
        self.register_buffer("queue_ptr", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        query = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            key = F.normalize(self.key(x + 0.05 * torch.randn_like(x)), dim=1)
            negatives = self.queue.clone().t()
            if self.training:
                self.queue[(self.queue_ptr + torch.arange(len(key))) % 32] = key
                self.queue_ptr.copy_((self.queue_ptr + len(key)) % 32)
        return torch.cat([(query * key).sum(1, keepdim=True), query @ negatives], dim=1) / 0.2

buffers = {"queue*": "first"}

def model():
    return MoCo()

def loss(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))

def measured(model, batch):
    # without the queue, whose rows are random at first: how well a key is told from those of all others
    query, key = model.query(batch["x"]), model.key(batch["x"] + 0.05 * torch.randn_like(batch["x"]))
    likeness = F.normalize(query, dim=1) @ F.normalize(key, dim=1).t()
    return F.cross_entropy(likeness / 0.2, torch.arange(len(query)))
"""
KEY_BY_HAND = """
class Key(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = copy.deepcopy(module).requires_grad_(False)

    def forward(self, x):
        return self.module(x)

def step(model, optimizers, batch):
    stepped(model, optimizers, loss(model, batch))
    with torch.no_grad():
        for key, query in zip(model.key.module.parameters(), model.query.parameters()):
            key.lerp_(query, 0.1)
"""
VQ_VAE = """
class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 5))
        self.register_buffer("used", torch.ones(16))
        self.register_buffer("codebook", torch.randn(16, 4) / 2)

    def forward(self, x):
        z = self.encoder(x)
        chosen = torch.cdist(z.detach(), self.codebook).argmin(1)
        code = self.codebook[chosen]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, 16).float()
                count = hot.sum(0)
                means = hot.t() @ z / count.clamp(min=1)[:, None]
                self.used.lerp_(count, 0.1)
                self.codebook.lerp_(torch.where(count[:, None] > 0, means, self.codebook), 0.3)
        return self.decoder(z + (code - z).detach()), F.mse_loss(z, code)

buffers = {"used": "mean", "codebook": "first"}

def model():
    return Quantized()

def loss(model, batch):
    made, commitment = model(batch["x"])
    return {"loss": F.mse_loss(made, batch["x"]) + 0.25 * commitment, "commitment": commitment}

def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)
"""
GNN = """
@dataclasses.dataclass
class Graphs:
    nodes: torch.Tensor
    edges: torch.Tensor
    graph: torch.Tensor
    y: torch.Tensor

def collate(records):
    nodes, edges, sizes = [], [], []
    for record in records:
        x = torch.as_tensor(record["x"])
        size = int(x[:, 0].isfinite().sum())
        edges.append(x[:size, 3:].nonzero().t() + sum(sizes))  # a block of the batch's adjacency matrix
        nodes.append(x[:size, :3])
        sizes.append(size)
    graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    y = torch.stack([torch.as_tensor(record["y"]) for record in records])
    return Graphs(torch.cat(nodes), torch.cat(edges, dim=1), graph, y)

class Convolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

class Scattered(Convolution):
    def forward(self, nodes, edges):
        gathered = torch.zeros_like(nodes).index_add_(0, edges[1], nodes[edges[0]])
        return self.own(nodes) + self.neighbours(gathered)

class Sparse(Convolution):
    def forward(self, nodes, edges):
        size = (len(nodes), len(nodes))
        near = torch.sparse_coo_tensor(edges.flip(0), torch.ones(edges.shape[1]), size, check_invariants=True)
        return self.own(nodes) + self.neighbours(torch.sparse.mm(near, nodes))

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Scattered(3, 8), Sparse(8, 8), nn.Linear(8, 2)

    def forward(self, graphs):
        h = F.relu(self.first(graphs.nodes, graphs.edges))
        h = F.relu(self.second(h, graphs.edges))
        pooled = h.new_zeros(len(graphs.y), 8).index_add_(0, graphs.graph, h)
        return self.head(pooled / torch.bincount(graphs.graph)[:, None])

def model():
    return Classifier()

def loss(model, batch):
    return F.cross_entropy(model(batch), batch.y)

def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)
"""
LORA = """
class Adapted(nn.Module):
    def __init__(self, frozen, rank=2):
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / 5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x):
        return self.frozen(x) + F.linear(F.linear(x, self.down), self.up)

def model():
    body = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    body.requires_grad_(False)
    body[0], body[2], body[4] = Adapted(body[0]), Adapted(body[2]), Adapted(body[4])
    return body

def optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.03, weight_decay=0.01)
"""
COMPILED = """
def model():
    body = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    return torch.compile(body, backend="{backend}")
"""
GAN_MODEL = """
class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

def model():
    return Gan()

def measured(model, batch):
    return (model.generator(torch.randn(500, 4)).mean(0) - batch["x"].mean(0)).norm()
"""
GAN = """
def loss(model, batch):
    made = model.generator(torch.randn(len(batch["x"]), 4))
    judge = model.discriminator
    of_judge = F.softplus(-judge(batch["x"])).mean() + F.softplus(judge(made.detach())).mean()
    of_maker = F.softplus(-judge(made)).mean()
    return {"generator": of_maker, "discriminator": of_judge}

def optimizer(model):
    return {
        "generator": torch.optim.Adam(model.generator.parameters(), lr=0.1, betas=(0.5, 0.999)),
        "discriminator": torch.optim.RMSprop(model.discriminator.parameters(), lr=0.01),
    }
"""
BOTH_STEPS_OF_A_GAN = """
def step(model, optimizers, batch):
    losses = loss(model, batch)
    of_generator, of_discriminator = optimizers
    of_discriminator.zero_grad()
    losses["discriminator"].backward()
    kept = [parameter.grad.clone() for parameter in model.discriminator.parameters()]
    of_generator.zero_grad()
    losses["generator"].backward()
    for parameter, gradient in zip(model.discriminator.parameters(), kept):
        parameter.grad = gradient
    of_discriminator.step()
    of_generator.step()
"""
GAN_IN_TURNS = """
def loss(model, batch):
    if model.training:
        model.steps += 1
    made = model.generator(torch.randn(len(batch["x"]), 4))
    judge = model.discriminator
    if int(model.steps) % 2:
        real, false = judge(batch["x"]), judge(made.detach())
        return {"discriminator": F.softplus(-real).mean() + F.softplus(false).mean()}
    return {"generator": F.softplus(-judge(made)).mean()}

def optimizer(model):
    return {
        "generator": torch.optim.AdamW(model.generator.parameters(), lr=0.1, betas=(0.5, 0.999)),
        "discriminator": torch.optim.RMSprop(model.discriminator.parameters(), lr=0.01, momentum=0.1),
    }

def scheduler(optimizer):
    return {
        "generator": torch.optim.lr_scheduler.ExponentialLR(optimizer["generator"], 0.99),
        "discriminator": torch.optim.lr_scheduler.StepLR(optimizer["discriminator"], 5, 0.9),
    }
"""
TURNS_OF_A_GAN = """
schedulers = []

def step(model, optimizers, batch):
    named = dict(zip(("generator", "discriminator"), optimizers))
    if not schedulers:
        schedulers.extend(scheduler(named).values())
        for one in optimizers:
            one._opt_called = True  # else torch warns of a scheduler that is stepped before its optimizer
    ((name, found),) = loss(model, batch).items()
    named[name].zero_grad()
    found.backward()
    named[name].step()
    for one in schedulers:
        one.step()
"""
ACTOR_CRITIC = """
class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, 3), nn.Linear(16, 1)

def model():
    return ActorCritic()

def loss(model, batch):
    seen = model.body(batch["x"])
    chances = model.actor(seen).log_softmax(1)
    action = torch.multinomial(chances.detach().exp(), 1)
    reward = (action[:, 0] == batch["y"]).float()
    value = model.critic(seen)[:, 0]
    advantage = reward - value.detach()
    of_actor = -(advantage * chances.gather(1, action)[:, 0]).mean()
    return of_actor, F.mse_loss(value, reward)

def optimizer(model):
    actor = [*model.body.parameters(), *model.actor.parameters()]
    return [torch.optim.Adam(actor, lr=0.05), torch.optim.SGD(model.critic.parameters(), 0.1, 0.9)]

def measured(model, batch):
    return 1 - model.actor(model.body(batch["x"])).softmax(1).gather(1, batch["y"][:, None]).mean()
"""
BOTH_STEPS_OF_ACTOR_AND_CRITIC = """
def step(model, optimizers, batch):
    of_actor, of_critic = loss(model, batch)
    for one in optimizers:
        one.zero_grad()
    of_actor.backward(retain_graph=True)
    kept = [parameter.grad.clone() for parameter in model.body.parameters()]
    of_critic.backward()
    for parameter, gradient in zip(model.body.parameters(), kept):
        parameter.grad = gradient  # the body is the actor's
    for one in optimizers:
        one.step()
"""
AUC = """
def model():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["x"])[:, 0], (batch["y"] > 0).float())

def evaluation_dataset():
    return dataset()

def evaluation_metrics():
    auroc = torchmetrics.classification.BinaryAUROC
    return {"exact": auroc(), "by_thresholds": auroc(thresholds=20)}

def evaluate(model, batch, metrics):
    for metric in metrics.values():
        metric.update(model(batch["x"])[:, 0].sigmoid(), (batch["y"] > 0).long())
"""
WEIGHTED = """
def dataset():
    x, y = (torch.from_numpy(np.load(HERE / name)) for name in ("x.npy", "y.npy"))
    items = [{"x": one, "y": label} for one, label in zip(x, y)]
    weights = 1 / torch.bincount(y)[y]
    return DataLoader(items, 16, sampler=WeightedRandomSampler(weights, 60), num_workers=2)

def model():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
"""
THAWING = """
class Thawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(5, 16), nn.Tanh()), nn.Linear(16, 3)
        self.body.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(self.body(x))

def model():
    return Thawing()

def loss(model, batch):
    if model.training:
        model.steps += 1
    model.body.requires_grad_(5 < int(model.steps) < 25)
    model.head.requires_grad_(not 15 < int(model.steps) < 20)
    return F.cross_entropy(model(batch["x"]), batch["y"])
"""
PLAIN_BODY = """
def model():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
"""
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    num_shards = 3

    def __init__(self, parts=(0, 1, 2)):
        self.parts = parts

    def shard(self, num_shards, index):
        return Stream(self.parts[index:index + 1])

    def __iter__(self):
        x, y = np.load(HERE / "x.npy"), np.load(HERE / "y.npy")
        for part in self.parts:
            for n in range(20 * part, 20 * part + 20):
                yield {"x": x[n], "y": y[n]}

def dataset():
    return Stream()
"""
HF_STREAM = """
import os
os.environ.setdefault("HF_HOME", str(HERE / "hf"))
import datasets

def dataset():
    files = [str(HERE / f"{part}.parquet") for part in range(3)]
    found = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return torch.utils.data.DataLoader(found.with_format("torch"), batch_size=16, num_workers=2)
"""
ZOO = {
    "averages in buffers, the mean": Model(
        AVERAGES_IN_BUFFERS + 'buffers = {"average_*": "mean"}\n' + CROSS_ENTROPY + SGD, falls=2
    ),
    "averages in buffers, the first": Model(
        AVERAGES_IN_BUFFERS + 'buffers = {"average_*": "first"}\n' + CROSS_ENTROPY + SGD, falls=2
    ),
    "trireme.nn.Ema": Model(
        EMA + CROSS_ENTROPY + SGD,
        falls=2,
        plain={"trireme.nn.Ema(self.body, 0.8)": BY_TORCH},
        beside=UPDATED_BY_TORCH,
    ),
    "MoCo": Model(
        MOCO + SGD,
        falls=1.1,
        plain={"trireme.nn.Ema(self.query, 0.9)": "Key(self.query)"},
        beside=KEY_BY_HAND,
        killed=("parameter_server",),
    ),
    "VQ-VAE": Model(VQ_VAE, falls=1.5),
    "GNN": Model(GNN, falls=1.5, data=graphs),
    "LoRA": Model(LORA + CROSS_ENTROPY, falls=2),
    "layers that thaw and freeze": Model(THAWING + SGD, falls=1.5),
    "torch.compile": Model(COMPILED.replace("{backend}", "aot_eager") + CROSS_ENTROPY + SGD, falls=2),
    "GAN": Model(GAN_MODEL + GAN, falls=2, beside=BOTH_STEPS_OF_A_GAN, data=points),
    "GAN in turns": Model(GAN_MODEL + GAN_IN_TURNS, falls=2, beside=TURNS_OF_A_GAN, data=points),
    "actor and critic": Model(ACTOR_CRITIC, falls=1.5, beside=BOTH_STEPS_OF_ACTOR_AND_CRITIC),
    "AUC by torchmetrics": Model(AUC + SGD, falls=2),
    "weighted sampler": Model(WEIGHTED + CROSS_ENTROPY + SGD, falls=2),
    "an IterableDataset in shards": Model(
        STREAM + PLAIN_BODY + CROSS_ENTROPY + SGD, falls=2, shards=3, killed=("parameter_server",)
    ),
    "streaming by Hugging Face's datasets": Model(
        HF_STREAM + PLAIN_BODY + CROSS_ENTROPY + SGD, falls=2, shards=3, by_loader=True
    ),
}
#: Kernels that a C++ compiler makes: half a minute for the first of them.
INDUCTOR = Model(COMPILED.replace("{backend}", "inductor") + CROSS_ENTROPY + SGD, falls=2)
