"""Buffers and other state that forward changes; random numbers."""

from __future__ import annotations

from tests.script_fuzz.mutation import STEP, Mutation

AT = f"if calls[0] == {STEP + 1}:\n    "  # in forward of step STEP the loss has counted it already

STATE = [
    Mutation(
        "running mean",
        init="self.register_buffer('mean', torch.zeros(8))",
        forward="self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)\nh = h - self.mean",
    ),
    Mutation(
        "running mean, assigned",
        init="self.register_buffer('mean1', torch.zeros(8))",
        forward="self.mean1 = 0.9 * self.mean1 + 0.1 * h.detach().mean(0)\nh = h - self.mean1",
    ),
    Mutation(
        "counter",
        init="self.register_buffer('seen', torch.zeros((), dtype=torch.int64))",
        forward="self.seen += len(x)\nh = h / (1 + self.seen)",
    ),
    Mutation(
        "not persistent",
        init="self.register_buffer('fleeting', torch.zeros(8), persistent=False)",
        forward="self.fleeting += h.detach().mean(0)\nh = h - self.fleeting",
    ),
    Mutation(
        "queue",
        init="self.register_buffer('queue', torch.zeros(16, 8))\n"
        "self.register_buffer('at', torch.zeros((), dtype=torch.int64))",
        forward="h = h - self.queue.mean(0)\nfor row in h.detach()[:4]:\n"
        "    self.queue[self.at % 16] = row\n    self.at += 1",
    ),
    Mutation(
        "constants of all dtypes",
        init="for number, dtype in enumerate((torch.bool, torch.uint8, torch.int8, torch.int16, "
        "torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)):\n"
        "    self.register_buffer(f'constant{number}', torch.ones(3, dtype=dtype))",
        forward="h = h + self.constant0[0] + self.constant4[1]",
    ),
    Mutation(
        "float64 constant",
        ("constant64",),
        init="self.register_buffer('constant64', torch.ones(8, dtype=torch.float64))",
        forward="h = h + self.constant64.float()",
    ),
    Mutation(
        "float64 state",
        ("state64",),
        init="self.register_buffer('state64', torch.zeros(8, dtype=torch.float64))",
        forward="self.state64 += h.detach().mean(0)\nh = h - self.state64.float()",
    ),
    Mutation(
        "complex constant",
        ("rotary",),
        init="self.register_buffer('rotary', torch.polar(torch.ones(4), torch.arange(4.0)))",
        forward="h = h + torch.view_as_real(self.rotary).flatten()",
    ),
    Mutation(
        "complex state",
        ("turning",),
        init="self.register_buffer('turning', torch.ones(4, dtype=torch.complex64))",
        forward="self.turning.mul_(1j)\nh = h + torch.view_as_real(self.turning).flatten()",
    ),
    Mutation(
        "int32 state",
        ("count32",),
        init="self.register_buffer('count32', torch.zeros((), dtype=torch.int32))",
        forward="self.count32 += 1\nh = h / self.count32",
    ),
    Mutation(
        "bool state",
        ("flag",),
        init="self.register_buffer('flag', torch.zeros(8, dtype=torch.bool))",
        forward="self.flag |= h.detach()[0] > 0\nh = h * self.flag",
    ),
    Mutation(
        "uint8 state",
        ("mask8",),
        init="self.register_buffer('mask8', torch.zeros(8, dtype=torch.uint8))",
        forward="self.mask8.add_(1)\nh = h / self.mask8",
    ),
    Mutation(
        "another shape",
        ("window",),
        init="self.register_buffer('window', torch.zeros(2, 8))",
        forward=f"h = h - self.window.mean(0)\n{AT}self.window = torch.cat([self.window, h.detach()[:1]])",
    ),
    Mutation(
        "another dtype",
        ("narrower",),
        init="self.register_buffer('narrower', torch.full((8,), 0.3))",
        forward=f"h = h - self.narrower\n{AT}self.narrower = self.narrower.half()",
    ),
    Mutation(
        "a buffer that comes later",
        ("latecomer",),
        forward=f"h = h - getattr(self, 'latecomer', 0.0)\n{AT}self.register_buffer('latecomer', "
        "h.detach().mean(0))",
    ),
    Mutation(
        "a buffer that goes",
        ("leaver",),
        init="self.register_buffer('leaver', torch.ones(8))",
        forward=f"h = h if self.leaver is None else h - self.leaver\n{AT}self.leaver = None",
    ),
    Mutation(
        "a teacher that follows",
        ("teacher",),
        init="self.teacher = nn.Linear(5, 8).requires_grad_(False)",
        forward="with torch.no_grad():\n"
        "    self.teacher.weight.mul_(0.9).add_(self.first.weight, alpha=0.1)\nh = h - self.teacher(x)",
    ),
    Mutation(
        "a teacher that follows through data",
        ("teacher1",),
        init="self.teacher1 = nn.Linear(5, 8).requires_grad_(False)",
        forward="self.teacher1.weight.data.mul_(0.9).add_(self.first.weight.data, alpha=0.1)\n"
        "h = h - self.teacher1(x)",
    ),
    Mutation(
        "a parameter clamped in forward",
        ("first.weight",),
        forward="with torch.no_grad():\n    self.first.weight.clamp_(-0.1, 0.1)",
    ),
    Mutation(
        "a parameter clamped through data",
        ("first.weight",),
        forward="self.first.weight.data.clamp_(-0.1, 0.1)",
    ),
    Mutation("a number in forward", init="self.times = 0", forward="self.times += 1\nh = h / self.times"),
    Mutation(
        "a tensor kept",
        init="self.before = None",
        forward="h = h if self.before is None else h - self.before\nself.before = h.detach().mean(0)",
    ),
    Mutation(
        "a cache",
        head="@functools.lru_cache\ndef table(n):\n    return torch.linspace(0, 1, n)",
        forward="h = h + table(8)",
    ),
    Mutation("noise in forward", forward="h = h + 0.1 * torch.randn_like(h) * torch.rand(1)"),
    Mutation("noise in the loss", loss="value = value * (1 + 0.1 * torch.rand(()))"),
    Mutation(
        "noise of numpy and random",
        loss="value = value * (1 + 0.1 * np.random.rand() + 0.1 * random.random())",
    ),
    Mutation(
        "noise in collate",
        collate="x = torch.stack([torch.as_tensor(r['x']) for r in records])\n"
        "return {'x': x + 0.1 * torch.randn_like(x), 'y': torch.tensor([int(r['y']) for r in records])}",
    ),
    Mutation(
        "mixup",
        loss="order, share = torch.randperm(len(out)), np.random.beta(1, 1)\n"
        "value = share * value + (1 - share) * F.cross_entropy(out, batch['y'][order])",
    ),
    Mutation(
        "seeded in the loss", loss="torch.manual_seed(step)\nvalue = value * (1 + 0.1 * torch.rand(()))"
    ),
    Mutation(
        "forked generators",
        loss="with torch.random.fork_rng():\n    torch.manual_seed(1)\n    noise = torch.rand(())\n"
        "value = value * (1 + noise)",
    ),
    Mutation(
        "a generator of its own",
        ("generator",),
        head="own = torch.Generator().manual_seed(3)",
        loss="value = value * (1 + 0.1 * torch.rand((), generator=own))",
    ),
    Mutation(
        "a generator of numpy",
        ("generator", "draws"),
        head="draws = np.random.default_rng(3)",
        loss="value = value * (1 + 0.1 * draws.random())",
    ),
    Mutation(
        "a generator of the model",
        ("generator", "dice"),
        init="self.dice = torch.Generator().manual_seed(3)",
        forward="h = h + 0.1 * torch.rand(8, generator=self.dice)",
    ),
    Mutation(
        "a random of its own",
        ("generator", "lots"),
        head="lots = random.Random(3)",
        loss="value = value * (1 + 0.1 * lots.random())",
    ),
    Mutation(
        "random features of numpy",
        init="self.register_buffer('features', torch.as_tensor(np.random.randn(8).astype('float32')))",
        forward="h = h * self.features",
    ),
    Mutation("random initial values of random", build="m.first.weight.data[0, 0] = random.random()"),
    Mutation(
        "drawn in the optimizer",
        optimizer="torch.optim.SGD(m.parameters(), lr=0.05 + 0.05 * torch.rand(()).item())",
    ),
]
