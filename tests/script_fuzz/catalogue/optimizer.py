"""Optimizers with their options, groups and hooks; schedulers; what is done to an optimizer while it
trains."""

from __future__ import annotations

from typing import Any

from tests.script_fuzz.mutation import Mutation, waits

P = "m.parameters()"
CLASSES = {
    "SGD": (
        "lr=0.1",
        "lr=0.1, momentum=0.9, nesterov=True",
        "lr=0.1, momentum=0.8, dampening=0.1, weight_decay=0.01",
        "lr=0.01, maximize=True",
        "lr=0.1, foreach=True",
        "lr=0.1, foreach=False, momentum=0.5",
        "lr=0.1, fused=True, momentum=0.9",
    ),
    "Adam": (
        "",
        "lr=0.02, betas=(0.8, 0.9), eps=1e-6",
        "lr=0.02, amsgrad=True",
        "lr=0.02, weight_decay=0.1",
        "lr=0.02, maximize=True",
        "lr=0.02, foreach=True",
        "lr=0.02, fused=True",
    ),
    "AdamW": (
        "lr=0.02",
        "lr=0.02, amsgrad=True, weight_decay=0.1",
        "lr=0.02, maximize=True",
        "lr=0.02, fused=True",
    ),
    "Adagrad": (
        "lr=0.1",
        "lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5",
        "lr=0.1, eps=1e-3, maximize=True",
    ),
    "RMSprop": (
        "",
        "lr=0.02, alpha=0.9, momentum=0.5, centered=True",
        "lr=0.02, weight_decay=0.1, maximize=True",
    ),
    "Adadelta": ("", "lr=0.5, rho=0.8, weight_decay=0.1", "foreach=True, maximize=True"),
    "Adamax": ("", "lr=0.02, weight_decay=0.1, betas=(0.8, 0.9)"),
    "NAdam": (
        "",
        "lr=0.02, momentum_decay=0.01, weight_decay=0.1",
        "lr=0.02, decoupled_weight_decay=True, weight_decay=0.1",
    ),
    "RAdam": ("lr=0.1", "lr=0.1, weight_decay=0.1", "lr=0.1, decoupled_weight_decay=True, weight_decay=0.1"),
}
REFUSED = {
    "ASGD": "lr=0.1",
    "Rprop": "lr=0.01",
    "SparseAdam": "",
    "LBFGS": "",
    "Adafactor": "",
}
OPTIMIZERS = [
    Mutation(f"{name}({options})", optimizer=f"torch.optim.{name}({P}{', ' if options else ''}{options})")
    for name, every in CLASSES.items()
    for options in every
]
OPTIMIZERS += [
    Mutation("Lion", optimizer=f"trireme.optim.Lion({P}, lr=0.01, weight_decay=0.1)"),
    *(Mutation(name, (name,), optimizer=f"trireme.optim.{name}({P}, lr=0.1)") for name in ("LARS", "LAMB")),
    *(
        Mutation(name, (name,), optimizer=f"torch.optim.{name}({P}{', ' if options else ''}{options})")
        for name, options in REFUSED.items()
        if name not in ("SparseAdam", "LBFGS")
    ),
    Mutation(
        "a rate in a tensor", ("lr",), optimizer=f"torch.optim.SGD({P}, lr=torch.tensor(0.1), foreach=False)"
    ),
    Mutation("a rate in a tensor, Adam", ("lr",), optimizer=f"torch.optim.Adam({P}, lr=torch.tensor(0.02))"),
    Mutation(
        "betas in tensors",
        ("betas", "option lr"),
        optimizer=f"torch.optim.Adam({P}, lr=torch.tensor(0.02), betas=(torch.tensor(0.8), "
        "torch.tensor(0.9)), foreach=False)",
        alone=True,
    ),
    Mutation(
        "differentiable", ("differentiable",), optimizer=f"torch.optim.SGD({P}, lr=0.1, differentiable=False)"
    ),
    Mutation(
        "groups",
        optimizer="torch.optim.AdamW([{'params': [m.first.weight, m.last.weight], 'weight_decay': 0.1}, "
        "{'params': [m.first.bias, m.last.bias], 'lr': 0.05, 'betas': (0.5, 0.9)}], lr=0.02)",
    ),
    Mutation(
        "a group for each parameter",
        optimizer="torch.optim.SGD([{'params': [p], 'lr': 0.1 / (1 + n), 'nesterov': n % 2 == 0} for n, p in "
        "enumerate(m.parameters())], momentum=0.9)",
    ),
    Mutation(
        "groups in another order",
        optimizer="torch.optim.Adam([{'params': list(m.parameters())[::-1]}], lr=0.02)",
    ),
    Mutation(
        "a group added",
        optimizer="torch.optim.SGD(m.first.parameters(), lr=0.1, momentum=0.9)",
        prepared="opt.add_param_group({'params': list(m.last.parameters()), 'lr': 0.02})",
    ),
    Mutation(
        "a group with names of its own",
        ("option name",),
        optimizer="torch.optim.SGD([{'params': m.parameters(), 'name': 'all', 'lr_mult': 2.0}], lr=0.1)",
    ),
    Mutation("named parameters", optimizer="torch.optim.SGD(m.named_parameters(), lr=0.1)"),
    Mutation("a part alone", optimizer="torch.optim.SGD(m.last.parameters(), lr=0.1, momentum=0.9)"),
    Mutation(
        "trainable ones alone",
        init="self.fixed = nn.Linear(8, 8).requires_grad_(False)",
        forward="h = self.fixed(h)",
        optimizer="torch.optim.Adam((p for p in m.parameters() if p.requires_grad), lr=0.02)",
    ),
    Mutation(
        "a subclass",
        ("Mine",),
        head="class Mine(torch.optim.SGD):\n    def step(self, closure=None):\n"
        "        for group in self.param_groups:\n            for p in group['params']:\n"
        "                p.grad.sign_()\n        return super().step(closure)",
        optimizer=f"Mine({P}, lr=0.1)",
    ),
    Mutation(
        "an optimizer of its own",
        ("Own",),
        head="class Own(torch.optim.Optimizer):\n    def __init__(self, p):\n"
        "        super().__init__(p, {'lr': 0.1})\n    def step(self, closure=None):\n"
        "        with torch.no_grad():\n            for p in self.param_groups[0]['params']:\n"
        "                p.sub_(0.1 * p.grad.sign())",
        optimizer=f"Own({P})",
    ),
    Mutation(
        "a hook before the step",
        ("hook",),
        prepared="opt.register_step_pre_hook(lambda opt, a, k: [p.grad.mul_(0.5) for p in m.parameters()] "
        "and None)",
    ),
    Mutation(
        "a hook behind the step",
        ("hook",),
        prepared="def clamp(opt, a, k):\n    with torch.no_grad():\n        for p in m.parameters():\n"
        "            p.clamp_(-0.05, 0.05)\nopt.register_step_post_hook(clamp)",
    ),
    Mutation(
        "a hook for all optimizers",
        ("hook",),
        head="from torch.optim.optimizer import register_optimizer_step_post_hook\nhandles = []",
        prepared="def clamp(one, a, k):\n    if one is opt:\n        with torch.no_grad():\n"
        "            for p in m.parameters():\n                p.clamp_(-0.05, 0.05)\n"
        "handles.append(register_optimizer_step_post_hook(clamp))",
        loss="if step == 7:\n    pass",
        alone=True,
    ),
    Mutation(
        "a step patched",
        ("step",),
        prepared="real = opt.step\ndef step(*a, **k):\n    real(*a, **k)\n    with torch.no_grad():\n"
        "        for p in m.parameters():\n            p.clamp_(-0.05, 0.05)\nopt.step = step",
    ),
    Mutation(
        "a step patched in the class",
        (".SGD", "a step that was replaced"),
        head="class Patched(torch.optim.SGD):\n    pass\nPatched.__name__ = 'SGD'\n"
        "def clamped(self, closure=None):\n    torch.optim.SGD.step(self)\n    with torch.no_grad():\n"
        "        for group in self.param_groups:\n            for p in group['params']:\n"
        "                p.clamp_(-0.05, 0.05)\nPatched.step = clamped",
        optimizer=f"Patched({P}, lr=0.1)",
        alone=True,
    ),
    Mutation(
        "an optimizer that has stepped",
        ("state",),
        prepared="for p in m.parameters():\n    p.grad = torch.ones_like(p)\nopt.step()\nopt.zero_grad()",
    ),
    Mutation(
        "an optimizer with loaded state",
        ("state",),
        prepared="state = opt.state_dict()\n"
        "state['state'] = {n: {'momentum_buffer': torch.ones_like(p)} for n, p in "
        "enumerate(m.parameters())}\nopt.load_state_dict(state)",
    ),
    Mutation(
        "a rate changed in the loss",
        ("lr", "options", "rate"),
        loss=waits("made[0].param_groups[0]['lr'] = 0.01"),
    ),
    Mutation(
        "a momentum changed in the loss",
        ("momentum", "options"),
        loss=waits("made[0].param_groups[0]['momentum'] = 0.1"),
    ),
    Mutation(
        "an option switched in the loss",
        ("nesterov", "options"),
        loss=waits("made[0].param_groups[0]['nesterov'] = True"),
    ),
    Mutation(
        "a group added in the loss",
        ("group",),
        optimizer="torch.optim.SGD(m.first.parameters(), lr=0.1)",
        loss=waits("made[0].add_param_group({'params': list(model.last.parameters())})"),
    ),
    Mutation(
        "a group removed in the loss",
        ("group",),
        optimizer="torch.optim.SGD([{'params': m.first.parameters()}, {'params': m.last.parameters()}], "
        "lr=0.1)",
        loss=waits("del made[0].param_groups[1]"),
    ),
    Mutation(
        "parameters taken out of a group",
        ("group",),
        loss=waits("made[0].param_groups[0]['params'] = list(model.first.parameters())"),
    ),
    Mutation(
        "state cleared in the loss",
        ("state",),
        optimizer=f"torch.optim.SGD({P}, lr=0.1, momentum=0.9)",
        loss=waits("made[0].state.clear()"),
    ),
    Mutation(
        "state changed in the loss",
        ("state",),
        loss=waits(
            "for p in model.parameters():\n"
            "    made[0].state.setdefault(p, {})['momentum_buffer'] = torch.zeros_like(p)"
        ),
    ),
]
SCHEDULED = {
    "StepLR": "2, 0.5",
    "MultiStepLR": "[2, 5], 0.3",
    "ConstantLR": "0.5, 3",
    "LinearLR": "0.2, 1.0, 4",
    "ExponentialLR": "0.8",
    "PolynomialLR": "6, 2.0",
    "CosineAnnealingLR": "5, 0.01",
    "CosineAnnealingWarmRestarts": "3, 2",
    "OneCycleLR": "0.2, total_steps=20, cycle_momentum=False",
    "LambdaLR": "lambda n: 1 / (1 + n)",
    "MultiplicativeLR": "lambda n: 0.9",
}
L = "torch.optim.lr_scheduler"
BY_EPOCHS: dict[str, Any] = {"schedule_per": "epoch"}
SCHEDULERS = [
    Mutation(f"{name}({given})", scheduler=f"{L}.{name}(opt, {given})", settings={})
    for name, given in SCHEDULED.items()
]
SCHEDULERS += [
    Mutation(
        "CyclicLR",
        scheduler=f"{L}.CyclicLR(opt, 0.01, 0.1, step_size_up=2, mode='exp_range', gamma=0.9)",
        optimizer=f"torch.optim.SGD({P}, lr=0.1, momentum=0.9)",
    ),
    Mutation(
        "CyclicLR without momentum",
        scheduler=f"{L}.CyclicLR(opt, 0.01, 0.1, step_size_up=3, cycle_momentum=False)",
    ),
    Mutation(
        "OneCycleLR with Adam",
        scheduler=f"{L}.OneCycleLR(opt, 0.2, total_steps=20, three_phase=True)",
        optimizer=f"torch.optim.Adam({P})",
    ),
    *(
        Mutation(f"{name} by epochs", scheduler=f"{L}.{name}(opt, {given})", settings=settings)
        for name, given, settings in (
            ("StepLR", "1, 0.5", BY_EPOCHS),
            ("OneCycleLR", "0.2, total_steps=4, cycle_momentum=False", BY_EPOCHS),
            ("CosineAnnealingLR", "3, 0.01", BY_EPOCHS | {"epochs": 4}),
            ("LambdaLR", "lambda n: 1 / (1 + n)", BY_EPOCHS | {"global_batch_size": 16}),
            (
                "SequentialLR",
                f"[{L}.LinearLR(opt, 0.1, 1.0, 1), {L}.ExponentialLR(opt, 0.5)], [1]",
                BY_EPOCHS | {"epochs": 3},
            ),
        )
    ),
    Mutation(
        "SequentialLR",
        scheduler=f"{L}.SequentialLR(opt, [{L}.LinearLR(opt, 0.1, 1.0, 3), {L}.CosineAnnealingLR(opt, 5)], "
        "[3])",
    ),
    Mutation(
        "ChainedScheduler",
        scheduler=f"{L}.ChainedScheduler([{L}.ConstantLR(opt, 0.1, 2), {L}.ExponentialLR(opt, 0.9)], opt)",
    ),
    Mutation(
        "a rate for each group",
        optimizer="torch.optim.SGD([{'params': [p for n, p in m.named_parameters() if n[:4] != 'last']}, "
        "{'params': m.last.parameters(), 'lr': 0.5}], lr=0.1)",
        scheduler=f"{L}.LambdaLR(opt, [lambda n: 0.9 ** n, lambda n: 1 / (1 + n)])",
    ),
    Mutation(
        "a schedule that remembers",
        head="steps = []",
        scheduler=f"{L}.LambdaLR(opt, lambda n: steps.append(n) or 1 / len(steps))",
    ),
    Mutation(
        "a scheduler of its own",
        head="class Warm(torch.optim.lr_scheduler.LRScheduler):\n    def get_lr(self):\n"
        "        return [rate * min(1, (self.last_epoch + 1) / 4) for rate in self.base_lrs]",
        scheduler="Warm(opt)",
    ),
    Mutation(
        "a scheduler that starts later",
        optimizer="torch.optim.SGD([{'params': list(m.parameters()), 'initial_lr': 0.1}], lr=0.05)",
        scheduler=f"{L}.StepLR(opt, 2, last_epoch=3)",
    ),
    Mutation(
        "a decay that follows the schedule",
        head="class Decay(torch.optim.lr_scheduler.LambdaLR):\n    def step(self, *a):\n"
        "        super().step(*a)\n        for group in self.optimizer.param_groups:\n"
        "            group['weight_decay'] = group['lr'] / 10",
        scheduler="Decay(opt, lambda n: 0.9 ** n)",
    ),
    Mutation(
        "a scheduler without a class of torch's",
        ("scheduler",),
        head="class Plain:\n    def __init__(self, opt):\n        self.opt, self.n = opt, 0\n"
        "    def step(self):\n        self.n += 1\n        for group in self.opt.param_groups:\n"
        "            group['lr'] = 0.1 / (1 + self.n)\n    def state_dict(self):\n"
        "        return {'n': self.n}\n    def load_state_dict(self, state):\n        self.n = state['n']",
        scheduler="Plain(opt)",
    ),
]
