"""Settings of torch that hold for a whole process or thread, before training and while it goes on."""

from __future__ import annotations

from tests.script_fuzz.mutation import Mutation, waits

BIG = "big = 1 / (1 + torch.arange(300_001.0))"  # its sum has other bits with each number of threads
SUMMED = "value = value * (big * value.detach()).sum()"
CONVOLVED = {
    "init": "self.conv3 = nn.Conv1d(2, 2, 3, padding=1)",
    "forward": "h = self.conv3(h.view(-1, 2, 4)).reshape(-1, 8)",
}
DOUBLE = "torch.set_default_dtype(torch.float64)"
COUNTS = "torch.optim.Adam(m.parameters(), lr=0.02)"  # its steps, in a dtype that follows the default one
NOISE = "value = value * (1 + 0.1 * torch.rand(()))"
KERNELS = "torch.backends.mkldnn.enabled = False"
FLUSHED = {"forward": "h = h + (h.detach() * 1e-40) * 1e38"}

SETTINGS = [
    Mutation("a sum in several parts", head=BIG, loss=SUMMED),
    Mutation("threads", ("threads",), head=f"torch.set_num_threads(7)\n{BIG}", loss=SUMMED),
    Mutation("threads in the model", ("threads",), head=BIG, build="torch.set_num_threads(7)", loss=SUMMED),
    Mutation(
        "threads at a step", ("threads",), head=BIG, loss=f"{waits('torch.set_num_threads(7)')}\n{SUMMED}"
    ),
    Mutation(
        "threads behind a step", ("threads",), head=BIG, loss=SUMMED, after=waits("torch.set_num_threads(7)")
    ),
    Mutation(
        "a default dtype from the model on", ("default_dtype",), build=DOUBLE, loss=NOISE, optimizer=COUNTS
    ),
    Mutation("a default dtype at a step", ("default_dtype",), loss=f"{waits(DOUBLE)}\n{NOISE}"),
    Mutation("a default dtype behind a step", ("default_dtype",), loss=NOISE, after=waits(DOUBLE)),
    Mutation(
        "a default dtype for a while", loss=f"{DOUBLE}\n{NOISE}\ntorch.set_default_dtype(torch.float32)"
    ),
    Mutation("a default device", head="torch.set_default_device('cpu')"),
    Mutation("deterministic algorithms", head="torch.use_deterministic_algorithms(True)"),
    Mutation(
        "deterministic algorithms at a step",
        ("deterministic",),
        loss=waits("torch.use_deterministic_algorithms(True)"),
    ),
    Mutation("other kernels", head=KERNELS, **CONVOLVED),
    Mutation("other kernels at a step", ("mkldnn",), loss=waits(KERNELS), **CONVOLVED),
    Mutation("other kernels behind a step", ("mkldnn",), after=waits(KERNELS), **CONVOLVED),
    Mutation(
        "kernels by flags",
        loss="with torch.backends.mkldnn.flags(enabled=False):\n"
        "    value = value + model(batch['x']).pow(2).mean()",
        **CONVOLVED,
    ),
    Mutation("precision of products", head="torch.set_float32_matmul_precision('medium')"),
    Mutation(
        "precision of products at a step",
        ("matmul",),
        loss=waits("torch.set_float32_matmul_precision('medium')"),
    ),
    Mutation("flags of cuDNN", head="torch.backends.cudnn.benchmark = True"),
    Mutation("flags of cuDNN at a step", ("cudnn",), loss=waits("torch.backends.cudnn.benchmark = True")),
    Mutation("small numbers", **FLUSHED),
    Mutation("small numbers are 0", ("flush_denormal",), head="torch.set_flush_denormal(True)", **FLUSHED),
    Mutation(
        "small numbers are 0 at a step",
        ("flush_denormal",),
        loss=waits("torch.set_flush_denormal(True)"),
        **FLUSHED,
    ),
    Mutation(
        "gradients left switched off",
        forward="torch.set_grad_enabled(True)\nh = self.first(x)",
        loss="torch.set_grad_enabled(False)",
        alone=True,
    ),
    Mutation("anomaly mode throughout", head="torch.autograd.set_detect_anomaly(True)"),
    Mutation("errors of NumPy", head="np.seterr(all='raise')"),
    Mutation("warnings as errors", head="import warnings\nwarnings.simplefilter('error')", alone=True),
    Mutation("backward in one thread", head="torch.autograd.set_multithreading_enabled(False)"),
]
