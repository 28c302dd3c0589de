"""What users do to a model: layers, frozen and shared parts, dtypes, what stands around parameters."""

from __future__ import annotations

from tests.script_fuzz.mutation import Mutation

MODEL = [
    Mutation("dropout", init="self.drop = nn.Dropout(0.4)", forward="h = self.drop(h)"),
    Mutation("functional dropout", forward="h = F.dropout(h, 0.3, self.training)"),
    Mutation("batch norm", init="self.norm = nn.BatchNorm1d(8)", forward="h = self.norm(h)"),
    Mutation(
        "batch norm, cumulative",
        init="self.norm0 = nn.BatchNorm1d(8, momentum=None)",
        forward="h = self.norm0(h)",
    ),
    Mutation(
        "batch norm without statistics",
        init="self.norm1 = nn.BatchNorm1d(8, track_running_stats=False)",
        forward="h = self.norm1(h)",
    ),
    Mutation(
        "frozen batch norm",
        init="self.norm2 = nn.BatchNorm1d(8)",
        forward="h = self.norm2(h)",
        build="m.norm2.eval()",
        modes=True,
    ),
    Mutation("layer norm", init="self.layer_norm = nn.LayerNorm(8)", forward="h = self.layer_norm(h)"),
    Mutation("group norm", init="self.group_norm = nn.GroupNorm(2, 8)", forward="h = self.group_norm(h)"),
    Mutation(
        "instance norm",
        init="self.instance_norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)",
        forward="h = self.instance_norm(h.view(-1, 2, 4)).reshape(-1, 8)",
    ),
    Mutation(
        "sync batch norm in eval",
        init="self.sync_norm = nn.SyncBatchNorm(8)",
        forward="h = self.sync_norm(h)",
        build="m.sync_norm.eval()",
        modes=True,
    ),
    Mutation(
        "eval of a part",
        init="self.off = nn.Dropout(0.5)",
        forward="h = self.off(h)",
        build="m.off.eval()",
        modes=True,
    ),
    Mutation(
        "a part in eval by train(False)",
        init="self.off1 = nn.Dropout(0.5)",
        forward="h = self.off1(h)",
        build="m.off1.train(False)",
        modes=True,
    ),
    Mutation(
        "embedding",
        init="self.words = nn.Embedding(9, 8, padding_idx=0)",
        forward="h = h + self.words((x[:, 0] * 3).long() % 9)",
    ),
    Mutation(
        "sparse embedding",
        init="self.rows = nn.Embedding(9, 8, sparse=True)",
        forward="h = h + self.rows(torch.arange(len(x)))",
        alone=True,
    ),
    Mutation(
        "max_norm",
        ("max_norm",),
        init="self.table = nn.Embedding(9, 8, max_norm=0.5)",
        forward="h = h + self.table((x[:, 0] * 3).long() % 9)",
    ),
    Mutation(
        "embedding bag",
        init="self.bag = nn.EmbeddingBag(9, 8)",
        forward="h = h + self.bag((x * 3).long() % 9)",
    ),
    Mutation(
        "lstm",
        init="self.lstm = nn.LSTM(8, 4, 2, dropout=0.2, bidirectional=True, batch_first=True)",
        forward="h = self.lstm(h.unsqueeze(1))[0].squeeze(1)",
    ),
    Mutation("gru cell", init="self.cell = nn.GRUCell(5, 8)", forward="h = self.cell(x, h)"),
    Mutation(
        "attention",
        init="self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)",
        forward="t = h.view(-1, 2, 4)\nh = self.attention(t, t, t)[0].reshape(-1, 8)",
    ),
    Mutation(
        "transformer layer",
        init="self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)",
        forward="h = self.layer(h.view(-1, 2, 4)).reshape(-1, 8)",
    ),
    Mutation(
        "convolution",
        init="self.conv = nn.Conv1d(2, 2, 3, padding=1)",
        forward="h = self.conv(h.view(-1, 2, 4)).reshape(-1, 8)",
    ),
    Mutation(
        "channels last",
        init="self.conv2 = nn.Conv2d(2, 2, 3, padding=1)",
        forward="h = self.conv2(h.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)).reshape(-1, 8)",
        build="m.conv2.to(memory_format=torch.channels_last)",
    ),
    Mutation(
        "transposed parameter",
        init="self.turned = nn.Parameter(torch.randn(8, 8).t())",
        forward="h = h + h @ self.turned",
    ),
    Mutation(
        "expanded buffer",
        init="self.register_buffer('wide', torch.ones(1, 8).expand(3, 8))",
        forward="h = h + self.wide[0]",
    ),
    Mutation(
        "sliced parameter",
        init="self.sliced = nn.Parameter(torch.randn(8, 16)[:, ::2])",
        forward="h = h + h @ self.sliced",
        alone=True,
        rounds=True,
    ),
    Mutation(
        "scalar parameter", init="self.scale = nn.Parameter(torch.tensor(1.5))", forward="h = h * self.scale"
    ),
    Mutation(
        "empty parameter",
        init="self.nothing = nn.Parameter(torch.zeros(0, 8))",
        forward="h = torch.cat([h, self.nothing])",
    ),
    Mutation(
        "frozen layer",
        init="self.body = nn.Linear(8, 8)",
        forward="h = self.body(h)",
        build="m.body.requires_grad_(False)",
    ),
    Mutation("frozen bias", build="m.last.bias.requires_grad = False"),
    Mutation(
        "frozen under no_grad",
        init="self.body1 = nn.Linear(8, 8).requires_grad_(False)",
        forward="with torch.no_grad():\n    h0 = self.body1(h)\nh = h + h0",
    ),
    Mutation(
        "tied",
        init="self.a = nn.Linear(8, 8)\nself.b = nn.Linear(8, 8)\nself.b.weight = self.a.weight",
        forward="h = self.b(torch.tanh(self.a(h)))",
    ),
    Mutation(
        "tied by data",
        ("d.weight", "c.weight"),
        init="self.c = nn.Linear(8, 8)\nself.d = nn.Linear(8, 8)\nself.d.weight.data = self.c.weight.data",
        forward="h = self.d(torch.tanh(self.c(h)))",
    ),
    Mutation(
        "tied to a part by data",
        ("part_of", "whole"),
        init="self.whole = nn.Parameter(torch.randn(2, 8))\nself.part_of = nn.Parameter(torch.zeros(8))\n"
        "self.part_of.data = self.whole.data[1]",
        forward="h = h * self.whole[0] + self.part_of",
    ),
    Mutation(
        "a buffer tied to a parameter",
        ("shadow", "lit"),
        init="self.lit = nn.Parameter(torch.randn(8))\nself.register_buffer('shadow', self.lit.data)",
        forward="h = h * self.lit + self.shadow",
    ),
    Mutation(
        "shared module",
        init="self.one = nn.Linear(8, 8)\nself.other = self.one",
        forward="h = self.other(torch.tanh(self.one(h)))",
    ),
    Mutation(
        "module list",
        init="self.some = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))",
        forward="for each in self.some:\n    h = torch.tanh(each(h))",
    ),
    Mutation(
        "module dict",
        init="self.named = nn.ModuleDict({'z': nn.Linear(8, 8), 'a': nn.Linear(8, 8)})",
        forward="h = self.named['z'](h) + self.named['a'](h)",
    ),
    Mutation(
        "module list of a set",
        init="self.of_set = nn.ModuleList(nn.Linear(8, 8 + 0 * len(name)) for name in sorted({'p', 'q', "
        "'r'}))",
        forward="for each in self.of_set:\n    h = torch.tanh(each(h))",
    ),
    Mutation(
        "parameter list",
        init="self.numbers = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))])",
        forward="h = h * self.numbers[0] + self.numbers[1]",
    ),
    Mutation(
        "parameter dict",
        init="self.by_name = nn.ParameterDict({'b': torch.ones(8), 'a': torch.zeros(8)})",
        forward="h = h * self.by_name['b'] + self.by_name['a']",
    ),
    Mutation(
        "no parameter and no buffer",
        init="self.register_parameter('nil', None)\nself.register_buffer('nought', None)\n"
        "self.linear = nn.Linear(8, 8, bias=False)",
        forward="h = self.linear(h)",
    ),
    Mutation(
        "weight norm",
        init="self.normed = parametrizations.weight_norm(nn.Linear(8, 8))",
        forward="h = self.normed(h)",
    ),
    Mutation(
        "old weight norm",
        init="self.old_normed = nn.utils.weight_norm(nn.Linear(8, 8))",
        forward="h = self.old_normed(h)",
    ),
    Mutation(
        "spectral norm",
        init="self.spectral = parametrizations.spectral_norm(nn.Linear(8, 8))",
        forward="h = self.spectral(h)",
    ),
    Mutation(
        "old spectral norm",
        init="self.old_spectral = nn.utils.spectral_norm(nn.Linear(8, 8))",
        forward="h = self.old_spectral(h)",
    ),
    Mutation(
        "orthogonal",
        init="self.orthogonal = parametrizations.orthogonal(nn.Linear(8, 8))",
        forward="h = self.orthogonal(h)",
    ),
    Mutation(
        "parametrised",
        head="class Symmetric(nn.Module):\n    def forward(self, w):\n"
        "        return w.triu() + w.triu(1).t()",
        init="self.symmetric = nn.Linear(8, 8)\n"
        "parametrize.register_parametrization(self.symmetric, 'weight', Symmetric())",
        forward="h = self.symmetric(h)",
    ),
    Mutation(
        "pruned",
        init="self.pruned = nn.Linear(8, 8)",
        forward="h = self.pruned(h)",
        build="prune.l1_unstructured(m.pruned, 'weight', 0.5)",
    ),
    Mutation(
        "lazy, never made",
        ("lazy", "not initialised"),
        init="self.lazy = nn.LazyLinear(8)",
        forward="h = self.lazy(h)",
    ),
    Mutation(
        "lazy, made in model()",
        init="self.lazy1 = nn.LazyLinear(8)",
        forward="h = self.lazy1(h)",
        build="m(torch.zeros(2, 5))",
    ),
    Mutation(
        "a layer that nobody uses",
        init="self.unused = nn.Linear(8, 8)",
        # one without decay, and no scheduler that makes one
        optimizer="torch.optim.SGD(m.parameters(), lr=0.1)",
        scheduler="torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)",
    ),
    Mutation(
        "a layer that nobody uses, with decay",
        init="self.unused1 = nn.Linear(8, 8)",
        optimizer="torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1)",
    ),
    Mutation(
        "a layer that is used now and then",
        ("sometimes",),
        init="self.sometimes = nn.Linear(8, 8)",
        forward="if calls[0] % 2:\n    h = self.sometimes(h)",
    ),
    Mutation(
        "double",
        ("float64",),
        build="m.double()",
        head="",
        forward="",
        loss="",
        collate="return {'x': torch.stack([torch.as_tensor(r['x']) for r in records]).double(), 'y': "
        "torch.tensor([int(r['y']) for r in records])}",
    ),
    Mutation(
        "bfloat16",
        ("bfloat16",),
        build="m.bfloat16()",
        collate="return {'x': torch.stack([torch.as_tensor(r['x']) for r in records]).bfloat16(), 'y': "
        "torch.tensor([int(r['y']) for r in records])}",
        optimizer="torch.optim.SGD(m.parameters(), lr=0.1)",
        alone=True,
    ),
    Mutation(
        "one layer in bfloat16",
        ("bfloat16", "low."),
        init="self.low = nn.Linear(8, 8).bfloat16()",
        forward="h = self.low(h.bfloat16()).float()",
    ),
    Mutation(
        "complex parameter",
        ("complex", "phase"),
        init="self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))",
        forward="h = (h * self.phase).abs()",
    ),
    Mutation(
        "integer parameter",
        init="self.codes = nn.Parameter(torch.arange(8), requires_grad=False)",
        forward="h = h + self.codes",
    ),
    Mutation(
        "a parameter beside the model",
        ("parameters that are not the model's", "not the model's"),
        head="beside = nn.Parameter(torch.ones(8))",
        forward="h = h * beside",
        optimizer="torch.optim.SGD([*m.parameters(), beside], lr=0.1)",
    ),
    Mutation(
        "a module beside the model",
        init="self.hidden_away = [nn.Linear(8, 8)]",
        forward="h = h + self.hidden_away[0](h).detach()",
    ),
    Mutation(
        "a custom parameter",
        head="class Mine(nn.Parameter):\n    pass",
        init="self.mine = Mine(torch.ones(8))",
        forward="h = h * self.mine",
    ),
    Mutation("state dict hooks", init="self._register_state_dict_hook(lambda m, state, prefix, meta: state)"),
    Mutation(
        "extra state",
        ("extra_state", "extra state"),
        init="self.extra = nn.Linear(8, 8)\nself.extra.get_extra_state = lambda: torch.tensor(3)\n"
        "self.extra.set_extra_state = lambda state: None",
    ),
    Mutation(
        "assigned afterwards",
        build="m.first.weight = nn.Parameter(m.first.weight.detach().clone() * 2)\n"
        "nn.init.zeros_(m.last.bias)",
    ),
    Mutation(
        "loaded", build="m.load_state_dict({name: value * 0.5 for name, value in m.state_dict().items()})"
    ),
    Mutation("a copy of a model", build="m = copy.deepcopy(m)", alone=True),
    Mutation(
        "checkpointed",
        forward="h = torch.utils.checkpoint.checkpoint(torch.tanh, h, use_reentrant=False)",
        head="import torch.utils.checkpoint",
    ),
    Mutation(
        "checkpointed, reentrant",
        init="self.again = nn.Linear(8, 8)",
        forward="h = torch.utils.checkpoint.checkpoint(lambda v: self.again(torch.tanh(v)), h, "
        "use_reentrant=True)",
        head="import torch.utils.checkpoint",
    ),
    Mutation(
        "its own function",
        head="class Cube(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, v):\n"
        "        ctx.save_for_backward(v)\n        return v ** 3\n    @staticmethod\n"
        "    def backward(ctx, g):\n        return 3 * ctx.saved_tensors[0] ** 2 * g",
        forward="h = Cube.apply(h)",
    ),
]
