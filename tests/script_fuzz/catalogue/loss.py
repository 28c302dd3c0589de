"""What a loss returns and does: to gradients, modes, the batch and the model."""

from __future__ import annotations

from tests.script_fuzz.mutation import Mutation, waits

LOSS = [
    Mutation("a dict", returns="{'loss': value, 'accuracy': (out.argmax(1) == batch['y']).float().mean()}"),
    Mutation("logged", loss="trireme.log(norm=sum(p.norm().item() for p in model.parameters()))"),
    Mutation("a loss of one element", returns="value.reshape(1)"),
    Mutation("a loss in double", loss="value = value.double()"),
    Mutation(
        "a loss that is no scalar",
        ("scalar", "shape"),
        head="",
        returns="value + torch.zeros(2) if calls[0] > 3 and __name__ != 'plain' else value",
    ),
    Mutation(
        "None as the loss",
        ("NoneType", "None"),
        returns="None if calls[0] > 3 and __name__ != 'plain' else value",
    ),
    Mutation(
        "a number as the loss",
        ("float",),
        returns="value.item() if calls[0] > 3 and __name__ != 'plain' else value",
    ),
    Mutation(
        "a loss without gradients",
        ("does not depend",),
        returns="value.detach() if calls[0] > 3 and __name__ != 'plain' else value",
    ),
    Mutation("NaN at a step", ("nan",), loss=waits("value = value * float('nan')")),
    Mutation("an infinite loss", ("inf",), loss=waits("value = value * float('inf')")),
    Mutation("a loss of 0", loss=waits("value = value * 0")),
    Mutation(
        "gradients that are not finite",
        ("not finite", "nan", "inf"),
        loss=waits("value = value + 0 * torch.sqrt(model.first.weight.sum() * 0)"),
    ),
    Mutation(
        "a NaN trained on", loss=waits("value = value * float('nan')"), settings={"on_nonfinite": "ignore"}
    ),
    Mutation(
        "decay in the loss", loss="value = value + 0.01 * sum(p.pow(2).sum() for p in model.parameters())"
    ),
    Mutation(
        "a gradient penalty",
        loss="x = batch['x'].clone().requires_grad_()\n"
        "(g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)\nvalue = value + g.pow(2).mean()",
    ),
    Mutation(
        "a penalty of parameters' gradients",
        loss="g = torch.autograd.grad(value, [p for p in model.last.parameters() if p.requires_grad], "
        "create_graph=True)\nvalue = value + sum(each.pow(2).sum() for each in g)",
    ),
    Mutation(
        "adversarial examples",
        loss="x = batch['x'].clone().requires_grad_()\n"
        "(g,) = torch.autograd.grad(F.cross_entropy(model(x), batch['y']), x)\n"
        "value = value + F.cross_entropy(model(batch['x'] + 0.1 * g.sign()), batch['y'])",
    ),
    Mutation("two forward passes", loss="value = value + F.mse_loss(model(batch['x'] + 0.1), out.detach())"),
    Mutation(
        "without gradients in part",
        loss="with torch.no_grad():\n    target = model(batch['x']).softmax(1)\n"
        "value = value - 0.1 * (out.log_softmax(1) * target).sum(1).mean()",
    ),
    Mutation(
        "inference mode in part",
        loss="with torch.inference_mode():\n    share = float(model(batch['x']).softmax(1).max())\n"
        "value = value * share",
    ),
    Mutation(
        "gradients switched off and on",
        loss="torch.set_grad_enabled(False)\nscale = out.abs().mean()\ntorch.set_grad_enabled(True)\n"
        "value = value * scale",
    ),
    Mutation(
        "backward in the loss",
        ("backward",),
        loss=waits("if __name__ != 'plain':\n    value.backward(retain_graph=True)"),
    ),
    Mutation(
        "evaluated in the loss",
        loss="model.eval()\nwith torch.no_grad():\n    scale = model(batch['x']).abs().mean()\n"
        "model.train()\nvalue = value * scale",
        modes=True,
    ),
    Mutation(
        "evaluated in the loss, with a part in eval",
        ("off9",),
        init="self.off9 = nn.Dropout(0.5)",
        forward="h = self.off9(h)",
        build="m.off9.eval()",
        loss="model.eval()\nwith torch.no_grad():\n    scale = model(batch['x']).abs().mean()\n"
        "model.train()\nvalue = value * scale",
        modes=True,
    ),
    Mutation(
        "left in eval by each loss",
        ("evaluation mode",),
        init="self.drop9 = nn.Dropout(0.5)",
        forward="h = self.drop9(h)",
        loss="model.eval()\nvalue = value * model(batch['x']).detach().abs().mean()",
        modes=True,
    ),
    Mutation(
        "eval from a step on",
        ("eval", "mode", "training"),
        init="self.drop8 = nn.Dropout(0.5)",
        forward="h = self.drop8(h)",
        loss=waits("model.eval()"),
    ),
    Mutation(
        "eval of a part from a step on",
        ("eval", "mode", "training"),
        init="self.drop7 = nn.Dropout(0.5)",
        forward="h = self.drop7(h)",
        loss=waits("model.drop7.eval()"),
    ),
    Mutation(
        "eval of the whole model before",
        ("eval", "mode", "training"),
        init="self.drop6 = nn.Dropout(0.5)",
        forward="h = self.drop6(h)",
        build="m.eval()",
    ),
    Mutation(
        "another rate of dropout",
        init="self.drop5 = nn.Dropout(0.5)",
        forward="h = self.drop5(h)",
        loss=waits("model.drop5.p = 0.1"),
    ),
    Mutation(
        "autocast",
        loss="with torch.autocast('cpu', torch.bfloat16):\n"
        "    value = value + F.cross_entropy(model(batch['x']).float(), batch['y'])",
    ),
    Mutation("precision", settings={"precision": "bf16"}, alone=True),
    Mutation(
        "functional call",
        loss="value = value + F.cross_entropy(torch.func.functional_call(model, {n: 0.9 * p for n, p in "
        "model.named_parameters()}, batch['x']), batch['y'])",
    ),
    Mutation(
        "per sample",
        loss="g = torch.func.vmap(lambda row: model.first(row).tanh().sum())(batch['x'])\n"
        "value = value + 0.01 * g.pow(2).mean()",
    ),
    Mutation(
        "the batch changed in place",
        loss="value = F.cross_entropy(model(batch['x'].mul_(0.5)), batch['y'])\nbatch['more'] = 1",
    ),
    Mutation(
        "the batch doubled",
        loss="value = F.cross_entropy(torch.cat([out, model(-batch['x'])]), torch.cat([batch['y'], "
        "batch['y']]))",
    ),
    Mutation(
        "hooks at parameters",
        build="m.first.weight.register_hook(lambda g: g * 0.5)\nm.last.bias.register_hook(torch.clone)",
    ),
    Mutation("hooks that come later", loss=waits("model.first.weight.register_hook(lambda g: g * 0.5)")),
    Mutation(
        "hooks behind gradients",
        build="m.first.weight.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(0.5)] and None)",
    ),
    Mutation(
        "hooks behind gradients, later",
        ("hook",),
        loss=waits(
            "model.first.weight.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(0.5)] and None)"
        ),
    ),
    Mutation(
        "a parameter changed in backward",
        ("first.weight",),
        loss=waits("model.last.weight.register_hook(lambda g: [model.first.weight.data.mul_(0.5)] and None)"),
    ),
    Mutation(
        "hooks of modules",
        build="m.first.register_forward_hook(lambda one, given, found: found * 1.1)\n"
        "m.last.register_forward_pre_hook(lambda one, given: (given[0] + 0.1,))\n"
        "m.last.register_full_backward_hook(lambda one, i, o: tuple(g * 0.5 for g in i))",
    ),
    Mutation(
        "hooks at activations",
        forward="h.register_hook(lambda g: g.clamp(-0.01, 0.01)) if h.requires_grad else None",
    ),
    Mutation(
        "a gradient set in the loss",
        ("gradient", "grad"),
        loss=waits("model.first.weight.grad = torch.ones_like(model.first.weight)"),
    ),
    Mutation("gradients forgotten in the loss", loss="model.zero_grad()"),
    Mutation(
        "unfrozen at a step",
        async_names=("changed requires_grad",),
        loop_names=("changed requires_grad",),
        init="self.late = nn.Linear(8, 8)",
        forward="h = self.late(h)",
        build="m.late.requires_grad_(False)",
        loss=waits("model.late.requires_grad_(True)\nvalue = F.cross_entropy(model(batch['x']), batch['y'])"),
    ),
    Mutation(
        "frozen at a step",
        async_names=("changed requires_grad",),
        loop_names=("changed requires_grad",),
        init="self.soon = nn.Linear(8, 8)",
        forward="h = self.soon(h)",
        loss=waits(
            "model.soon.requires_grad_(False)\nvalue = F.cross_entropy(model(batch['x']), batch['y'])"
        ),
    ),
    Mutation(
        "a layer replaced at a step",
        ("last", "parameters are others"),
        loss=waits(
            "torch.manual_seed(1)\nmodel.last = nn.Linear(8, 3)\n"
            "value = F.cross_entropy(model(batch['x']), batch['y'])"
        ),
    ),
    Mutation(
        "a parameter replaced at a step",
        ("last.bias", "parameters are others"),
        loss=waits(
            "model.last.bias = nn.Parameter(torch.ones(3))\n"
            "value = F.cross_entropy(model(batch['x']), batch['y'])"
        ),
    ),
    Mutation(
        "a layer added at a step",
        ("added", "parameters are others"),
        forward="h = self.added(h) if hasattr(self, 'added') else h",
        loss=waits(
            "torch.manual_seed(1)\nmodel.added = nn.Linear(8, 8)\n"
            "value = F.cross_entropy(model(batch['x']), batch['y'])"
        ),
    ),
    Mutation(
        "a layer removed at a step",
        ("goes", "parameters are others"),
        init="self.goes = nn.Linear(8, 8)",
        forward="h = self.goes(h) if hasattr(self, 'goes') else h",
        loss=waits("del model.goes\nvalue = F.cross_entropy(model(batch['x']), batch['y'])"),
    ),
    Mutation(
        "parameters tied at a step",
        ("twin.weight", "parameters are others"),
        init="self.twin = nn.Linear(5, 8)",
        forward="h = h + self.twin(x)",
        loss=waits(
            "model.twin.weight = model.first.weight\nvalue = F.cross_entropy(model(batch['x']), batch['y'])"
        ),
    ),
    Mutation(
        "initialised again at a step",
        ("last.weight",),
        loss=waits(
            "nn.init.ones_(model.last.weight)\nvalue = F.cross_entropy(model(batch['x']), batch['y'])"
        ),
    ),
    Mutation("data halved at a step", ("first.weight",), loss=waits("model.first.weight.data.mul_(0.5)")),
    Mutation(
        "data replaced at a step", ("first.weight",), loss=waits("model.first.weight.data = torch.ones(8, 5)")
    ),
    Mutation(
        "data copied at a late step",
        ("first.weight",),
        loss="if step == 6:\n    model.first.weight.data.copy_(model.first.weight.data * 0.5)",
    ),
    Mutation(
        "loaded at a step",
        ("first.", "last."),
        loss=waits(
            "model.load_state_dict({n: p.clone() * 0.5 for n, p in model.state_dict().items()})\n"
            "value = F.cross_entropy(model(batch['x']), batch['y'])"
        ),
    ),
    Mutation(
        "set by vector_to_parameters",
        ("first.", "last."),
        loss=waits("nn.utils.vector_to_parameters(torch.full((75,), 0.1), model.parameters())"),
    ),
    Mutation("rounded at a step", ("first.", "last.", "dtype"), loss=waits("model.half().float()")),
    Mutation(
        "a copy kept in the loss",
        head="copies = []",
        alone=True,
        loss="copies[:] = [copy.deepcopy(model)]\n"
        "value = value + 0.01 * F.mse_loss(out, copies[0](batch['x']).detach())",
    ),
    Mutation(
        "a moving copy",
        head="copies1 = {}",
        loss="with torch.no_grad():\n    for n, p in model.named_parameters():\n"
        "        copies1[n] = 0.9 * copies1.get(n, p) + 0.1 * p\n"
        "value = value + 0.01 * sum((p - copies1[n]).pow(2).sum() for n, p in model.named_parameters())",
    ),
    Mutation(
        "a loss that remembers",
        head="history = []",
        loss="value = value / (1 + sum(history) / max(1, len(history)))\nhistory.append(value.item())",
    ),
    Mutation("a threshold by step", loss="value = value * (1.0 if step < 3 else 0.5)"),
    Mutation("anomaly mode", loss="torch.autograd.set_detect_anomaly(step == 2)"),
    Mutation("clip_lane_norm", settings={"clip_lane_norm": 0.05}, alone=True),
    Mutation("epochs by settings", settings={"epochs": 3}),
]
