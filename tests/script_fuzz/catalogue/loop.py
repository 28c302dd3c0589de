"""What a loop of one's own does between backward and step, and between two steps."""

from __future__ import annotations

from tests.script_fuzz.mutation import Mutation, waits

G = ("gradient", "grad")
STATEFUL = (
    # to clear the state of one that has none is no change
    "torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)"
)
LOOP = [
    Mutation(
        "read only",
        between="total = sum(p.grad.pow(2).sum().item() for p in model.parameters())",
        after="norms = [p.norm().item() for p in model.parameters()]",
    ),
    Mutation("clipped by norm", G, between="nn.utils.clip_grad_norm_(model.parameters(), 0.05)"),
    Mutation("clipped by value", G, between="nn.utils.clip_grad_value_(model.parameters(), 0.01)"),
    Mutation(
        "one layer clipped through data",
        G,
        between="for p in model.first.parameters():\n    p.grad.data.clamp_(-0.01, 0.01)",
    ),
    Mutation("scaled in place", G, between="for p in model.parameters():\n    p.grad.mul_(0.5)"),
    Mutation(
        "scaled by foreach", G, between="torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)"
    ),
    Mutation(
        "scaled through numpy", G, between="for p in model.parameters():\n    p.grad.numpy()[...] *= 0.5"
    ),
    Mutation("replaced", G, between="for p in model.parameters():\n    p.grad = p.grad.sign()"),
    Mutation(
        "replaced through data", G, between="for p in model.parameters():\n    p.grad.data = p.grad * 0.5"
    ),
    Mutation("one set to None", (*G, "first.bias"), between="model.first.bias.grad = None"),
    Mutation("set to zero at a step", G, between=waits("for p in model.parameters():\n    p.grad.zero_()")),
    Mutation(
        "noise added", G, between="for p in model.parameters():\n    p.grad.add_(0.01 * torch.randn_like(p))"
    ),
    Mutation(
        "decay by hand", G, between="for p in model.parameters():\n    p.grad.add_(p.detach(), alpha=0.01)"
    ),
    Mutation(
        "centralised",
        G,
        between="model.first.weight.grad.sub_(model.first.weight.grad.mean(1, keepdim=True))",
    ),
    Mutation(
        "scaler",
        G,
        head="scaler = torch.amp.GradScaler('cpu', init_scale=4.0)",
        returns="scaler.scale(value)",
        between="scaler.unscale_(opt)",
        after="scaler.update()",
    ),
    Mutation("never set to zero", ("zero_grad",), zero="pass"),
    Mutation("set to zero now and then", ("zero_grad",), zero="opt.zero_grad() if step % 2 == 0 else None"),
    Mutation("zeros kept", zero="opt.zero_grad(set_to_none=False)"),
    Mutation("zeroed by the model", zero="model.zero_grad()"),
    Mutation(
        "zeroed behind the step",
        zero="opt.zero_grad() if step == 0 else None",
        after="opt.zero_grad(set_to_none=True)",
    ),
    Mutation("gradients set to None by hand", zero="for p in model.parameters(): p.grad = None"),
    Mutation(
        "a parameter clamped",
        ("first.weight",),
        after="with torch.no_grad():\n    model.first.weight.clamp_(-0.1, 0.1)",
    ),
    Mutation(
        "a parameter clamped through data behind a step",
        ("first.weight",),
        after="model.first.weight.data.clamp_(-0.1, 0.1)",
    ),
    Mutation(
        "a parameter changed before the pass",
        ("first.weight",),
        top=waits("model.first.weight.data.mul_(0.5)"),
    ),
    Mutation(
        "a parameter changed before the step",
        ("first.weight",),
        between=waits("model.first.weight.data.mul_(0.5)"),
    ),
    Mutation(
        "normalised rows",
        ("last.weight",),
        after="model.last.weight.data = F.normalize(model.last.weight.data, dim=1)",
    ),
    Mutation(
        "a buffer changed behind the step",
        ("temperature",),
        init="self.register_buffer('temperature', torch.ones(()))",
        forward="h = h / self.temperature",
        after="model.temperature.mul_(1.5)",
    ),
    Mutation(
        "a counter behind the step",
        ("turns",),
        init="self.register_buffer('turns', torch.zeros((), dtype=torch.int64))",
        forward="h = h / (1 + self.turns)",
        after="model.turns += 1",
    ),
    Mutation(
        "statistics behind the step",
        ("norm9",),
        init="self.norm9 = nn.BatchNorm1d(8)",
        forward="h = self.norm9(h)",
        after="model(batch['x'])",
    ),
    Mutation(
        "a buffer changed before the step",
        ("warmth",),
        init="self.register_buffer('warmth', torch.ones(()))",
        forward="h = h / self.warmth",
        between="model.warmth.mul_(1.5)",
    ),
    Mutation(
        "a constant changed",
        ("allowed",),
        init="self.register_buffer('allowed', torch.ones(8, dtype=torch.bool))",
        forward="h = h * self.allowed",
        after=waits("model.allowed[0] = False"),
    ),
    Mutation("a rate changed", ("options", "lr"), after=waits("opt.param_groups[0]['lr'] = 0.01")),
    Mutation(
        "a rate changed before the pass", ("options", "lr"), top=waits("opt.param_groups[0]['lr'] = 0.01")
    ),
    Mutation(
        "a rate changed before the step", ("options", "lr"), between=waits("opt.param_groups[0]['lr'] = 0.01")
    ),
    Mutation(
        "a group added behind a step",
        ("group", "options"),
        optimizer="torch.optim.SGD(m.first.parameters(), lr=0.1)",
        after=waits("opt.add_param_group({'params': list(model.last.parameters())})"),
    ),
    Mutation("state cleared behind a step", ("state",), optimizer=STATEFUL, after=waits("opt.state.clear()")),
    Mutation(
        "state dict of the optimizer loaded",
        ("state",),
        optimizer=STATEFUL,
        after=waits("opt.load_state_dict(opt.state_dict() | {'state': {}})"),
    ),
    Mutation(
        "a step hook behind a step",
        ("hook",),
        after=waits(
            "def half(opt, a, k):\n    with torch.no_grad():\n        for p in model.parameters():\n"
            "            p.mul_(0.5)\nopt.register_step_post_hook(half)"
        ),
    ),
    Mutation(
        "eval behind a step",
        ("eval", "mode", "training"),
        init="self.drop3 = nn.Dropout(0.5)",
        forward="h = self.drop3(h)",
        after=waits("model.eval()"),
    ),
    Mutation(
        "eval of a part behind a step",
        ("eval", "mode", "training"),
        init="self.drop4 = nn.Dropout(0.5)",
        forward="h = self.drop4(h)",
        after=waits("model.drop4.eval()"),
    ),
    Mutation(
        "train in each pass",
        init="self.drop2 = nn.Dropout(0.5)",
        forward="h = self.drop2(h)",
        top="model.train()",
    ),
    Mutation(
        "unfrozen behind a step",
        ("asleep", "requires_grad"),
        init="self.asleep = nn.Linear(8, 8)",
        forward="h = self.asleep(h)",
        build="m.asleep.requires_grad_(False)",
        after=waits("model.asleep.requires_grad_(True)"),
    ),
    Mutation(
        "frozen behind a step",
        ("awake", "requires_grad"),
        init="self.awake = nn.Linear(8, 8)",
        forward="h = self.awake(h)",
        after=waits("model.awake.requires_grad_(False)"),
    ),
    Mutation(
        "a layer replaced behind a step",
        ("last", "parameters are others"),
        after=waits("torch.manual_seed(1)\nmodel.last = nn.Linear(8, 3)"),
    ),
    Mutation(
        "a layer added behind a step",
        ("extra_layer", "parameters are others"),
        after=waits("torch.manual_seed(1)\nmodel.extra_layer = nn.Linear(8, 3)"),
    ),
    Mutation(
        "averaged weights beside",
        head="average = {}",
        after="for n, p in model.named_parameters():\n"
        "    average[n] = 0.9 * average.get(n, p.detach()) + 0.1 * p.detach()",
    ),
    Mutation(
        "averaged model",
        ("AveragedModel", "trireme.nn.Ema"),
        head="averaged = []",
        after="averaged[:] = averaged or [torch.optim.swa_utils.AveragedModel(model)]\n"
        "averaged[0].update_parameters(model)",
    ),
    Mutation(
        "evaluated between steps",
        init="self.norm8 = nn.BatchNorm1d(8)",
        forward="h = self.norm8(h)",
        after="model.eval()\nwith torch.no_grad():\n    model(batch['x'])\nmodel.train()",
    ),
    Mutation("random numbers behind a step", after="torch.rand(3)\nnp.random.rand()"),
    Mutation(
        "saved behind a step",
        after="torch.save(model.state_dict(), '/dev/null')\ncopy.deepcopy(opt.state_dict())",
    ),
]
