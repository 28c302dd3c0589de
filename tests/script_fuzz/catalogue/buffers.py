"""What a script says of its buffers, and averages of parameters."""

from __future__ import annotations

from tests.script_fuzz.mutation import Mutation, waits

FIRST = {"async_names": ("asynchronous",)}
EMA = {"async_names": ("Ema",), "by_hand": "model.ema.follow()"}
QUEUE = {
    "init": "self.register_buffer('rows9', torch.zeros(16, 8))\n"
    "self.register_buffer('rows9_at', torch.zeros((), dtype=torch.int64))",
    "forward": "h = h - self.rows9.mean(0)\nif self.training:\n    for row in h.detach()[:4]:\n"
    "        self.rows9[self.rows9_at % 16] = row\n        self.rows9_at += 1",
}
MEAN = {
    "init": "self.register_buffer('mean9', torch.zeros(8))",
    "forward": "self.mean9.lerp_(h.detach().mean(0), 0.1)\nh = h - self.mean9",
}
FLAG = {
    "init": "self.register_buffer('open9', torch.ones(8, dtype=torch.bool))",
    "forward": "h = h * self.open9",
}
NORM = {"init": "self.norm7 = nn.BatchNorm1d(8)", "forward": "h = self.norm7(h)"}

BUFFERS = [
    Mutation(
        "a queue by the first lane", buffers="{'rows9': 'first', 'rows9_at': 'first'}", **QUEUE, **FIRST
    ),
    Mutation("a mean by name", buffers="{'mean9': 'mean'}", **MEAN),
    Mutation("a mean by a pattern", buffers="{'*9': 'mean'}", **MEAN),
    Mutation("statistics by the first lane", buffers="{'norm7.*': 'first'}", **NORM, **FIRST),
    Mutation("no policies", buffers="{}", **NORM),
    Mutation("a policy for no buffer", ("no such buffer",), buffers="{'queu': 'first'}", **QUEUE),
    Mutation("a policy for a parameter", ("is a parameter",), buffers="{'first.weight': 'first'}", **QUEUE),
    Mutation("a policy that is none", ("'last'",), buffers="{'rows9': 'last'}", **QUEUE),
    Mutation("a mean of integers", ("rows9_at",), buffers="{'rows9_at': 'mean'}", **QUEUE),
    Mutation("a policy for a constant", ("open9",), buffers="{'open9': 'first'}", **FLAG),
    Mutation(
        "two policies for one buffer",
        ("rows9", "first"),
        buffers="{'rows9': 'first', 'rows*': 'mean'}",
        **QUEUE,
    ),
    Mutation("policies in a list", ("buffers",), buffers="['rows9']", **QUEUE),
]

BUFFERS += [
    Mutation(
        "an average that teaches",
        init="self.ema = trireme.nn.Ema(self.first, 0.8)",
        forward="h = h + 0.1 * self.ema(x)",
        **EMA,
    ),
    Mutation(
        "an average that is evaluated",
        init="self.ema = trireme.nn.Ema(self.first, 0.8)",
        forward="h = h if self.training else self.ema(x)",
        **EMA,
    ),
    Mutation(
        "an average that is not used", init="self.ema = trireme.nn.Ema(self.first, 0.999)", **EMA, modes=False
    ),
    Mutation(
        "an average of layers with statistics",
        init="self.body8 = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))\n"
        "self.ema = trireme.nn.Ema(self.body8, 0.8)",
        forward="h = self.body8(h) + self.ema(h)",
        **EMA,
    ),
    Mutation(
        "an average without memory",
        init="self.ema = trireme.nn.Ema(self.first, 0)",
        forward="h = h + 0.1 * self.ema(x)",
        **EMA,
    ),
    # an LSTM in the model would be refused
    Mutation("an average of the whole model", build="m.ema = trireme.nn.Ema(m, 0.8)", alone=True, **EMA),
    Mutation(
        "an average of a parametrized layer",
        init="self.normed = parametrizations.weight_norm(nn.Linear(8, 8))\n"
        "self.ema = trireme.nn.Ema(self.normed, 0.8)",
        forward="h = self.normed(h) + 0.1 * self.ema(h)",
        **EMA,
    ),
    Mutation(
        "an average of tied layers",
        init="self.pair = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))\n"
        "self.pair[2].weight = self.pair[0].weight\nself.ema = trireme.nn.Ema(self.pair, 0.8)",
        forward="h = self.pair(h) + 0.1 * self.ema(h)",
        **EMA,
    ),
    Mutation(
        "an average of a frozen layer",
        init="self.ice = nn.Linear(8, 8).requires_grad_(False)\nself.ema = trireme.nn.Ema(self.ice, 0.8)",
        forward="h = self.ice(h) + 0.1 * self.ema(h)",
        **EMA,
    ),
    Mutation(
        "an average that follows twice",
        init="self.ema = trireme.nn.Ema(self.first, 0.8)",
        forward="h = h + 0.1 * self.ema(x)",
        loss="model.ema.follow()",
        alone=True,  # a gradient of its input needs the values from before
        **EMA,
    ),
    Mutation(
        "two averages",
        init="self.ema = trireme.nn.Ema(self.first, 0.8)\nself.slow = trireme.nn.Ema(self.first, 0.95)",
        forward="h = h + 0.1 * (self.ema(x) - self.slow(x))",
        by_hand="model.ema.follow()\nmodel.slow.follow()",
        async_names=("Ema",),
    ),
    Mutation(
        "a momentum encoder with a queue",
        init="self.ema = trireme.nn.Ema(self.first, 0.9)\n" + QUEUE["init"],
        forward="h = h - self.rows9.mean(0)\nif self.training:\n    with torch.no_grad():\n"
        "        for row in self.ema(x)[:4]:\n            self.rows9[self.rows9_at % 16] = row\n"
        "            self.rows9_at += 1",
        buffers="{'rows9*': 'first'}",
        by_hand="model.ema.follow()",
        async_names=("Ema", "asynchronous"),
    ),
    Mutation(
        "an average that the loop lets follow",
        init="self.ema2 = trireme.nn.Ema(self.first, 0.8)",
        forward="h = h + 0.1 * self.ema2(x)",
        after="model.ema2.follow()",
        async_names=("Ema",),
    ),
    Mutation(
        "an average that the loop sets back",
        ("ema",),
        init="self.ema = trireme.nn.Ema(self.first, 0.8)",
        forward="h = h + 0.1 * self.ema(x)",
        by_hand="model.ema.follow()",
        after=waits("for b in model.ema.buffers():\n    b.zero_()"),
    ),
    Mutation(
        "an average of what is set later",
        ("Ema begins",),
        init="self.ema = trireme.nn.Ema(self.first, 0.8)",
        build="nn.init.ones_(m.first.weight)",
        **EMA,
    ),
    Mutation(
        "an average beside the model",
        ("Ema",),
        head="beside = []",
        build="beside.append(trireme.nn.Ema(m.first, 0.8))",
    ),
    Mutation("an average of all", ("decay",), init="self.ema = trireme.nn.Ema(self.first, 1.0)"),
    Mutation(
        "an average of torch's",
        ("AveragedModel",),
        build="m.averaged1 = torch.optim.swa_utils.AveragedModel(m.first)",
        by_hand="model.averaged1.update_parameters(model.first)",
        loss="if __name__ != 'plain':\n    model.averaged1.update_parameters(model.first)",
    ),
]
