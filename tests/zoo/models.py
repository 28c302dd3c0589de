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
    """Of six nodes: three numbers and a row of the adjacency matrix for each. The class: whether more than
    half of the edges are there."""
    edges = np.triu(numbers.random((RECORDS, 6, 6)) < numbers.random((RECORDS, 1, 1)), 1)
    x = np.concatenate([numbers.standard_normal((RECORDS, 6, 3)), edges + edges.transpose(0, 2, 1)], axis=2)
    return x.astype(np.float32), (edges.sum((1, 2)) > 7).astype(np.int64)


def points(numbers: np.random.Generator) -> Records:
    """A cloud around (2, -1)."""
    x = numbers.standard_normal((RECORDS, 2)) * 0.3 + (2, -1)
    return x.astype(np.float32), np.zeros(RECORDS, np.int64)


@dataclass(frozen=True)
class Model:
    """`script`: all but head and dataset. `plain`: what plain PyTorch has in place of parts of it, and
    `beside`: what it has beside it, such as a `step(model, optimizers, batch)` of its own. `falls`: what
    `measured(model, batch)`, else the loss, is divided by at least in ten epochs with four lanes. `killed`:
    the strategies with which real processes are killed in every run of the tests; with the others only in the
    soak. `shards`: the dataset is an iterable in so many, `by_loader` given by a DataLoader."""

    script: str
    falls: float
    plain: Mapping[str, str] = field(default_factory=dict)
    beside: str = ""
    data: Callable[[np.random.Generator], Records] = of_classes
    killed: tuple[str, ...] = ()
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
    x = torch.stack([torch.as_tensor(record["x"]) for record in records])
    graph, source, target = x[:, :, 3:].nonzero(as_tuple=True)
    edges = torch.stack([graph * 6 + source, graph * 6 + target])
    y = torch.stack([torch.as_tensor(record["y"]) for record in records])
    return Graphs(x[:, :, :3].reshape(-1, 3), edges, torch.arange(len(x)).repeat_interleave(6), y)

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
        pooled = h.new_zeros(len(graphs.y), 8).index_add_(0, graphs.graph, h) / 6
        return self.head(pooled)

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
GAN = """
class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

def model():
    return Gan()

def loss(model, batch):
    made = model.generator(torch.randn(len(batch["x"]), 4))
    judge = model.discriminator
    of_judge = F.softplus(-judge(batch["x"])).mean() + F.softplus(judge(made.detach())).mean()
    fixed = {name: value.detach() for name, value in judge.named_parameters()}
    of_maker = F.softplus(-torch.func.functional_call(judge, fixed, (made,))).mean()
    return {"loss": of_judge + of_maker, "of_judge": of_judge, "of_maker": of_maker}

def optimizer(model):
    groups = [
        {"params": model.generator.parameters(), "lr": 0.02},
        {"params": model.discriminator.parameters(), "lr": 0.01},
    ]
    return torch.optim.Adam(groups, betas=(0.5, 0.999))

def measured(model, batch):
    return (model.generator(torch.randn(500, 4)).mean(0) - batch["x"].mean(0)).norm()
"""
TWO_OPTIMIZERS_OF_A_GAN = """
def optimizer(model):
    return [
        torch.optim.Adam(model.generator.parameters(), lr=0.02, betas=(0.5, 0.999)),
        torch.optim.Adam(model.discriminator.parameters(), lr=0.01, betas=(0.5, 0.999)),
    ]

def step(model, optimizers, batch):
    of_generator, of_discriminator = optimizers
    made = model.generator(torch.randn(len(batch["x"]), 4))
    of_discriminator.zero_grad()
    real, false = model.discriminator(batch["x"]), model.discriminator(made.detach())
    (F.softplus(-real).mean() + F.softplus(false).mean()).backward()
    model.discriminator.requires_grad_(False)
    of_generator.zero_grad()
    F.softplus(-model.discriminator(made)).mean().backward()
    model.discriminator.requires_grad_(True)
    of_discriminator.step()
    of_generator.step()
"""
ACTOR_CRITIC = """
class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

def losses(model, batch):
    chances = model.actor(batch["x"]).log_softmax(1)
    action = torch.multinomial(chances.detach().exp(), 1)
    reward = (action[:, 0] == batch["y"]).float()
    value = model.critic(batch["x"])[:, 0]
    advantage = reward - value.detach()
    return -(advantage * chances.gather(1, action)[:, 0]).mean(), F.mse_loss(value, reward)

def model():
    return ActorCritic()

def loss(model, batch):
    of_actor, of_critic = losses(model, batch)
    return {"loss": of_actor + of_critic, "of_actor": of_actor, "of_critic": of_critic}

def optimizer(model):
    actor, critic = model.actor.parameters(), model.critic.parameters()
    return torch.optim.Adam([{"params": actor, "lr": 0.05}, {"params": critic, "lr": 0.02}])

def measured(model, batch):
    return 1 - model.actor(batch["x"]).softmax(1).gather(1, batch["y"][:, None]).mean()
"""
TWO_OPTIMIZERS_OF_ACTOR_AND_CRITIC = """
def optimizer(model):
    actor, critic = model.actor.parameters(), model.critic.parameters()
    return [torch.optim.Adam(actor, lr=0.05), torch.optim.Adam(critic, lr=0.02)]

def step(model, optimizers, batch):
    for part, one in zip(losses(model, batch), optimizers):
        one.zero_grad()
        part.backward()
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
        x, y = numpy.load(HERE / "x.npy"), numpy.load(HERE / "y.npy")
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
        killed=("collective",),
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
    "torch.compile": Model(COMPILED.replace("{backend}", "aot_eager") + CROSS_ENTROPY + SGD, falls=2),
    "GAN": Model(GAN, falls=2, beside=TWO_OPTIMIZERS_OF_A_GAN, data=points),
    "actor and critic": Model(ACTOR_CRITIC, falls=1.5, beside=TWO_OPTIMIZERS_OF_ACTOR_AND_CRITIC),
    "AUC by torchmetrics": Model(AUC + SGD, falls=2),
    "an IterableDataset in shards": Model(
        STREAM + PLAIN_BODY + CROSS_ENTROPY + SGD, falls=2, shards=3, killed=("parameter_server",)
    ),
    "streaming by Hugging Face's datasets": Model(
        HF_STREAM + PLAIN_BODY + CROSS_ENTROPY + SGD, falls=2, shards=3, by_loader=True
    ),
}
#: Kernels that a C++ compiler makes: half a minute for the first of them.
INDUCTOR = Model(COMPILED.replace("{backend}", "inductor") + CROSS_ENTROPY + SGD, falls=2)
