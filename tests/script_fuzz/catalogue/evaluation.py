"""Metric objects of an evaluation. `scores` are the model's of a minibatch of rows."""

from __future__ import annotations

from tests.script_fuzz.mutation import Mutation

M = "torchmetrics.classification.Multiclass"
UPDATE = "metrics['it'].update(scores, batch['y'])"
BINARY = "metrics['it'].update(scores[:, 1].sigmoid(), batch['y'] == 1)"
SQUARES = "metrics['it'].update(scores[:, 0], batch['x'][:, 0])"
OWN = """
class Own(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state('total', default=torch.tensor({start}), dist_reduce_fx={reduced!r})
        self.add_state('seen', default=[], dist_reduce_fx='cat')
        self.times = 0
    def update(self, scores, y):
        self.total = self.total + scores.sum()
        self.seen.append(y)
        self.times += 1
    def compute(self):
        return self.total / (torch.cat(self.seen) if isinstance(self.seen, list) else self.seen).sum(){more}
"""


def objects(name: str, made: str, *names: str, evaluate: str = UPDATE, **more: object) -> Mutation:
    return Mutation(f"metrics: {name}", names, objects=f"{{'it': {made}}}", evaluate=evaluate, **more)  # type: ignore[arg-type]


def own(start: str = "0.0", reduced: str = "sum", more: str = "") -> str:
    return OWN.format(start=start, reduced=reduced, more=more)


EVALUATION = [
    objects("F1", f"{M}F1Score(3, average='macro')"),
    objects("F1 of each class", f"{M}F1Score(3, average=None)"),
    objects("AUC of every record", f"{M}AUROC(3)"),
    objects("AUC by thresholds", f"{M}AUROC(3, thresholds=20)"),
    objects("squares", "torchmetrics.MeanSquaredError()", evaluate=SQUARES),
    objects(
        "squares in double", "torchmetrics.MeanSquaredError().set_dtype(torch.float64)", evaluate=SQUARES
    ),
    objects("correlation", "torchmetrics.SpearmanCorrCoef()", evaluate=SQUARES),
    objects("merged means", "torchmetrics.PearsonCorrCoef()", evaluate=SQUARES),
    objects("AUC of ours", "trireme.metrics.AUC(512)", evaluate=BINARY),
    objects("F1 of ours", "trireme.metrics.F1(classes=3)"),
    objects("recall among the first", "trireme.metrics.RecallAtK(2)"),
    objects("perplexity", "trireme.metrics.Perplexity()"),
    objects(
        "perplexity of theirs",
        "torchmetrics.text.Perplexity()",
        evaluate="metrics['it'].update(scores[:, None], batch['y'][:, None])",
    ),
    objects("called instead of updated", f"{M}F1Score(3)", evaluate="metrics['it'](scores, batch['y'])"),
    objects("computed in between", f"{M}F1Score(3)", evaluate=f"{UPDATE}\nmetrics['it'].compute()"),
    objects(
        "of one class alone",
        f"{M}AUROC(3)",
        evaluate="if (batch['y'] > 0).any():\n"
        "    keep = batch['y'] > 0\n    metrics['it'].update(scores[keep], batch['y'][keep])",
    ),
    objects("with sums beside", f"{M}F1Score(3)", evaluate=f"{UPDATE}\nreturn {{}}"),
    objects("with states of its own", "Own()", head=own()),
    objects("while it trains", f"{M}F1Score(3)", settings={"evaluate_every": 3}),
    objects(
        "each epoch, and the best kept",
        f"{M}AUROC(3, thresholds=20)",
        settings={"evaluate_every": "epoch", "keep_best": "it:max"},
    ),
    objects(
        "of the mode",
        f"{M}F1Score(3)",
        evaluate=f"{UPDATE}\nmodel.train()",
        init="self.drop5 = nn.Dropout(0.5)",
        forward="h = self.drop5(h)",
        settings={"evaluate_every": 3},
    ),
    *(
        objects(
            f"of buffers that {how}",
            "torchmetrics.MeanSquaredError()",
            evaluate=SQUARES,
            init=f"self.register_buffer('{name}', torch.zeros(8))",
            forward=f"{moves}\nh = h - self.{name}",
            settings={"evaluate_every": 3},
        )
        for how, name, moves in (
            ("move", "mean6", "self.mean6.lerp_(h.detach().mean(0), 0.5)"),
            ("are assigned", "mean5", "self.mean5 = 0.5 * self.mean5 + 0.5 * h.detach().mean(0)"),
        )
    ),
    Mutation(
        "metrics: one under two names",
        head=f"both = {M}F1Score(3)",
        objects="{'it': both, 'other': both}",
        evaluate=UPDATE,
        alone=True,
    ),
    objects("a matrix", f"{M}ConfusionMatrix(3)", "metric it"),
    objects("a collection", f"torchmetrics.MetricCollection([{M}F1Score(3)])", "MetricCollection"),
    objects(
        "a wrapper",
        f"torchmetrics.wrappers.MinMaxMetric({M}F1Score(3))",
        "MinMaxMetric",
    ),
    objects("a mean of parts", "Own()", "total is reduced", head=own(reduced="mean")),
    objects("a sum that starts at 1", "Own()", "start at 0", head=own(start="1.0")),
    objects(
        "a number beside the states", "Own()", "it keeps something beside", head=own(more=" / self.times")
    ),
    objects("a class, no object", f"{M}F1Score", "metric it", "as it"),
]
